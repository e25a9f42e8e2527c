"""The parts of a world, and of a kind of world."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from strata.protocol.errors import StrataError

from strata_testkit.sim.bounds import Bounds
from strata_testkit.sim.chaos import SMALL
from strata_testkit.sim.faults import NO_FAULTS, Faults
from strata_testkit.sim.participant import SimParticipant
from strata_testkit.sim.simulation import Report, Scenario, Simulation, simulate

__all__ = ["World", "WorldKind", "WorldSize", "rest_until", "say", "talk"]


@dataclass(frozen=True, slots=True)
class WorldSize:
    """The largest size of worlds. A seed draws the size of its world up to that."""

    gap: int = 400
    """Messages that somebody misses."""
    people: int = 36
    """Participants of a crowd; a crowd has at least a third of that."""


@dataclass(frozen=True, slots=True)
class World:
    """One world, ready to run."""

    scenario: Scenario
    bounds: Bounds
    faults: Faults = NO_FAULTS
    participants: int = 3
    relays: int = 1
    options: Mapping[str, object] = field(default_factory=dict)

    def run(self, seed: int, name: str) -> Report:
        """Run the world. Raises `SimulationFailed`."""
        return simulate(
            self.scenario,
            seed=seed,
            faults=self.faults,
            participants=self.participants,
            relays=self.relays,
            options={**SMALL, **self.options},
            bounds=self.bounds,
            world=name,
        )


@dataclass(frozen=True, slots=True)
class WorldKind:
    """A kind of world. `make` draws one; its bounds are the requirements for a channel."""

    name: str
    about: str
    make: Callable[[random.Random, WorldSize], World]
    weight: int
    """How many of a thousand worlds of the mix are of this kind."""
    open_because: str = ""
    """Why it is not in the mix: the requirement that no channel meets yet; empty if it is in the mix."""


async def talk(run: Simulation, messages: int, seconds: float, *, sizes: tuple[int, ...] = (10, 60)) -> None:
    """Send messages from random present participants, spread over about `seconds`."""
    for number in range(messages):
        await asyncio.sleep(run.rng.expovariate(messages / seconds))
        present = [each for each in run.participants if each.alive and not each.asleep]
        if present:
            await say(run, run.rng.choice(present), b"%d" % number, run.rng.choice(sizes))


async def say(run: Simulation, sender: SimParticipant, word: bytes, size: int) -> str | None:
    """Send one message; None if it was not accepted."""
    try:
        return await sender.send((word + b" ").ljust(size, b"."))
    except StrataError:
        run.network.counts["refused_sends"] += 1  # the store fails: nothing was promised
        return None


async def rest_until(run: Simulation, at: float) -> None:
    """Wait until a virtual second, unless it has passed."""
    await asyncio.sleep(max(0.0, at - run.network.time()))
