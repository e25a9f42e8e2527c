"""The server's half of all sessions, without I/O (T-030 … T-044, T-049, T-072, T-078; A-155 … A-157, A-164).

    connection ──▶ header ──▶ session ──▶ frames in sequence ──▶ the queue ──▶ acknowledged

A `ReceivingSession` holds the number that makes delivery exact: the next expected sequence. A message with a
lower sequence is a repetition, and is acknowledged again. A higher sequence cannot occur on a stream, and
ends the session. A session outlives its connections, of which the newest counts (T-037), so that a
reconnecting sender need not wait until the old connection is found dead.

`take` accepts as many messages as there is room for, and leaves the rest unread. Accepted messages are
acknowledged at once, or after N messages or T seconds (T-041), and always before a message waits for room:
otherwise senders would give up messages that a full queue holds.

A session that has accepted a message, or was rejected, is remembered until `session_timeout` after its last
connection, because its sender may return with messages that were accepted.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from strata.txrx.codecs import MessageCodec
from strata.txrx.errors import CodecError, ProtocolViolation
from strata.txrx.frames import (
    HEADER_BYTES,
    SEQUENCE,
    Ack,
    Closed,
    Reject,
    Response,
    encode_response,
    read_header,
)
from strata.txrx.multipart import FrameReader
from strata.txrx.settings import TxRxSettings

__all__ = ["ReceiverCounters", "ReceivingLink", "ReceivingSession", "Sessions"]

M = TypeVar("M")

_LATE_SECONDS = 5.0
"""A timer that is later than this was delayed together with all other work."""


@dataclass(slots=True)
class ReceiverCounters:
    """The counters of a server (T-100)."""

    connections: int = 0
    sessions: int = 0
    frames_received: int = 0
    bytes_received: int = 0
    messages_accepted: int = 0
    duplicates: int = 0
    acks_sent: int = 0
    rejects_sent: int = 0
    broken_connections: int = 0
    """Connections that were lost within a frame, or closed because they stalled there."""
    queue_full: int = 0
    """How often a connection had to wait for room."""


@dataclass(slots=True, eq=False)
class ReceivingSession(Generic[M]):
    """The state of one sender's session."""

    id: int
    expected: int = 0
    """The next expected sequence."""
    rejected: str | None = None
    """Why the session was ended, if it was."""
    link: ReceivingLink[M] | None = None
    """Its current connection."""


class Sessions(Generic[M]):
    """The sessions of one server. At most `max_sessions` are kept; a further session is refused."""

    def __init__(self, settings: TxRxSettings) -> None:
        self._settings = settings
        self._sessions: dict[int, ReceivingSession[M]] = {}
        self._detached: OrderedDict[int, float] = OrderedDict()
        """When each session without a connection is to be forgotten, the earliest first."""

    def __len__(self) -> int:
        return len(self._sessions)

    def attach(self, session_id: int, link: ReceivingLink[M]) -> ReceivingSession[M] | None:
        """The session of a new connection; None if there is no room for another session."""
        session = self._sessions.get(session_id)
        if session is None:
            if len(self._sessions) >= self._settings.max_sessions:
                return None
            session = self._sessions[session_id] = ReceivingSession(session_id)
        self._detached.pop(session_id, None)
        session.link = link
        return session

    def link_of(self, session_id: int) -> ReceivingLink[M] | None:
        """The current connection of a session, or None."""
        session = self._sessions.get(session_id)
        return None if session is None else session.link

    def detach(self, session: ReceivingSession[M], now: float) -> None:
        """Note that the connection of a session is gone."""
        session.link = None
        if session.expected == 0 and session.rejected is None:
            del self._sessions[session.id]
        else:
            self._detached[session.id] = now + self._settings.session_timeout

    def forget(self, session: ReceivingSession[M]) -> None:
        """Forget a session that its sender has ended, with all messages acknowledged."""
        session.link = None
        del self._sessions[session.id]

    def get_timer(self) -> float | None:
        """When to call `handle_timer`; None if nothing is due."""
        return next(iter(self._detached.values()), None)

    def handle_timer(self, now: float) -> None:
        """Forget sessions that have been without a connection for too long (T-035)."""
        at = self.get_timer()
        if at is not None and now > at + _LATE_SECONDS:
            # This process was not running: senders that returned in the meantime are waiting to be read.
            for session_id in self._detached:
                self._detached[session_id] = now + self._settings.session_timeout
        while self._detached and next(iter(self._detached.values())) <= now:
            session_id, _ = self._detached.popitem(last=False)
            del self._sessions[session_id]


