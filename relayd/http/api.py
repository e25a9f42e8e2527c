"""The answers to plain HTTP requests, without a socket.

`HttpApi.respond` takes a request target and returns a whole response, which the shell that owns the
connection writes. Errors are JSON, `{"error": code, "reason": sentence}`. The answers:

    /healthz                         200 while the process runs its event loop
    /readyz                          200, or 503 with the reason why the relay takes no connections
    /metrics                         Prometheus text
    /.well-known/strata-relay.json   the manifest (R-389)
    /packets/{packet_id}             a stored packet (R-301)
    /did/…, /did-docs/…              identities (R-058, see `identities`)
    /, /assets/…                     the console (see `console`)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from strata.protocol.fields import is_content_id

from relayd.access.gate import RequestHeaders
from relayd.feed.events import Form, annotated_tail, event_tail
from relayd.http.console import WebConsole
from relayd.http.identities import IdentityApi
from relayd.http.scrapes import Scrape
from relayd.responses import JSON, NO_STORE, Response, error_response, json_response, kept_for
from relayd.store.payers import NOBODY, Asker, Payer
from relayd.store.types import StoredPacket, StoreTimeout, StoreUnavailable

__all__ = ["HttpApi", "MetricsApi"]


class _Expiring(msgspec.Struct, gc=False):
    expires_at: int | None = None


_EXPIRING = msgspec.json.Decoder(_Expiring)


class HttpApi:
    """The answers of the relay's main port.

    `readiness` returns None when the relay is ready, else one of `draining`, `database`, `memory`.
    `by_id` is the store's: it returns a `StoredPacket`, None for an id never seen, or any other object for a
    packet that was removed or is not served (R-323). `form` says how annotated packets are served. `metrics`
    is None if another port serves them. A `manifest` that is the same object as before is not encoded again.
    """

    def __init__(
        self,
        *,
        readiness: Callable[[], str | None],
        manifest: Callable[[], Mapping[str, object]],
        by_id: Callable[[bytes, int, Payer | None], Awaitable[object]],
        identities: IdentityApi | None = None,
        form: Form = "rewrite",
        metrics: Callable[[], Awaitable[Scrape]] | None = None,
        websocket_path: str = "/strata",
        clock: Callable[[], float] = time.time,
        log_epoch: Callable[[], int] = lambda: 1,
        console: WebConsole | None = None,
    ) -> None:
        self._log_epoch = log_epoch
        self._console = console
        self._readiness = readiness
        self._manifest = manifest
        self._by_id = by_id
        self._identities = identities
        self._form: Form = form
        self._metrics = metrics
        self._written: tuple[Mapping[str, object], Response] | None = None
        self._websocket_path = websocket_path
        self._clock = clock

    def page(self, path: str, headers: RequestHeaders) -> Response | None:
        """The console's answer to this path, or None if it has none."""
        return None if self._console is None else self._console.page(path, headers)

    async def respond(self, path: str, asker: Asker = NOBODY) -> Response:
        """Answer `GET path` at the expense of `asker`, ignoring a query.

        Cancelling it cancels any read of the store under way.
        """
        path = path.partition("?")[0]
        if path.startswith("/packets/"):
            return await self._packet(path.removeprefix("/packets/"), asker.payer)
        if self._identities is not None:
            answer = await self._identities.respond(path, asker)
            if answer is not None:
                return answer
        match path:
            case "/healthz":
                return json_response(200, {"status": "alive"}, NO_STORE)
            case "/readyz":
                return self._ready()
            case "/metrics" if self._metrics is not None:
                return _scraped(await self._metrics())
            case "/.well-known/strata-relay.json":
                return self._described()
            case self._websocket_path:
                refusal = error_response(426, "upgrade_required", "this path speaks WebSocket")
                return dataclasses.replace(refusal, headers={"Upgrade": "websocket", **NO_STORE})
        return _not_found()

    def _described(self) -> Response:
        manifest = self._manifest()
        if self._written is None or self._written[0] is not manifest:
            self._written = manifest, json_response(200, manifest, kept_for(60, None, 0))
        return self._written[1]

    def _ready(self) -> Response:
        reason = self._readiness()
        if reason is None:
            return json_response(200, {"status": "ready", "log_epoch": self._log_epoch()}, NO_STORE)
        return error_response(503, "not_ready", reason)

    async def _packet(self, text: str, payer: Payer | None) -> Response:
        if not is_content_id(text):  # an id has only one spelling
            return error_response(400, "invalid_packet_id", "a packet id is 0x and 64 lowercase hex digits")
        packet_id = bytes.fromhex(text[2:])
        now = int(self._clock())
        try:
            found = await self._by_id(packet_id, now, payer)
        except StoreTimeout:
            return error_response(503, "unavailable", "the store did not answer in time")
        except StoreUnavailable:
            return error_response(503, "unavailable", "the store cannot be reached")
        if found is None:
            return error_response(404, "not_found", "no packet with this id is known")
        if not isinstance(found, StoredPacket):
            return error_response(410, "gone", "the packet has expired or was removed")
        # An id always means the same bytes, but a packet may expire or be removed, so caches keep it briefly.
        headers = {**kept_for(60, _EXPIRING.decode(found.body).expires_at, now), "ETag": f'"{text}"'}
        return Response(200, JSON, self._body(found), headers)

    def _body(self, found: StoredPacket) -> bytes:
        """The stored bytes as they are (A-006), except for a packet whose origin was downgraded (R-208)."""
        body, annotation, received_at = found.body, found.annotation, found.received_at
        if annotation is None:
            return b'{"packet":' + event_tail(body, received_at, None)
        return b'{"packet":' + annotated_tail(body, annotation, received_at, None, self._form)


class MetricsApi:
    """The answers of a port that serves only metrics (`metrics_listen`)."""

    def __init__(self, metrics: Callable[[], Awaitable[Scrape]]) -> None:
        self._metrics = metrics

    def page(self, path: str, headers: RequestHeaders) -> None:
        """There is no console here."""

    async def respond(self, path: str, asker: Asker = NOBODY) -> Response:
        """Answer `GET path`."""
        if path.partition("?")[0] != "/metrics":
            return _not_found()
        return _scraped(await self._metrics())


def _scraped(scrape: Scrape) -> Response:
    content_type, body = scrape
    return Response(200, content_type, body, NO_STORE)


def _not_found() -> Response:
    return error_response(404, "not_found", "nothing is served at this path")
