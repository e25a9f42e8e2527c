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
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = ["FairQueue"]

T = TypeVar("T")

_OVERHEAD: Final = 512
"""What each item costs beside its bytes, in bytes."""


class _Item(NamedTuple, Generic[T]):
    end: int
    number: int
    cost: int
    owner: Hashable
    group: Hashable
    item: T


class FairQueue(Generic[T]):
    """Items with a size and an owner, taken one by one.

    Items of several owners may be of one group. One that is put `behind_group` keeps its place behind all of
    these.
    """

    def __init__(self) -> None:
        self._items: list[_Item[T]] = []
        self._passed: list[_Item[T]] = []
        self._passed_owners: set[Hashable] = set()
        self._passed_groups: set[Hashable] = set()
        self._ends: dict[Hashable, int] = {}
        self._last_of_groups: dict[Hashable, tuple[int, int]] = {}  # its end and number: two may end together
        self._now = 0  # bytes that each owner would have been served by now
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._items) + len(self._passed)

    def put(
        self, item: T, size: int, owner: Hashable, group: Hashable = None, *, behind_group: bool = False
    ) -> None:
        """Add an item behind those of the same owner."""
        begin = max(self._ends.get(owner, 0), self._now)
        last = self._last_of_groups.get(group, (0, 0))
        number, cost = next(self._numbers), size + _OVERHEAD
        end = (max(begin, last[0]) if behind_group else begin) + cost
        self._ends[owner] = end
        self._last_of_groups[group] = max(last, (end, number))
        heapq.heappush(self._items, _Item(end, number, cost, owner, group, item))

    def first(self) -> T | None:
        """The item whose turn it is, which stays; None where there is none but what is passed over."""
        while self._passed and self._items and self._is_behind_passed(self._items[0]):
            self.pass_over()
        return self._items[0].item if self._items else None

    def _is_behind_passed(self, item: _Item[T]) -> bool:
        return item.owner in self._passed_owners or item.group in self._passed_groups

    def pass_over(self) -> None:
        """Have the first item stay until `look_again`, and all that its owner or its group has behind it."""
        passed = heapq.heappop(self._items)
        self._passed.append(passed)
        self._passed_owners.add(passed.owner)
        self._passed_groups.add(passed.group)

    def look_again(self) -> None:
        """Have what was passed over its turn as before."""
        if self._passed:
            self._items += self._passed
            heapq.heapify(self._items)
            self._passed.clear()
            self._passed_owners.clear()
            self._passed_groups.clear()

    def take(self) -> T:
        """The item that is `first`. Raises `IndexError` where there is none."""
        self.first()
        end, number, cost, owner, group, item = heapq.heappop(self._items)
        self._now += cost // len(self._ends)
        if self._ends[owner] == end:
            del self._ends[owner]
        if self._last_of_groups[group] == (end, number):
            del self._last_of_groups[group]
        return item

    def drop(self, is_dropped: Callable[[T], bool]) -> list[T]:
        """Take out all these, in their order. What was passed over is not so any more."""
        self.look_again()
        # What is in order is a heap too, and the last item of each owner comes last.
        self._items.sort(key=lambda each: (each.end, each.number))
        dropped = [each for each in self._items if is_dropped(each.item)]
        if dropped:
            self._items = [each for each in self._items if not is_dropped(each.item)]
            self._ends = {each.owner: each.end for each in self._items}
            self._last_of_groups = {each.group: (each.end, each.number) for each in self._items}
        return [each.item for each in dropped]
