"""One socket as bytes and frames: the asyncio shell around the WebSocket protocol.

The library's `ServerProtocol` decides which frames are legal, `Liveness` whether a peer is still there, and
`Parting` how long a socket that is about to end still has. This shell moves bytes and applies pressure:

- Bytes for the peer collect in a `SocketOutbox`. While it is paused, nothing more is read from the peer.
- A peer that takes no byte for `slow_consumer_timeout` is closed with 1013, and aborted if even the close
  does not get through (R-170). Pings find half-open sockets (R-130).
- `suspend` keeps the peer's next messages waiting until `resume`, and stops reading.
- One step takes a limited number of frames from a peer, and only as many as the turn of the loop has time
  for; when many peers send, they wait in line. Its handler says how long a peer that has used its share of
  the loop must then wait. A peer that sends many pings or tiny fragments is closed with 1008.

A `SocketHandler` (`socket_handler`) gives the messages their meaning.
"""

from __future__ import annotations

import asyncio
import http
import re
import time
from collections.abc import Generator, Hashable, Iterable, Sequence
from typing import Final, TypeAlias, cast

from strata.protocol.errors import ErrorCode
from websockets.exceptions import InvalidMessage, PayloadTooBig
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import CLOSED, CONNECTING, OPEN, Event
from websockets.server import ServerProtocol

from relayd.access.gate import Turnaway
from relayd.access.limits import Budget
from relayd.frames import FrameSplitter, text_frame
from relayd.relay import RunningRelay
from relayd.roll import OpenSession
from relayd.sessions.answers import frame_too_large_payload
from relayd.sessions.http_requests import rejection
from relayd.sessions.liveness import Liveness, PeerState
from relayd.sessions.outbox import SocketOutbox
from relayd.sessions.parting import Due, Parting
from relayd.sessions.socket_handler import NOBODY, SocketHandler

__all__ = ["WebSocket"]

_Received: TypeAlias = bytes | Event
"""A whole text message, or any other event as the library gives it."""
_LINGER: Final = 0.2
"""Over TLS, where one side alone cannot close, a socket lingers until this many seconds pass in silence."""
_LINGERING_FRAMES: Final = 8
"""How many frames of the largest size are read from a peer while its socket lingers."""
_SMALL_FRAGMENT: Final = 1024
"""A fragment of fewer bytes than this counts as a control frame."""
_LONGEST_REST: Final = 1.0
"""The longest time between two looks at what a peer owes, in seconds."""
_VERSION: Final = "13"
_END_OF_HEADERS: Final = b"\r\n\r\n"
_EMPTY_LINES: Final = re.compile(rb"\A(?:\r\n)+")
_REASONS: Final = {1001: "going_away", 1008: "malformed", 1013: "slow_consumer"}


def _ignoring() -> Generator[None, None, None]:
    while True:
        yield


class _ServerProtocol(ServerProtocol):
    """Answers HTTP requests that the library does not answer, and marks every response with `nosniff`."""

    def send_response(self, response: Response) -> None:
        if response.status_code != http.HTTPStatus.SWITCHING_PROTOCOLS:
            response.headers["X-Content-Type-Options"] = "nosniff"
        super().send_response(response)

    def send_eof(self) -> None:
        fault = self.handshake_exc
        if (
            isinstance(fault, InvalidMessage)
            and not isinstance(fault.__cause__, EOFError)
            and not self.writes
        ):
            # The library closes without an answer on what it cannot read, such as a request with a body.
            sentence = "This relay reads no such request: it takes GET, without a body.\n"
            self.send_response(self.reject(http.HTTPStatus.BAD_REQUEST, sentence))
        else:
            super().send_eof()


_IGNORES: Final = _ignoring()


