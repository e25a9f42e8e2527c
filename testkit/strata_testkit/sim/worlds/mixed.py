"""Worlds in which several kinds of accidents happen at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from strata_testkit.sim.bounds import Bounds
from strata_testkit.sim.chaos import HARSH
from strata_testkit.sim.simulation import Simulation
from strata_testkit.sim.worlds.kinds import World, WorldSize, talk
from strata_testkit.sim.worlds.relays import lose_a_part

__all__ = ["mixed"]


async def _sleep(run: Simulation) -> None:
    sleeper = run.rng.choice(run.participants)
    sleeper.fall_asleep()
    await asyncio.sleep(run.rng.uniform(10, 600))
    sleeper.wake_up()


async def _set_clock(run: Simulation) -> None:
    run.rng.choice(run.participants).set_clock(run.rng.uniform(-7_200, 7_200))


async def _crash(run: Simulation) -> None:
    crashed = run.rng.choice(run.participants)
    crashed.kill()
    await asyncio.sleep(run.rng.uniform(1, 200))
    if not crashed.alive and crashed in run.participants:
        await crashed.start()


async def _add(run: Simulation) -> None:
    if len(run.participants) < 5:
        await run.join(f"device-{run.rng.randrange(10**9)}")


async def _lose(run: Simulation) -> None:
    if len(run.participants) > 2:
        run.lose(run.rng.choice(run.participants))


async def _relay(run: Simulation) -> None:
    relay = run.rng.choice(run.network.relays)
    run.network.take_down(relay)
    await asyncio.sleep(run.rng.uniform(1, 60))
    if run.rng.random() < 0.3:
        lose_a_part(run, relay)
    run.network.bring_up(relay)


async def _cut(run: Simulation) -> None:
    name, relay = run.rng.choice(run.participants).name, run.rng.choice(run.network.relays)
    run.network.cut(name, relay)
    await asyncio.sleep(run.rng.uniform(1, 300))
    run.network.mend(name, relay)


_ACCIDENTS: tuple[Callable[[Simulation], Awaitable[None]], ...] = (
    _sleep,
    _set_clock,
    _crash,
    _crash,
    _crash,
    _add,
    _lose,
    _relay,
    _cut,
)


@dataclass(frozen=True, slots=True)
class Mixed:
    """One accident after another, sometimes several at once, while people talk."""

    accidents: int

    async def __call__(self, run: Simulation) -> None:
        """The scenario."""
        talking = asyncio.ensure_future(talk(run, 12, 200, sizes=(10, 60, 600)))
        under_way = []
        try:
            for _ in range(self.accidents):
                await asyncio.sleep(run.rng.expovariate(self.accidents / 150))
                under_way.append(asyncio.ensure_future(run.rng.choice(_ACCIDENTS)(run)))
            await asyncio.gather(talking, *under_way)
        finally:
            for task in (talking, *under_way):
                task.cancel()


def mixed(rng: random.Random, size: WorldSize) -> World:
    """Sleep, clocks, crashes, devices, relays and cuts in one world, over a bad network."""
    faults = replace(
        HARSH,
        loss=rng.choice((0.0, 0.1, 0.3)),
        disk_failure=rng.choice((0.0, 0.02)),
        disk_delay=(0.0, rng.choice((0.01, 3.0))),
    )
    return World(
        Mixed(rng.randint(2, 8)),
        Bounds(agree_within=3_600, entries=1_500),
        faults=faults,
        participants=rng.randint(2, 4),
        relays=rng.randint(1, 3),
        options={"hand_over": rng.choice(("once", "again"))},
    )
