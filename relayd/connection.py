"""One socket: the asyncio shell around the WebSocket protocol, the session and the outbound queue.

Decisions live elsewhere: what is a legal frame in the library's `ServerProtocol`, what a message means in
`Session`, what to read in `Subscription`. This shell moves bytes, keeps deadlines, and applies pressure:

- Bytes for the peer collect in an outbox and leave in one write at the end of each step. When the
  transport holds more than `outbound_queue_bytes`, live delivery is refused, so that subscriptions read on
  from the store, and nothing further is read from the peer.
- A peer with `max_pending_publishes` unanswered publishes is not read from until half are answered.
- A peer that takes no byte for `slow_consumer_timeout` is closed with 1013, and aborted if even that does
  not pass (R-170). Pings find half-open sockets (R-130).
"""

from __future__ import annotations

import asyncio
import http
import itertools
import time
from typing import Any, Final, Protocol, cast

import structlog
from strata.errors import ErrorCode, InvalidPacket
from strata.wire import Error, encode
from websockets.datastructures import Headers
from websockets.exceptions import PayloadTooBig
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import CLOSED, CONNECTING, OPEN
from websockets.server import ServerProtocol

from relayd.admission.pipeline import Lane, PublishRequest
from relayd.backlog import Backlog
from relayd.feed.subscription import Phase, Subscription
from relayd.frames import FrameReader, text_frame
from relayd.http import Response as HttpResponse
from relayd.liveness import Liveness, Verdict
from relayd.relay import Relay
from relayd.session import (
    Action,
    Answer,
    CloseConnection,
    PublishReceived,
    Session,
    SubscriptionClosed,
    SubscriptionOpened,
    ok_payload,
    refusal_payload,
)

__all__ = ["Connection", "HttpResponder"]

_log = structlog.get_logger("relayd.connection")
_numbers = itertools.count(1)

_CLOSE_TIMEOUT: Final = 5.0
"""How long a peer may take to answer our close, or to take our last HTTP response, in seconds."""
_REASONS: Final = {1001: "going_away", 1008: "malformed", 1013: "slow_consumer"}


class HttpResponder(Protocol):
    """Answers plain HTTP GET requests."""

    async def respond(self, path: str) -> HttpResponse: ...


