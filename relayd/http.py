"""What the relay answers to plain HTTP GET requests, without a socket.

`HttpApi.respond` takes a request target and returns a whole response; the shell that owns the connection
writes it. Errors are JSON, `{"error": code, "reason": sentence}`. The answers:

    /healthz                         200 while the process runs its event loop
    /readyz                          200, or 503 with why the relay takes no connections
    /metrics                         Prometheus text
    /.well-known/strata-relay.json   the manifest (R-389)
    /packets/{packet_id}             a stored packet (R-301)
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from relayd.store.types import StoredPacket, StoreTimeout, StoreUnavailable

__all__ = ["HttpApi", "MetricsApi", "Response"]

_PACKET_ID = re.compile(r"0x[0-9a-f]{64}")  # no other spelling is an id
_JSON = "application/json"
_ENCODE = msgspec.json.Encoder().encode
_NO_STORE = {"Cache-Control": "no-store"}
# Anyone may read these from a web page: they are public, and no cookie or address gives more.
_PUBLIC = {"Access-Control-Allow-Origin": "*"}


@dataclass(frozen=True, slots=True)
class Response:
    """One HTTP response; the shell adds Content-Length, Content-Type and Connection."""

    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class HttpApi:
    """The GET answers of the relay's main port.

    `readiness` gives None when the relay is ready, else one of `starting`, `draining`, `database`.
    `by_id` is the store's: a `StoredPacket`, None for an id never seen, or any other object for one that is
    gone. `declined` says whether policy keeps a stored packet from being served (R-323). `render_metrics`
    is None where another port serves them.
    """

    def __init__(
        self,
        *,
        readiness: Callable[[], str | None],
        manifest: Callable[[], dict[str, Any]],
        by_id: Callable[[bytes, int], Awaitable[object]],
        declined: Callable[[bytes, StoredPacket], bool] | None = None,
        render_metrics: Callable[[], tuple[str, bytes]] | None = None,
        websocket_path: str = "/strata",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._readiness = readiness
        self._manifest = manifest
        self._by_id = by_id
        self._declined = declined
        self._render_metrics = render_metrics
        self._websocket_path = websocket_path
        self._clock = clock

    async def respond(self, path: str) -> Response:
        """Answer `GET path`; a query is ignored. Cancelling it cancels a read of the store under way."""
        path = path.partition("?")[0]
        if path.startswith("/packets/"):
            return await self._packet(path.removeprefix("/packets/"))
        match path:
            case "/healthz":
                return _json(200, {"status": "alive"}, _NO_STORE)
            case "/readyz":
                return self._ready()
            case "/metrics" if self._render_metrics is not None:
                return _metrics(self._render_metrics)
            case "/.well-known/strata-relay.json":
                return _json(200, self._manifest(), {"Cache-Control": "public, max-age=60", **_PUBLIC})
            case self._websocket_path:
                refusal = _error(426, "upgrade_required", "this path speaks WebSocket")
                return dataclasses.replace(refusal, headers={"Upgrade": "websocket", **_NO_STORE})
        return _not_found()

    def _ready(self) -> Response:
        reason = self._readiness()
        if reason is None:
            return _json(200, {"status": "ready"}, _NO_STORE)
        return _error(503, "not_ready", reason)

    async def _packet(self, text: str) -> Response:
        if _PACKET_ID.fullmatch(text) is None:
            return _error(400, "invalid_packet_id", "a packet id is 0x and 64 lowercase hex digits")
        packet_id = bytes.fromhex(text[2:])
        try:
            found = await self._by_id(packet_id, int(self._clock()))
        except StoreTimeout:
            return _error(503, "unavailable", "the store did not answer in time")
        except StoreUnavailable:
            return _error(503, "unavailable", "the store cannot be reached")
        if found is None:
            return _error(404, "not_found", "no packet with this id is known")
        if not isinstance(found, StoredPacket) or (self._declined and self._declined(packet_id, found)):
            return _error(410, "gone", "the packet has expired or was removed")
        # The stored bytes go out as they are: what was signed is what is served.
        body = b'{"packet":%b,"received_at":%d}' % (found.body, found.received_at)
        # An id never means other bytes, but a packet may expire or be removed, so caches keep it briefly.
        return Response(
            200, _JSON, body, {"Cache-Control": "public, max-age=60", "ETag": f'"{text}"', **_PUBLIC}
        )


class MetricsApi:
    """The answers of a port that serves metrics alone (`metrics_listen`)."""

    def __init__(self, render_metrics: Callable[[], tuple[str, bytes]]) -> None:
        self._render_metrics = render_metrics

    async def respond(self, path: str) -> Response:
        """Answer `GET path`."""
        return _metrics(self._render_metrics) if path.partition("?")[0] == "/metrics" else _not_found()


def _metrics(render: Callable[[], tuple[str, bytes]]) -> Response:
    content_type, body = render()
    return Response(200, content_type, body, _NO_STORE)


def _json(status: int, value: object, headers: Mapping[str, str]) -> Response:
    return Response(status, _JSON, _ENCODE(value), headers)


def _error(status: int, error: str, reason: str) -> Response:
    headers = {"Retry-After": "1", **_NO_STORE} if status == 503 else _NO_STORE
    return _json(status, {"error": error, "reason": reason}, headers)


def _not_found() -> Response:
    return _error(404, "not_found", "nothing is served at this path")
