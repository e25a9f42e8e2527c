"""One stream out of several relays': each packet once, with the earliest time it was received (C-271, R-106).

No I/O, no clock. Two promises, and what they rest on:

*Once.* An id handed on is never handed on again. The latest `dedup_packets` ids are held in memory, older
ones go to `OlderIds`, which is asked only about packets whose timestamp is not newer than that of its newest
id: live packets never ask. Nothing is forgotten, however far apart the relays stand.

*The earliest time.* The first copy is handed on at once, so its `received_at` is the earliest known then.
Later copies can lower what `received_at` tells about the packet; with `hold_back` the packet waits for them.
A time that lies before the packet's own timestamp by more than relays admit is a lie and does not count.

A relay's position moves when its packet is queued, for resuming here; and when the packet is taken, for
programs that keep positions: those never name what their user has not seen.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from strata.protocol.canonical import MAX_SAFE_INTEGER
from strata.protocol.packets import MAX_FUTURE_SECONDS
from strata.relays.connection.values import Delivery
from strata.relays.pool.values import Position

__all__ = ["Merging", "OlderIds"]

_EVICTED_AT_ONCE = 256


class OlderIds(Protocol):
    """Where ids go that are too many for memory."""

    def add(self, digests: Iterable[bytes]) -> None:
        """Keep these. Raises `OSError` if it cannot; then it has kept none of them."""

    def __contains__(self, digest: bytes) -> bool: ...


@dataclass(slots=True)
class _Known:
    timestamp: int
    received_at: int


@dataclass(slots=True)
class _Queued:
    delivery: Delivery
    advances: dict[str, Position] = field(default_factory=dict)
    """Positions that hold once this packet has been taken."""


@dataclass(slots=True)
class _Held:
    delivery: Delivery
    due_at: float
    seen_at: set[str]
    advances: dict[str, Position]


class Merging:
    """The state of one merged subscription; at most `capacity` packets wait for the consumer."""

    def __init__(self, *, capacity: int, dedup_packets: int, hold_back: float, older_ids: OlderIds) -> None:
        self.merged = 0
        self.dropped = 0
        self.older_ids_failures = 0
        self.taken_positions: dict[str, Position] = {}
        """Where each relay stood at the packet last taken."""
        self.positions: dict[str, Position] = {}
        """Where each relay stands, counting packets still in the queue."""
        self._capacity = capacity
        self._window = dedup_packets
        self._hold_back = hold_back
        self._older_ids = older_ids
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._older_newest = -math.inf
        self._queue: deque[_Queued] = deque()
        self._held: OrderedDict[bytes, _Held] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def must_wait(self) -> bool:
        """Whether readers have to wait until the consumer has taken something."""
        return len(self._queue) + len(self._held) >= self._capacity

    def offer(
        self,
        url: str,
        delivery: Delivery,
        now: float,
        *,
        unix_now: int = MAX_SAFE_INTEGER,
        readers: int = 1,
        in_stream: bool = True,
    ) -> bool:
        """A verified packet from a relay; true if it is the first copy.

        `readers` is how many relays may yet bring it. A packet found by a sweep is not `in_stream`: the
        relay's position stays. No position is later than `unix_now`, whatever the relay's clock says: another
        relay may have to go on from there.
        """
        advance: dict[str, Position] = {}
        if in_stream:
            position = Position(delivery.cursor, min(delivery.received_at, unix_now))
            advance[url] = self.positions[url] = position
        digest = delivery.packet.digest
        known = self._known.get(digest)
        if known is not None:
            self._another_copy(url, digest, known, delivery, advance, readers)
            return False
        if delivery.packet.timestamp <= self._older_newest and digest in self._older_ids:
            self.dropped += 1
            self._advance(advance)
            return False
        self._remember(digest, delivery)
        self.merged += 1
        # What comes behind a packet held back waits too: a position must not overtake a packet.
        if self._held or (self._hold_back > 0 and readers > 1):
            self._held[digest] = _Held(delivery, now + self._hold_back, {url}, advance)
        else:
            self._queue.append(_Queued(replace(delivery, cursor=None), advance))
        return True

    def take(self) -> Delivery | None:
        """The next packet for the consumer, or None."""
        if not self._queue:
            return None
        queued = self._queue.popleft()
        self.taken_positions |= queued.advances
        return queued.delivery

    def drop(self) -> None:
        """Drop what waits. No position moves: another session brings it."""
        self._held.clear()
        self._queue.clear()

    def handle_timer(self, now: float) -> None:
        """Release what has been held back long enough."""
        self._release(now, readers=None)

    def get_timer(self) -> float:
        """When `handle_timer` has work to do."""
        return next(iter(self._held.values())).due_at if self._held else math.inf

    def release_all(self) -> None:
        """Hold nothing back any longer: no further copies will come."""
        self._release(math.inf, readers=None)

    def received_at(self, digest: bytes) -> int | None:
        """The earliest time any relay says it received the packet; None once out of the window."""
        known = self._known.get(digest)
        return None if known is None else known.received_at

    def _another_copy(
        self,
        url: str,
        digest: bytes,
        known: _Known,
        delivery: Delivery,
        advance: dict[str, Position],
        readers: int,
    ) -> None:
        self.dropped += 1
        if known.timestamp - MAX_FUTURE_SECONDS <= delivery.received_at < known.received_at:
            known.received_at = delivery.received_at
        held = self._held.get(digest)
        if held is None:
            self._advance(advance)
            return
        held.seen_at.add(url)
        # The position belongs to what was held last: the packets between here and there are before it.
        self._advance(advance)
        self._release(-math.inf, readers=readers)

    def _release(self, now: float, *, readers: int | None) -> None:
        """Queue, in order, what has waited until `now` or has come from that many readers."""
        while self._held:
            digest, held = next(iter(self._held.items()))
            if held.due_at > now and (readers is None or len(held.seen_at) < readers):
                return
            del self._held[digest]
            earliest = self._known[digest].received_at
            self._queue.append(
                _Queued(replace(held.delivery, received_at=earliest, cursor=None), held.advances)
            )

    def _advance(self, advance: dict[str, Position]) -> None:
        """A position without a packet of its own holds once all queued before it has been taken."""
        if self._held:
            next(reversed(self._held.values())).advances |= advance
        elif self._queue:
            self._queue[-1].advances |= advance
        else:
            self.taken_positions |= advance

    def _remember(self, digest: bytes, delivery: Delivery) -> None:
        timestamp = delivery.packet.timestamp
        self._known[digest] = _Known(timestamp, max(delivery.received_at, timestamp - MAX_FUTURE_SECONDS))
        if len(self._known) < self._window + _EVICTED_AT_ONCE:
            return
        oldest = [digest for digest, _ in zip(self._known, range(_EVICTED_AT_ONCE), strict=False)]
        if any(digest in self._held for digest in oldest):
            return
        try:
            self._older_ids.add(oldest)
        except OSError:
            self.older_ids_failures += 1  # memory grows instead: never twice comes before never much
            self._window += _EVICTED_AT_ONCE
            return
        for digest in oldest:
            self._older_newest = max(self._older_newest, self._known.pop(digest).timestamp)
