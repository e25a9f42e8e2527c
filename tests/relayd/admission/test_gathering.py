"""Jobs go through in batches, and none is forgotten."""

from __future__ import annotations

import asyncio

from relayd.admission.gathering import Gathering


async def test_the_jobs_of_a_batch_that_fails_are_given_back_and_the_next_ones_done():
    lost: list[tuple[int, str]] = []
    done: asyncio.Queue[list[int]] = asyncio.Queue()

    async def work(jobs: list[int]) -> None:
        await asyncio.sleep(0)
        if 1 in jobs:
            raise ValueError("no")
        done.put_nowait(jobs)

    gathering = Gathering("jobs", work, lambda job, error: lost.append((job, str(error))))
    for job in (1, 2, 3):
        gathering.put(job)
    async with asyncio.timeout(60):
        assert await done.get() == [2, 3]
    assert lost == [(1, "no")]
    await gathering.close()
