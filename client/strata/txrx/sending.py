"""The sender's half of a session, without I/O (T-027, T-029, T-049, T-054 … T-056, T-062 … T-067).

    post ──▶ outbox ──▶ (written) unacked ──▶ acknowledged
                ▲            │
                └─ cut off ──┘ all of it, in order, in front of what waits

A session outlives its connections. Each connection begins with the session's id, and sends all
unacknowledged messages again; the server drops the messages that it has. Sequences are not stored: `_base` is
that of the oldest unacknowledged message, and the next ones follow without gaps.

    state        posts     connection
    idle         waits     none
    connected    written   one
    closed       refused   none, never again

A session is closed by the peer (`Reject`, `Closed`, or a broken rule), by its owner, or by the delivery
timeout of the oldest message. Each pending message is then returned once, in order, with its
`DeliveryStatus`.

Times are in seconds of any monotonic clock.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Generic, TypeAlias, TypeVar

from strata.txrx.codecs import MessageCodec
from strata.txrx.errors import (
    CodecError,
    DeliveryStatus,
    DeliveryTimeout,
    OutboxFull,
    OversizedMessage,
    ProtocolViolation,
    TxRxClosed,
    TxRxError,
)
from strata.txrx.frames import (
    MAX_RESPONSE_BYTES,
    SEQUENCE,
    Ack,
    Reject,
    encode_header,
    read_response,
)
from strata.txrx.multipart import EMPTY_FRAME, LARGE, MAX_PARTS, FrameReader, frame_of, frame_size
from strata.txrx.settings import TxRxSettings

__all__ = ["Returned", "SenderCounters", "SendingSession"]

M = TypeVar("M")
K = TypeVar("K")
_Entry: TypeAlias = "tuple[bytes, Sequence[bytes], M, K | None]"
"""Body, parts, message and the caller's token. Frames are made when they are written, to copy less."""

_SMALL = Struct(">QQQ").pack
_TOGETHER = 120 * 1024
"""How many bytes are written at once. A piece of 128 KiB or more would take new memory from the system each
time."""
_MOST_RESPONSES = 1000


@dataclass(slots=True)
class SenderCounters:
    """The counters of a sender (T-100)."""

    messages_posted: int = 0
    messages_delivered: int = 0
    messages_returned: int = 0
    messages_refused: int = 0
    frames_sent: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    retransmits: int = 0
    connections: int = 0
    acks_received: int = 0
    ack_delay_seconds: float = 0.0
    """The ages of the oldest message covered by each acknowledgement, summed over `acks_received`."""


@dataclass(frozen=True, slots=True)
class Returned(Generic[M, K]):
    """A message that was not acknowledged."""

    message: M
    token: K | None
    error: TxRxError
    delivery: DeliveryStatus


