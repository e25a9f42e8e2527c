"""The main test scenario of the library: everything that can go wrong does, and then all must agree."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass

from strata.protocol.errors import StrataError

from strata_testkit.sim.faults import Faults
from strata_testkit.sim.network import SimRelay
from strata_testkit.sim.participant import SimParticipant
from strata_testkit.sim.simulation import Report, Simulation, simulate

__all__ = ["HARSH", "SMALL", "Chaos", "run_chaos"]

HARSH = Faults(
    loss=0.3,
    duplication=0.1,
    latency=(0.01, 2.0),
    forgetting=0.05,
    disk_failure=0.02,
    partitions=2.0,
    relay_crashes=1.0,
    crashes=2.0,
    disk_losses=0.1,
    clock_jumps=1.0,
)
"""30 % loss on every hop, wide reordering, crashes of relays and participants, cuts, and clock jumps."""

SMALL: Mapping[str, object] = {
    "bloom_filter_size": 500,
    "segment_size_bytes": 256,
    "repair_t_min_ms": 10_000,
    "repair_t_max_ms": 40_000,
}
"""Settings with which a run takes milliseconds; the promise does not depend on them."""


@dataclass(frozen=True, slots=True)
class Chaos:
    """The scenario: what happens in addition to the faults."""

    messages: int = 20
    seconds: float = 120.0
    """The virtual seconds over which messages and faults are spread."""

    async def __call__(self, run: Simulation) -> None:
        """The scenario."""
        rng = run.rng
        tasks = [asyncio.ensure_future(self._talk(run, rng))]
        faults = run.network.faults
        for each in run.participants:
            tasks += [
                asyncio.ensure_future(self._crash(run, each, faults.crashes)),
                asyncio.ensure_future(self._partition(run, each, faults.partitions)),
                asyncio.ensure_future(self._jump(run, each, faults.clock_jumps)),
            ]
        tasks += [asyncio.ensure_future(self._crash_relay(run, relay)) for relay in run.network.relays]
        try:
            await tasks[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled() and (error := task.exception()) is not None:
                    raise error

    async def _talk(self, run: Simulation, rng: random.Random) -> None:
        for number in range(self.messages):
            await asyncio.sleep(rng.expovariate(self.messages / self.seconds))
            sender = rng.choice(run.participants)
            # Some messages take several segments, and some repeat an earlier payload.
            size = rng.choice((10, 10, 100, 700))
            word = rng.choice((b"ok", b"%d" % number, b"%d" % number))
            try:
                await sender.send((word + b" ").ljust(size, b"."))
            except StrataError:
                run.network.counts["refused_sends"] += 1  # the store fails: nothing was promised
        await asyncio.sleep(rng.uniform(0, 10))

    async def _crash(self, run: Simulation, participant: SimParticipant, per_minute: float) -> None:
        rng, faults = run.rng, run.network.faults
        while per_minute:
            await asyncio.sleep(rng.expovariate(per_minute / 60))
            participant.kill()
            if rng.random() < faults.disk_losses:
                participant.lose_disk()
            await asyncio.sleep(rng.uniform(*faults.outage))
            await participant.start()

    async def _partition(self, run: Simulation, participant: SimParticipant, per_minute: float) -> None:
        rng, faults = run.rng, run.network.faults
        while per_minute:
            await asyncio.sleep(rng.expovariate(per_minute / 60))
            relay = rng.choice(run.network.relays)
            run.network.cut(participant.name, relay)
            await asyncio.sleep(rng.uniform(*faults.outage))
            run.network.mend(participant.name, relay)

    async def _jump(self, run: Simulation, participant: SimParticipant, per_minute: float) -> None:
        while per_minute:
            await asyncio.sleep(run.rng.expovariate(per_minute / 60))
            participant.set_clock(run.rng.uniform(-3600, 3600))

    async def _crash_relay(self, run: Simulation, relay: SimRelay) -> None:
        rng, faults = run.rng, run.network.faults
        while faults.relay_crashes:
            await asyncio.sleep(rng.expovariate(faults.relay_crashes / 60))
            run.network.take_down(relay)
            await asyncio.sleep(rng.uniform(*faults.outage))
            run.network.bring_up(relay)


def run_chaos(
    seed: int,
    *,
    faults: Faults = HARSH,
    chaos: Chaos | None = None,
    options: Mapping[str, object] | None = None,
) -> Report:
    """Run everything at once, with two to five participants and one to three relays, drawn from the seed.

    Raises `SimulationFailed`.
    """
    rng = random.Random(f"shape of {seed}")
    participants, relays = rng.randint(2, 5), rng.randint(1, 3)
    hand_over, timeout_ms = rng.choice(("once", "again")), rng.choice((10_000, 600_000))
    return simulate(
        chaos or Chaos(),
        seed=seed,
        faults=faults,
        participants=participants,
        relays=relays,
        options={
            **SMALL,
            "hand_over": hand_over,
            "reassembly_timeout_ms": timeout_ms,
            **(options or {}),
        },
        world="wild",
        # Many rooms have only receipts, some have only filters, and some have both.
        with_filters=max(0, rng.randint(-participants, participants)),
    )
