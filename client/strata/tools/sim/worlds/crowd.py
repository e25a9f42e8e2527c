"""Worlds of many people: what does not grow with their number must not."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from strata.tools.sim.bounds import Bounds
from strata.tools.sim.faults import NO_FAULTS, Faults
from strata.tools.sim.simulation import Simulation
from strata.tools.sim.worlds.kinds import World, WorldSize, talk

__all__ = ["Crowd", "crowd", "crowd_bounds"]

_SYNCS_PER_MINUTE = 6.0
"""At most one in ten seconds, for two people and for a thousand."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """Many people, each of whom says little."""

    messages: int
    seconds: float

    async def __call__(self, run: Simulation) -> None:
        """The scenario."""
        await talk(run, self.messages, self.seconds)


def crowd_bounds(people: int, *, strict: bool, idle_minutes: float = 2.0) -> Bounds:
    """What a crowd may cost.

    Without `strict` idle traffic may grow with the people, as it does where each draws its own delay: about
    two syncs a minute of each.
    """
    idle = _SYNCS_PER_MINUTE if strict else 4.0 * (people + 1)
    return Bounds(
        agree_within=1_200,
        idle_minutes=idle_minutes,
        idle_syncs_per_minute=idle,
        idle_repeats_per_minute=1.0,
        idle_reads_per_minute=1.0 if strict else None,
        sends_per_message=1.5,
        syncs_per_message=2.0 if strict else None,
        entries=1_500,
        idle_growth=200,
        says_synced_after=30.0 if strict else None,
    )


def crowd(rng: random.Random, size: WorldSize, strict: bool) -> World:
    """Many people, over a network that may lose a little."""
    people = rng.randint(max(2, size.people // 3), max(2, size.people))
    messages = rng.randint(5, max(6, min(40, people)))
    lossy = rng.random() < 0.3
    bounds = crowd_bounds(people, strict=strict and not lossy, idle_minutes=1.0)
    if lossy:
        bounds = replace(bounds, sends_per_message=3.0, idle_repeats_per_minute=None)
    return World(
        Crowd(messages, rng.choice((1.0, 60.0))),
        bounds,
        faults=Faults(loss=0.03) if lossy else NO_FAULTS,
        participants=people,
        options={"expected_participants": people},
    )
