"""Changes reach the store in order and as soon as it works again, whatever failed in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest
from strata.channels.persistence import (
    Change,
    ChangeWriter,
    CorruptStore,
    MemoryPersistence,
    ParticipantKey,
    PersistenceClosed,
    PersistenceError,
    Put,
    Raise,
    Remove,
    StorageFull,
    WriterHealth,
)
from strata.channels.persistence.testing import FaultyPersistence
from strata.channels.persistence.writer import Steps

ALICE = ParticipantKey("room", "alice")


class Pauses:
    """Replaces the clock: records how long the writer wanted to wait, and returns at once."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)


class Stuck:
    """A pause that ends only by being cancelled."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def __call__(self, _seconds: float) -> None:
        self.begun.set()
        await asyncio.Event().wait()


@pytest.fixture
def store() -> FaultyPersistence:
    return FaultyPersistence(MemoryPersistence())


@pytest.mark.req("C-256")
async def test_failed_writes_are_surfaced_and_retried(
    store: FaultyPersistence, caplog: pytest.LogCaptureFixture
) -> None:
    pauses, heard = Pauses(), list[WriterHealth]()
    store.fail_before = [StorageFull("full"), StorageFull("full"), StorageFull("full")]
    writer = ChangeWriter(
        store, ALICE, retry_interval=1, retry_interval_max=3, sleep=pauses, on_health=heard.append
    )
    with caplog.at_level(logging.WARNING):
        writer.submit([Put("log", "a", b"1")])
        await writer.written()
    assert (await store.load(ALICE)).records == {"log": {"a": b"1"}}
    assert pauses.asked == [1, 2, 3]
    assert [health.failures for health in heard] == [1, 2, 3, 0]
    assert isinstance(heard[0].error, StorageFull) and heard[-1].error is None
    assert sum("could not be written" in record.message for record in caplog.records) == 3
    assert writer.health == WriterHealth(0, 0, None)
    await writer.close()


async def test_a_store_that_is_out_of_order_for_days_is_written_once_it_works(
    store: FaultyPersistence,
) -> None:
    pauses, faults = Pauses(), list[Exception]()
    store.fail_before = [StorageFull("full") for _ in range(1_100)]  # more than nine hours
    async with ChangeWriter(store, ALICE, sleep=pauses, on_fault=faults.append) as writer:
        writer.submit([Put("log", "a", b"1")])
        await writer.written()
    assert pauses.asked[-1] == 30 and faults == []
    assert (await store.load(ALICE)).records == {"log": {"a": b"1"}}


@pytest.mark.req("C-255")
async def test_a_write_whose_fate_is_unknown_is_repeated_without_harm(store: FaultyPersistence) -> None:
    store.fail_after = [PersistenceError("the answer was lost")]
    async with ChangeWriter(store, ALICE, sleep=Pauses()) as writer:
        writer.submit([Put("queued", "1", b"x"), Raise("lamport", 5)])
        writer.submit([Remove("queued", "1"), Put("queued", "2", b"y")])
        await writer.written()
    assert len(store.applied) == 2
    state = await store.load(ALICE)
    assert state.records == {"queued": {"2": b"y"}}
    assert state.counters == {"lamport": 5}


async def test_order_is_kept_and_submissions_stay_whole(store: FaultyPersistence) -> None:
    submissions: list[Sequence[Change]] = [
        [Put("log", f"{n}.{part}", b"") for part in range(300)] for n in range(10)
    ]
    async with ChangeWriter(store, ALICE) as writer:
        for changes in submissions:
            writer.submit(changes)
        await writer.written()
    assert [change for _, batch in store.applied for change in batch] == [
        change for changes in submissions for change in changes
    ]
    assert all(len(batch) % 300 == 0 for _, batch in store.applied)
    assert 1 < len(store.applied) < 10  # in batches, but of bounded size


async def test_written_waits_for_what_was_submitted_before_it(store: FaultyPersistence) -> None:
    pause = Stuck()
    writer = ChangeWriter(store, ALICE, sleep=pause)
    await writer.written()  # nothing to wait for
    store.fail_before = [StorageFull("full")]
    writer.submit([Put("log", "a", b"")])
    waiting = asyncio.ensure_future(writer.written())
    await pause.begun.wait()
    assert not waiting.done()
    given_up = asyncio.ensure_future(writer.written())
    await asyncio.sleep(0)
    given_up.cancel()
    await writer.close()  # ends the pause with one more attempt
    await waiting
    assert given_up.cancelled()
    assert len(store.applied) == 1


async def test_closing_with_a_store_out_of_order_says_what_was_lost(store: FaultyPersistence) -> None:
    pause = Stuck()
    store.fail_before = [StorageFull("full"), StorageFull("still full")]
    writer = ChangeWriter(store, ALICE, sleep=pause)
    writer.submit([Put("log", "a", b"")])
    waiting = asyncio.ensure_future(writer.written())
    await pause.begun.wait()
    with pytest.raises(StorageFull, match="still full"):
        await writer.close()
    with pytest.raises(StorageFull):
        await waiting
    with pytest.raises(PersistenceClosed):
        writer.submit([Put("log", "b", b"")])
    assert writer.health.pending == 1


async def test_what_a_step_made_goes_out_once_the_step_is_durable(store: FaultyPersistence) -> None:
    async with ChangeWriter(store, ALICE, max_pending=2) as writer:
        steps = Steps(writer)
        assert steps.store([], ["kept nowhere"]) == 0 and steps.is_stored("kept nowhere")
        first = steps.store([Put("log", "a", b"")], ["a"])
        assert not steps.is_stored("a")
        with pytest.raises(PersistenceError):  # the writer has no room for it
            steps.store([Put("log", "b", b""), Put("log", "c", b"")], ["b"])
        assert steps.is_behind
        with pytest.raises(PersistenceError, match="far behind"):
            steps.check()
        await writer.written()
        assert (first, steps.is_stored("a"), steps.is_stored("b")) == (1, True, False)
        assert steps.store([], ["d"]) == 2
        steps.check()
        assert not steps.is_stored("b") and not steps.is_stored("d")
        await writer.written()
        assert steps.is_stored("b") and steps.is_stored("d")
        steps.forget("b")
        assert steps.is_stored("b")


async def test_a_store_that_has_too_much_to_write_is_behind_until_it_has_written_it() -> None:
    writer = ChangeWriter(MemoryPersistence(), ALICE)
    steps = Steps(writer)
    steps.store([Put("log", "a", b"")] * 20_000, [])
    assert (steps.is_behind, writer.pending) == (False, 20_000)
    steps.store([Put("log", "b", b"")], [])
    assert (steps.is_behind, writer.pending) == (True, 20_001)
    with pytest.raises(PersistenceError, match="far behind"):
        steps.check()
    await writer.written()
    assert (steps.is_behind, writer.pending) == (False, 0)
    await writer.close()


async def test_a_store_that_failed_for_good_is_not_tried_again(store: FaultyPersistence) -> None:
    store.fail_before = [CorruptStore("damaged")]
    writer = ChangeWriter(store, ALICE, sleep=Stuck())
    writer.submit([Put("log", "a", b"")])
    with pytest.raises(CorruptStore):
        await writer.written()
    with pytest.raises(CorruptStore):
        writer.submit([Put("log", "b", b"")])
    with pytest.raises(CorruptStore):
        await writer.written()
    with pytest.raises(CorruptStore):
        await writer.close()


async def test_what_waits_is_bounded(store: FaultyPersistence) -> None:
    writer = ChangeWriter(store, ALICE, max_pending=3)
    writer.submit([Put("log", "a", b""), Put("log", "b", b"")])
    with pytest.raises(PersistenceError):
        writer.submit([Put("log", "c", b""), Put("log", "d", b"")])
    with pytest.raises(ValueError):
        writer.submit([Raise("lamport", -1)])
    writer.submit([Put("log", "e", b"")])
    writer.submit([])
    await writer.close()
    assert list((await store.load(ALICE)).records["log"]) == ["a", "b", "e"]


async def test_an_error_that_a_custom_store_should_not_raise_is_retried_too() -> None:
    class Strange(MemoryPersistence):
        failures = 1

        async def apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
            if self.failures:
                self.failures -= 1
                raise OSError("a disk of its own kind")
            await super().apply(participant, changes)

    store = Strange()
    heard: list[WriterHealth] = []
    async with ChangeWriter(store, ALICE, sleep=Pauses(), on_health=heard.append) as writer:
        writer.submit([Put("log", "a", b"")])
        await writer.written()
    assert "a disk of its own kind" in str(heard[0].error)
    assert (await store.load(ALICE)).records == {"log": {"a": b""}}


class Cut(MemoryPersistence):
    """A store whose first write is cancelled from within, as by a closing connection pool."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts = 1

    async def apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
        if self.cuts:
            self.cuts -= 1
            gone = asyncio.get_running_loop().create_future()
            gone.cancel()
            await gone
        await super().apply(participant, changes)


