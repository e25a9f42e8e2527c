"""Turns of comparing sets, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from relayd.federation.comparison_turns import TURN_SECONDS, ComparisonTurns, TurnOver
from tests.support.virtual_time import virtually


def now() -> float:
    return asyncio.get_running_loop().time()


async def take(turns: ComparisonTurns, peer: int, seconds: float) -> float:
    """Take a turn for this long; return when it began."""
    async with turns.turn(peer) as waited:
        began = now()
        assert waited >= 0
        await asyncio.sleep(seconds)
        return began


@virtually
async def test_one_at_a_time_and_who_has_used_least_comes_first():
    turns = ComparisonTurns()
    first = asyncio.create_task(take(turns, 1, 50))
    await asyncio.sleep(1)
    others = [asyncio.create_task(take(turns, peer, seconds)) for peer, seconds in ((1, 50), (2, 5), (3, 5))]
    await asyncio.gather(first, *others)
    began = [each.result() - first.result() for each in (first, *others)]
    assert began == pytest.approx([0, 60, 50, 55])


@virtually
async def test_a_long_turn_ends_when_another_waits_and_not_before():
    turns, began = ComparisonTurns(), now()
    long = asyncio.create_task(take(turns, 1, 1000))
    await asyncio.sleep(10)
    impatient = asyncio.create_task(take(turns, 2, 1))
    await asyncio.sleep(10)
    impatient.cancel()
    await asyncio.sleep(480)
    assert not long.done(), "nobody waits any more"
    assert await take(turns, 3, 1) - began == pytest.approx(500)
    with pytest.raises(TurnOver, match="other peers wait"):
        await long
    young = asyncio.create_task(take(turns, 1, 1000))
    await asyncio.sleep(1)
    assert await take(turns, 3, 1) - young.get_loop().time() == pytest.approx(-1)
    with pytest.raises(TurnOver):
        await young
    assert now() - began == pytest.approx(501 + TURN_SECONDS + 1)


@virtually
async def test_cancelling_and_errors_leave_no_turn_behind():
    turns = ComparisonTurns()
    holding = asyncio.create_task(take(turns, 1, 1000))
    await asyncio.sleep(1)
    waiting = asyncio.create_task(take(turns, 2, 1))
    await asyncio.sleep(1)
    waiting.cancel()
    holding.cancel()
    await asyncio.wait([waiting, holding])
    assert holding.cancelled() and waiting.cancelled()
    with pytest.raises(TimeoutError):
        async with turns.turn(1):
            raise TimeoutError
    # Cancelled in the very step in which its turn begins.
    holding = asyncio.create_task(take(turns, 1, 10))
    await asyncio.sleep(1)
    waiting = asyncio.create_task(take(turns, 2, 1))
    holding.add_done_callback(lambda _: waiting.cancel())
    await asyncio.wait([waiting, holding])
    async with asyncio.timeout(1), turns.turn(3):
        pass
