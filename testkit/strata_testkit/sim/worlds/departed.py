"""Worlds in which the speaker is gone permanently, and only the relays have the messages that were lost."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from strata_testkit.sim.bounds import Bounds
from strata_testkit.sim.simulation import Simulation
from strata_testkit.sim.worlds.kinds import World, WorldSize, say

__all__ = ["departed"]


@dataclass(frozen=True, slots=True)
class Departed:
    """A participant speaks while nothing reaches the others; then its last message does, and it is gone."""

    messages: int

    async def __call__(self, run: Simulation) -> None:
        """The scenario."""
        speaker, *others = run.participants
        await say(run, speaker, b"first", 10)
        await asyncio.sleep(5)
        run.network.deaf |= {each.name for each in others}
        for number in range(self.messages):
            await asyncio.sleep(run.rng.uniform(0.2, 1))
            await say(run, speaker, b"%d" % number, run.rng.choice((10, 60, 600)))
        await asyncio.sleep(1)
        run.network.deaf.clear()
        await say(run, speaker, b"last", 10)
        await asyncio.sleep(1)
        run.lose(speaker)


def departed(rng: random.Random, size: WorldSize) -> World:
    """A participant that spoke and is gone permanently."""
    messages = rng.randint(2, 8)
    return World(
        Departed(messages),
        Bounds(agree_within=300, entries=1_500),
        participants=rng.randint(2, 4),
        relays=rng.randint(1, 2),
    )
