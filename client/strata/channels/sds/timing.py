"""Time for a participant without a clock: a steady count of online milliseconds, and timers on it."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from strata.channels.sds.config import FAR_AHEAD_MS

__all__ = ["LamportClock", "Schedule", "SteadyClock"]

T = TypeVar("T")


class SteadyClock:
    """Milliseconds that pass while online, made from wall times that may step.

    A step back counts as no time. A step forward looks like a pause of the process, and counts. Offline the
    clock stands still, and so does every timer: no attempt is made or counted (C-088).
    """

    def __init__(self, now_ms: int) -> None:
        self.now = now_ms
        self.online = True
        self.wall = now_ms

    def advance(self, now_ms: int) -> int:
        """Set the wall time, and return the steady time."""
        if self.online and now_ms > self.wall:
            self.now += now_ms - self.wall
        self.wall = now_ms
        return self.now

    def step(self, by_ms: int) -> None:
        """Note that the wall clock was set, or that the machine slept: no steady time has passed."""
        self.wall += by_ms

    def was_at(self, moment: int) -> int:
        """The wall time of a steady time, exact while the clock is online from the one to the other."""
        return moment - self.now + self.wall

    def to_wall(self, at: float) -> float:
        """When a timer is due by the wall clock; infinite while offline."""
        return at - self.now + self.wall if self.online else math.inf


class Schedule(Generic[T]):
    """Items by id, each due at a time; the earliest is found quickly."""

    def __init__(self) -> None:
        self._items: dict[str, tuple[int, T]] = {}
        self._heap: list[tuple[int, str]] = []

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._items

    def __len__(self) -> int:
        return len(self._items)

    def get(self, message_id: str) -> tuple[int, T] | None:
        """The time at which this item is due, and the item."""
        return self._items.get(message_id)

    def put(self, message_id: str, at: int, item: T) -> None:
        """Schedule an item for `at`, which replaces its previous time."""
        self._items[message_id] = (at, item)
        heappush(self._heap, (at, message_id))
        if len(self._heap) > 2 * len(self._items) + 64:
            self._heap = [(at, message_id) for message_id, (at, _) in self._items.items()]
            heapify(self._heap)

    def discard(self, message_id: str) -> bool:
        """Remove an item; True if it was there."""
        return self._items.pop(message_id, None) is not None

    def times(self) -> dict[str, int]:
        """When each item is due."""
        return {message_id: at for message_id, (at, _) in self._items.items()}

    @property
    def next_at(self) -> float:
        """When the first item is due; infinite if there is none."""
        while self._heap:
            at, message_id = self._heap[0]
            item = self._items.get(message_id)
            if item is not None and item[0] == at:
                return at
            heappop(self._heap)
        return math.inf

    def take_due(self, now: int, limit: int | None = None) -> list[tuple[str, T]]:
        """Remove and return the items that are due, earliest first, at most `limit`."""
        due: list[tuple[str, T]] = []
        while self.next_at <= now and len(due) != limit:
            _, message_id = heappop(self._heap)
            due.append((message_id, self._items.pop(message_id)[1]))
        return due


class LamportClock:
    """The logical time of one participant: near the wall clock, never decreasing (C-101, C-105, C-117)."""

    def __init__(self, time: int) -> None:
        self.time = time

    def tick(self, wall: int) -> int:
        """The time for a message that is about to be sent."""
        self.time = max(wall, self.time + 1)
        return self.time

    def follow(self, time: int) -> None:
        """Note that a message with this time, from another participant, was delivered."""
        self.time = max(self.time, time)

    def credible(self, wall: int) -> int:
        """Our time, unless it is far ahead of the wall clock, which was wrong once if so (C-119)."""
        return min(self.time, wall + FAR_AHEAD_MS)
