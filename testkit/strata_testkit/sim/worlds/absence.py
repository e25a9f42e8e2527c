"""Worlds in which somebody was away while others talked, for a long time or longer than relays remember."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from strata_testkit.sim.bounds import Bounds
from strata_testkit.sim.participant import SimParticipant
from strata_testkit.sim.simulation import Simulation
from strata_testkit.sim.worlds.kinds import World, WorldSize, rest_until, say, talk

__all__ = ["absence", "newcomers", "short_retention"]

_LIVE_WITHIN = 10.0
"""Virtual seconds within which a newcomer has a new message, plus the time to read those that it follows."""
_READ_A_SECOND = 50
"""The least number of messages that a newcomer reads per second: pages are small here, and requests slow."""
_ON_ITS_WAY = 600.0
"""The seconds (`lost_message_timeout_ms`) for which a message that no relay has may still be on its way."""
_DECLARED = 60
"""The `retention_seconds` of a channel whose messages expire sooner."""


@dataclass(frozen=True, slots=True)
class Away:
    """Everybody leaves, a recorded conversation goes on without them, and they come back one by one."""

    gap: int
    remembered: float
    """The share of the gap that the relays still have when the first participant is back."""
    interrupted: int
    """How many times each participant is killed while it catches up."""
    rest: tuple[float, float] = (30, 300)
    """The least and most seconds from the last recorded message until the first participant is back."""

    async def __call__(self, run: Simulation) -> None:
        """The scenario."""
        rng = run.rng
        run.evidence.programs_are_busy = False
        await talk(run, 4, 40)
        await asyncio.sleep(120)
        for each in run.participants:
            _leave(run, each)
        ended_at = run.play(self.gap)
        run.missed += self.gap * len(run.participants)
        await rest_until(run, ended_at + rng.uniform(*self.rest))
        _forget(run, self.gap, self.remembered)
        for each in run.participants:
            await _return(run, each)
            for _ in range(self.interrupted):
                await asyncio.sleep(rng.uniform(0.05, 0.3) + rng.random() * self.gap / 200)
                each.kill()
                await asyncio.sleep(rng.uniform(0, 5))
                await each.start()
        await talk(run, 4, 40)


def _forget(run: Simulation, gap: int, remembered: float) -> None:
    """Let the relays keep only the end of the gap and, in some worlds, forget more of it as time passes."""
    if remembered == 1:
        return
    kept = max(3, int(gap * remembered))
    goes_on = run.rng.random() < 0.3
    for relay in run.network.relays:
        stored = sorted(relay.stored, key=relay.stored_at.__getitem__)
        relay.forget(stored[:-kept])
        if goes_on:
            relay.retention = run.network.time() + 1 - relay.stored_at[stored[-kept]]


def _leave(run: Simulation, participant: SimParticipant) -> None:
    """Make a participant leave: by kill, with the lid closed, or with the network gone."""
    way = run.rng.randrange(3)
    if way == 0:
        participant.kill()
    elif way == 1:
        participant.fall_asleep()
    else:
        run.network.part(participant.name)


async def _return(run: Simulation, participant: SimParticipant) -> None:
    if not participant.alive:
        await participant.start()
    participant.wake_up()
    run.network.rejoin(participant.name)


def _gap(rng: random.Random, size: WorldSize) -> int:
    """The size of a gap, distributed so that small gaps are as frequent as large ones."""
    return int(math.exp(rng.uniform(math.log(20), math.log(max(21, size.gap)))))


def _options(rng: random.Random, gap: int) -> dict[str, object]:
    # Small bounds of a channel affect small gaps too.
    narrow = rng.random() < 0.5
    return {
        "max_waiting": max(20, gap // 4) if narrow else 10_000,
        "max_inbox_messages": rng.choice((16, 10_000)),
        "hand_over": rng.choice(("once", "again")),
    }


def _bounds(gap: int) -> Bounds:
    return Bounds(
        agree_within=900 + gap / 10,
        reads_per_missed=4,
        entries=1_500,
        says_synced_after=5.0,
        gaps_are_told=True,
    )


def absence(rng: random.Random, size: WorldSize) -> World:
    """A gap that the relays have completely."""
    gap = _gap(rng, size)
    scenario = Away(gap, 1.0, rng.choice((0, 0, 1, 3)))
    return World(
        scenario,
        _bounds(gap),
        participants=rng.randint(1, 3),
        relays=rng.randint(1, 2),
        options=_options(rng, gap),
    )


def short_retention(rng: random.Random, size: WorldSize) -> World:
    """A gap whose beginning the relays have forgotten: long ago, as the channel asked, or too early."""
    gap = _gap(rng, size)
    world = absence(rng, size)
    rest, options = _expiry(rng)
    bounds = _bounds(gap)
    if _is_early(rest, options):
        # Messages that wait for others, which may be on their way, can fill the space, and are read again.
        bounds = replace(bounds, reads_per_missed=12)
    scenario = Away(gap, rng.uniform(0.1, 0.9), 0, rest)
    return replace(world, scenario=scenario, bounds=bounds, options={**world.options, **options})


def _expiry(rng: random.Random) -> tuple[tuple[float, float], dict[str, object]]:
    """How long ago the conversation ended, and the channel's options on how long its messages are kept."""
    if rng.random() < 0.5:
        return (_ON_ITS_WAY + 60, 5 * _ON_ITS_WAY), {}
    return (_DECLARED + 30, 300), {"retention_seconds": _DECLARED} if rng.random() < 0.5 else {}


