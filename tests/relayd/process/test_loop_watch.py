"""What is reported about a loop that blocks: in processor time, so that a busy machine is no fault."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator

import pytest

from relayd.metrics import Metrics
from relayd.process.loop_watch import LoopWatch

LONG = 0.05
"""Processor seconds: five times the interval between two looks."""


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(1000))


class Watched:
    """This test's loop, and the reports about it."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.watch = LoopWatch(self.metrics)

    async def looked(self) -> None:
        """Wait until the loop has been checked twice."""
        before = self.value("relayd_loop_lag_seconds_count")
        async with asyncio.timeout(60):
            while self.value("relayd_loop_lag_seconds_count") < before + 2:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.001)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    @property
    def step(self) -> float:
        return self.value("relayd_loop_longest_step_seconds")


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    made = Watched()
    task = asyncio.create_task(made.watch.run())
    await made.looked()
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert made.watch._collecting not in gc.callbacks


@pytest.mark.req("R-321")
async def test_a_long_step_is_seen_at_its_full_length_and_waiting_is_none(watched: Watched):
    time.sleep(2 * LONG)  # noqa: ASYNC251 - the machine does something else
    await watched.looked()
    assert watched.step < LONG
    assert watched.value("relayd_loop_lag_seconds_sum") > LONG
    work(LONG)
    await watched.looked()
    assert watched.step >= LONG


async def test_a_reload_and_the_collector_are_no_steps(watched: Watched):
    with watched.watch.apart("reload"):
        work(LONG)
    await watched.looked()
    kept: list[object] = [[] for _ in range(100_000)]
    await watched.looked()  # creating them was a step
    before = watched.step
    gc.collect()
    await watched.looked()
    assert len(kept) == 100_000
    assert watched.value("relayd_loop_longest_pause_seconds", cause="reload") >= LONG
    assert watched.value("relayd_loop_longest_pause_seconds", cause="collection") > 0.001
    assert watched.step == before