class ReceivingLink(Generic[M]):
    """One connection to the server, from its first byte."""

    def __init__(
        self,
        sessions: Sessions[M],
        codec: MessageCodec[M],
        settings: TxRxSettings,
        counters: ReceiverCounters,
        now: float,
    ) -> None:
        self.is_finished = False
        """Whether to close the connection after `data_to_send` has been written."""
        self.has_said_why = False
        """Whether the peer has been told why the connection ends."""
        self.superseded: ReceivingLink[M] | None = None
        """An older connection of this session, which this one has replaced."""
        self.is_blocked = False
        """Whether frames may be waiting for room; then the caller must not read on."""
        self._sessions = sessions
        self._decode = codec.decode
        self._settings = settings
        self._counters = counters
        self._reader = FrameReader(settings.codec_max_frame_length)
        self._session: ReceivingSession[M] | None = None
        self._to_send: list[bytes] = []
        self._acked = -1
        """The highest sequence that was acknowledged on this connection."""
        self._owes_repeat = False
        """Whether to send the last acknowledgement again, because it may have been lost."""
        self._due_at: float | None = None
        """When the accepted messages must be acknowledged."""
        self._heard_at = now
        counters.connections += 1

    @property
    def session_id(self) -> int | None:
        """The session's id; None until it is known."""
        return None if self._session is None else self._session.id

    # From bytes to messages

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """The buffer for the peer's next bytes."""
        return self._reader.get_buffer()

    def buffer_updated(self, count: int, now: float) -> None:
        """Report that `count` bytes were put into the buffer; call `take` next."""
        self._reader.buffer_updated(count)
        self._heard_at = now
        self._counters.bytes_received += count

    def discard(self) -> None:
        """Drop the bytes that have not been read, because the connection ends."""
        self._reader.discard()

    def take(self, room: int, now: float) -> list[M]:
        """Accept up to `room` messages. The caller must put all of them into the queue, in this order."""
        messages: list[M] = []
        if self.is_finished:
            return messages
        try:
            session = self._session or self._read_header()
            if session is not None:
                self._read_frames(session, messages, room)
        except Exception as error:
            # The program's own codec may raise any error. The messages before it are in sequence, and count.
            self._counters.messages_accepted += len(messages)
            known = isinstance(error, ProtocolViolation | CodecError)
            self._reject(str(error) if known else f"undecodable: {type(error).__name__}")
            return messages
        self._counters.messages_accepted += len(messages)
        self._acknowledge(now)
        return messages

    def _read_header(self) -> ReceivingSession[M] | None:
        """Read the header and return the session; None if there is no session to read frames for."""
        header = self._reader.read_exactly(HEADER_BYTES)
        if header is None:
            return None
        try:
            session_id = read_header(header)
        except ProtocolViolation:
            # The peer does not speak this protocol, so it would not understand an answer.
            self._counters.broken_connections += 1
            self.is_finished = True
            return None
        known = len(self._sessions)
        older = self._sessions.link_of(session_id)
        session = self._sessions.attach(session_id, self)
        if session is None:
            self._reject("the server has too many sessions")
            return None
        self._counters.sessions += len(self._sessions) - known
        self._session = session
        if older is not None:
            older.is_finished = True
            older.is_blocked = False
            older._session = None
            self.superseded = older
        if session.rejected is not None:
            self._reject(session.rejected)
            return None
        # An acknowledgement may have been lost with the previous connection.
        self._owes_repeat = session.expected > 0
        return session

    def _read_frames(self, session: ReceivingSession[M], messages: list[M], room: int) -> None:
        decode, read = self._decode, self._reader.read
        sequence_of, append = SEQUENCE.unpack_from, messages.append
        most = self._settings.message_ack_every_n_messages
        while (left := room - len(messages)) > 0:
            wanted = min(left, most)
            if bodies := self._reader.read_numbered(session.expected, wanted):
                self._counters.frames_received += len(bodies)
                before = len(messages)
                try:
                    for body in bodies:
                        append(decode(body, ()))
                finally:
                    session.expected += len(messages) - before
                if len(messages) < room and self._reader.is_between_frames:
                    self.is_blocked = False
                    return
                continue
            frames = read(wanted)
            if not frames:
                self.is_blocked = False
                return
            self._counters.frames_received += len(frames)
            expected = session.expected
            for frame in frames:
                if not frame:
                    self._send_ack(session)
                    self._sessions.forget(session)
                    self._session = None
                    self.is_finished = True
                    return
                if len(frame[0]) < 8:
                    raise ProtocolViolation("a frame without a sequence")
                (sequence,) = sequence_of(frame[0])
                if sequence == expected:
                    append(decode(frame[0][8:], frame[1:]))
                    session.expected = expected = expected + 1
                elif sequence < expected:
                    self._counters.duplicates += 1
                    self._owes_repeat = True
                elif expected == 0:
                    raise ProtocolViolation(f"the session is not known here, and begins with {sequence}")
                else:
                    raise ProtocolViolation(f"message {sequence} came where {expected} was expected")
        if not self.is_blocked:
            self._counters.queue_full += 1
            self.is_blocked = True

    # Acknowledgements

    def _acknowledge(self, now: float) -> None:
        """Decide whether to acknowledge now or later."""
        session = self._session
        if session is None:
            return
        owed = session.expected - 1 - self._acked
        if not owed and not self._owes_repeat:
            return
        settings = self._settings
        if (
            settings.message_ack_eagerly
            or self.is_blocked
            or owed >= settings.message_ack_every_n_messages
            or (self._due_at is not None and now >= self._due_at)
        ):
            self._send_ack(session)
        elif self._due_at is None:
            self._due_at = now + settings.message_ack_time_interval

    def _send_ack(self, session: ReceivingSession[M]) -> None:
        self._due_at = None
        self._owes_repeat = False
        self._acked = session.expected - 1
        if self._acked >= 0:
            self._counters.acks_sent += 1
            self._answer(Ack(self._acked))

    def _reject(self, reason: str) -> None:
        if self._session is not None:
            self._session.rejected = reason
            self._send_ack(self._session)
        self._counters.rejects_sent += 1
        self._answer(Reject(reason))
        self.is_finished = self.has_said_why = True
        self.is_blocked = False

    def _answer(self, response: Response) -> None:
        self._to_send.append(encode_response(response))

    def data_to_send(self) -> bytes:
        """The bytes to write now."""
        pieces, self._to_send = self._to_send, []
        return b"".join(pieces)

    # Time and the end

    def get_timer(self) -> float | None:
        """When to call `handle_timer`; None if nothing is due."""
        moments = [] if self._due_at is None else [self._due_at]
        if self.is_blocked:
            moments.append(self._heard_at + self._settings.message_ack_time_interval)
        elif self._session is None or not self._reader.is_between_frames:
            moments.append(self._heard_at + self._settings.idle_frame_timeout)
        return None if self.is_finished else min(moments, default=None)

    def handle_timer(self, now: float) -> None:
        """Send an acknowledgement that is due; end a connection that stalls within a frame or the header."""
        if self.is_finished:
            return
        session = self._session
        if (
            session is not None
            and self.is_blocked
            and now >= self._heard_at + self._settings.message_ack_time_interval
        ):
            # This tells the sender that the server is alive, although the queue is still full.
            self._heard_at = now
            self._send_ack(session)
        elif session is not None and self._due_at is not None and now >= self._due_at:
            self._send_ack(session)
        elif (
            (session is None or not self._reader.is_between_frames)
            and not self.is_blocked
            and now >= self._heard_at + self._settings.idle_frame_timeout
        ):
            self._counters.broken_connections += 1
            self.is_finished = True

    def refuse(self, reason: str) -> None:
        """End the session for a reason that no new connection can repair, such as lost bytes."""
        if not self.is_finished:
            self._reject(reason)

    def close(self, reason: str) -> None:
        """Acknowledge the accepted messages, and tell the sender that the receiver is gone (T-024)."""
        if not self.is_finished:
            if self._session is not None:
                self._send_ack(self._session)
            self._answer(Closed(reason))
            self.is_finished = self.has_said_why = True

    def connection_lost(self, now: float) -> None:
        """Note that the connection is gone; the session waits for its next connection."""
        if not self.is_finished and not self._reader.is_between_frames:
            self._counters.broken_connections += 1
        if self._session is not None and self._session.link is self:
            self._sessions.detach(self._session, now)
        self._session = None
        self.is_finished = True
        self.is_blocked = False
