"""The scores of one pool over several sessions, in one file."""

from __future__ import annotations

import asyncio

import pytest
from strata.relays.conduct import Aspect, Standing
from strata.relays.pool.scorekeeper import Scorekeeper

T = 1_760_000_000.0
HOUR = 3600
R = "ws://r"


@pytest.mark.req("R-340", "R-344")
async def test_a_sentence_served_is_not_served_again_after_a_restart(tmp_path):
    now = T

    async def session(*hours: int) -> list[Standing]:
        """A session of the program, that lasts so many hours and looks once in each."""
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
