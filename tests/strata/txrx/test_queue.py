"""The queue between connections and `recv`: order, room for senders, and which receiver gets a message."""

from __future__ import annotations

import asyncio

import pytest
from strata.txrx import TxRxClosed
from strata.txrx.queue import RxQueue


async def started(*waits: asyncio.Task[int]) -> None:
    """Let each task reach its wait in `get`."""
    for _ in waits:
        await asyncio.sleep(0)


def reason(queue: RxQueue[int]) -> str | None:
    """A function, because a type checker assumes that an attribute keeps its value between two calls."""
    return None if queue.closed is None else queue.closed.reason


def getting(queue: RxQueue[int], count: int = 1) -> list[asyncio.Task[int]]:
    return [asyncio.create_task(queue.get()) for _ in range(count)]


@pytest.mark.req("T-020", "T-050")
async def test_what_is_put_first_comes_first_and_takes_room() -> None:
    queue: RxQueue[int] = RxQueue(4)
    assert (len(queue), queue.room) == (0, 4)
    queue.put([1, 2])
    queue.put_one(3)
    assert (len(queue), queue.room) == (3, 1)
    assert [await queue.get(), await queue.get()] == [1, 2]
    queue.put([4, 5, 6])
    assert (len(queue), queue.room) == (4, 0)
    queue.put_one(7)  # what a connection has already accepted is never dropped
    assert (len(queue), queue.room) == (5, 0)
    assert [await queue.get() for _ in range(5)] == [3, 4, 5, 6, 7]


async def test_a_queue_without_a_bound_has_room_for_any_number() -> None:
    queue: RxQueue[int] = RxQueue(None)
    queue.put(range(10_000))
    assert queue.room > 1_000_000
    assert await queue.get() == 0


@pytest.mark.req("T-051")
@pytest.mark.parametrize("capacity", [1, 2, 3, 8])
async def test_senders_are_called_once_half_the_queue_is_free(capacity: int) -> None:
    queue: RxQueue[int] = RxQueue(capacity)
    queue.put(range(capacity))
    called: list[int] = []
    queue.when_room("sender", lambda: called.append(queue.room))
    while not called:
        await queue.get()
    assert called == [capacity - capacity // 2]
    while len(queue):
        await queue.get()
    assert len(called) == 1, "it asks again if it waits again"


@pytest.mark.req("T-051")
async def test_senders_are_called_in_the_order_of_asking_until_the_room_is_used() -> None:
    queue: RxQueue[int] = RxQueue(4)
    queue.put(range(4))
    called: list[str] = []

    def sender(name: str, messages: int) -> None:
        def call() -> None:
            called.append(name)
            queue.put([9] * messages)

        queue.when_room(name, call)

    for name, messages in (("nothing", 0), ("gone", 0), ("one", 1), ("late", 1)):
        sender(name, messages)
    sender("nothing", 4)  # it is waiting already
    queue.forget("gone")
    queue.forget("never asked")
    await queue.get()
    assert called == []
    await queue.get()
    # A sender without a message leaves its room to the next; with one more message, less than half is free.
    assert called == ["nothing", "one"]
    await queue.get()
    assert called == ["nothing", "one", "late"]
    assert [await queue.get() for _ in range(3)] == [3, 9, 9]


@pytest.mark.req("T-021")
async def test_all_who_wait_get_one_each_of_what_comes_together() -> None:
    queue: RxQueue[int] = RxQueue(8)
    waiting = getting(queue, 3)
    await started(*waiting)
    queue.put([1, 2, 3, 4])
    async with asyncio.timeout(5):
        assert [await each for each in waiting] == [1, 2, 3]
    assert len(queue) == 1
    (one,) = getting(queue)
    queue.put_one(5)
    async with asyncio.timeout(5):
        assert [await one, await queue.get()] == [4, 5]
        (last,) = getting(queue)
        await started(last)
        queue.put_one(6)
        assert await last == 6


@pytest.mark.parametrize("closes", [False, True])
async def test_who_is_woken_and_cancelled_at_once_leaves_the_message_to_another(closes: bool) -> None:
    queue: RxQueue[int] = RxQueue(8)
    first, second, third = waiting = getting(queue, 3)
    await started(*waiting)
    second.cancel()  # nothing wakes it
    await started(*waiting)
    queue.put_one(1)
    first.cancel()
    if closes:
        queue.close(TxRxClosed("over"))
    async with asyncio.timeout(5):
        assert await third == 1
    for cancelled in (first, second):
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    assert not queue._receivers


async def test_waits_that_are_cancelled_leave_nothing_behind() -> None:
    queue: RxQueue[int] = RxQueue(8)
    for _ in range(3):
        (waiting,) = getting(queue)
        await started(waiting)
        waiting.cancel()
        await asyncio.wait([waiting])
    assert not queue._receivers  # a program may wait with a timeout of a second for as long as it runs
    queue.put_one(1)
    assert await queue.get() == 1


@pytest.mark.req("T-021")
async def test_a_closed_queue_gives_what_it_has_and_then_says_why() -> None:
    queue: RxQueue[int] = RxQueue(2)
    queue.put([1, 2])
    queue.when_room("sender", lambda: pytest.fail("nothing is taken any more"))
    assert reason(queue) is None
    queue.close(TxRxClosed("over"))
    queue.close(TxRxClosed("another reason"))
    assert reason(queue) == "over"
    assert [await queue.get(), await queue.get()] == [1, 2]
    raised = []
    for _ in range(2):
        with pytest.raises(TxRxClosed, match="over") as error:
            await queue.get()
        raised.append(error.value)
    assert raised[0] is not raised[1], "an error that is raised again collects tracebacks"


@pytest.mark.req("T-021")
async def test_closing_wakes_all_who_wait() -> None:
    queue: RxQueue[int] = RxQueue(2)
    waiting = getting(queue, 3)
    await started(*waiting)
    queue.close(TxRxClosed("over"))
    async with asyncio.timeout(5):
        for each in waiting:
            with pytest.raises(TxRxClosed, match="over"):
                await each
