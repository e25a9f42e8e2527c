"""What waits to be stored, in an order that is fair by bytes: small packets do not wait behind large ones.

It is fair queueing (Demers, Keshav and Shenker, 1989), with bytes for time. If all owners were served at
once, a byte of each in turn, each item would end at some moment: behind the last one of its owner, or behind
now, by its own size. The item that would end first goes first. So the items of one owner keep their order, an
owner who puts much waits behind itself, and nobody waits for ever: "now" moves on with what is taken.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

__all__ = ["FairQueue"]

T = TypeVar("T")

_OVERHEAD: Final = 512
"""What each item costs beside its bytes, in bytes."""


class FairQueue(Generic[T]):
    """Items with a size and an owner, taken one by one."""

    def __init__(self) -> None:
        self._items: list[tuple[int, int, int, Hashable, T]] = []
        self._ends: dict[Hashable, int] = {}
        self._now = 0  # bytes that each owner would have been served by now
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T, size: int, owner: Hashable) -> None:
        """Add an item behind those of the same owner."""
        end = max(self._ends.get(owner, 0), self._now) + size + _OVERHEAD
        self._ends[owner] = end
        heapq.heappush(self._items, (end, next(self._numbers), size + _OVERHEAD, owner, item))

    def take(self) -> T:
        """The item whose turn it is. Raises `IndexError` where there is none."""
        end, _, cost, owner, item = heapq.heappop(self._items)
        self._now += cost // len(self._ends)
        if self._ends[owner] == end:
            del self._ends[owner]
        return item

    def drop(self, is_dropped: Callable[[T], bool]) -> list[T]:
        """Take out all these, in their order."""
        # What is in order is a heap too, and the last item of each owner comes last.
        self._items.sort(key=lambda each: each[:2])
        dropped = [each for each in self._items if is_dropped(each[-1])]
        if dropped:
            self._items = [each for each in self._items if not is_dropped(each[-1])]
            self._ends = {owner: end for end, _, _, owner, _ in self._items}
        return [each[-1] for each in dropped]
