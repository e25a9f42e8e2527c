"""The interest index: from a packet to the subscriptions that want it, without asking the others.

Subscriptions with equal filters form one group. A group is filed under the most selective member of its
filter: its packet ids, else its authors, else its types, else under "everything". A packet is looked up in
four places, and only the groups found there are matched in full. So a packet costs work only where it may be
wanted, and a thousand equal subscriptions are matched once.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from relayd.feed.filters import CompiledFilter
from relayd.store.types import LogEntry

__all__ = ["FilterGroup", "InterestIndex"]

S = TypeVar("S", bound=Hashable)


class FilterGroup(Generic[S]):
    """The live subscriptions that share one filter, in the order they joined."""

    __slots__ = ("filter", "members")

    def __init__(self, filter: CompiledFilter) -> None:
        self.filter = filter
        self.members: dict[S, None] = {}


class InterestIndex(Generic[S]):
    """The index of the live subscriptions that may want a packet."""

    def __init__(self) -> None:
        self._groups: dict[CompiledFilter, FilterGroup[S]] = {}
        self._by_packet_id: dict[bytes, dict[FilterGroup[S], None]] = {}
        self._by_author: dict[str, dict[FilterGroup[S], None]] = {}
        self._by_type: dict[str, dict[FilterGroup[S], None]] = {}
        self._everything: dict[FilterGroup[S], None] = {}

    def __len__(self) -> int:
        return sum(len(group.members) for group in self._groups.values())

    def add(self, subscription: S, filter: CompiledFilter) -> None:
        """File a subscription; adding it twice changes nothing."""
        group = self._groups.get(filter)
        if group is None:
            group = self._groups[filter] = FilterGroup(filter)
            self._file(group)
        group.members[subscription] = None

    def discard(self, subscription: S, filter: CompiledFilter) -> None:
        """Take a subscription out; a subscription that is not there changes nothing."""
        group = self._groups.get(filter)
        if group is None:
            return
        group.members.pop(subscription, None)
        if not group.members:
            del self._groups[filter]
            self._unfile(group)

    def candidates(self, entry: LogEntry) -> Iterator[FilterGroup[S]]:
        """The groups whose filter matches this packet, each once."""
        packet = entry.packet
        # A group stands on only one kind of shelf, and at most once on each shelf of that kind, so no packet
        # meets a group twice.
        for shelf in (
            self._everything,
            self._by_author.get(packet.author_id),
            self._by_type.get(packet.content_type),
            self._by_packet_id.get(packet.packet_id),
        ):
            if shelf:
                for group in shelf:
                    if group.filter.matches(entry):
                        yield group

    def _file(self, group: FilterGroup[S]) -> None:
        filter = group.filter
        if filter.packet_ids:
            _put(group, self._by_packet_id, filter.packet_ids)
        elif filter.authors:
            _put(group, self._by_author, filter.authors)
        elif filter.types:
            _put(group, self._by_type, filter.types)
        else:
            self._everything[group] = None

    def _unfile(self, group: FilterGroup[S]) -> None:
        filter = group.filter
        if filter.packet_ids:
            _take(group, self._by_packet_id, filter.packet_ids)
        elif filter.authors:
            _take(group, self._by_author, filter.authors)
        elif filter.types:
            _take(group, self._by_type, filter.types)
        else:
            self._everything.pop(group, None)


K = TypeVar("K", bound=Hashable)


# One pass each: a filter may have a thousand values, and come and go with every message.


def _put(group: FilterGroup[S], shelves: dict[K, dict[FilterGroup[S], None]], keys: Iterable[K]) -> None:
    for key in keys:
        shelf = shelves.get(key)
        if shelf is None:
            shelves[key] = {group: None}
        else:
            shelf[group] = None


def _take(group: FilterGroup[S], shelves: dict[K, dict[FilterGroup[S], None]], keys: Iterable[K]) -> None:
    """Take the group off its shelves, and remove shelves that are then empty."""
    for key in keys:
        shelf = shelves.get(key)
        if shelf is not None:
            shelf.pop(group, None)
            if not shelf:
                del shelves[key]
