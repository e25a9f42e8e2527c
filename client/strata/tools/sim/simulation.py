"""A run: participants on a network that fails as asked, and the proof that nothing was lost or doubled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from strata.channels.sds import SdsMessage
from strata.tools.sim.checking import Evidence, PromiseChecks, SimulationFailed
from strata.tools.sim.faults import NO_FAULTS, FaultCounts, Faults
from strata.tools.sim.loop import run_virtually
from strata.tools.sim.network import SimNetwork
from strata.tools.sim.participant import SimParticipant

__all__ = ["Report", "Scenario", "Simulation", "simulate"]

_LOOK_SECONDS = 5.0


@dataclass(slots=True)
class Report:
    """The counts of one run, or of many added up."""

    runs: int = 0
    checks: PromiseChecks = field(default_factory=PromiseChecks)
    faults: FaultCounts = field(default_factory=FaultCounts)
    messages_on_the_wire: int = 0
    bytes_on_the_wire: int = 0
    virtual_seconds: float = 0.0
    converged_after: list[float] = field(default_factory=list)
    """For each run, how many virtual seconds after the last fault all agreed."""

    def add(self, other: Report) -> None:
        """Count another one in."""
        self.runs += other.runs
        for name in PromiseChecks.__dataclass_fields__:
            setattr(self.checks, name, getattr(self.checks, name) + getattr(other.checks, name))
        self.faults.update(other.faults)
        self.messages_on_the_wire += other.messages_on_the_wire
        self.bytes_on_the_wire += other.bytes_on_the_wire
        self.virtual_seconds += other.virtual_seconds
        self.converged_after += other.converged_after


class Simulation:
    """One run in progress. All randomness comes from `rng`, so a seed repeats the run."""

    def __init__(
        self,
        seed: int,
        faults: Faults = NO_FAULTS,
        *,
        participants: int = 3,
        relays: int = 2,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """`options` are settings of every participant's channel."""
        self.seed = seed
        self.rng = random.Random(seed)
        self.network = SimNetwork(relays, faults, self.rng)
        self.evidence = Evidence()
        self.participants = [self._make(f"p{number}", options or {}) for number in range(participants)]
        self._converged_after = 0.0

    def _make(self, name: str, options: Mapping[str, object]) -> SimParticipant:
        return SimParticipant(
            name,
            self.network,
            self.rng,
            self.evidence,
            channel_id="room",
            topic="/sim/1/room/proto",
            options=options,
        )

    async def join(self, name: str, options: Mapping[str, object] | None = None) -> SimParticipant:
        """Add a participant, who joins late."""
        participant = self._make(name, options or {})
        self.participants.append(participant)
        await participant.start()
        return participant

    async def start(self) -> None:
        """Begin every participant's life."""
        for participant in self.participants:
            await participant.start()

    async def converge(self, *, timeout: float = 3600.0) -> None:
        """End every fault, wait until all agree, and check everything there is to check.

        Raises `SimulationFailed` if they do not within `timeout` virtual seconds.
        """
        self.network.heal(NO_FAULTS)
        self.evidence.concluding = True
        for participant in self.participants:
            participant.heal()
            if not participant.alive:
                await participant.start()
        began_at = asyncio.get_running_loop().time()
        agreed = 0
        while agreed < 2:  # events that are durable at the first look have been told at the second
            if self._agree():
                agreed += 1
            else:
                agreed = 0
                self._converged_after = asyncio.get_running_loop().time() - began_at
            if asyncio.get_running_loop().time() - began_at > timeout:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        logs = {each.name: None if each.channel is None else each.channel.log() for each in self.participants}
        self.evidence.conclude(logs, self._obtainable())
        if self.evidence.problems:
            raise SimulationFailed(self.seed, self.evidence.problems + self._standing())

    def _obtainable(self) -> set[str]:
        stored = [event for relay in self.network.relays for event in relay.stored.values()]
        messages = [SdsMessage.decode(event.message.payload) for event in stored]
        ids = {message.message_id for message in messages if message is not None}
        return ids.union(*(each.channel.log() for each in self.participants if each.channel is not None))

    def _agree(self) -> bool:
        logs = []
        for participant in self.participants:
            channel = participant.channel
            if channel is None:
                return False
            status = channel.sync_status()
            waiting = any(not each.undelivered for each in status.outstanding)
            if waiting or status.missing or status.queued or status.partial_messages or status.inbox:
                return False
            logs.append(channel.log())
        return all(log == logs[0] for log in logs)

    def _standing(self) -> list[str]:
        return [
            f"{each.name}: {each.channel.sync_status()}"
            for each in self.participants
            if each.channel is not None
        ]

    async def stop(self) -> None:
        """End every participant's life as one should."""
        for participant in self.participants:
            await participant.stop()

    def report(self) -> Report:
        """What happened in this run."""
        return Report(
            1,
            self.evidence.checks,
            self.network.counts,
            self.network.messages_sent,
            self.network.bytes_sent,
            self.network.time(),
            [self._converged_after],
        )


Scenario = Callable[[Simulation], Awaitable[None]]
"""What happens in a run, on virtual time: asynchronous code as any other."""


def simulate(
    scenario: Scenario,
    *,
    seed: int,
    faults: Faults = NO_FAULTS,
    participants: int = 3,
    relays: int = 2,
    options: Mapping[str, object] | None = None,
) -> Report:
    """Run a scenario to its end, all converged and checked; the same seed runs it again.

        async def chat(run: Simulation) -> None:
            await run.participants[0].send(b"hello")
            await asyncio.sleep(60)

        report = simulate(chat, seed=7, faults=Faults(loss=0.3))

    Raises `SimulationFailed` with all problems, and every error of the scenario.
    """

    async def run() -> Report:
        simulation = Simulation(seed, faults, participants=participants, relays=relays, options=options)
        await simulation.start()
        await scenario(simulation)
        await simulation.converge()
        report = simulation.report()
        await simulation.stop()
        return report

    try:
        return run_virtually(run)
    except SimulationFailed:
        raise
    except Exception as error:
        error.add_note(f"in the simulation of seed {seed}")
        raise
