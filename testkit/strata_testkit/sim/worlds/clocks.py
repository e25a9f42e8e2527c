"""Worlds whose clocks misbehave: laptops sleep, clocks are set, devices boot before their clock is set."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from strata_testkit.sim.bounds import Bounds
from strata_testkit.sim.faults import NO_FAULTS, Faults
from strata_testkit.sim.network import EPOCH
from strata_testkit.sim.simulation import Simulation
from strata_testkit.sim.worlds.kinds import World, WorldSize, talk

__all__ = ["clock_steps", "laptops"]


@dataclass(frozen=True, slots=True)
class Laptops:
    """Participants close the lid for minutes while the others talk, and finally all of them for a night."""

    sleeps: int
    longest: float
    night: float
    """How long all sleep at the end, in hours; each wakes up some minutes after the one before."""

    async def __call__(self, run: Simulation) -> None:
        """The scenario."""
        rng = run.rng
        for _ in range(self.sleeps):
            sleeper = rng.choice(run.participants)
            await talk(run, rng.randint(0, 3), 20)
            await asyncio.sleep(rng.uniform(0, 60))
            sleeper.fall_asleep()
            await talk(run, rng.randint(1, 4), rng.uniform(10, self.longest))
            await asyncio.sleep(rng.uniform(0, self.longest))
            sleeper.wake_up()
        if self.night:
            for each in run.participants:
                each.fall_asleep()
            await asyncio.sleep(3_600 * self.night)
            for each in run.participants:
                each.wake_up()
                await talk(run, 1, rng.uniform(1, 200))
        await asyncio.sleep(30)
        await talk(run, 3, 20)


def laptops(rng: random.Random, size: WorldSize) -> World:
    """Sleeping laptops: monotonic time stops, wall time goes on."""
    lossy = rng.random() < 0.5
    return World(
        Laptops(rng.randint(1, 3), rng.choice((60.0, 400.0)), rng.choice((0.0, 8.0, 60.0))),
        Bounds(agree_within=1_800, entries=1_500, says_synced_after=None if lossy else 5.0),
        faults=Faults(loss=0.1) if lossy else NO_FAULTS,
        participants=rng.randint(2, 4),
        relays=rng.randint(1, 2),
        options={"hand_over": rng.choice(("once", "again"))},
    )


@dataclass(frozen=True, slots=True)
class ClockSteps:
    """Clocks are set forward and back while the channel is open, and one device boots in 1970."""

    steps: int
    furthest: float
    boots_early: bool

    async def __call__(self, run: Simulation) -> None:
        """The scenario."""
        rng = run.rng
        if self.boots_early:
            early = await run.join("early", clock_offset=-float(EPOCH) - run.network.time())
            await talk(run, 3, 30)
            early.set_clock(0.0)
            await asyncio.sleep(90)
        for _ in range(self.steps):
            stepped = rng.choice(run.participants)
            stepped.set_clock(rng.uniform(-self.furthest, self.furthest))
            await talk(run, rng.randint(1, 4), 60)
            if rng.random() < 0.3:
                stepped.kill()
                await asyncio.sleep(5)
                await stepped.start()
            stepped.set_clock(0.0)
            await asyncio.sleep(rng.uniform(0, 120))
        await asyncio.sleep(120)
        run.evidence.clocks_are_right = True  # channel time follows a clock that was corrected
        await talk(run, 2 * len(run.participants), 60)
        run.evidence.clocks_are_right = False


def clock_steps(rng: random.Random, size: WorldSize) -> World:
    """Clocks that are set while the channel is open."""
    lossy = rng.random() < 0.5
    return World(
        ClockSteps(rng.randint(1, 3), rng.choice((5.0, 3_600.0, 40 * 3_600.0)), rng.random() < 0.3),
        Bounds(agree_within=1_800, entries=1_500),
        faults=Faults(loss=0.1) if lossy else NO_FAULTS,
        participants=rng.randint(2, 4),
    )
