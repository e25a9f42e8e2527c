"""The verify threads: every job once, and an orderly end."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from relayd.admission.verify import BATCH, VerifyPool


def unexpected(job: object, error: BaseException) -> None:
    raise AssertionError(job) from error


async def test_every_job_is_checked_once_and_batches_are_bounded():
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    checked: list[int] = []
    batches: list[int] = []

    def finished(jobs: Sequence[int], seconds: float) -> None:
        checked.extend(jobs)
        batches.append(len(jobs))
        if len(checked) == 1000:
            done.set()

    pool: VerifyPool[int] = VerifyPool(lambda job: 0.0, finished, unexpected, threads=3, loop=loop)
    for job in range(1000):
        pool.put(job)
    async with asyncio.timeout(10):
        await done.wait()
    assert sorted(checked) == list(range(1000))
    assert max(batches) <= BATCH
    await loop.run_in_executor(None, pool.close)


@pytest.mark.parametrize("beside", [0, 20])
async def test_a_job_that_works_long_is_told_of_and_one_that_only_waits_is_not(beside: int):
    loop = asyncio.get_running_loop()
    done: list[str] = []
    dear: dict[str, float] = {}

    def check(job: str) -> float:
        if job == "waits":
            time.sleep(0.05)
        if job == "works":
            until = time.thread_time() + 0.05
            while time.thread_time() < until:
                sum(range(100))
            raise ValueError(job)
        return 0.0

    def failed(job: str, error: BaseException) -> None:
        done.append(job)

    pool: VerifyPool[str] = VerifyPool(
        check,
        lambda jobs, seconds: done.extend(jobs),
        failed,
        threads=1,
        loop=loop,
        is_quick=lambda job: True,
        on_dear=dear.__setitem__,
    )
    for jobs in (["waits"], ["works", *map(str, range(beside))]):
        wanted = len(done) + len(jobs)
        for job in jobs:
            pool.put(job)
        async with asyncio.timeout(30):
            while len(done) < wanted:  # noqa: ASYNC110 - a thread
                await asyncio.sleep(0.001)
    assert dear["works"] > 0.02
    assert sum(dear.values()) - dear["works"] < dear["works"]
    await loop.run_in_executor(None, pool.close)


async def test_what_a_job_takes_elsewhere_counts():
    loop = asyncio.get_running_loop()
    done: list[int] = []
    dear: dict[int, float] = {}

    def finished(jobs: Sequence[int], seconds: float) -> None:
        done.extend(jobs)

    pool: VerifyPool[int] = VerifyPool(
        lambda job: 7.0 * (job == 3), finished, unexpected, threads=1, loop=loop, on_dear=dear.__setitem__
    )
    for job in range(5):
        pool.put(job)
    async with asyncio.timeout(30):
        while len(done) < 5:  # noqa: ASYNC110 - a thread
            await asyncio.sleep(0.001)
    assert dear[3] > 7.0
    assert all(seconds < 7.0 for job, seconds in dear.items() if job != 3)
    await loop.run_in_executor(None, pool.close)


async def test_closing_ends_the_threads_and_drops_what_is_queued():
    loop = asyncio.get_running_loop()
    pool: VerifyPool[int] = VerifyPool(
        lambda job: 0.0, lambda jobs, seconds: None, unexpected, threads=2, loop=loop
    )
    await loop.run_in_executor(None, pool.close)
    pool.put(1)
    assert not any(thread.is_alive() for thread in pool._threads)


class Held:
    """Checks that do not end until released, with the thread and order of each."""

    def __init__(self, *names: str) -> None:
        self.here = threading.get_ident()
        self.begun = {name: threading.Event() for name in names}
        self.release = threading.Event()
        self.on_the_loop: dict[str, bool] = {}
        self.done: list[str] = []

    def pool(self, threads: int = 1, place: Callable[[str], float] = lambda job: math.inf) -> VerifyPool[str]:
        return VerifyPool(
            self._check,
            lambda jobs, seconds: None,
            unexpected,
            threads=threads,
            loop=asyncio.get_running_loop(),
            is_quick=lambda job: not job.startswith("dear"),
            place=place,
        )

    def _check(self, job: str) -> float:
        self.on_the_loop[job] = threading.get_ident() == self.here
        if job in self.begun:
            self.begun[job].set()
            assert self.release.wait(30)
        self.done.append(job)
        return 0.0

    async def all_done(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.done) < count:  # noqa: ASYNC110 - another thread
                await asyncio.sleep(0.001)


async def put(pool: VerifyPool[str], *jobs: str) -> None:
    """Queue these in one step of the loop, and have them handed over."""
    for job in jobs:
        pool.put(job)
    await asyncio.sleep(0)


async def test_few_jobs_are_done_on_the_loop_and_more_or_one_beside_others_are_not():
    held = Held("held")
    pool = held.pool()
    await put(pool, "alone")
    assert (held.on_the_loop, held.done) == ({"alone": True}, ["alone"])
    await put(pool, "1", "2", "3", "4")
    assert held.done == ["alone", "1", "2", "3", "4"] and all(held.on_the_loop.values())
    companions = [f"companion {number}" for number in range(4)]
    await put(pool, "held", *companions)
    await asyncio.to_thread(held.begun["held"].wait, 30)
    await put(pool, "beside them")
    assert "held" not in held.done and "beside them" not in held.done
    held.release.set()
    await held.all_done(11)
    assert not any(held.on_the_loop[job] for job in ("held", *companions, "beside them"))
    await asyncio.to_thread(pool.close)


@pytest.mark.parametrize("threads", [1, 2, 4])
async def test_quick_jobs_do_not_wait_for_dear_ones(threads: int):
    dear = [f"dear {number}" for number in range(20)]
    held = Held(*dear)
    pool = held.pool(threads)
    await put(pool, *dear)
    await asyncio.to_thread(held.begun[dear[0]].wait, 30)
    await put(pool, "alone")
    assert held.done == ["alone"]
    quick = [f"quick {number}" for number in range(5)]
    await put(pool, *quick)
    if threads > 1:  # one of them takes no expensive jobs
        await held.all_done(6)
        for each in dear[: threads - 1]:
            await asyncio.to_thread(held.begun[each].wait, 30)
        assert sum(event.is_set() for event in held.begun.values()) == threads - 1
    held.release.set()
    await held.all_done(26)
    before = min(map(held.done.index, quick)) - 1
    assert before <= (0 if threads > 1 else 1), "a thread that is alone ends what it has begun"
    await asyncio.to_thread(pool.close)


async def test_dear_jobs_are_done_in_the_order_of_their_places():
    places = {"dear first": 0.0, "dear c": 3.0, "dear a": 1.0, "dear b": 2.0, "dear b too": 2.0}
    held = Held("dear first")
    pool = held.pool(place=places.__getitem__)
    await put(pool, "dear first")
    await asyncio.to_thread(held.begun["dear first"].wait, 30)
    await put(pool, "dear c", "dear b")
    await put(pool, "dear a", "dear b too")
    held.release.set()
    await held.all_done(5)
    assert held.done == ["dear first", "dear a", "dear b", "dear b too", "dear c"]
    await asyncio.to_thread(pool.close)


async def test_of_many_jobs_those_of_who_has_had_little_are_done_on_the_loop():
    now = time.monotonic()
    places = {f"little {number}": now - number for number in range(6)} | {"much": now + 60, "held": now + 30}
    held = Held("held")
    pool = held.pool(place=places.__getitem__)
    await put(pool, "held", "much", *(f"little {number}" for number in range(6)))
    first = ["little 5", "little 4", "little 3", "little 2"]
    assert held.done[:4] == first and all(map(held.on_the_loop.__getitem__, first)), (
        "few, for the loop serves all"
    )
    await asyncio.to_thread(held.begun["held"].wait, 30)
    held.release.set()
    await held.all_done(8)
    assert held.done[4:] == ["little 1", "little 0", "held", "much"]
    assert not any(map(held.on_the_loop.__getitem__, held.done[4:]))
    await asyncio.to_thread(pool.close)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, MemoryError])
async def test_a_job_whose_check_raises_is_reported_and_the_others_are_checked(error):
    loop = asyncio.get_running_loop()
    passed: list[int] = []
    failed: list[int] = []
    done = asyncio.Event()

    def check(job: int) -> float:
        if job % 3 == 0:
            raise error
        return 0.0

    def finished(jobs: Sequence[int], seconds: float) -> None:
        passed.extend(jobs)
        if len(passed) + len(failed) == 200:
            done.set()

    pool: VerifyPool[int] = VerifyPool(
        check,
        finished,
        lambda job, error: failed.append(job),
        threads=2,
        loop=loop,
        is_quick=lambda job: True,
    )
    pool.put(0)
    await asyncio.sleep(0)
    for job in range(1, 200):
        pool.put(job)
    async with asyncio.timeout(10):
        await done.wait()
    assert sorted(failed) == [job for job in range(200) if job % 3 == 0]
    assert sorted(passed + failed) == list(range(200))
    await loop.run_in_executor(None, pool.close)
    assert not any(thread.is_alive() for thread in pool._threads)
