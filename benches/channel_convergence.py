"""`python -m benches.channel_convergence`: when all agree although messages are lost, and at what cost.

Five participants send a hundred messages through two simulated relays, one per virtual second on average,
with every setting at its default. Each hop of a message, to a relay, from it, and of its answer, is lost with
the same probability, from the first message to the end: the network never heals. Time is virtual, so the
figures are the same on every machine; a seed repeats its run.

All agree when every channel's log has every message, in the same order; messages that a program has not taken
by then are in its inbox. When every sender has also learned of it, or has given up, the run is *settled*.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata_testkit.sim import Faults, Simulation, run_virtually

from benches.channel_plot import plot
from benches.measures import Measure, Progress, percentile
from benches.peer import BenchError
from benches.processes import fork_context

__all__ = ["LOSSES", "Run", "as_measures", "main", "measure_convergence", "summarise"]

LOSSES = (0.0, 0.1, 0.3)
PARTICIPANTS, RELAYS, MESSAGES = 5, 2, 100
SEEDS = 200
"""Enough for ten runs beyond the 95th percentile, which the slowest runs decide, and they are rare."""
_LOOK_SECONDS = 0.05
_GIVE_UP_SECONDS = 3_600.0
_PAYLOAD_BYTES = 120


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of one seed. Counts are those at the moment when all agreed."""

    seed: int
    loss: float
    agreed_after: float
    """Virtual seconds from the last send."""
    settled_after: float
    retransmissions: int
    syncs: int
    repairs: int
    retrievals: int
    publishes: int
    """SDS messages given to relays; each counts once per relay."""
    bytes_published: int


def converge(seed: int, loss: float, messages: int = MESSAGES) -> Run:
    """One run. Raises `BenchError` if the participants never agree."""

    async def run() -> Run:
        simulation = Simulation(seed, Faults(loss=loss), participants=PARTICIPANTS, relays=RELAYS)
        await simulation.start()
        for number in range(messages):
            await asyncio.sleep(simulation.rng.expovariate(1.0))
            sender = simulation.rng.choice(simulation.participants)
            await sender.send(b"%08d" % number + b"." * (_PAYLOAD_BYTES - 8))
        sent_at = simulation.network.time()
        agreed_after = await _until(simulation, _agree, sent_at)
        found = _counts(simulation)
        settled_after = await _until(simulation, _settled, sent_at)
        result = Run(seed, loss, agreed_after, settled_after, **found)
        await simulation.stop()
        return result

    return run_virtually(run)


async def _until(simulation: Simulation, reached: Any, since: float) -> float:
    while not reached(simulation):
        passed = simulation.network.time() - since
        if passed > _GIVE_UP_SECONDS:
            raise BenchError(f"seed {simulation.seed}: no agreement after {passed:.0f} virtual seconds")
        await asyncio.sleep(_LOOK_SECONDS)
    return simulation.network.time() - since


def _agree(simulation: Simulation) -> bool:
    people = simulation.participants
    total = sum(len(each.sent) for each in people)  # each takes one segment, hence one entry
    logs = [each.channel.log() for each in people if each.channel is not None]
    return len(logs) == len(people) and len(logs[0]) == total and all(log == logs[0] for log in logs)


def _settled(simulation: Simulation) -> bool:
    return not any(
        not message.undelivered
        for each in simulation.participants
        if each.channel is not None
        for message in each.channel.sync_status().outstanding
    )


def _counts(simulation: Simulation) -> dict[str, int]:
    all_counts = [each.channel.statistics for each in simulation.participants if each.channel is not None]
    return {
        "retransmissions": sum(each.sds.retransmissions for each in all_counts),
        "syncs": sum(each.sds.syncs_sent for each in all_counts),
        "repairs": sum(each.sds.repairs_sent for each in all_counts),
        "retrievals": sum(each.retrievals for each in all_counts),
        "publishes": simulation.network.messages_sent,
        "bytes_published": simulation.network.bytes_sent,
    }


def measure_convergence(
    losses: Sequence[float], seeds: int, messages: int = MESSAGES
) -> Iterator[tuple[float, list[Run]]]:
    """The runs for each loss, on every core. Raises `BenchError`."""
    context = fork_context()
    with ProcessPoolExecutor(min(os.cpu_count() or 1, seeds), mp_context=context) as pool:
        for loss in losses:
            yield loss, list(pool.map(converge, range(seeds), [loss] * seeds, [messages] * seeds))


def summarise(runs: Sequence[Run], messages: int = MESSAGES) -> dict[str, Any]:
    """The summary of the runs of one loss."""
    sent = len(runs) * messages

    def each(name: str) -> float:
        return float(sum(getattr(run, name) for run in runs)) / sent

    agreed = sorted(run.agreed_after for run in runs)
    settled = sorted(run.settled_after for run in runs)
    return {
        "loss": runs[0].loss,
        "runs": len(runs),
        "agreed_p50": percentile(agreed, 0.5),
        "agreed_p95": percentile(agreed, 0.95),
        "agreed_most": agreed[-1],
        "settled_p50": percentile(settled, 0.5),
        "settled_p95": percentile(settled, 0.95),
        "retransmissions_per_message": each("retransmissions"),
        "syncs_per_message": each("syncs"),
        "repairs_per_message": each("repairs"),
        "retrievals_per_message": each("retrievals"),
        "publishes_per_message": each("publishes"),
        "bytes_per_message": each("bytes_published"),
        "bytes_per_delivery": each("bytes_published") / (PARTICIPANTS - 1),
    }


def as_measures(losses: Sequence[float], seeds: int, messages: int, progress: Progress) -> list[Measure]:
    """The figures for the table of `python -m benches`: each loss beside the first, which is zero."""
    measures: list[Measure] = []
    alone: dict[str, Any] | None = None
    for loss, runs in measure_convergence(losses, seeds, messages):
        found = summarise(runs, messages)
        alone = alone or found
        progress(f"convergence: {100 * loss:.0f} % lost, agreed after {found['agreed_p50']:.1f} s")
        for key, what, unit in (
            ("agreed_p50", "last send to all agreeing, p50", "s"),
            ("agreed_p95", "last send to all agreeing, p95", "s"),
            ("bytes_per_message", "published for each message", "B"),
        ):
            measures.append(
                Measure(
                    "convergence",
                    f"{100 * loss:.0f} % lost: {what}",
                    found[key],
                    unit,
                    limit=alone[key],
                    limit_name="nothing lost",
                    details=found if key == "agreed_p50" else {},
                )
            )
    return measures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print JSON lines, and draw. 0: done, 1: the participants of a run never agreed."""
    parser = argparse.ArgumentParser(prog="python -m benches.channel_convergence", description=__doc__)
    parser.add_argument("--losses", type=float, nargs="+", default=LOSSES)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--messages", type=int, default=MESSAGES)
    parser.add_argument("--output", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--plot", type=Path, help="file for the curves, as SVG")
    options = parser.parse_args(arguments)
    summaries, runs_of = [], {}
    try:
        for loss, runs in measure_convergence(options.losses, options.seeds, options.messages):
            runs_of[loss] = runs
            summaries.append(summarise(runs, options.messages))
            print(json.dumps(summaries[-1]), flush=True)
    except BenchError as error:
        print(f"void: {error}", file=sys.stderr)
        return 1
    if options.output is not None:
        options.output.write_text(json.dumps(summaries, indent=1) + "\n")
    if options.plot is not None:
        agreed = {loss: [run.agreed_after for run in runs] for loss, runs in runs_of.items()}
        options.plot.write_text(plot(agreed, summaries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