class SendingSession(Generic[M, K]):
    """One session. `K` is the token that the caller passes with a message, and receives with its outcome."""

    def __init__(self, session_id: int, codec: MessageCodec[M], settings: TxRxSettings) -> None:
        self.session_id = session_id
        self.counters = SenderCounters()
        self.closed: TxRxError | None = None
        """Why the session is closed; None while it is open."""
        self._encode = codec.encode
        self._settings = settings
        self._limit = settings.codec_max_frame_length
        # A server that acknowledges as late as its settings allow is not silent.
        self._patience = max(settings.link_timeout, 2 * settings.message_ack_time_interval)
        self._most = settings.outbox_limit
        self._outbox: deque[_Entry[M, K]] = deque()
        self._unacked: deque[_Entry[M, K]] = deque()
        self._base = 0
        self._next = 0
        self._marked = 0
        """The value of `_next` at the last `mark`."""
        self._reached = 0
        """One past the highest sequence that was ever written, so that the peer may have it."""
        self._reached_before = 0
        """The value of `_reached` when this connection began."""
        self._is_known = False
        """Whether the server has sent an acknowledgement on this connection: then it knows the session."""
        self._doubtful = 0
        """One past the messages that an earlier server may have received before the current one."""
        self._posted_at: deque[tuple[int, float]] = deque()
        """For each `mark` with pending messages, its last sequence and its time."""
        self._reader: FrameReader | None = None
        self._to_send: list[bytes] = []
        self._heard_at = 0.0
        self._bytes_gone = 0
        self._is_dead = False
        self._returned: list[Returned[M, K]] = []
        self._delivered: list[K] = []

    # Posting

    @property
    def pending(self) -> int:
        """The number of messages that are neither delivered nor returned."""
        return self._next - self._base

    @property
    def acknowledged(self) -> int:
        """The number of acknowledged messages of the session."""
        return self._base

    @property
    def outbox_size(self) -> int:
        """The number of messages waiting to be written."""
        return len(self._outbox)

    @property
    def unacked_size(self) -> int:
        """The number of messages that were written and are not acknowledged."""
        return len(self._unacked)

    def post(self, message: M, token: K | None = None) -> None:
        """Take a message. Call `mark` before time passes.

        Raises `CodecError`, `OversizedMessage`, `OutboxFull`, or the error that closed the session; then the
        message was not taken.
        """
        try:
            if self.closed is not None:
                # Many posts raise this same error: it must not collect a traceback for each.
                raise self.closed.with_traceback(None)
            if self._most is not None and len(self._outbox) >= self._most:
                raise OutboxFull(f"outbox full: {len(self._outbox)} messages wait already")
            body, parts = self._encode(message)
            if not parts:
                size = len(body) + 16
            elif len(parts) < MAX_PARTS:
                size = frame_size(body, parts) + 8
            else:
                raise CodecError(f"{len(parts)} parts: with its body a message has at most {MAX_PARTS}")
            if size > self._limit:
                raise OversizedMessage(size, self._limit)
        except TxRxError:
            self.counters.messages_refused += 1
            raise
        except Exception as error:  # the program's own codec, or its own type, may raise any error
            self.counters.messages_refused += 1
            raise CodecError(f"it cannot be encoded: {type(error).__name__}: {error}") from error
        self._outbox.append((body, parts, message, token))
        self._next += 1

    def mark(self, now: float) -> None:
        """Note that the messages since the last call were posted now: their age counts from `now` (A-163)."""
        if not self.is_marked:
            self._marked = self._next
            self._count_posted()
            if self._next > self._base:
                self._posted_at.append((self._next - 1, now))

    @property
    def is_marked(self) -> bool:
        """Whether every message has its time."""
        return self._marked == self._next

    def statistics(self) -> SenderCounters:
        """The counters so far. This changes nothing else, so any thread may call it, as a scrape does."""
        self._count_posted()
        return self.counters

    def _count_posted(self) -> None:
        counters = self.counters
        posted = counters.messages_delivered + counters.messages_returned + self.pending
        # In another thread, messages may end between these reads; a counter must never decrease.
        counters.messages_posted = max(counters.messages_posted, posted)

    # Connections

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection."""
        return self._reader is not None

    @property
    def is_dead(self) -> bool:
        """Whether the connection must be replaced; call `connection_lost` next."""
        return self._is_dead

    def connection_made(self, now: float) -> None:
        """Begin a new connection: send the session's id, and all unacknowledged messages again."""
        assert self._reader is None and self.closed is None
        self._reader = FrameReader(MAX_RESPONSE_BYTES)
        self._is_dead = False
        self._heard_at = now
        self._reached_before = self._reached
        self._is_known = False
        self._bytes_gone = self.counters.bytes_sent
        self.counters.connections += 1
        self._to_send.append(encode_header(self.session_id))

    def connection_lost(self, next_session_id: int) -> None:
        """End the connection: messages written on it return to the front of the outbox (T-055).

        If no message is pending, a new session begins with `next_session_id`: by the time of the next message
        the server may have forgotten the old session, or be another server, and no message needs the old one.
        """
        if not self.pending:
            self.session_id = next_session_id
            self._base = self._next = self._marked = self._reached = self._doubtful = 0
        self._reader = None
        self._is_dead = False
        self._to_send.clear()
        self._unacked.extend(self._outbox)
        self._unacked, self._outbox = deque(), self._unacked

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """The buffer for the peer's next bytes."""
        assert self._reader is not None
        return self._reader.get_buffer()

    def buffer_updated(self, count: int, now: float) -> None:
        """Report that `count` bytes of the peer were put into the buffer."""
        if self._reader is None or self._is_dead:
            return
        self._reader.buffer_updated(count)
        self._heard_at = now
        self.counters.bytes_received += count
        try:
            while frames := self._reader.read(_MOST_RESPONSES):
                for frame in frames:
                    match read_response(frame):
                        case Ack(sequence):
                            self._acknowledged(sequence, now)
                        case Reject(reason):
                            return self._close(TxRxClosed(f"rejected: {reason}"), refused=True)
                        case _ as closed:
                            return self._close(TxRxClosed(closed.reason), refused=True)
        except ProtocolViolation as error:
            self.close(error)

    def _acknowledged(self, sequence: int, now: float) -> None:
        if sequence >= self._reached:
            raise ProtocolViolation(f"the peer acknowledged {sequence}, and only {self._reached} were sent")
        if not self._is_known:
            self._is_known = True
            if self._base == 0:
                # The session's first one: an earlier server may have accepted messages unacknowledged.
                self._doubtful = self._reached_before
        self.counters.acks_received += 1
        count = sequence + 1 - self._base
        if count <= 0:  # repeated, or late
            return
        self._count_delay(now)
        delivered = self._delivered
        written = min(count, len(self._unacked))
        # It may cover messages of an earlier connection that have not been sent again on this one.
        for queue, some in ((self._unacked, written), (self._outbox, count - written)):
            popleft = queue.popleft
            for _ in range(some):
                token = popleft()[3]
                if token is not None:
                    delivered.append(token)
        self.counters.messages_delivered += count
        self._base += count
        while self._posted_at and self._posted_at[0][0] < self._base:
            self._posted_at.popleft()

    def _count_delay(self, now: float) -> None:
        if self._posted_at:
            self.counters.ack_delay_seconds += max(0.0, now - self._posted_at[0][1])

    @property
    def end(self) -> int:
        """One past the sequence of the last message that `data_to_send` has returned on this connection."""
        return self._base + len(self._unacked)

    def written(self, end: int) -> int:
        """Note that all bytes before the sequence `end` may reach the peer from now on: only for bytes that
        `data_to_send` returned without `are_written`. Returns what `not_written` takes back."""
        before, self._reached = self._reached, max(self._reached, end)
        return before

    def not_written(self, before: int) -> None:
        """Take back the last `written`, which returned `before`: nothing of it has gone out."""
        self._reached = before

    def data_to_send(self, most_bytes: int = _TOGETHER, *, are_written: bool = True) -> list[bytes]:
        """The bytes to write now: whole frames, at least one if any waits, until `most_bytes` are reached.

        With `are_written` they count as written at once.
        """
        pieces, self._to_send = self._to_send, []
        if self._reader is None or self._is_dead or not self._outbox:
            return pieces
        outbox, unacked = self._outbox, self._unacked
        first = sequence = self.end
        size = 0
        all_small = True
        while outbox and size < most_bytes:
            entry = outbox.popleft()
            unacked.append(entry)
            body, parts = entry[0], entry[1]
            length = len(body)
            if parts:
                frame = frame_of(SEQUENCE.pack(sequence) + body, parts)
                size += sum(map(len, frame))
                pieces += frame
                all_small = False
            else:
                pieces.append(_SMALL(length + 16, length + 8, sequence))
                pieces.append(body)
                size += length + 24
                if length >= LARGE:
                    all_small = False
            sequence += 1
        self._count_written(first, sequence, size)
        if are_written:
            self.written(sequence)
        return [b"".join(pieces)] if all_small else _join(pieces)

    def _count_written(self, first: int, end: int, size: int) -> None:
        counters = self.counters
        counters.retransmits += max(0, min(end, self._reached) - first)
        counters.frames_sent += end - first
        counters.bytes_sent += size

    # Time

    def get_timer(self) -> float | None:
        """When to call `handle_timer`; None if nothing is due."""
        moments = []
        if self.closed is None and self._posted_at:
            moments.append(self._posted_at[0][1] + self._settings.message_delivery_timeout)
            if self._unacked and self._reader is not None and not self._is_dead:
                moments.append(self._waits_since() + self._patience)
        return min(moments, default=None)

    def handle_timer(self, now: float, unwritten: int = 0) -> None:
        """Close a session whose oldest message is too old (T-065); mark a silent connection as dead.

        `unwritten` is the number of bytes of `data_to_send` that the system has not yet accepted. While bytes
        wait and the system accepts more of them, the connection counts as alive.
        """
        gone = self.counters.bytes_sent - unwritten
        if unwritten and gone > self._bytes_gone:
            self._heard_at = now
        self._bytes_gone = gone
        if self.closed is not None or not self._posted_at:
            return
        if now >= self._posted_at[0][1] + self._settings.message_delivery_timeout:
            seconds = self._settings.message_delivery_timeout
            self.close(DeliveryTimeout(f"the oldest message was not acknowledged within {seconds:g} s"))
        elif self._unacked and self._reader is not None:
            self._is_dead |= now >= self._waits_since() + self._patience

    def _waits_since(self) -> float:
        """When an acknowledgement became due: the later of the peer's last bytes and the oldest message."""
        return max(self._heard_at, self._posted_at[0][1])

    # The end

    def farewell(self) -> bytes:
        """The last bytes of a connection, for a sender that closes with all messages acknowledged.

        They are an empty frame, which tells the server to forget the session. With pending messages or
        without a connection, there are none.
        """
        over = self._reader is None or self.pending or self.closed is not None
        return b"" if over else EMPTY_FRAME

    def close(self, error: TxRxError) -> None:
        """Close permanently; `take_returned` then has the pending messages. A second call does nothing."""
        self._close(error, refused=False)

    def _close(self, error: TxRxError, *, refused: bool) -> None:
        if self.closed is not None:
            return
        self.closed = error
        # A server that refuses has acknowledged the messages it accepted. But a server that has sent no
        # acknowledgement on this connection may not be the server of an earlier connection.
        unknown = self._reached
        if refused:
            unknown = self._doubtful if self._is_known else self._reached_before
        pending = itertools.chain(self._unacked, self._outbox)
        for sequence, (_, _, message, token) in enumerate(pending, self._base):
            delivery = DeliveryStatus.UNKNOWN if sequence < unknown else DeliveryStatus.NOT_DELIVERED
            self._returned.append(Returned(message, token, error, delivery))
        self.counters.messages_returned += len(self._returned)
        self._unacked.clear()
        self._outbox.clear()
        self._posted_at.clear()
        self._to_send.clear()
        self._base = self._next
        self._reader = None

    def take_returned(self) -> list[Returned[M, K]]:
        """The messages returned since the last call, in the order posted."""
        returned, self._returned = self._returned, []
        return returned

    def take_delivered(self) -> list[K]:
        """The tokens of messages acknowledged since the last call, in the order posted."""
        delivered, self._delivered = self._delivered, []
        return delivered


def _join(pieces: list[bytes]) -> list[bytes]:
    """Join consecutive small pieces; leave large pieces as they are (T-085)."""
    if len(pieces) < 2:
        return pieces
    joined: list[bytes] = []
    small: list[bytes] = []
    for piece in pieces:
        if len(piece) < LARGE:
            small.append(piece)
        else:
            if small:
                joined.append(b"".join(small))
                small = []
            joined.append(piece)
    if small:
        joined.append(b"".join(small))
    return joined
