"""Worlds of many people: costs that need not grow with their number must not."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from strata_testkit.sim.bounds import Bounds
from strata_testkit.sim.faults import NO_FAULTS, Faults
from strata_testkit.sim.simulation import Simulation
from strata_testkit.sim.worlds.kinds import World, WorldSize, talk

__all__ = ["Crowd", "crowd", "crowd_bounds"]

_SYNCS_PER_MINUTE = 6.0
"""At most one every ten seconds, for two people as for a thousand."""
_SYNCS_PER_MESSAGE = 4.0
"""While people talk, one to four in total acknowledge a message."""
_SYNCS_AT_FIRST, _SYNCS_OF_A_THOUSAND = 15.0, 55.0
"""Before people know how many they are: for a few dozen, and in addition for a thousand (decision 51)."""
_FEW_DOZEN = 36
_REST_MINUTES = 5.0


@dataclass(frozen=True, slots=True)
class Crowd:
    """Many people, each of whom says little."""

    messages: int
    seconds: float

    async def __call__(self, run: Simulation) -> None:
        """The scenario."""
        await talk(run, self.messages, self.seconds)


def crowd_bounds(people: int, *, lossy: bool = False) -> Bounds:
    """What a crowd may cost, however many people it has.

    People who have just begun to talk do not know yet how many they are (decision 51), so some syncs are
    allowed in addition, and the quiet minutes are counted after some others.
    """
    larger = max(0.0, math.log(people / _FEW_DOZEN) / math.log(1_000 / _FEW_DOZEN))
    return Bounds(
        agree_within=1_200,
        rest_minutes=_REST_MINUTES,
        idle_minutes=2.0,
        idle_syncs_per_minute=_SYNCS_PER_MINUTE,
        idle_repeats_per_minute=None if lossy else 1.0,
        idle_reads_per_minute=None if lossy else 1.0,
        sends_per_message=3.0 if lossy else 1.5,
        syncs_per_message=None if lossy else _SYNCS_PER_MESSAGE,
        syncs_at_first=_SYNCS_AT_FIRST + larger * _SYNCS_OF_A_THOUSAND,
        entries=1_500,
        idle_growth=200,
        says_synced_after=None if lossy else 30.0,
    )


def crowd(rng: random.Random, size: WorldSize) -> World:
    """Many people, over a network that may lose a little."""
    people = rng.randint(max(2, size.people // 3), max(2, size.people))
    messages = rng.randint(5, max(6, min(40, people)))
    lossy = rng.random() < 0.3
    return World(
        Crowd(messages, rng.choice((1.0, 60.0))),
        crowd_bounds(people, lossy=lossy),
        faults=Faults(loss=0.03) if lossy else NO_FAULTS,
        participants=people,
        options={"expected_participants": people},
    )
