"""A queue of packets to store that is fair by bytes: small packets do not wait behind large ones.

It is fair queueing (Demers, Keshav and Shenker, 1989), with bytes for time. If all owners were served at
once, a byte of each in turn, each item would end at some moment: its own size after the last item of its
owner, or after now, whichever is later. The item that would end first goes first. So the items of one owner
keep their order, an owner who puts many waits behind itself, and nobody waits forever: "now" advances with
what is taken.
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
"""The cost of each item besides its bytes, in bytes."""


class _Item(NamedTuple, Generic[T]):
    end: int
    number: int
    cost: int
    owner: Hashable
    group: Hashable
    item: T


class FairQueue(Generic[T]):
    """Items with a size and an owner, taken one by one.

    Items of several owners may belong to one group. An item that is put `behind_group` stays behind all of
    the group's earlier items.
    """

    def __init__(self) -> None:
        self._items: list[_Item[T]] = []
        self._passed: list[_Item[T]] = []
        self._passed_owners: set[Hashable] = set()
        self._passed_groups: set[Hashable] = set()
        self._ends: dict[Hashable, int] = {}
        self._last_of_groups: dict[Hashable, tuple[int, int]] = {}  # its end and number: two may end together
        self._now = 0  # the bytes that each owner would have been served by now
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
        """The next item, which stays in the queue; None if there is none that is not passed over."""
        while self._passed and self._items and self._is_behind_passed(self._items[0]):
            self.pass_over()
        return self._items[0].item if self._items else None

    def _is_behind_passed(self, item: _Item[T]) -> bool:
        return item.owner in self._passed_owners or item.group in self._passed_groups

    def pass_over(self) -> None:
        """Hold back the first item, and those of its owner and its group behind it, until `look_again`."""
        passed = heapq.heappop(self._items)
        self._passed.append(passed)
        self._passed_owners.add(passed.owner)
        self._passed_groups.add(passed.group)

    def look_again(self) -> None:
        """Give items that were passed over their turn as before."""
        if self._passed:
            self._items += self._passed
            heapq.heapify(self._items)
            self._passed.clear()
            self._passed_owners.clear()
            self._passed_groups.clear()

    def take(self) -> T:
        """Remove and return the item that is `first`. Raises `IndexError` if there is none."""
        self.first()
        end, number, cost, owner, group, item = heapq.heappop(self._items)
        self._now += cost // len(self._ends)
        if self._ends[owner] == end:
            del self._ends[owner]
        if self._last_of_groups[group] == (end, number):
            del self._last_of_groups[group]
        return item

    def drop(self, is_dropped: Callable[[T], bool]) -> list[T]:
        """Remove and return all these items, in order. Items that were passed over get their turn again."""
        self.look_again()
        dropped = [each for each in self._items if is_dropped(each.item)]
        if dropped:
            dropped.sort()
            gone = {each.number for each in dropped}
            # A sorted list is also a heap, and the last item of each owner comes last.
            self._items = sorted(each for each in self._items if each.number not in gone)
            self._ends = {each.owner: each.end for each in self._items}
            self._last_of_groups = {each.group: (each.end, each.number) for each in self._items}
        return [each.item for each in dropped]
