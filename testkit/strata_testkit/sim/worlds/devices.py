"""Worlds in which people have several devices, add some, and lose some."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from strata_testkit.sim.bounds import Bounds
from strata_testkit.sim.faults import NO_FAULTS, Faults
from strata_testkit.sim.simulation import Simulation
from strata_testkit.sim.worlds.kinds import World, WorldSize, talk

__all__ = ["devices"]


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices come and go; each has its own sender id, and the author is its person."""

    people: int
    changes: int

    async def __call__(self, run: Simulation) -> None:
        """The scenario."""
        rng, number = run.rng, 0
        for _ in range(self.changes):
            await talk(run, rng.randint(1, 4), 30, sizes=(10, 60, 600))
            if rng.random() < 0.4 and len(run.participants) > 1:
                await asyncio.sleep(rng.uniform(0, 20))
                run.lose(rng.choice(run.participants))
            else:
                number += 1
                await run.join(f"device-{number}", identity=f"person-{rng.randrange(self.people)}")
        await talk(run, 4, 30)


def devices(rng: random.Random, size: WorldSize) -> World:
    """Devices that are added and lost."""
    return World(
        Devices(rng.randint(1, 3), rng.randint(2, 7)),
        Bounds(agree_within=3_600, entries=1_500),
        faults=Faults(loss=0.1) if rng.random() < 0.5 else NO_FAULTS,
        participants=rng.randint(2, 3),
        relays=rng.randint(1, 2),
    )
