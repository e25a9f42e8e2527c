"""The verify threads: every job once, and an orderly end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relayd.admission.verify import BATCH, VerifyPool


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

    pool: VerifyPool[int] = VerifyPool(lambda job: None, finished, threads=3, loop=loop)
    for job in range(1000):
        pool.put(job)
    async with asyncio.timeout(10):
        await done.wait()
    assert sorted(checked) == list(range(1000))
    assert max(batches) <= BATCH
    await loop.run_in_executor(None, pool.close)


async def test_closing_ends_the_threads_and_drops_what_is_queued():
    loop = asyncio.get_running_loop()
    pool: VerifyPool[int] = VerifyPool(lambda job: None, lambda jobs, seconds: None, threads=2, loop=loop)
    await loop.run_in_executor(None, pool.close)
    pool.put(1)
    assert not any(thread.is_alive() for thread in pool._threads)
