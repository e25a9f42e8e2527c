"""One socket as bytes and frames: the asyncio shell around the WebSocket protocol and the outbound queue.

The library's `ServerProtocol` decides which frames are legal, `Liveness` whether a peer is still there. This
shell moves bytes, keeps deadlines, and applies pressure:

- Bytes for the peer collect in an outbox and leave in one write at the end of each step. When the
  transport holds more than `outbound_queue_bytes`, nothing further is read from the peer.
- A peer that takes no byte for `slow_consumer_timeout` is closed with 1013, and aborted if even that does
  not pass (R-170). Pings find half-open sockets (R-130).
- `suspend` keeps the peer's next messages waiting until `resume`, and stops reading.

A `SocketHandler` gives the messages their meaning.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeAlias, cast

from strata.protocol.errors import ErrorCode
from websockets.exceptions import PayloadTooBig
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import CLOSED, CONNECTING, OPEN, Event
from websockets.server import ServerProtocol

from relayd.access.gate import Turnaway
from relayd.frames import FrameReader, text_frame
from relayd.relay import Relay
from relayd.sessions.answers import frame_too_large_payload
from relayd.sessions.http_requests import rejection
from relayd.sessions.liveness import Liveness, PeerState

__all__ = ["SocketHandler", "WebSocket"]

_Received: TypeAlias = bytes | Event
"""A whole text message, or anything else as the library gives it."""
_CLOSE_TIMEOUT: Final = 5.0
"""How long a peer may take to answer our close, or to take our last HTTP response, in seconds."""
_WITHDRAWAL_TIMEOUT: Final = 1.0
"""How long bytes that should not be sent any more may still leave, in seconds."""
_REASONS: Final = {1001: "going_away", 1008: "malformed", 1013: "slow_consumer"}


class SocketHandler(Protocol):
    """The owner of a socket, which hears of its events; they stand here in the order of a socket's life."""

    def accepted(self, peer: str | None) -> bool:
        """A socket was accepted from this address. False drops it without a word."""

    def requested(self, request: Request, now: float) -> None:
        """The opening handshake, or a plain HTTP request: answer it with `accept`, `reject` or `respond`."""

    def received(self, data: bytes, is_text: bool, now: float) -> None:
        """One whole message; text is known to be UTF-8."""

    def review(self) -> None:
        """About once a second while open: what the peer was let in by must still hold."""

    def tick(self) -> None:
        """About once a second while open, unless the peer reads too slowly."""

    def closing(self) -> None:
        """Nothing further will be sent: let go of what feeds this socket. Called once or more."""

    def ended(self, reason: str) -> None:
        """The socket is gone."""


