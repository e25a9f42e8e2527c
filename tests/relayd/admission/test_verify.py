"""The verify threads: every job once, and an orderly end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

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

    pool: VerifyPool[int] = VerifyPool(lambda job: None, finished, unexpected, threads=3, loop=loop)
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

    def check(job: str) -> None:
        if job == "waits":
            time.sleep(0.05)
        if job == "works":
            until = time.thread_time() + 0.05
            while time.thread_time() < until:
                sum(range(100))
            raise ValueError(job)

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


async def test_closing_ends_the_threads_and_drops_what_is_queued():
    loop = asyncio.get_running_loop()
    pool: VerifyPool[int] = VerifyPool(
        lambda job: None, lambda jobs, seconds: None, unexpected, threads=2, loop=loop
    )
    await loop.run_in_executor(None, pool.close)
    pool.put(1)
    assert not any(thread.is_alive() for thread in pool._threads)


async def test_a_lone_job_is_done_on_the_loop_and_a_second_one_beside_it_is_not():
    loop = asyncio.get_running_loop()
    here = threading.get_ident()
    release, begun = threading.Event(), threading.Event()
    where: dict[str, bool] = {}
    done: list[str] = []

    def check(job: str) -> None:
        where[job] = threading.get_ident() == here
        if job == "slow":
            begun.set()
            release.wait(10)

    pool: VerifyPool[str] = VerifyPool(
        check,
        lambda jobs, seconds: done.extend(jobs),
        unexpected,
        threads=1,
        loop=loop,
        is_quick=lambda job: job != "slow",
    )
    pool.put("alone")
    await asyncio.sleep(0)
    assert (where, done) == ({"alone": True}, ["alone"])
    pool.put("slow")
    await asyncio.to_thread(begun.wait, 10)
    pool.put("beside it")
    await asyncio.sleep(0)
    assert done == ["alone"]
    release.set()
    async with asyncio.timeout(10):
        while len(done) < 3:  # noqa: ASYNC110 - another thread
            await asyncio.sleep(0.001)
    assert where == {"alone": True, "slow": False, "beside it": False}
    await loop.run_in_executor(None, pool.close)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, MemoryError])
async def test_a_job_whose_check_raises_is_reported_and_the_others_are_checked(error):
    loop = asyncio.get_running_loop()
    passed: list[int] = []
    failed: list[int] = []
    done = asyncio.Event()

    def check(job: int) -> None:
        if job % 3 == 0:
            raise error

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