class Connection(asyncio.Protocol):
    """A client connection, from accept to the last byte. `path` None refuses every WebSocket handshake."""

    def __init__(self, relay: Relay, responder: HttpResponder, path: str | None) -> None:
        self._id = next(_numbers)
        self._relay = relay
        self._responder = responder
        self._path = path
        self._protocol = ServerProtocol(max_size=relay.settings.max_frame_bytes)
        self._frames = FrameReader(self._protocol, relay.settings.max_frame_bytes)
        self._session = Session(relay.limits, relay.cursors)
        self._lane = Lane(self)
        self._backlog = Backlog(relay, self)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._pending_publishes = 0
        self._paused = False
        self._reading = True
        self._resumed: asyncio.Future[None] | None = None
        self._fragments: list[bytes] = []
        self._fragments_text = True
        self._close_sent = False
        self._is_websocket = False
        self._http_task: asyncio.Task[None] | None = None
        self._close_reason: str | None = None
        self._opened_at = time.monotonic()
        self._liveness = Liveness(
            relay.settings.ping_interval,
            relay.settings.ping_misses,
            relay.settings.slow_consumer_timeout,
            heard_at=self._opened_at,
        )
        self._abort_at: float | None = None
        self._events_sent = 0
        self._publishes = 0

    @property
    def id(self) -> int:
        """Its number in the logs of this process."""
        return self._id

    # asyncio.Protocol: what the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._relay.settings.outbound_queue_bytes)
        self._relay.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._relay.tally.bytes_received += len(data)
        now = time.monotonic()
        self._liveness.heard(now)
        if self._protocol.state is CONNECTING:
            self._protocol.receive_data(data)
            events: list[Any] = self._protocol.events_received()
        else:
            events = self._frames.receive(data)
        for event in events:
            if isinstance(event, bytes):
                self._text(event, now)
            elif isinstance(event, Frame):
                self._frame(event, now)
            elif isinstance(event, Request):
                self._request(event)
        self._send_protocol_data()
        self._relay.flush()

    def eof_received(self) -> bool:
        self._protocol.receive_eof()
        self._send_protocol_data()
        return False

    def pause_writing(self) -> None:
        self._paused = True
        self._liveness.write_paused(time.monotonic(), self._transport.get_write_buffer_size())
        self._update_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self._liveness.write_resumed(time.monotonic())
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)
        self._resumed = None
        self._update_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._release_subscriptions()
        if self._http_task is not None:
            self._http_task.cancel()
        self._relay.forget(self)
        if self._protocol.state is not CLOSED and not self._protocol.reader.eof:
            self._protocol.receive_eof()
        reason = self._close_reason or ("client" if self._protocol.close_rcvd else "lost")
        if self._is_websocket:
            self._relay.metrics.connections.dec()
        if self._http_task is None:
            self._relay.metrics.connections_closed[reason].inc()
        # A plain HTTP request, of a health check for one, is no connection worth a line.
        log = _log.debug if self._http_task is not None else _log.info
        log(
            "connection_closed",
            connection=self.id,
            reason=reason,
            publishes=self._publishes,
            events=self._events_sent,
            seconds=round(time.monotonic() - self._opened_at, 3),
        )

    # The outbound queue.

    def queue(self, frames: bytes) -> None:
        """Add whole frames to the outbox; they are written when the step ends."""
        if not self._outbox:
            self._relay.wants_flush(self)
        self._outbox.append(frames)
        self._outbox_bytes += len(frames)

    def flush(self) -> None:
        """Write the outbox in one piece."""
        outbox = self._outbox
        if not outbox:
            return
        data = outbox[0] if len(outbox) == 1 else b"".join(outbox)
        self._outbox = []
        self._outbox_bytes = 0
        if not self._close_sent:
            self._transport.write(data)
            self._relay.tally.bytes_sent += len(data)

    async def writable(self) -> None:
        """Wait until the transport has room. Cancelling it changes nothing."""
        while self._paused:
            if self._resumed is None:
                self._resumed = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._resumed)

    # Sink: what the fan-out calls.

    def deliver(self, frames: bytes, events: int) -> bool:
        if self._paused or self._outbox_bytes > self._relay.settings.outbound_queue_bytes:
            return False
        self._events_sent += events
        self.queue(frames)
        return True

    def fell_behind(self, subscription: Subscription) -> None:
        self._backlog.add(subscription)

    # Publisher: what admission calls.

    def publish_accepted(
        self, request: PublishRequest, received_at: int, *, duplicate: bool, duplicate_of: bytes | None = None
    ) -> None:
        self._relay.tally.answered(time.monotonic() - request.started_at, duplicate=duplicate)
        assert request.packet is not None
        payload = ok_payload(
            request.packet.packet_id,
            received_at,
            request.client_msg_id,
            duplicate=duplicate,
            duplicate_of=duplicate_of,
        )
        self._answered(payload)

    def publish_refused(self, request: PublishRequest, error: InvalidPacket) -> None:
        metrics = self._relay.metrics
        metrics.publishes[error.code].inc()
        metrics.errors_sent[error.code].inc()
        self._answered(refusal_payload(error, request.client_msg_id))

    def _answered(self, payload: bytes) -> None:
        self._pending_publishes -= 1
        if self._protocol.state is OPEN:
            self.queue(text_frame(payload))
        if not self._reading:
            self._update_reading()

    # What a peer sent.

    def _request(self, request: Request) -> None:
        """The opening handshake, or a plain HTTP request on the same port."""
        path = request.path.partition("?")[0]
        if path == self._path and "Upgrade" in request.headers:
            if self._relay.draining or len(self._relay.connections) > self._relay.settings.max_connections:
                self._close_reason = "going_away" if self._relay.draining else "too_many_connections"
                response = self._protocol.reject(
                    http.HTTPStatus.SERVICE_UNAVAILABLE, "This relay takes no more connections now.\n"
                )
                response.headers["Retry-After"] = "1"
            else:
                response = self._protocol.accept(request)
            self._protocol.send_response(response)
            if self._protocol.state is OPEN:
                self._is_websocket = True
                self._relay.metrics.connections_total.inc()
                self._relay.metrics.connections.inc()
                _log.info("connection_opened", connection=self.id)
            else:
                self._close_reason = self._close_reason or "handshake"
            return
        self._close_reason = "client"
        self._http_task = asyncio.create_task(self._respond(request), name=f"http-{self.id}")

    async def _respond(self, request: Request) -> None:
        method = getattr(request, "method", "GET")
        if method != "GET":
            body, status, headers = b"", 405, {"Allow": "GET"}
            content_type = "text/plain"
        else:
            try:
                answer = await self._responder.respond(request.path)
            except Exception:
                _log.exception("http_failed", connection=self.id)
                self._transport.abort()
                return
            body, status, headers = answer.body, answer.status, dict(answer.headers)
            content_type = answer.content_type
        response = Response(
            status,
            http.HTTPStatus(status).phrase,
            Headers(
                {
                    **headers,
                    "Content-Type": content_type,
                    "Content-Length": str(len(body)),
                    "Connection": "close",
                }
            ),
            body,
        )
        self._protocol.send_response(response)
        self._send_protocol_data()

    def _frame(self, frame: Frame, now: float) -> None:
        match frame.opcode:
            case Opcode.TEXT | Opcode.BINARY if frame.fin:
                self._message(bytes(frame.data), frame.opcode is Opcode.TEXT, now)
            case Opcode.TEXT | Opcode.BINARY:
                self._fragments = [bytes(frame.data)]
                self._fragments_text = frame.opcode is Opcode.TEXT
            case Opcode.CONT:
                if frame.data:  # the library bounds their bytes, not how many empty ones there are
                    self._fragments.append(bytes(frame.data))
                if frame.fin:
                    data, self._fragments = b"".join(self._fragments), []
                    self._message(data, self._fragments_text, now)
            case Opcode.CLOSE:
                self._release_subscriptions()

    def _message(self, data: bytes, is_text: bool, now: float) -> None:
        if is_text:
            self._text(data, now)
        else:
            self._act(self._session.receive_binary(now))

    def _text(self, data: bytes, now: float) -> None:
        if self._protocol.state is not OPEN and (self._close_reason or self._protocol.close_rcvd is None):
            return  # we are closing; what a peer sent before its own close frame still counts
        if not data.isascii():
            try:
                data.decode()
            except UnicodeDecodeError:
                self._close_reason = "protocol_error"
                self._protocol.fail(1007, "a text frame must be UTF-8")  # RFC 6455 §8.1
                return
        self._act(self._session.receive_text(data, now))

    def _act(self, action: Action) -> None:
        metrics = self._relay.metrics
        match action:
            case PublishReceived():
                self._relay.tally.publishes += 1
                self._publishes += 1
                self._pending_publishes += 1
                self._relay.admission.submit(
                    PublishRequest(action.raw, action.client_msg_id, self._lane, self._liveness.heard_at)
                )
                if self._reading:
                    self._update_reading()
            case SubscriptionOpened():
                metrics.messages_received["SUBSCRIBE"].inc()
                self._open(action.subscription, action.replaced)
            case SubscriptionClosed():
                metrics.messages_received["UNSUBSCRIBE"].inc()
                self._close_subscription(action.subscription)
            case Answer():
                self.answer(action.payload, action.code)
            case CloseConnection():
                self.answer(action.payload, action.code)
                self.close(action.close_code, action.reason)
            case None:
                metrics.messages_received["UNSUBSCRIBE"].inc()

    def answer(self, payload: bytes, code: ErrorCode) -> None:
        """Queue an ERROR that belongs to no publish."""
        self._relay.metrics.errors_sent[code].inc()
        self.queue(text_frame(payload))

    # Subscriptions.

    def _open(self, subscription: Subscription, replaced: Subscription | None) -> None:
        if replaced is not None:
            self._close_subscription(replaced)
            subscription.take_over(replaced)
        self._relay.metrics.subscriptions.inc()
        self._backlog.add(subscription)

    def _close_subscription(self, subscription: Subscription) -> None:
        fanout = self._relay.fanout
        if subscription.phase is Phase.LIVE:
            # Everything the feed has passed on is in the outbox already.
            subscription.leave_live(fanout.position)
            fanout.leave(subscription)
        subscription.close()
        self._backlog.discard(subscription)
        self._relay.metrics.subscriptions.dec()

    def end_subscription(self, subscription: Subscription) -> None:
        """End a subscription that cannot be served."""
        self._session.drop(subscription)
        self._close_subscription(subscription)

    def _release_subscriptions(self) -> None:
        for subscription in list(self._session.subscriptions.values()):
            self.end_subscription(subscription)
        self._backlog.close()

    # Pressure and deadlines.

    def resume_if_room(self) -> None:
        """There is room for publishes again."""
        self._update_reading()

    def _update_reading(self) -> None:
        """Read from the peer only while its answers can leave and its publishes have room."""
        limit = self._relay.settings.max_pending_publishes
        room = self._pending_publishes < (limit if self._reading else limit // 2 or 1)
        full = self._relay.is_full() and self._pending_publishes > 0
        wanted = not self._paused and room and not full and not self._relay.draining
        if full:
            self._relay.hold(self)
        if wanted is self._reading or self._transport.is_closing():
            return
        self._reading = wanted
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def check_deadlines(self, now: float) -> None:
        """Called about once a second."""
        if self._abort_at is not None:
            if now >= self._abort_at:
                self._transport.abort()
        elif self._protocol.state is CONNECTING:
            if now - self._opened_at > self._relay.settings.handshake_timeout:
                self._close_reason = "handshake"
                self._transport.abort()
        elif self._protocol.state is OPEN:
            self._act_on_liveness(now)

    def _act_on_liveness(self, now: float) -> None:
        waiting_bytes = self._transport.get_write_buffer_size()
        match self._liveness.check(now, waiting_bytes=waiting_bytes, listening=self._reading):
            case Verdict.PING:
                self._protocol.send_ping(b"")
                self._send_protocol_data()
            case Verdict.GONE:
                self._close_reason = "ping_timeout"
                self._transport.abort()
            case Verdict.STUCK:
                self._relay.metrics.slow_consumers_closed.inc()
                self.close(1013, "the reader takes nothing")

    def stop_reading(self) -> None:
        """Take nothing further from the peer; the relay is draining."""
        if self._reading and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def close(self, code: int, reason: str) -> None:
        """Start the closing handshake; the socket is aborted if the peer does not finish it in time."""
        self._release_subscriptions()
        self.flush()
        if self._protocol.state is OPEN:
            self._close_reason = self._close_reason or _REASONS.get(code, "internal_error")
            self._protocol.send_close(code, reason)
            self._send_protocol_data()
            if not self._reading and not self._transport.is_closing():
                self._reading = True
                self._transport.resume_reading()  # for the peer's half of the handshake
        elif self._protocol.state is CONNECTING and self._http_task is None:
            self._transport.abort()
        self._abort_at = time.monotonic() + _CLOSE_TIMEOUT

    def abort(self) -> None:
        """Drop the socket at once."""
        self._transport.abort()

    def _send_protocol_data(self) -> None:
        """Write what the library wants written; an empty piece from it means: close after this."""
        writes = self._protocol.data_to_send()
        if not writes:
            return
        self.flush()
        if isinstance(self._protocol.parser_exc, PayloadTooBig):
            self._report_too_large()
        self._close_sent = self._protocol.close_sent is not None
        for data in writes:
            if data:
                self._transport.write(data)
            else:
                self._transport.close()
                self._abort_at = time.monotonic() + _CLOSE_TIMEOUT

    def _report_too_large(self) -> None:
        """Say what was wrong before the library's close frame with 1009 (R-123)."""
        if self._close_reason is not None:
            return
        self._close_reason = "too_large"
        limit = self._relay.settings.max_packet_bytes
        error = Error(
            code=ErrorCode.PACKET_TOO_LARGE,
            reason=f"the frame is larger than any packet of {limit} bytes can be",
            max_bytes=limit,
        )
        self._relay.metrics.errors_sent[ErrorCode.PACKET_TOO_LARGE].inc()
        self._transport.write(text_frame(encode(error)))
