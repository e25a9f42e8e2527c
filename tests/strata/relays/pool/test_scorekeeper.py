"""The scores of one pool over several sessions, in one file."""

from __future__ import annotations

import asyncio

import pytest
from strata.relays.conduct import Aspect, Standing
from strata.relays.pool import PacketPool, PoolOptions
from strata.relays.pool.score_file import ScoreFile
from strata.relays.pool.scorekeeper import Scorekeeper

from tests.support.simulated_relays import Character, SimConnection, World, until

T = 1_760_000_000.0
HOUR = 3600
R = "ws://r"


async def test_a_relay_that_was_removed_does_not_come_back_from_the_file(tmp_path):
    options = PoolOptions(scores=tmp_path / "scores.db", sample_interval=None)
    world = World(1, Character(), Character(), Character())

    def pool_of(urls):
        return PacketPool(
            urls, options=options, make=lambda url, changed: SimConnection(world.relays[url], changed)
        )

    async with pool_of(list(world.relays)) as pool:
        await until(lambda: len(pool._relays.connected()) == 3, timeout=10)
        pool.remove("ws://b")
        pool.remove("ws://c")
        await until(lambda: pool._relays.connected() == ["ws://a"], timeout=10)
        pool.add("ws://c")
        await until(lambda: len(pool._relays.connected()) == 2, timeout=10)
    with ScoreFile(tmp_path / "scores.db") as file:
        assert {relay.url for relay in file.relays()} == {"ws://a", "ws://c"}
        assert {seen.url for seen in file.observations(0)} == {"ws://a", "ws://c"}
    async with pool_of(["ws://a"]) as pool:
        assert {view.url for view in pool.relays} == {"ws://a", "ws://c"}


@pytest.mark.req("R-340", "R-344")
async def test_a_sentence_served_is_not_served_again_after_a_restart(tmp_path):
    now = T

    async def session(*hours: int) -> list[Standing]:
        """Run a session of the program with one look at each of these hours."""
        nonlocal now
        keeper = Scorekeeper(lambda: now)
        assert set(await keeper.load(tmp_path / "scores.db", lambda: [R])) <= {R}
        writing = asyncio.create_task(keeper.run())
        await asyncio.sleep(0)
        if not hours[0]:
            keeper.observe(R, Aspect.VALIDITY, 0, 9, None)
        seen = []
        for hour in hours:
            now = T + hour * HOUR
            keeper.judge([R])
            seen.append(keeper.standing(R))
        writing.cancel()
        await asyncio.wait([writing])
        return seen

    assert await session(0, 1) == [Standing.BLACKLISTED, Standing.BACKUP]
    assert Standing.BLACKLISTED not in await session(2, 3)
    assert Standing.BLACKLISTED not in await session(4, 150)
