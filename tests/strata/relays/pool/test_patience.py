"""Patience with a relay that brings nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from strata.protocol.errors import RequestTimeout
from strata.relays.pool.patience import FindPatience, ReadPatience

from tests.support.virtual_time import virtually


@virtually
async def test_a_relay_that_brings_nothing_is_waited_for_until_the_wait_may_end():
    done: list[str] = []
    asyncio.get_running_loop().call_later(100, done.append, "another")
    with pytest.raises(RequestTimeout, match="the history"):
        async with ReadPatience(30, lambda: bool(done), "the history"):
            await asyncio.sleep(1000)
    assert 100 <= asyncio.get_running_loop().time() <= 130


@virtually
async def test_a_relay_that_brings_something_now_and_then_and_a_slow_program_are_not_hurried():
    async with ReadPatience(30, lambda: True, "the history") as patience:
        for _ in range(10):
            await asyncio.sleep(29)
            patience.heard()
            await asyncio.sleep(300)
            patience.wait()
        patience.heard()
    await asyncio.sleep(100)


@virtually
async def test_being_cancelled_and_other_errors_stay_what_they_are():
    async def wait() -> None:
        async with ReadPatience(30, lambda: False, "the history"):
            await asyncio.sleep(1000)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(50)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(KeyError):
        async with ReadPatience(30, lambda: True, "the history"):
            raise KeyError


async def each_after(seconds: float) -> AsyncGenerator[int, None]:
    for n in range(100):
        await asyncio.sleep(seconds)
        yield n


@virtually
async def test_who_finds_packets_at_an_even_pace_is_not_hurried_and_who_drips_is_left():
    patience, found = FindPatience(30), each_after(1.5)
    for n in range(100):
        assert await patience.next(found) == n
        await asyncio.sleep(300)  # the program's own time counts for nothing
    assert await patience.next(found) is None
    patience, found = FindPatience(30), each_after(29)
    assert await patience.next(found) == 0
    with pytest.raises(RequestTimeout, match="the search for packets"):
        await patience.next(found)
