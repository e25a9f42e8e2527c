"""The bounded queue of events that wait for one subscription's consumer: no I/O."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Raw

from strata.protocol import canonical
from strata.relays.connection.options import Options
from strata.relays.connection.values import LogReset

__all__ = ["EventQueue", "QueuedEvent", "possible_time"]

_EVENT_OVERHEAD_BYTES = 256


class QueuedEvent(NamedTuple):
    """An event as it arrived: nothing in it has been checked."""

    packet: Raw
    received_at: int
    """As `possible_time` returns it."""
    cursor: str | None
    live: bool | None
    annotations: dict[str, object] | None = None
    """The relay's annotations on the packet (R-209)."""
    arrived_at: float = 0.0
    """When it arrived, on the connection's clock."""
    size_bytes: int = 0
    """The size of the whole message: cursor and annotations may be larger than the packet."""
    by_receipt: bool = False
    """Whether the relay was asked to apply the bounds on the time of receipt."""
    turn: int = 0
    """How often the stream had gone back before: what was delivered may come again."""


def possible_time(received_at: int) -> int:
    """The time of an event, clamped to the safe integers of JSON (R-012).

    A relay may send any integer, and later stages accept only those that fit into 64 bits.
    """
    return min(max(received_at, -canonical.MAX_SAFE_INTEGER), canonical.MAX_SAFE_INTEGER)


class EventQueue:
    """Events, and notices of resets between them, in the order they arrived.

    `put` refuses nothing: the producer (`Stream`) checks `is_full` or `has_room_for`, and leaves the feed.
    """

    def __init__(self, options: Options) -> None:
        self.size_bytes = 0
        """The size of the events; a reset counts as nothing."""
        self._most_events = options.queue_events
        self._most_bytes = options.queue_bytes
        self._waiting: deque[QueuedEvent | LogReset] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[QueuedEvent]:
        """The events, without taking them."""
        return (event for event in self._waiting if isinstance(event, QueuedEvent))

    def put(self, event: QueuedEvent | LogReset) -> None:
        """Add an event at the end."""
        self._waiting.append(event)
        self.size_bytes += _size_of(event)

    def take(self) -> QueuedEvent | LogReset | None:
        """Remove and return the first event, or None."""
        if not self._waiting:
            return None
        event = self._waiting.popleft()
        self.size_bytes -= _size_of(event)
        return event

    def clear(self) -> None:
        """Drop everything."""
        self._waiting.clear()
        self.size_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another event, in number or in bytes."""
        return len(self._waiting) >= self._most_events or self.size_bytes >= self._most_bytes

    def has_room_for(self, events: int) -> bool:
        """Whether this many events, at least one, may be requested; their size is not known in advance."""
        return len(self._waiting) + events <= self._most_events and self.size_bytes <= self._most_bytes // 2


def _size_of(event: QueuedEvent | LogReset) -> int:
    return event.size_bytes + _EVENT_OVERHEAD_BYTES if isinstance(event, QueuedEvent) else 0
