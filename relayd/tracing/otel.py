"""Sending of spans to a collector, with the SDK of OpenTelemetry: imported only if `tracing_url` is set.

The loop puts a span into a bounded queue and continues; a thread encodes and sends. If a collector is slow,
unreachable or wrong, spans are lost, and a counter and two lines of the log say so. The `OTEL_*` variables of
the SDK apply, such as `OTEL_EXPORTER_OTLP_HEADERS` for a collector's key and `OTEL_RESOURCE_ATTRIBUTES`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from relayd.logs import get_logger
from relayd.tracing.spans import TraceSpan
from relayd.version import VERSION

__all__ = ["OtlpCollector"]

_log = get_logger("relayd.tracing")

_MOST_WAITING: Final = 8192
_MOST_AT_ONCE: Final = 512
_DELAY_MILLISECONDS: Final = 1000
_SEND_TIMEOUT: Final = 5
_CLOSE_SECONDS: Final = 2.0
_LARGEST_DRIFT_NS: Final = 1_000_000
_KINDS: Final = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}


class _GivenIds(IdGenerator):
    """Gives the next span the ids that were set here."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _Counting(SpanExporter):
    """Sends through another exporter, counts the outcomes, and logs only the start and end of a failure."""

    def __init__(self, exporter: SpanExporter, count: Callable[[str, int], None]) -> None:
        self._exporter = exporter
        self._count = count
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # whatever it raises, the next batch is tried
            result, problem = SpanExportResult.FAILURE, type(error).__name__
        else:
            problem = "the collector does not take them"
        has_failed = result is not SpanExportResult.SUCCESS
        self._count("lost" if has_failed else "sent", len(spans))
        if has_failed and not self._is_failing:
            _log.warning("traces_lost", problem=problem, consequence="spans are dropped until it does")
        elif self._is_failing and not has_failed:
            _log.info("traces_back")
        self._is_failing = has_failed
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class OtlpCollector:
    """The connection to a collector at `url`. `count(outcome, spans)` counts the outcomes, from any thread.

    `instance` names this process among those of its log.
    """

    def __init__(self, url: str, *, instance: str, count: Callable[[str, int], None]) -> None:
        # The SDK logs every batch that a collector refuses; `_Counting` logs that once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._count = count
        self._ids = _GivenIds()
        self._exporter = _Counting(OTLPSpanExporter(endpoint=url, timeout=_SEND_TIMEOUT), count)
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # the spans that arrive here were sampled before
            resource=Resource.create(
                {
                    "service.name": os.environ.get("OTEL_SERVICE_NAME", "relayd"),
                    "service.version": VERSION,
                    "service.instance.id": instance,
                }
            ),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=_MOST_WAITING,
                max_export_batch_size=_MOST_AT_ONCE,
                schedule_delay_millis=_DELAY_MILLISECONDS,
            )
        )
        self._tracer = self._provider.get_tracer("relayd", VERSION)
        self._offset = _offset_ns()

    def emit(self, span: TraceSpan) -> None:
        """Queue a span. If the queue is full, the oldest span is dropped. Use it on the event loop."""
        self._count("made", 1)
        # Keep one offset as long as it is right, so that adjacent spans stay adjacent in the collector.
        if abs((offset := _offset_ns()) - self._offset) > _LARGEST_DRIFT_NS:
            self._offset = offset
        self._ids.trace_id, self._ids.span_id = span.trace_id, span.span_id
        context = Context()
        if span.parent_id is not None:
            parent = SpanContext(span.trace_id, span.parent_id, False, TraceFlags(TraceFlags.SAMPLED))
            context = set_span_in_context(NonRecordingSpan(parent), context)
        made = self._tracer.start_span(
            span.name,
            context,
            _KINDS[span.kind],
            dict(span.attributes),
            start_time=self._offset + int(span.began_at * 1e9),
        )
        if span.problem is not None:
            made.set_status(Status(StatusCode.ERROR, span.problem))
        made.end(self._offset + int(span.ended_at * 1e9))

    def close(self) -> None:
        """Send the queued spans, for two seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        if closing.is_alive():
            self._exporter.shutdown()  # this ends a wait between two attempts


def _offset_ns() -> int:
    """The offset from the monotonic clock to Unix time."""
    return time.time_ns() - time.monotonic_ns()
