"""The server's half of all sessions, without I/O (T-030 … T-044, T-049, T-072, T-078; A-155 … A-157, A-164).

    connection ──▶ header ──▶ session ──▶ frames in sequence ──▶ the queue ──▶ acknowledged

A `ReceivingSession` is the one number that makes delivery exact: the sequence it expects. Lower ones are
repetitions, and are acknowledged again; a higher one cannot come over a stream, and ends the session. It
outlives its connections, of which the newest counts (T-037): a reconnecting sender does not wait for the old
one to be found dead.

A message is accepted by being given out of `take`, which is told how many there is room for; the rest stays
unread. Accepted messages are acknowledged at once, or after N of them or T seconds (T-041), always before
anything waits for room: else a full queue would make senders give up what it holds.

A session that has accepted something, or was ended, is remembered until `session_timeout` after its last
connection: its sender may come back with messages that were accepted.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from strata.txrx.codecs import Codec
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
from strata.txrx.framing import FrameReader
from strata.txrx.settings import ChannelSettings

__all__ = ["ReceiverCounters", "ReceivingLink", "ReceivingSession", "Sessions"]

M = TypeVar("M")

_LATE_SECONDS = 5.0
"""A timer that comes later than this has been held up with everything else."""


@dataclass(slots=True)
class ReceiverCounters:
    """What a server has done (T-100)."""

    connections: int = 0
    sessions: int = 0
    frames_received: int = 0
    bytes_received: int = 0
    messages_accepted: int = 0
    duplicates: int = 0
    acks_sent: int = 0
    rejects_sent: int = 0
    broken_connections: int = 0
    """Lost within a frame, or given up because nothing more of one came."""
    queue_full: int = 0
    """How often a connection had to wait for room."""


@dataclass(slots=True, eq=False)
class ReceivingSession:
    """What is remembered of a sender."""

    id: int
    expected: int = 0
    """The sequence that comes next."""
    rejected: str | None = None
    """Why it was ended."""
    link: ReceivingLink[Any] | None = None
    """Its connection."""


class Sessions:
    """The sessions of one server. Bounded: what is new beyond `max_sessions` is refused."""

    def __init__(self, settings: ChannelSettings) -> None:
        self._settings = settings
        self._sessions: dict[int, ReceivingSession] = {}
        self._detached: OrderedDict[int, float] = OrderedDict()
        """Those without a connection, with when they are forgotten; the first to go comes first."""

    def __len__(self) -> int:
        return len(self._sessions)

    def attach(self, session_id: int, link: ReceivingLink[M]) -> ReceivingSession | None:
        """The session of a new connection; None where there is no room for another."""
        session = self._sessions.get(session_id)
        if session is None:
            if len(self._sessions) >= self._settings.max_sessions:
                return None
            session = self._sessions[session_id] = ReceivingSession(session_id)
        self._detached.pop(session_id, None)
        session.link = link
        return session

    def link_of(self, session_id: int) -> ReceivingLink[Any] | None:
        """The connection that a session has."""
        session = self._sessions.get(session_id)
        return None if session is None else session.link

    def detach(self, session: ReceivingSession, now: float) -> None:
        """Its connection is gone."""
        session.link = None
        if session.expected == 0 and session.rejected is None:
            del self._sessions[session.id]
        else:
            self._detached[session.id] = now + self._settings.session_timeout

    def forget(self, session: ReceivingSession) -> None:
        """Its sender has ended it, with everything acknowledged: nothing more of it will come."""
        session.link = None
        del self._sessions[session.id]

    def get_timer(self) -> float | None:
        """When `handle_timer` has something to do."""
        return next(iter(self._detached.values()), None)

    def handle_timer(self, now: float) -> None:
        """Forget sessions that have been without a connection for too long (T-035)."""
        at = self.get_timer()
        if at is not None and now > at + _LATE_SECONDS:
            # We were not running: whoever came back meanwhile waits in front of the door.
            for session_id in self._detached:
                self._detached[session_id] = now + self._settings.session_timeout
        while self._detached and next(iter(self._detached.values())) <= now:
            session_id, _ = self._detached.popitem(last=False)
            del self._sessions[session_id]


class ReceivingLink(Generic[M]):
    """One connection to the server, from its first byte."""

    def __init__(
        self,
        sessions: Sessions,
        codec: Codec[M],
        settings: ChannelSettings,
        counters: ReceiverCounters,
        now: float,
    ) -> None:
        self.is_finished = False
        """Whether to close the connection once what is to be sent has been."""
        self.superseded: ReceivingLink[M] | None = None
        """An older connection of this session, which this one has finished."""
        self.is_blocked = False
        """Whether frames may wait for room: do not read on."""
        self._sessions = sessions
        self._decode = codec.decode
        self._settings = settings
        self._counters = counters
        self._reader = FrameReader(settings.codec_max_frame_length)
        self._session: ReceivingSession | None = None
        self._to_send: list[bytes] = []
        self._acked = -1
        """The highest sequence acknowledged on this connection."""
        self._owes_repeat = False
        """An acknowledgement may have been lost: send the last one again."""
        self._due_at: float | None = None
        """When what is accepted and not acknowledged must be acknowledged."""
        self._heard_at = now
        counters.connections += 1

    @property
    def session_id(self) -> int | None:
        """The session's id, once it is known."""
        return None if self._session is None else self._session.id

    # Bytes in, messages out

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """Where the peer's next bytes go."""
        return self._reader.get_buffer()

    def buffer_updated(self, count: int, now: float) -> None:
        """So many bytes were put there; `take` has to follow."""
        self._reader.buffer_updated(count)
        self._heard_at = now
        self._counters.bytes_received += count

    def take(self, room: int, now: float) -> list[M]:
        """Accept up to `room` messages: the caller puts all of them into the queue, in this order."""
        messages: list[M] = []
        if self.is_finished:
            return messages
        try:
            if self._session is not None or self._read_header(now):
                self._read_frames(messages, room)
        except Exception as error:
            # A codec of the program's own may raise anything. What came before is in sequence, and stays.
            self._counters.messages_accepted += len(messages)
            known = isinstance(error, ProtocolViolation | CodecError)
            self._reject(str(error) if known else f"undecodable: {type(error).__name__}")
            return messages
        self._counters.messages_accepted += len(messages)
        self._acknowledge(now)
        return messages

    def _read_header(self, now: float) -> bool:
        header = self._reader.read_exactly(HEADER_BYTES)
        if header is None:
            return False
        try:
            session_id = read_header(header)
        except ProtocolViolation:
            # Whoever this is does not speak our language: there is no answer that he would understand.
            self._counters.broken_connections += 1
            self.is_finished = True
            return False
        known = len(self._sessions)
        older = self._sessions.link_of(session_id)
        session = self._sessions.attach(session_id, self)
        if session is None:
            self._reject("the server has too many sessions")
            return False
        self._counters.sessions += len(self._sessions) - known
        self._session = session
        if older is not None:
            older.is_finished = True
            older.is_blocked = False
            older._session = None
            self.superseded = older
        if session.rejected is not None:
            self._reject(session.rejected)
            return False
        # An acknowledgement may have been lost with the connection before.
        self._owes_repeat = session.expected > 0
        return True

    def _read_frames(self, messages: list[M], room: int) -> None:
        session, decode, read = self._session, self._decode, self._reader.read
        assert session is not None
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
                    self._send_ack()
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
            self._send_ack()
        elif self._due_at is None:
            self._due_at = now + settings.message_ack_time_interval

    def _send_ack(self) -> None:
        assert self._session is not None
        self._due_at = None
        self._owes_repeat = False
        self._acked = self._session.expected - 1
        if self._acked >= 0:
            self._counters.acks_sent += 1
            self._answer(Ack(self._acked))

    def _reject(self, reason: str) -> None:
        if self._session is not None:
            self._session.rejected = reason
            self._send_ack()
        self._counters.rejects_sent += 1
        self._answer(Reject(reason))
        self.is_finished = True
        self.is_blocked = False

    def _answer(self, response: Response) -> None:
        self._to_send.append(encode_response(response))

    def data_to_send(self) -> bytes:
        """What to write now."""
        pieces, self._to_send = self._to_send, []
        return b"".join(pieces)

    # Time and ends

    def get_timer(self) -> float | None:
        """When `handle_timer` has something to do."""
        moments = [] if self._due_at is None else [self._due_at]
        if self.is_blocked:
            moments.append(self._heard_at + self._settings.message_ack_time_interval)
        elif self._session is None or not self._reader.is_between_frames:
            moments.append(self._heard_at + self._settings.idle_frame_timeout)
        return None if self.is_finished else min(moments, default=None)

    def handle_timer(self, now: float) -> None:
        """Acknowledge what is due; give up a peer that stops within a frame or says nothing at all."""
        if self.is_finished:
            return
        if self.is_blocked and now >= self._heard_at + self._settings.message_ack_time_interval:
            # The sender hears that we live, though nothing moves.
            self._heard_at = now
            self._send_ack()
        elif self._due_at is not None and now >= self._due_at:
            self._send_ack()
        elif (
            (self._session is None or not self._reader.is_between_frames)
            and not self.is_blocked
            and now >= self._heard_at + self._settings.idle_frame_timeout
        ):
            self._counters.broken_connections += 1
            self.is_finished = True

    def refuse(self, reason: str) -> None:
        """End the session: what carries it has failed in a way that no connection mends."""
        if not self.is_finished:
            self._reject(reason)

    def close(self, reason: str) -> None:
        """The receiver is gone: acknowledge what was accepted, and say so (T-024)."""
        if not self.is_finished:
            if self._session is not None:
                self._send_ack()
            self._answer(Closed(reason))
            self.is_finished = True

    def connection_lost(self, now: float) -> None:
        """The connection is gone; the session waits for the next one."""
        if not self.is_finished and not self._reader.is_between_frames:
            self._counters.broken_connections += 1
        if self._session is not None and self._session.link is self:
            self._sessions.detach(self._session, now)
        self._session = None
        self.is_finished = True
        self.is_blocked = False