class WebSocket(asyncio.Protocol):
    """A socket from accept to the last byte. It has slots because a process holds ten thousand sockets."""

    __slots__ = (
        "_allowed",
        "_close_reason",
        "_control",
        "_dismissed",
        "_fragments",
        "_fragments_text",
        "_frames",
        "_handler",
        "_headers_end",
        "_held",
        "_is_resting",
        "_is_stopped",
        "_liveness",
        "_parting",
        "_protocol",
        "_reading",
        "_relay",
        "_resting",
        "_suspended",
        "_tally",
        "_transport",
        "_unread",
        "opened_at",
        "outbox",
    )

    def __init__(self, relay: RunningRelay, handler: SocketHandler) -> None:
        settings = relay.settings
        self._relay = relay
        self._handler = handler
        self._protocol = _ServerProtocol(max_size=settings.max_frame_bytes)
        self._frames = FrameSplitter(self._protocol, settings.max_frame_bytes)
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._tally = relay.tally
        self.outbox = SocketOutbox(settings.outbound_queue_bytes, relay.tally, relay.registry.wants_flush)
        self._reading = self._allowed = True
        self._is_stopped = False
        self._headers_end = b""
        self._control: Budget | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._is_resting = False  # until `_resting` fires, or until the socket's turn comes
        self._fragments = bytearray()
        self._fragments_text = True
        self._suspended = False
        self._held: list[_Received] = []
        self._unread = b""
        self._close_reason: str | None = None
        self.opened_at = time.monotonic()
        """When the socket was accepted, on the monotonic clock."""
        self._parting = Parting(_LINGERING_FRAMES * settings.max_frame_bytes)
        self._dismissed = False
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
    def _is_asked(self) -> bool:
        """Whether a plain HTTP request waits for its answer; the peer has nothing more to say then."""
        return (
            self._close_reason is not None
            and self._protocol.state is CONNECTING
            and not self._parting.is_lingering
        )

    @property
    def heard_at(self) -> float:
        """When the peer last gave a sign of life, on the monotonic clock."""
        return self._liveness.heard_at

    @property
    def account(self) -> Hashable:
        """The account that pays for the bytes the socket holds."""
        return self._handler.account

    @property
    def held_bytes(self) -> int:
        """The approximate bytes kept for the peer; 0 once it was dismissed, because then all of them go."""
        if self._dismissed:
            return 0
        if self._transport.is_closing():
            return self.outbox.held_bytes  # of an answer that a slow reader has not taken yet
        held = sum(len(event) for event in self._held if isinstance(event, bytes))
        here = self._frames.held_bytes + len(self._fragments) + len(self._unread) + held
        return here + self.outbox.held_bytes + self._handler.held_bytes

    def described(self, process: str) -> OpenSession | None:
        """The session as operators see it, in the process of this name; None if there is no session."""
        return self._handler.described(process) if self.is_open else None

    def expel(self) -> None:
        """End the session for an operator: report this to the peer, and close."""
        self._handler.expelled()

    def refuse_publishes(self, refuse: bool) -> None:
        """Say whether publishes of the peer are refused."""
        self._handler.refuse_publishes(refuse)

    # asyncio.Protocol: called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.outbox.attach(self._transport)
        try:
            peer = transport.get_extra_info("peername")
            is_welcome = self._handler.accepted(peer[0] if peer else None)
        except Exception as error:
            self._relay.faults.caught("message", error)
            self._close_reason = "internal_error"
            self._transport.abort()
            return
        if not is_welcome:
            self._close_reason = "too_many_connections"
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=self._relay.settings.outbound_queue_bytes)
        self._relay.registry.add(self)

    def data_received(self, data: bytes) -> None:
        self._tally.bytes_received += len(data)
        if self._parting.is_lingering or self._is_asked:
            if self._parting.discard(len(data)):
                self._close_transport()
            return
        registry = self._relay.registry
        registry.unseen_bytes += len(data)
        if registry.unseen_bytes > registry.look_after_bytes:
            registry.look()
        now = time.monotonic()
        self._liveness.heard(now)
        if self._relay.slices.is_over(self._handler.turn(now)):
            self._unread += data
            self._go_on_after(0.0)
        else:
            self._read(data, now)

    def _read(self, data: bytes, now: float) -> None:
        if self._protocol.state is CONNECTING:
            data = self._take_headers(data, now)
        self._take(self._frames.receive(data) if data else [], now)

    def _take_headers(self, data: bytes, now: float) -> bytes:
        """Give the library the request. What follows it in the same read is not for the library's parser."""
        if self._headers_end in (
            b"",
            b"\r",
        ):  # ignore empty lines before it (RFC 9112 section 2.2)
            data = _EMPTY_LINES.sub(b"", self._headers_end + data, count=1)
            self._headers_end = b""
            if data in (b"", b"\r"):
                self._headers_end = data
                return b""
        seen = self._headers_end + data
        end = seen.find(_END_OF_HEADERS)
        size = len(data) if end < 0 else end + len(_END_OF_HEADERS) - len(self._headers_end)
        self._headers_end = seen[-3:]
        self._protocol.receive_data(data[:size])
        self._handle(self._protocol.events_received(), now)
        return data[size:] if self._protocol.state is OPEN else b""

    def _take(self, events: Sequence[_Received], now: float) -> None:
        """Handle the events of one step, or as many as there is time for."""
        if self._suspended or self._held:
            self._held += events
        else:
            self._handle(events, now)
        if self._suspended or not self._held:  # else the library's answer to a close frame would be too early
            self._send_protocol_data()
        self._relay.registry.flush()
        self._go_on_after(self._handler.worked(time.monotonic() - now, now))

    def _go_on_after(self, owed: float) -> None:
        """Continue in a later step, if something is left or the peer has to wait."""
        is_left = self._held or self._frames.has_more or self._unread
        if self._is_resting or not (owed > 0 or (is_left and not self._suspended)):
            return
        self._is_resting = True
        if owed > 0:
            self._resting = asyncio.get_running_loop().call_later(min(owed, _LONGEST_REST), self._rested)
        else:
            self._relay.slices.later(self._rested, self._handler.turn(time.monotonic()))
        self._update_reading()

    def _rested(self) -> None:
        self._resting, self._is_resting = None, False
        try:
            if not self._suspended and not self._transport.is_closing():
                self._go_on(time.monotonic())
        except Exception as error:
            self._relay.faults.caught("message", error)
            self._transport.abort()  # nothing more would be read from it
        if not self._is_resting:
            self._update_reading()

    def _go_on(self, now: float) -> None:
        """Take the input that has waited longest."""
        if self._held:
            held, self._held = self._held, []
            self._take(held, now)
        elif self._frames.has_more:
            self._take(self._frames.receive(b""), now)
        elif self._unread:
            data, self._unread = self._unread, b""
            self._read(data, now)

    def eof_received(self) -> bool:
        if self._is_asked and self._transport.can_write_eof():
            # The peer has either said all it had to say or gone; the answer has until the deadline to be
            # found. Over TLS, asyncio and uvloop end the connection whatever is returned here.
            if not self._parting.has_begun:
                self._parting.begin(time.monotonic())
            return True
        self._protocol.receive_eof()
        self._send_protocol_data()
        self._close_transport()  # what waits to be sent has no more time than after a close of ours
        return False

    def pause_writing(self) -> None:
        self.outbox.pause()
        self._liveness.write_paused(time.monotonic(), self._transport.get_write_buffer_size())
        self._update_reading()

    def resume_writing(self) -> None:
        self._liveness.write_resumed(time.monotonic())
        self.outbox.resume()
        self._update_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        # At once: a connection that has ended is a cycle, which the collector finds at some later time.
        self._held.clear()
        self._frames.forget()
        self._unread = b""
        self._fragments = bytearray()
        self.outbox.end()
        if self._resting is not None:
            self._resting.cancel()
        self._relay.registry.remove(self)
        if self._relay.slices.is_over():
            self._relay.slices.later(self._end)
        else:
            self._end()

    def _end(self) -> None:
        try:
            self._handler.closing()
        except Exception as error:
            self._relay.faults.caught("message", error)  # the socket is gone all the same
        if self._protocol.state is not CLOSED and not self._protocol.reader.eof:
            self._protocol.receive_eof()
        self._handler.ended(self._close_reason or ("client" if self._protocol.close_rcvd else "lost"))
        self.forget()

    def forget(self) -> None:
        """Leave no reference cycle, so that memory is freed now and not by the collector.

        After a flood of sockets, the collector would examine a million objects in one step of the loop.
        """
        self._handler = NOBODY
        self._protocol.parser = _IGNORES  # the parser's frame holds the protocol
        self._protocol.handshake_exc = self._protocol.parser_exc = None  # these hold frames too

    # The opening handshake, and plain HTTP.

    def accept(self, request: Request) -> None:
        """Accept a WebSocket handshake, which the library may still refuse: see `is_open`."""
        response = self._protocol.accept(request)
        if request.headers.get_all("Sec-WebSocket-Version") != [_VERSION] and response.status_code >= 400:
            response.headers["Sec-WebSocket-Version"] = _VERSION  # RFC 6455 section 4.4
        self.respond(response)
        if self._protocol.state is not OPEN:
            self.ends_for("handshake")

    def reject(self, turnaway: Turnaway) -> None:
        """Refuse a WebSocket handshake."""
        self.ends_for(turnaway.reason)
        self.respond(rejection(self._protocol, turnaway))

    def respond(self, response: Response) -> None:
        """Answer the request, ahead of anything that is queued."""
        self._protocol.send_response(response)
        self._send_protocol_data()
        if self._protocol.state is not OPEN:
            self._parting.answered(self._transport.get_write_buffer_size())

    def ends_for(self, reason: str) -> None:
        """Count this socket under `reason` when it ends, unless another reason came first."""
        self._close_reason = self._close_reason or reason

    # Messages of the peer.

    def suspend(self) -> None:
        """Keep the messages behind this one waiting until `resume`.

        They are bounded by one read of the socket, because no other read follows.
        """
        self._suspended = True
        self._update_reading()

    def resume(self) -> None:
        """Go on with the waiting messages."""
        self._suspended = False
        held, self._held = self._held, []
        self._handle(held, time.monotonic())
        self._go_on_after(0.0)
        self._update_reading()
        if not self._held:
            self._send_protocol_data()
        self._relay.registry.flush()

    def _handle(self, events: Iterable[_Received], now: float) -> None:
        remaining, slices, place = iter(events), self._relay.slices, self._handler.turn(now)
        for event in remaining:
            if isinstance(event, bytes):
                self._message(event, True, now)
            elif isinstance(event, Frame):
                self._frame(event, now)
            elif isinstance(event, Request):
                self._handler.requested(event, now)
            if self._suspended or slices.is_over(place):
                self._held += remaining
                return

    def _frame(self, frame: Frame, now: float) -> None:
        if self._is_costly(frame) and not self._may_cost(now):
            self.close(1008, "too many control frames", "control_frames")
            return
        match frame.opcode:
            case Opcode.TEXT | Opcode.BINARY if frame.fin:
                self._message(bytes(frame.data), frame.opcode is Opcode.TEXT, now)
            case Opcode.TEXT | Opcode.BINARY:
                self._fragments = bytearray(frame.data)
                self._fragments_text = frame.opcode is Opcode.TEXT
            case Opcode.CONT:
                self._fragments += frame.data
                if frame.fin:
                    data, self._fragments = bytes(self._fragments), bytearray()
                    self._message(data, self._fragments_text, now)
            case Opcode.CLOSE:
                self._handler.closing()

    @staticmethod
    def _is_costly(frame: Frame) -> bool:
        """Whether the frame costs more work than its bytes pay for."""
        if frame.opcode is Opcode.CLOSE:
            return False
        is_part = not frame.fin or frame.opcode is Opcode.CONT
        return frame.opcode in (Opcode.PING, Opcode.PONG) or (is_part and len(frame.data) < _SMALL_FRAGMENT)

    def _may_cost(self, now: float) -> bool:
        if self._protocol.state is not OPEN:
            return True  # one of the sides has closed already
        if self._control is None:
            settings = self._relay.settings
            self._control = Budget(settings.control_frame_limit, settings.malformed_window)
        return self._control.take(now)

    def _message(self, data: bytes, is_text: bool, now: float) -> None:
        if self._protocol.state is not OPEN and (self._close_reason or self._protocol.close_rcvd is None):
            return  # we are closing; messages before the peer's own close frame still count
        if is_text and not data.isascii():
            try:
                data.decode()
            except UnicodeDecodeError:
                self._close_reason = "protocol_error"
                self._protocol.fail(1007, "a text frame must be UTF-8")  # RFC 6455 §8.1
                return
        self._handler.received(data, is_text, now)

    # Pressure and deadlines.

    def allow_reading(self, allowed: bool) -> None:
        """Say whether there is room for messages. Without room, nothing is read from the peer."""
        self._allowed = allowed
        self._update_reading()

    def _update_reading(self) -> None:
        """Read from the peer only while its answers can leave and its messages have room."""
        is_held_up = (
            self.outbox.is_paused
            or self._suspended
            or self._is_resting
            or self._frames.has_more
            or (self._is_stopped and not self._parting.has_begun)
        )
        wanted = self._allowed and not is_held_up
        if wanted is self._reading or self._parting.is_lingering or self._transport.is_closing():
            return
        self._reading = wanted
        if wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def withdraw(self) -> None:
        """Anything written before now that still waits must leave within a second, or not at all.

        A reader whose socket is dropped for this resumes by cursor.
        """
        self.outbox.withdraw(time.monotonic())

    def check_deadlines(self, now: float) -> None:
        """Look at the deadlines. Called about once a second; `now` is monotonic."""
        if self.outbox.is_late(now):
            self._close_reason = self._close_reason or "withdrawn"
            self._transport.abort()
        elif self._parting.has_begun:
            self._act_on_parting(now)
        elif self._protocol.state is CONNECTING:
            if now - self.opened_at > self._relay.settings.handshake_timeout:
                self._close_reason = "handshake"
                self._transport.abort()
        elif self._protocol.state is OPEN:
            self._handler.review()
            if self.is_open:
                self._act_on_liveness(now)
            if not self.outbox.is_paused and not self._parting.has_begun:
                self._handler.tick()

    def _act_on_parting(self, now: float) -> None:
        waiting_bytes, is_closed = self._transport.get_write_buffer_size(), self._transport.is_closing()
        match self._parting.check(now, waiting_bytes=waiting_bytes, is_closed=is_closed):
            case Due.CLOSE:
                self._close_transport()
            case Due.ABORT:
                self._transport.abort()

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
        """Take nothing more from the peer, even if there is room; the relay is draining."""
        self._is_stopped = True
        self._update_reading()

    # Closing.

    def close(self, code: int, reason: str, cause: str | None = None) -> None:
        """Start the closing handshake. The socket is aborted if the peer does not finish it in time.

        `cause` is the reason under which the closed connection is counted, if `code` alone does not show it.
        """
        self._handler.closing()
        self.outbox.flush()
        if self._protocol.state is OPEN:
            self._close_reason = self._close_reason or cause or _REASONS.get(code, "internal_error")
            self._protocol.send_close(code, reason)
            self._send_protocol_data()
            is_left = self._frames.has_more or self._unread
            if not self._reading and not self._transport.is_closing() and not is_left:
                self._reading = True
                self._transport.resume_reading()  # for the peer's half of the handshake
        elif self._protocol.state is CONNECTING and self._close_reason is None:
            self._transport.abort()
        self._parting.begin(time.monotonic())

    def dismiss(self, code: int, reason: str, cause: str) -> None:
        """Close, and drop what the peer has sent: the memory it holds is needed now.

        The bytes that wait for the peer go out first, so that a reader learns why it is closed and resumes
        after the last packet that it got. This takes a second at most; the rest is dropped.
        """
        if self._dismissed:
            return
        self._dismissed = True
        self.close(code, reason, cause)
        if not self._transport.is_closing():
            self._held.clear()
            self._fragments = bytearray()
            self._linger()
        self.withdraw()

    def abort(self) -> None:
        """Drop the socket at once."""
        self._transport.abort()

    def _send_protocol_data(self) -> None:
        """Write the library's bytes; an empty piece means that the socket closes after it."""
        writes = self._protocol.data_to_send()
        if not writes:
            return
        self.outbox.flush()
        if isinstance(self._protocol.parser_exc, PayloadTooBig):
            self._report_too_large()
        if self._protocol.close_sent is not None:
            self.outbox.shut()
        for data in writes:
            if not data:
                self._linger()
            elif not self._parting.is_lingering:
                self.outbox.write(data)

    def _close_transport(self) -> None:
        self._transport.close()
        self._parting.closed(time.monotonic())

    def _linger(self) -> None:
        """Write nothing more, and read and discard for a while, before the socket is closed.

        Closing over unread bytes resets the connection, as do bytes that arrive after the close. The reset
        overtakes the close frame or the HTTP response that says why (RFC 6455 §7.1.1, RFC 9112 §9.6).
        """
        if self._parting.is_lingering or self._transport.is_closing():
            return
        self.outbox.shut()
        self._frames.forget()
        self._unread = b""
        self._parting.linger(time.monotonic())
        if not self._reading:
            self._reading = True
            self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()  # a peer that has nothing more to say closes now, which ends the wait
        else:
            self._linger_on(-1)

    def _linger_on(self, discarded: int) -> None:
        if self._parting.discarded == discarded:
            self._close_transport()
        elif not self._transport.is_closing():
            asyncio.get_running_loop().call_later(_LINGER, self._linger_on, self._parting.discarded)

    def _report_too_large(self) -> None:
        """Send the ERROR before the library's close frame with 1009 (R-123)."""
        if self._close_reason is not None:
            return
        self._close_reason = "too_large"
        self._relay.metrics.errors_sent[ErrorCode.PACKET_TOO_LARGE].inc()
        payload = frame_too_large_payload(self._relay.settings.max_packet_bytes)
        self.outbox.write(text_frame(payload))