class WebSocket(asyncio.Protocol):
    """A socket from accept to the last byte. With slots, for a process holds ten thousand of them."""

    __slots__ = (
        "_abort_at",
        "_allowed",
        "_close_reason",
        "_close_sent",
        "_fragments",
        "_fragments_text",
        "_frames",
        "_handler",
        "_held",
        "_liveness",
        "_outbox",
        "_outbox_bytes",
        "_paused",
        "_protocol",
        "_reading",
        "_relay",
        "_resumed",
        "_suspended",
        "_transport",
        "_withdrawn",
        "_written",
        "opened_at",
    )

    def __init__(self, relay: Relay, handler: SocketHandler) -> None:
        settings = relay.settings
        self._relay = relay
        self._handler = handler
        self._protocol = ServerProtocol(max_size=settings.max_frame_bytes)
        self._frames = FrameReader(self._protocol, settings.max_frame_bytes)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._written = 0
        self._withdrawn: tuple[int, float] | None = None  # up to which byte, and until when they may leave
        self._paused = False
        self._reading = self._allowed = True
        self._resumed: asyncio.Future[None] | None = None
        self._fragments: list[bytes] = []
        self._fragments_text = True
        self._suspended = False
        self._held: list[_Received] = []
        self._close_sent = False
        self._close_reason: str | None = None
        self.opened_at = time.monotonic()
        """When it was accepted, on the monotonic clock."""
        self._abort_at: float | None = None
        self._liveness = Liveness(
            settings.ping_interval,
            settings.ping_misses,
            settings.slow_consumer_timeout,
            heard_at=self.opened_at,
        )

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._protocol.state is OPEN

    @property
    def heard_at(self) -> float:
        """When the peer last gave a sign of life, on the monotonic clock."""
        return self._liveness.heard_at

    # asyncio.Protocol: called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        if not self._handler.accepted(peer[0] if peer else None):
            self._close_reason = "too_many_connections"
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=self._relay.settings.outbound_queue_bytes)
        self._relay.registry.add(self)

    def data_received(self, data: bytes) -> None:
        self._relay.tally.bytes_received += len(data)
        now = time.monotonic()
        self._liveness.heard(now)
        if self._protocol.state is CONNECTING:
            self._protocol.receive_data(data)
            events: Sequence[_Received] = self._protocol.events_received()
        else:
            events = self._frames.receive(data)
        if self._suspended:
            self._held += events
        else:
            self._handle(events, now)
        self._send_protocol_data()
        self._relay.registry.flush()

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
        self._held.clear()
        self._handler.closing()
        self._relay.registry.remove(self)
        if self._protocol.state is not CLOSED and not self._protocol.reader.eof:
            self._protocol.receive_eof()
        self._handler.ended(self._close_reason or ("client" if self._protocol.close_rcvd else "lost"))

    # The opening handshake, and plain HTTP.

    def accept(self, request: Request) -> None:
        """Accept a WebSocket handshake, which the library may still refuse: see `is_open`."""
        self.respond(self._protocol.accept(request))
        if self._protocol.state is not OPEN:
            self.ends_for("handshake")

    def reject(self, turnaway: Turnaway) -> None:
        """Refuse a WebSocket handshake."""
        self.ends_for(turnaway.reason)
        self.respond(rejection(self._protocol, turnaway))

    def respond(self, response: Response) -> None:
        """Answer the request, before anything that is queued."""
        self._protocol.send_response(response)
        self._send_protocol_data()

    def ends_for(self, reason: str) -> None:
        """Count this socket under `reason` when it has ended, unless another reason came first."""
        self._close_reason = self._close_reason or reason

    # The outbound queue.

    def queue(self, frames: bytes) -> None:
        """Add whole frames to the outbox; they are written when the step ends."""
        if not self._outbox:
            self._relay.registry.wants_flush(self)
        self._outbox.append(frames)
        self._outbox_bytes += len(frames)

    def offer(self, frames: bytes) -> bool:
        """Queue whole frames if there is room for them; False means that nothing was queued."""
        if self._paused or self._outbox_bytes > self._relay.settings.outbound_queue_bytes:
            return False
        # As in `queue`, without the call: this runs once for each subscriber of each batch.
        if not self._outbox:
            self._relay.registry.wants_flush(self)
        self._outbox.append(frames)
        self._outbox_bytes += len(frames)
        return True

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
            self._written += len(data)
            self._relay.tally.bytes_sent += len(data)

    async def writable(self) -> None:
        """Wait until the transport has room. Cancelling it changes nothing."""
        while self._paused:
            if self._resumed is None:
                self._resumed = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._resumed)

    # Messages of the peer.

    def suspend(self) -> None:
        """Keep the messages behind this one waiting until `resume`.

        They are bounded by one read of the socket, for no other read follows.
        """
        self._suspended = True
        self._update_reading()

    def resume(self) -> None:
        """Go on with the messages that wait."""
        self._suspended = False
        held, self._held = self._held, []
        self._handle(held, time.monotonic())
        self._update_reading()
        self._send_protocol_data()
        self._relay.registry.flush()

    def _handle(self, events: Iterable[_Received], now: float) -> None:
        remaining = iter(events)
        for event in remaining:
            if isinstance(event, bytes):
                self._text(event, now)
            elif isinstance(event, Frame):
                self._frame(event, now)
            elif isinstance(event, Request):
                self._handler.requested(event, now)
            if self._suspended:
                self._held += remaining
                return

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
                self._handler.closing()

    def _message(self, data: bytes, is_text: bool, now: float) -> None:
        if is_text:
            self._text(data, now)
        else:
            self._handler.received(data, False, now)

    def _text(self, data: bytes, now: float) -> None:
        if self._protocol.state is not OPEN and (self._close_reason or self._protocol.close_rcvd is None):
            return  # we are closing; messages before the peer's own close frame still count
        if not data.isascii():
            try:
                data.decode()
            except UnicodeDecodeError:
                self._close_reason = "protocol_error"
                self._protocol.fail(1007, "a text frame must be UTF-8")  # RFC 6455 §8.1
                return
        self._handler.received(data, True, now)

    # Pressure and deadlines.

    def allow_reading(self, allowed: bool) -> None:
        """Say whether there is room for messages; without room, nothing is read from the peer."""
        self._allowed = allowed
        self._update_reading()

    def _update_reading(self) -> None:
        """Read from the peer only while its answers can leave and its messages have room."""
        is_held_up = self._paused or self._suspended or self._relay.registry.draining
        wanted = self._allowed and not is_held_up
        if wanted is self._reading or self._transport.is_closing():
            return
        self._reading = wanted
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def withdraw(self) -> None:
        """What was written before now and waits still must leave within a second, or not at all.

        The reader of a socket that is dropped for it resumes by cursor.
        """
        if self._transport.get_write_buffer_size():
            self._withdrawn = (self._written, time.monotonic() + _WITHDRAWAL_TIMEOUT)

    def _is_withdrawn(self, now: float) -> bool:
        """Whether bytes that were to leave are waiting still, after all the time they had."""
        if self._withdrawn is None:
            return False
        up_to, until = self._withdrawn
        if self._written - self._transport.get_write_buffer_size() >= up_to:
            self._withdrawn = None
            return False
        return now >= until

    def check_deadlines(self, now: float) -> None:
        """Called about once a second."""
        if self._is_withdrawn(now):
            self._close_reason = self._close_reason or "withdrawn"
            self._transport.abort()
        elif self._abort_at is not None:
            if now >= self._abort_at:
                self._transport.abort()
        elif self._protocol.state is CONNECTING:
            if now - self.opened_at > self._relay.settings.handshake_timeout:
                self._close_reason = "handshake"
                self._transport.abort()
        elif self._protocol.state is OPEN:
            self._handler.review()
            if self.is_open:
                self._act_on_liveness(now)
            if not self._paused and self._abort_at is None:
                self._handler.tick()

    def _act_on_liveness(self, now: float) -> None:
        waiting_bytes = self._transport.get_write_buffer_size()
        match self._liveness.check(now, waiting_bytes=waiting_bytes, listening=self._reading):
            case PeerState.SILENT:
                self._protocol.send_ping(b"")
                self._send_protocol_data()
            case PeerState.GONE:
                self._close_reason = "ping_timeout"
                self._transport.abort()
            case PeerState.STUCK:
                self._relay.metrics.slow_consumers_closed.inc()
                self.close(1013, "the reader takes nothing")

    def stop_reading(self) -> None:
        """Take nothing further from the peer; the relay is draining."""
        if self._reading and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    # Closing.

    def close(self, code: int, reason: str, cause: str | None = None) -> None:
        """Start the closing handshake; the socket is aborted if the peer does not finish it in time.

        `cause` counts it among the closed connections, where the code alone does not tell.
        """
        self._handler.closing()
        self.flush()
        if self._protocol.state is OPEN:
            self._close_reason = self._close_reason or cause or _REASONS.get(code, "internal_error")
            self._protocol.send_close(code, reason)
            self._send_protocol_data()
            if not self._reading and not self._transport.is_closing():
                self._reading = True
                self._transport.resume_reading()  # for the peer's half of the handshake
        elif self._protocol.state is CONNECTING and self._close_reason is None:
            self._transport.abort()
        self._abort_at = time.monotonic() + _CLOSE_TIMEOUT

    def abort(self) -> None:
        """Drop the socket at once."""
        self._transport.abort()

    def _send_protocol_data(self) -> None:
        """Write the library's bytes; an empty piece means: close after this."""
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
                self._written += len(data)
            else:
                self._transport.close()
                self._abort_at = time.monotonic() + _CLOSE_TIMEOUT

    def _report_too_large(self) -> None:
        """Send the ERROR before the library's close frame with 1009 (R-123)."""
        if self._close_reason is not None:
            return
        self._close_reason = "too_large"
        self._relay.metrics.errors_sent[ErrorCode.PACKET_TOO_LARGE].inc()
        payload = frame_too_large_payload(self._relay.settings.max_packet_bytes)
        self._transport.write(text_frame(payload))
