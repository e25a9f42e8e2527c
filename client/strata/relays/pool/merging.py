"""One stream from several relays: each packet once, with the earliest time it was received (C-271, R-106).

No I/O, no clock. There are two promises:

*Once.* A delivered id is never delivered again. The latest `dedup_packets` ids are held in memory; older ones
go to `OlderIds`, which is asked only about packets whose timestamp is not newer than that of its newest id,
so live packets need no lookup. No id is forgotten, however far apart the relays' positions are.

*The earliest time.* The first copy is delivered at once, so its `received_at` is the earliest known then.
Later copies can lower the `received_at` of the packet; with `hold_back` the packet waits for them. A time
that is earlier than the packet's own timestamp by more than relays allow is false and does not count.

A relay's position moves twice: in `positions` when its packet is queued, for resuming here, and in
`taken_positions` when the packet is taken, for programs that keep positions. The latter are never ahead of
what the program has received.
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
    """Storage for the ids that no longer fit in memory."""

    def add(self, digests: Iterable[bytes]) -> None:
        """Keep these ids. Raises `OSError` if that fails; then none of them is kept."""

    def __contains__(self, digest: bytes) -> bool: ...


@dataclass(slots=True)
class _Known:
    timestamp: int
    received_at: int


@dataclass(slots=True)
class _Queued:
    delivery: Delivery
    advances: dict[str, Position] = field(default_factory=dict)
    """Positions that take effect once this packet has been taken."""


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
        """The position at each relay as of the packet last taken."""
        self.positions: dict[str, Position] = {}
        """The position at each relay, including packets still in the queue."""
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
        """Whether readers must wait until the consumer has taken something."""
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
        """Accept a verified packet from a relay; true if it is the first copy.

        `readers` is the number of relays that may send it. A packet found by a sweep is not `in_stream`: it
        does not move the relay's position. No position is later than `unix_now`, whatever the relay's clock
        says, because another relay may have to resume from there.
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
        # Packets behind one that is held back wait too: a position must not overtake a packet.
        if self._held or (self._hold_back > 0 and readers > 1):
            self._held[digest] = _Held(delivery, now + self._hold_back, {url}, advance)
        else:
            self._queue.append(_Queued(replace(delivery, cursor=None), advance))
        return True

    def take(self) -> Delivery | None:
        """Take the next packet for the consumer, if any."""
        if not self._queue:
            return None
        queued = self._queue.popleft()
        self.taken_positions |= queued.advances
        return queued.delivery

    def drop(self) -> None:
        """Drop all waiting packets. No position moves, so another session reads them again."""
        self._held.clear()
        self._queue.clear()

    def handle_timer(self, now: float) -> None:
        """Release what has been held back long enough."""
        self._release(now, readers=None)

    def get_timer(self) -> float:
        """When `handle_timer` has work to do."""
        return next(iter(self._held.values())).due_at if self._held else math.inf

    def release_all(self) -> None:
        """Release all packets held back: no further copies will come."""
        self._release(math.inf, readers=None)

    def received_at(self, digest: bytes) -> int | None:
        """The earliest time at which a relay says it received the packet; None outside the window."""
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
        # The position takes effect with the packet held last: all packets held now come before it.
        self._advance(advance)
        self._release(-math.inf, readers=readers)

    def _release(self, now: float, *, readers: int | None) -> None:
        """Queue, in order, packets that were due by `now` or have come from `readers` relays."""
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
        """Make a position without a new packet take effect once all packets before it have been taken."""
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
            self.older_ids_failures += 1  # memory grows instead: no repeats matters more than little memory
            self._window += _EVICTED_AT_ONCE
            return
        for digest in oldest:
            self._older_newest = max(self._older_newest, self._known.pop(digest).timestamp)
