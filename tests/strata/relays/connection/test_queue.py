"""The queue of one subscription counts its contents, in events and in bytes."""

from __future__ import annotations

import pytest
from msgspec import Raw
from strata.relays.connection.options import Options
from strata.relays.connection.queue import EventQueue, QueuedEvent, possible_time
from strata.relays.connection.values import LogReset

RESET = LogReset(lost="c1", cursor="c0", since=None)


def event(size_bytes: int = 0) -> QueuedEvent:
    return QueuedEvent(Raw(b"{}"), 0, "c", True, size_bytes=size_bytes)


def queue_of(*events: QueuedEvent | LogReset, most: int = 4, most_bytes: int = 10_000) -> EventQueue:
    queue = EventQueue(Options(queue_events=most, queue_bytes=most_bytes, page_events=1))
    for each in events:
        queue.put(each)
    return queue


def test_what_came_first_is_taken_first_and_a_reset_takes_a_place_and_no_bytes():
    queue = queue_of(event(1), RESET, event(2))
    assert (len(queue), [each.size_bytes for each in queue]) == (3, [1, 2])
    assert [queue.take(), queue.take(), queue.take(), queue.take()] == [event(1), RESET, event(2), None]
    assert queue.size_bytes == 0


@pytest.mark.parametrize(
    ("queue", "is_full", "room"),
    [
        (queue_of(), False, 4),
        (queue_of(event(), event()), False, 2),
        (queue_of(event(), RESET, event(), RESET), True, 0),
        (queue_of(event(4_000)), False, 3),
        (queue_of(event(5_000)), False, 0),  # half of its bytes are used: the rest is for events in flight
        (queue_of(event(9_744)), True, 0),
        (queue_of(most=1), False, 1),
        (queue_of(event(), most=1), True, 0),
    ],
)
def test_it_is_full_by_events_or_by_bytes(queue, is_full, room):
    assert queue.is_full is is_full
    assert [queue.has_room_for(events) for events in range(1, 6)] == [
        events <= room for events in range(1, 6)
    ]
    queue.clear()
    assert (len(queue), queue.size_bytes, queue.is_full) == (0, 0, False)


def test_a_time_is_one_that_json_keeps():
    assert [possible_time(at) for at in (10**30, -(10**30), 7)] == [2**53 - 1, -(2**53 - 1), 7]
