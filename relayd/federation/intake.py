"""The packets of one peer that have no verdict yet, and how far the peer has been read.

A peer's packets pass the same checks as all others, and verdicts come out of order: a refusal may be there
before the packet ahead of it is stored, and a packet that the database could not take is tried again. The
cursor that is kept never passes a packet without a verdict (R-364):

    settled  settled  waiting  settled  settled
                   ▲ up to here; with the batch that stores the waiting packet, up to the end

The window is bounded, and a full window stops reading: the peer's store is the buffer. A packet that waits
for its time or for keys takes no place among those under way, because a stranger can publish many such
packets. It holds up the cursor, and a packet that waits for its time does so until the window is half full:
thousands of packets are behind it, or very large ones wait with it. Then it is passed over, and a comparison
fetches it once it is due.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.packets import MAX_FUTURE_SECONDS, Packet, id_holds

from relayd.admission.refusals import is_passing

__all__ = [
    "MAX_ATTEMPTS",
    "Intake",
    "Item",
    "KeyAnswer",
    "KeyVerdict",
    "PeerVerdict",
    "backoff",
    "is_keepable",
    "is_suspicious",
    "judge_key",
    "judge_refusal",
    "retry_delay",
]

MAX_ATTEMPTS = 5
"""How often a packet on which this relay fails is tried, before it is passed over with a reason."""
_WINDOW_PACKETS = 256
"""Half of what the writer commits at once; the other half is left to local publishers."""
_WINDOW_BYTES = 8 * 2**20
_WAITING_BYTES = 32 * 2**20
"""The most bytes of packets that wait for their time or for keys."""
_WINDOW_SETTLED = 8192
"""The most packets, with and without verdicts, from the first without: a crash has them read again."""
_LONGEST_CURSOR = 4096
_RETRY_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 2 * 3600


class PeerVerdict(enum.StrEnum):
    """The outcome for a packet that a peer sent."""

    STORED = "stored"
    KNOWN = "known"
    """The log already had it, from a publisher or another peer."""
    SKIPPED = "skipped"
    """Refused by a rule of this relay or because of its time, which is no fault of the peer's."""
    FORGED = "forged"
    """Its id is not that of its content: only the peer can be responsible for that."""
    KEYS = "keys"
    """Refused for lack of the author's keys: they are fetched, and the packet is judged once more."""
    LATER = "later"
    """Not judged: this relay could not, or the packet's time is in the future."""


class KeyVerdict(enum.Enum):
    """The outcome for an identity packet that was fetched to judge another packet by it."""

    JUDGED = enum.auto()
    """The log has it, or this relay has refused it for good."""
    LATER = enum.auto()
    """Not judged: the packet's time is in the future, or this relay fails on it."""
    AWAY = enum.auto()
    """Not judged: this relay could not."""


class KeyAnswer(NamedTuple):
    """A peer's answer to a question for an author's identity packets."""

    is_whole: bool
    """Whether the peer sent all that it has."""
    is_alone: bool
    """Whether the question was about this author alone: then no other one can be why it is not whole."""
    verdicts: frozenset[KeyVerdict]
    """What became of the identity packets that it sent."""


class Item:
    """One packet of the peer, from its arrival to its verdict."""

    __slots__ = (
        "asked_for_keys",
        "attempts",
        "cursor",
        "is_settled",
        "is_waiting",
        "key_attempts",
        "raw",
        "received_at",
    )

    def __init__(self, raw: bytes, received_at: int, cursor: str | None) -> None:
        self.raw = raw
        self.received_at = received_at
        self.cursor = cursor
        self.attempts = 0
        self.asked_for_keys = False
        """Whether the peer was asked for the author's keys with success, or often enough."""
        self.key_attempts = 0
        """How often the peer was asked without success."""
        self.is_settled = False
        self.is_waiting = False
        """Whether it waits for its time or for keys, and is not under way."""


