"""What has arrived for one subscription and waits for its consumer: a bounded queue, no I/O."""

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
    """As `possible_time` gives it."""
    cursor: str | None
    live: bool | None
    annotations: dict[str, object] | None = None
    """What the relay says about the packet beside it (R-209)."""
    arrived_at: float = 0.0
    """When it came in, on the connection's clock."""
    size_bytes: int = 0
    """How much came: cursor and annotations may be larger than the packet."""
    by_receipt: bool = False
    """The relay was asked to apply the bounds on the time of receipt."""


def possible_time(received_at: int) -> int:
    """The time of an event, as far as a number of JSON can be a time (R-012).

    A relay may send any integer, and what is behind this takes none that has no place in 64 bits.
    """
    return min(max(received_at, -canonical.MAX_SAFE_INTEGER), canonical.MAX_SAFE_INTEGER)


class EventQueue:
    """Events, and word of resets between two of them, in the order they came.

    It refuses nothing: whoever puts asks `is_full` or `has_room_for`, and leaves the stream (`Stream`).
    """

    def __init__(self, options: Options) -> None:
        self.size_bytes = 0
        """What the events take; a reset takes nothing."""
        self._most_events = options.queue_events
        self._most_bytes = options.queue_bytes
        self._waiting: deque[QueuedEvent | LogReset] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[QueuedEvent]:
        """The events, without taking them."""
        return (event for event in self._waiting if isinstance(event, QueuedEvent))

    def put(self, event: QueuedEvent | LogReset) -> None:
        """Add what came last."""
        self._waiting.append(event)
        self.size_bytes += _size_of(event)

    def take(self) -> QueuedEvent | LogReset | None:
        """What came first, or None."""
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
        """Whether the next event would be one too many, in number or in bytes."""
        return len(self._waiting) >= self._most_events or self.size_bytes >= self._most_bytes

    def has_room_for(self, events: int) -> bool:
        """Whether so many, at least one, can be asked for; how many bytes those will take, nobody knows."""
        return len(self._waiting) + events <= self._most_events and self.size_bytes <= self._most_bytes // 2


def _size_of(event: QueuedEvent | LogReset) -> int:
    return event.size_bytes + _EVENT_OVERHEAD_BYTES if isinstance(event, QueuedEvent) else 0