async def test_a_store_in_which_something_is_cancelled_is_tried_again() -> None:
    store = Cut()
    heard: list[WriterHealth] = []
    async with ChangeWriter(store, ALICE, sleep=Pauses(), on_health=heard.append) as writer:
        writer.submit([Put("log", "a", b"")])
        await writer.written()
    assert [health.failures for health in heard] == [1, 0]
    assert (await store.load(ALICE)).records == {"log": {"a": b""}}


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
async def test_closing_writes_what_a_cancelled_task_has_left(turns: int) -> None:
    class Slow(MemoryPersistence):
        async def apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
            for _ in range(5):
                await asyncio.sleep(0)
            await super().apply(participant, changes)

    store = Slow()
    writer = ChangeWriter(store, ALICE)
    before = asyncio.all_tasks()
    writer.submit([Put("log", "a", b"")])
    (task,) = asyncio.all_tasks() - before
    waiting = asyncio.ensure_future(writer.written())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()  # as a program does that ends and cancels all its tasks
    with pytest.raises(PersistenceClosed):
        await waiting
    await writer.close()
    assert (await store.load(ALICE)).records == {"log": {"a": b""}} and writer.pending == 0


@pytest.mark.parametrize("works_again", [True, False])
async def test_closing_tries_once_more_also_where_the_task_was_cancelled_between_two_tries(
    store: FaultyPersistence, works_again: bool
) -> None:
    pause = Stuck()
    store.fail_before = [StorageFull("full")]
    writer = ChangeWriter(store, ALICE, sleep=pause)
    before = asyncio.all_tasks()
    writer.submit([Put("log", "a", b"1")])
    (task,) = asyncio.all_tasks() - before
    await pause.begun.wait()
    task.cancel()  # as a program does that ends and cancels all its tasks
    await asyncio.wait([task])
    if works_again:
        await writer.close()
    else:
        store.fail_before = [StorageFull("still full")]
        with pytest.raises(StorageFull, match="still full"):
            await writer.close()
    assert ((await store.load(ALICE)).records == {"log": {"a": b"1"}}) is works_again


async def test_however_much_a_step_has_made_nothing_of_it_counts_as_stored_before_it_is() -> None:
    writer = ChangeWriter(MemoryPersistence(), ALICE)
    steps = Steps(writer)
    names = [f"m{number}" for number in range(2_000)]
    steps.store([Put("log", "m", b"")], names)
    steps.written()  # called for another step
    assert not any(map(steps.is_stored, names))
    await writer.written()
    steps.written()
    assert all(map(steps.is_stored, names))
    assert not steps._tickets, "and nothing is kept of what is stored"
    await writer.close()