class Intake:
    """The window of one subscription to one peer."""

    def __init__(self, cursor: str | None, *, last_witness: int | None = None) -> None:
        self.cursor = cursor
        """The cursor up to which every packet has its verdict."""
        self.last_witness = last_witness
        self._items: deque[Item] = deque()
        self._under_way = 0
        self._bytes = 0
        """The size of those under way."""
        self._waiting_bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def has_room(self) -> bool:
        """Whether one more packet may be taken."""
        is_short = len(self._items) < _WINDOW_SETTLED and self._waiting_bytes < _WAITING_BYTES
        return is_short and self.may_resume

    @property
    def is_half_full(self) -> bool:
        """Whether no packet may wait for its time any longer."""
        return len(self._items) >= _WINDOW_SETTLED // 2 or self._waiting_bytes >= _WAITING_BYTES // 2

    @property
    def may_resume(self) -> bool:
        """Whether a packet that waits may be under way again."""
        return self._under_way < _WINDOW_PACKETS and self._bytes < _WINDOW_BYTES

    def add(self, raw: bytes, received_at: int, cursor: str | None) -> Item:
        """Take the peer's next packet."""
        item = Item(raw, received_at, cursor)
        self._items.append(item)
        self._under_way += 1
        self._bytes += len(raw)
        return item

    def wait(self, item: Item) -> None:
        """Note that the item waits for its time or for keys."""
        item.is_waiting = True
        self._under_way -= 1
        self._bytes -= len(item.raw)
        self._waiting_bytes += len(item.raw)

    def resume(self, item: Item) -> None:
        """Note that the item, if it has waited, is under way again."""
        if item.is_waiting:
            item.is_waiting = False
            self._under_way += 1
            self._bytes += len(item.raw)
            self._waiting_bytes -= len(item.raw)

    def settle(self, item: Item, now: int) -> None:
        """Note that the item has its verdict; the cursor follows as far as it may. Idempotent."""
        if not item.is_settled:
            self.resume(item)
            item.is_settled = True
            self._under_way -= 1
            self._bytes -= len(item.raw)
            item.raw = b""  # only its place counts now
        items = self._items
        while items and items[0].is_settled:
            first = items.popleft()
            self.cursor = first.cursor or self.cursor
            self._witness(first, now)

    def cursor_with(self, batch: Collection[Item]) -> str | None:
        """The cursor once all of `batch` is stored."""
        cursor = self.cursor
        for item in self._items:
            if not item.is_settled and item not in batch:
                break
            cursor = item.cursor or cursor
        return cursor

    def _witness(self, item: Item, now: int) -> None:
        # If a peer's clock is fast, packets that it receives once the clock is right must not be skipped.
        at = min(item.received_at, now)
        if at >= 0:  # a peer may send any integer
            self.last_witness = at if self.last_witness is None else max(self.last_witness, at)


_KEY_CODES = frozenset(
    {
        ErrorCode.INVALID_SIGNATURE,
        ErrorCode.KEY_EXPIRED,
        ErrorCode.KEY_REVOKED,
        ErrorCode.KEY_NOT_YET_VALID,
    }
)


def _is_altered(raw: bytes, error: InvalidPacket) -> bool:
    """Whether the packet differs from what its id was made of, so that no key can make it its author's."""
    if error.code is ErrorCode.INVALID_SCHEMA:
        return not id_holds(raw)
    return error.code is ErrorCode.INVALID_SIGNATURE and error.detail == "packet_id_mismatch"


def judge_refusal(item: Item, error: InvalidPacket) -> PeerVerdict:
    """The verdict that a refusal means for the packet, and so for how far the peer has been read."""
    match error.code:
        case ErrorCode.INTERNAL_ERROR:
            if not is_passing(error) and item.attempts >= MAX_ATTEMPTS:
                return PeerVerdict.SKIPPED  # a packet on which we fail must not hold up all behind it
            return PeerVerdict.LATER
        case ErrorCode.TIMESTAMP_IN_FUTURE:
            return PeerVerdict.LATER if item.attempts < MAX_ATTEMPTS else PeerVerdict.SKIPPED
        case _ if _is_altered(item.raw, error):
            return PeerVerdict.FORGED
        case code if code in _KEY_CODES and not item.asked_for_keys:
            return PeerVerdict.KEYS  # a signature may fail for lack of the author's newer keys
        case _:
            # A signature that fits no key proves nothing: the key may have expired since, at the peer too.
            return PeerVerdict.SKIPPED


def judge_key(error: InvalidPacket) -> KeyVerdict:
    """What the refusal of an identity packet says about whether this relay knows the author's keys."""
    if is_passing(error):
        return KeyVerdict.AWAY
    if error.code in (ErrorCode.INTERNAL_ERROR, ErrorCode.TIMESTAMP_IN_FUTURE):
        return KeyVerdict.LATER
    return KeyVerdict.JUDGED


def is_keepable(cursor: str | None) -> bool:
    """Whether the database can keep the cursor: a peer may send any text, and PostgreSQL stores no NUL.

    The cursor is stored in one commit with packets, including those of local publishers.
    """
    return cursor is None or (len(cursor) <= _LONGEST_CURSOR and "\0" not in cursor)


def is_suspicious(error: InvalidPacket) -> bool:
    """Whether a refused packet is malformed or its key is not valid, for which either the author or the peer
    is responsible."""
    return error.code is ErrorCode.INVALID_SCHEMA or error.code in _KEY_CODES


def retry_delay(item: Item, packet: Packet | None, error: InvalidPacket, now: int) -> float:
    """Seconds until a packet that was not judged is tried again: the next time that it can be judged."""
    if error.code is ErrorCode.TIMESTAMP_IN_FUTURE and packet is not None:
        return float(max(1, min(packet.timestamp - MAX_FUTURE_SECONDS - now, _LONGEST_WAIT_SECONDS)))
    return backoff(item.attempts)


def backoff(attempts: int) -> float:
    """Seconds until the next attempt, after this many attempts."""
    return _RETRY_SECONDS * float(2 ** min(attempts, 6))
