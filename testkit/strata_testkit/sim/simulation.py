"""A run: participants on a network that fails on demand, and the proof that nothing was lost or doubled."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from strata.channels.sds import SdsConfig

from strata_testkit.sim.bounds import Bounds, Idle
from strata_testkit.sim.checking import Evidence, PromiseChecks, SimulationFailed
from strata_testkit.sim.claims import SyncClaims
from strata_testkit.sim.faults import NO_FAULTS, FaultCounts, Faults
from strata_testkit.sim.loop import run_virtually
from strata_testkit.sim.network import SimNetwork, SimRelay
from strata_testkit.sim.participant import SimParticipant
from strata_testkit.sim.tape import tape
from strata_testkit.sim.weighing import Weight, weigh

__all__ = ["CHANNEL_ID", "TAPE_BEGINS_AT", "TOPIC", "Report", "Scenario", "Simulation", "simulate"]

CHANNEL_ID = "room"
TOPIC = "/sim/1/room/proto"
TAPE_BEGINS_AT = 600.0
"""The virtual second at which the recorded conversation begins."""

_LOOK_SECONDS = 5.0
_CLAIM_SECONDS = 1.0
_ASLEEP_SECONDS = 20.0
_TOLD = 5
"""The number of participants whose status a failure reports."""
_WEIGHED = 2
"""The number of participants of a world that are weighed; they all run the same code."""


@dataclass(slots=True)
class Report:
    """The counts of one run, or the totals of many."""

    runs: int = 0
    checks: PromiseChecks = field(default_factory=PromiseChecks)
    faults: FaultCounts = field(default_factory=FaultCounts)
    messages_on_the_wire: int = 0
    bytes_on_the_wire: int = 0
    virtual_seconds: float = 0.0
    converged_after: list[float] = field(default_factory=list)
    """For each run, the virtual seconds from the last fault until all agreed."""
    worlds: Counter[str] = field(default_factory=Counter)
    """The number of runs of each kind of world."""
    traffic: Counter[str] = field(default_factory=Counter)
    """The messages that the channels sent, by kind, and their bytes (`Evidence.traffic`)."""
    messages_read: int = 0
    """Messages read from the relays' stores."""
    most_entries: int = 0
    """The largest number of items that a weighed participant kept."""
    idles: list[Idle] = field(default_factory=list)
    """The quiet times measured."""

    def add(self, other: Report) -> None:
        """Add the counts of another report."""
        self.runs += other.runs
        for name in PromiseChecks.__dataclass_fields__:
            setattr(self.checks, name, getattr(self.checks, name) + getattr(other.checks, name))
        self.faults.update(other.faults)
        self.messages_on_the_wire += other.messages_on_the_wire
        self.bytes_on_the_wire += other.bytes_on_the_wire
        self.virtual_seconds += other.virtual_seconds
        self.converged_after += other.converged_after
        self.worlds.update(other.worlds)
        self.traffic.update(other.traffic)
        self.messages_read += other.messages_read
        self.most_entries = max(self.most_entries, other.most_entries)
        self.idles += other.idles


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
        bounds: Bounds | None = None,
        world: str = "",
        with_filters: int = 0,
    ) -> None:
        """`options` are settings of every participant's channel. `world` names the run in its report. The
        first `with_filters` participants know only filters, and no receipts."""
        self.seed = seed
        self.world = world
        self.bounds = bounds or Bounds()
        self.rng = random.Random(seed)
        self.network = SimNetwork(relays, faults, self.rng)
        self.evidence = Evidence(gaps_are_told=self.bounds.gaps_are_told, is_served=self._is_served)
        # A write waits for the one before it, and each may take the longest delay.
        self.evidence.write_seconds = 2 * faults.disk_delay[1]
        self._answer_seconds = 2 * faults.latency[1]
        self.options = dict(options or {})
        self.evidence.max_log = self._setting("max_history")
        self.missed = 0
        """The number of messages that participants had to get from the relays' stores, all together."""
        self.claims = SyncClaims(self.network, self.evidence, self.bounds.says_synced_after or math.inf)
        self.participants = [self._make(f"p{number}", {}) for number in range(participants)]
        for participant in self.participants[:with_filters]:
            participant.receipts = False
        self._looks = self._look_at_claims()
        self._next_look: asyncio.TimerHandle | None = None
        self._converged_after = 0.0
        self._most_entries = 0
        self._idles: list[Idle] = []

    def _setting(self, name: str) -> int:
        value = self.options.get(name, getattr(SdsConfig(), name))
        assert isinstance(value, int)
        return value

    def _make(self, name: str, options: Mapping[str, object], identity: str | None = None) -> SimParticipant:
        return SimParticipant(
            name,
            self.network,
            self.rng,
            self.evidence,
            channel_id=CHANNEL_ID,
            topic=TOPIC,
            options={**self.options, **options},
            identity=identity,
        )

    async def join(
        self,
        name: str,
        options: Mapping[str, object] | None = None,
        *,
        identity: str | None = None,
        clock_offset: float = 0.0,
    ) -> SimParticipant:
        """Add a participant that joins late; with `identity`, as another device of that author."""
        participant = self._make(name, options or {}, identity)
        participant.clock_offset = clock_offset
        self.participants.append(participant)
        await participant.start()
        return participant

    def lose(self, participant: SimParticipant) -> None:
        """Remove a participant permanently, with everything that only it had."""
        participant.kill()
        self.network.counts["devices_lost"] += 1
        self.participants.remove(participant)
        self.evidence.forget(participant.name, participant.disk.content.holds)

    def play(self, count: int) -> float:
        """Put the first `count` messages of the recorded conversation into the relays.

        Returns when the last of them was said. Only for use while nobody listens: nothing is handed on.
        """
        size = self._setting("bloom_filter_size")
        recording = tape(CHANNEL_ID, TOPIC, size, SdsConfig().bloom_filter_error_rate, TAPE_BEGINS_AT)
        ended_at = 0.0
        for entry in recording.first(count):
            for relay in self.network.relays:
                relay.keep(entry.event, entry.at)
            self.evidence.recorded(
                entry.sender_id,
                entry.request_id,
                entry.payload,
                message_id=entry.message_id,
                lamport=entry.lamport,
                follows=entry.follows,
            )
            self.evidence.packet(entry.event.message_hash, entry.message_id)
            self.claims.stored(entry.event, entry.at)
            ended_at = entry.at
        return ended_at

    async def start(self) -> None:
        """Start every participant."""
        for participant in self.participants:
            await participant.start()
        if self.bounds.says_synced_after is not None:
            self._watch_claims()

    def _watch_claims(self) -> None:
        # Each timer sets the next one; a task that sleeps would take two turns of the loop for each look.
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(next(self._looks), self._watch_claims)

    def _look_at_claims(self) -> Iterator[float]:
        """Check the claims of one participant after the other. Yields the seconds until the next step."""
        while True:
            if all(each.asleep for each in self.participants):
                yield _ASLEEP_SECONDS
            for participant in list(self.participants):
                yield _CLAIM_SECONDS / max(1, min(4, len(self.participants)))
                if participant.asleep:
                    self.claims.away(participant.name)
                elif participant.channel is not None:
                    self.claims.look(participant.name, participant.channel.sync_status())

    async def converge(self, *, timeout: float | None = None) -> None:
        """End every fault, wait until all agree, and check everything.

        Raises `SimulationFailed` if a check fails, or if they do not agree within `timeout` virtual seconds
        (default: `Bounds.agree_within`).
        """
        timeout = self.bounds.agree_within if timeout is None else timeout
        self.network.heal(NO_FAULTS)
        self.evidence.programs_are_busy = False
        for participant in self.participants:
            participant.wake_up()
            participant.heal()
            if not participant.alive:
                await participant.start()
        clock = asyncio.get_running_loop().time
        began_at = clock()
        agreed = 0
        while agreed < 2:  # events that are durable at the first look have been delivered by the second
            if self._agree():
                agreed += 1
            else:
                agreed = 0
                self._converged_after = clock() - began_at
            if clock() - began_at > timeout:
                self.evidence.problems.append(f"they do not agree after {timeout:g} s without a fault")
                break
            await asyncio.sleep(_LOOK_SECONDS)
        logs = {each.name: None if each.channel is None else each.channel.log() for each in self.participants}
        stored = self._stored()
        obtainable = stored.union(*(log for log in logs.values() if log is not None))
        self.evidence.conclude(logs, obtainable, stored)
        await self._hold_to_bounds()
        if self._next_look is not None:
            self._next_look.cancel()
        if self.evidence.problems:
            raise SimulationFailed(self.seed, self.evidence.problems + self._standing(), self.world)

    def _is_served(self, name: str, message_id: str) -> bool:
        """Whether a reachable relay had a message: one stored only while its answer was on its way, or was
        being written to the participant's store, does not count."""
        asked = self.network.time() - self.evidence.write_seconds - self._answer_seconds
        return message_id in self._stored_at(self.network.reachable(name), before=asked)

    def _stored(self) -> set[str]:
        """The SDS messages that relays serve."""
        return self._stored_at(self.network.relays)

    def _stored_at(self, relays: Iterable[SimRelay], *, before: float = math.inf) -> set[str]:
        now, packet_id = self.network.time(), self.evidence.packet_id
        found = {
            packet_id(event)
            for relay in relays
            for event in relay.stored.values()
            if relay.serves(event.message_hash, now) and relay.stored_at[event.message_hash] < before
        }
        return {each for each in found if each is not None}

    def _agree(self) -> bool:
        channels = [each.channel for each in self.participants]
        for channel in channels:
            if channel is None:
                return False
            status = channel.sync_status()
            waiting = any(not each.undelivered for each in status.outstanding)
            if waiting or status.missing or status.queued or status.partial_messages or status.inbox:
                return False
            if not status.caught_up:
                return False  # the channel knows that its relays have more
        logs = [(each.name, each.channel.log()) for each in self.participants if each.channel is not None]
        return all(self.evidence.agree(name, log, *logs[0]) for name, log in logs)

    async def _hold_to_bounds(self) -> None:
        """Check what the run has cost, and what a quiet time costs."""
        problems, bounds, traffic = self.evidence.problems, self.bounds, self.evidence.traffic
        messages = self.evidence.checks.messages
        problems += bounds.of_talk(traffic["content"], traffic["content"] + traffic["again"], traffic["sync"])
        problems += bounds.of_reads(self.network.messages_read, self.missed)
        before = self._weigh_all()
        for name, weight in before.items():
            problems += bounds.of_state(name, weight, messages)
            self._most_entries = max(self._most_entries, weight.entries)
        if not bounds.idle_minutes:
            return
        await asyncio.sleep(60 * bounds.rest_minutes)
        idle = await self._idle(bounds.idle_minutes)
        self._idles.append(idle)
        self.evidence.checks.idle_minutes += idle.minutes
        problems += bounds.of_idle(idle)
        after = self._weigh_all()
        for name in before.keys() & after.keys():
            problems += bounds.of_growth(name, before[name], after[name])

    def _weigh_all(self) -> dict[str, Weight]:
        if self.bounds.entries is None and self.bounds.idle_growth is None:
            return {}
        weighed = self.participants[:_WEIGHED]
        self.evidence.checks.weighed += len(weighed)
        return {each.name: weigh(each.channel, each.disk.content) for each in weighed}

    async def _idle(self, minutes: float) -> Idle:
        traffic, network = self.evidence.traffic.copy(), self.network
        read, handed_on = network.messages_read, network.bytes_handed_on
        await asyncio.sleep(60 * minutes)
        now = self.evidence.traffic
        return Idle(
            people=len(self.participants),
            minutes=minutes,
            syncs=now["sync"] - traffic["sync"],
            repeats=now["again"] + now["repair"] - traffic["again"] - traffic["repair"],
            reads=network.messages_read - read,
            bytes_handed_on=network.bytes_handed_on - handed_on,
        )

    def _standing(self) -> list[str]:
        return [
            f"{each.name}: {each.channel.sync_status()}"
            for each in self.participants[:_TOLD]
            if each.channel is not None
        ]

    async def stop(self) -> None:
        """Stop every participant in good order."""
        for participant in self.participants:
            await participant.stop()

    def report(self) -> Report:
        """The counts of this run."""
        return Report(
            1,
            self.evidence.checks,
            self.network.counts,
            self.network.messages_sent,
            self.network.bytes_sent,
            self.network.time(),
            [self._converged_after],
            Counter({self.world: 1} if self.world else {}),
            self.evidence.traffic,
            self.network.messages_read,
            self._most_entries,
            self._idles,
        )


Scenario = Callable[[Simulation], Awaitable[None]]
"""What happens in a run, in virtual time: ordinary asynchronous code."""


def simulate(
    scenario: Scenario,
    *,
    seed: int,
    faults: Faults = NO_FAULTS,
    participants: int = 3,
    relays: int = 2,
    options: Mapping[str, object] | None = None,
    bounds: Bounds | None = None,
    world: str = "",
    with_filters: int = 0,
) -> Report:
    """Run a scenario to its end, then converge and check. The same seed repeats the run.

        async def chat(run: Simulation) -> None:
            await run.participants[0].send(b"hello")
            await asyncio.sleep(60)

        report = simulate(chat, seed=7, faults=Faults(loss=0.3))

    Raises `SimulationFailed` with all problems, and any error of the scenario.
    """

    async def run() -> Report:
        simulation = Simulation(
            seed,
            faults,
            participants=participants,
            relays=relays,
            options=options,
            bounds=bounds,
            world=world,
            with_filters=with_filters,
        )
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
        error.add_note(f"in the simulation of seed {seed}{f' of {world}' if world else ''}")
        raise
