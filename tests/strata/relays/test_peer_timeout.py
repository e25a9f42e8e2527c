"""Waiting for others counts only while the program looks."""

from __future__ import annotations

import asyncio

import pytest
from strata.relays.peer_timeout import PeerTimeout
from strata.relays.pool.patience import ReadPatience
from strata_testkit.sim.loop import VirtualLoop

from tests.support.virtual_time import virtually


def stall(seconds):
    """Move the virtual clock as a pause would: nothing runs meanwhile."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.now += seconds


@virtually
async def test_a_program_that_looks_waits_exactly_so_long():
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError):
        async with PeerTimeout(7.5):
            await asyncio.Event().wait()
    assert loop.time() == pytest.approx(7.5, abs=0.01)


@pytest.mark.parametrize("at", [0.0, 3.3, 7.4])
def test_an_answer_that_came_during_a_pause_is_read_first(at):
    @virtually
    async def test():
        answered = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with PeerTimeout(7.5) as limit:
            loop.call_later(at, stall, 600)
            # The loop reads the socket only after what was overdue.
            loop.call_later(at + 0.05, lambda: loop.call_later(0.1, answered.set))
            await answered.wait()
        assert limit.left <= 7.5

    test()


@virtually
async def test_after_a_pause_the_wait_goes_on_and_ends():
    loop = asyncio.get_running_loop()
    loop.call_later(5.0, stall, 600)
    with pytest.raises(TimeoutError):
        async with PeerTimeout(7.5):
            await asyncio.Event().wait()
    assert 603 <= loop.time() <= 610


@virtually
async def test_a_program_that_pauses_again_and_again_does_not_wait_for_ever():
    async def pauses():
        while True:
            await asyncio.sleep(0.1)
            stall(3)

    pausing = asyncio.create_task(pauses())
    with pytest.raises(TimeoutError):
        async with PeerTimeout(7.5):
            await asyncio.Event().wait()
    pausing.cancel()


@virtually
async def test_no_limit_is_none():
    async with PeerTimeout(None):
        await asyncio.sleep(10**6)


@virtually
async def test_a_reader_is_patient_while_the_program_pauses():
    heard = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with ReadPatience(30.0, lambda: True, "the reading"):
        loop.call_later(29.5, stall, 600)
        loop.call_later(29.6, lambda: loop.call_later(0.1, heard.set))
        await heard.wait()
