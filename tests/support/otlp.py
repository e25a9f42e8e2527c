"""A collector of traces: it accepts OTLP/HTTP, and keeps what it was sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

__all__ = ["OtlpReceiver", "ReceivedSpan", "receiver"]


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as received over the wire."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began_at: int
    ended_at: int
    attributes: dict[str, object]
    has_failed: bool
    instance: str
    service: str


class OtlpReceiver:
    """The spans received; `status` is the answer to the next requests, and `gate` holds them up."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.requests = 0
        self.status = 200
        self.gate = threading.Event()
        self.gate.set()
        self.url = ""

    def named(self, name: str) -> list[ReceivedSpan]:
        """The spans of this name."""
        return [span for span in list(self.spans) if span.name == name]

    def take(self, body: bytes) -> None:
        """Keep the spans of one request."""
        for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = _attributes(batch.resource.attributes)
            for scope in batch.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        ReceivedSpan(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            _attributes(span.attributes),
                            span.status.code == 2,
                            str(about["service.instance.id"]),
                            str(about["service.name"]),
                        )
                    )


@contextmanager
def receiver() -> Iterator[OtlpReceiver]:
    """A collector on a free port."""
    taken = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            taken.requests += 1
            taken.gate.wait()
            if self.path == "/v1/traces" and taken.status == 200:
                taken.take(body)
            self.send_response(taken.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    taken.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        yield taken
    finally:
        taken.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _attributes(pairs: Any) -> dict[str, object]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> object:
    which = value.WhichOneof("value")
    return None if which is None else getattr(value, which)
