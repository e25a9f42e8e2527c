"""One timer, on both event loops that programs use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest
import uvloop
from strata.txrx.timers import Timer

RUNNERS = [asyncio.run, uvloop.run]
Run = Callable[[Coroutine[None, None, None]], None]


@pytest.mark.parametrize("run", RUNNERS, ids=["asyncio", "uvloop"])
def test_the_earliest_time_counts_and_it_calls_once(run: Run) -> None:
    async def ask() -> None:
        loop = asyncio.get_running_loop()
        called: list[float] = []
        done = asyncio.Event()

        def call() -> None:
            called.append(loop.time())
            done.set()

        timer = Timer(loop, call)
        timer.arm(None)
        began = loop.time()
        for seconds in (3600.0, 0.02, 7200.0):
            timer.arm(began + seconds)
        await done.wait()
        assert len(called) == 1 and called[0] - began < 1800
        done.clear()
        timer.arm(loop.time())
        await done.wait()
        assert len(called) == 2
        timer.arm(loop.time())
        timer.cancel()
        await asyncio.sleep(0.01)
        assert len(called) == 2

    run(ask())


@pytest.mark.parametrize("run", RUNNERS, ids=["asyncio", "uvloop"])
def test_a_time_that_is_now_can_be_asked_for_again_and_again(run: Run) -> None:
    """uvloop sets no timer for less than half a millisecond, and its handle does not know its time."""

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        timer = Timer(loop, done.set)
        for _ in range(3):
            for late in (0.0004, 0.0001, 0.0, -1.0):
                timer.arm(loop.time() + late)
            await done.wait()
            done.clear()

    run(ask())
