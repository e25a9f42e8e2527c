"""Worlds whose relays drop out and return with a part of their log."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from strata_testkit.sim.bounds import Bounds
from strata_testkit.sim.faults import NO_FAULTS, Faults
from strata_testkit.sim.network import SimRelay
from strata_testkit.sim.simulation import Simulation
from strata_testkit.sim.worlds.kinds import World, WorldSize, talk

__all__ = ["lose_a_part", "returning_relays"]


@dataclass(frozen=True, slots=True)
class ReturningRelays:
    """One relay after another goes down while people talk, and returns with a part of its messages."""

    drops: int

    async def __call__(self, run: Simulation) -> None:
        """The scenario."""
        rng = run.rng
        for _ in range(self.drops):
            await talk(run, rng.randint(1, 4), 30)
            relay = rng.choice(run.network.relays)
            run.network.take_down(relay)
            away = rng.choice(run.participants)
            if rng.random() < 0.5:
                away.kill()
            await talk(run, rng.randint(0, 3), 30)
            lose_a_part(run, relay)
            run.network.bring_up(relay)
            await asyncio.sleep(rng.uniform(0, 60))
            if not away.alive:
                await away.start()
        await talk(run, 3, 20)


def lose_a_part(run: Simulation, relay: SimRelay) -> None:
    """Make a relay lose the end of its log, as a restored backup would; its beginning; or any messages."""
    rng, stored = run.rng, list(relay.stored)
    cut = rng.randint(0, len(stored))
    match rng.randrange(3):
        case 0:
            lost = stored[cut:]
        case 1:
            lost = stored[:cut]
        case _:
            lost = [each for each in stored if rng.random() < 0.5]
    run.network.counts["messages_relays_lost"] += len(lost)
    relay.forget(lost)


def returning_relays(rng: random.Random, size: WorldSize) -> World:
    """Relays that drop out and return with a part of their log."""
    return World(
        ReturningRelays(rng.randint(1, 4)),
        Bounds(agree_within=3_600, entries=1_500),
        faults=Faults(loss=0.1) if rng.random() < 0.5 else NO_FAULTS,
        participants=rng.randint(2, 4),
        relays=rng.randint(1, 3),
    )
