"""A channel's lane of the rate limiter: what waits, of which kind, and what happens to it."""

from __future__ import annotations

import pytest
from strata.channels.rate_limit import Priority, RateLimitConfig, RateLimiter, SendQueueFull, Transmission
from strata.channels.reliable.outbox import Outbox, Repair, Sync

NOW = 1_760_000_000_000


def made(**limits: int) -> tuple[RateLimiter, Outbox]:
    limiter = RateLimiter(RateLimitConfig(**limits))  # type: ignore[arg-type]
    return limiter, Outbox(limiter, "lane")


def taken(limiter: RateLimiter) -> Transmission:
    transmission = limiter.take(NOW)
    assert transmission is not None
    return transmission


def test_a_sync_and_a_repair_are_told_from_chunks_by_their_type_alone():
    limiter, outbox = made()
    outbox.queue(["sync:1", "repair:x"])  # chunk ids that look like other kinds
    outbox.queue_sync(b"sync")
    outbox.queue_repair("x", b"repair")
    kinds = [outbox.background(taken(limiter)) for _ in range(4)]
    assert kinds == [None, None, Sync(b"sync"), Repair("x", b"repair")]


def test_a_sync_takes_the_place_of_one_that_waits_and_not_of_one_on_its_way():
    limiter, outbox = made()
    outbox.queue_sync(b"first")
    outbox.queue_sync(b"second")
    assert outbox.queued == 1
    second = taken(limiter)
    outbox.sending(second)
    outbox.queue_sync(b"third")
    assert outbox.background(second) == Sync(b"second"), "its failure is still that of a sync"
    outbox.not_sent(second, again=False)
    assert outbox.background(second) is None
    assert outbox.background(taken(limiter)) == Sync(b"third")


def test_a_repair_that_waits_is_not_queued_again():
    _, outbox = made()
    assert outbox.queue_repair("x", b"once") is not None
    assert outbox.queue_repair("x", b"again") is None
    assert outbox.queued == 1


def test_a_chunk_that_was_not_sent_takes_its_place_again_and_one_that_was_leaves_the_store():
    limiter, outbox = made()
    outbox.queue(["a", "b"])
    outbox.changes_to_store()
    first = taken(limiter)
    outbox.sending(first)
    assert outbox.is_in_flight("a")
    outbox.not_sent(first, again=True)
    assert not outbox.is_in_flight("a")
    assert [head.message_id for head in outbox.heads()] == ["a"]
    again = taken(limiter)
    outbox.sending(again)
    outbox.sent(again)
    assert not outbox.is_in_flight("a") and len(outbox.changes_to_store()) == 1
    assert [head.message_id for head in outbox.heads()] == ["b"]


def test_a_retransmission_waits_apart_and_is_withdrawn_with_its_message():
    _, outbox = made()
    outbox.queue_again("a")
    outbox.queue_again("a")
    assert [head.priority for head in outbox.heads()] == [Priority.RETRANSMISSION]
    outbox.withdraw("a")
    assert outbox.heads() == [] and outbox.queued == 0


def test_a_full_queue_refuses_a_whole_message():
    _, outbox = made(max_queued=2)
    with pytest.raises(SendQueueFull):
        outbox.check_room(3)
    with pytest.raises(SendQueueFull):
        outbox.queue(["a", "b", "c"])
    assert outbox.queued == 0