def _is_early(rest: tuple[float, float], options: Mapping[str, object]) -> bool:
    """Whether relays forgot messages that, as far as the channel knows, may still be on their way."""
    return rest[0] < _ON_ITS_WAY and not options


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Somebody joins a room with a past, of which the relays may have forgotten the beginning."""

    gap: int
    remembered: float
    rest: tuple[float, float] = (30, 300)
    """The least and most seconds from the last recorded message until the first participant is back."""
    live_within: float = _LIVE_WITHIN

    async def __call__(self, run: Simulation) -> None:
        """The scenario."""
        first = run.participants[0]
        run.evidence.programs_are_busy = False
        await talk(run, 2, 20)
        await asyncio.sleep(60)
        first.kill()
        ended_at = run.play(self.gap)
        run.missed += 2 * self.gap
        await rest_until(run, ended_at + run.rng.uniform(*self.rest))
        _forget(run, self.gap, self.remembered)
        await first.start()
        await asyncio.sleep(120)
        joined = await run.join("new")
        began_at = run.network.time()
        await asyncio.sleep(run.rng.uniform(0, 1))
        request_id = await say(run, first, b"live", 10)
        assert request_id is not None
        while not run.evidence.has_taken(joined.name, request_id):
            await asyncio.sleep(0.5)
            if run.network.time() - began_at > self.live_within:
                run.evidence.problems.append(
                    f"{joined.name} has nothing of what is said now {self.live_within:g} s after it joined"
                )
                return


def newcomers(rng: random.Random, size: WorldSize) -> World:
    """A newcomer gets new messages at once, or once it is sure that the messages before them are gone."""
    gap = _gap(rng, size)
    remembered = rng.choice((1.0, rng.uniform(0.2, 0.9)))
    rest, options = _expiry(rng)
    waits = remembered < 1 and _is_early(rest, options)
    within = _LIVE_WITHIN + gap / _READ_A_SECOND + (_ON_ITS_WAY if waits else 0)
    bounds = replace(_bounds(gap), gaps_are_told=remembered < 1)
    if remembered < 1:
        # The participant that was there has the past, and repairs it backwards, two messages per round.
        bounds = replace(bounds, agree_within=900 + 20 * gap)
    return World(
        Newcomer(gap, remembered, rest, within),
        bounds,
        participants=1,
        relays=rng.randint(1, 2),
        options=options,
    )
