"""`python -m strata.tools.sim`: thousands of runs in which everything goes wrong, and what they proved.

    python -m strata.tools.sim --seeds 2000            # runs 0 … 1999, with a progress bar on a terminal
    python -m strata.tools.sim --first 1996 --seeds 1  # one run again

Exit code 1: a run broke the promise; the program prints its seed and the problems.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import msgspec
from rich.console import Console
from rich.progress import Progress

from strata.tools.sim.chaos import run_chaos
from strata.tools.sim.checking import SimulationFailed
from strata.tools.sim.simulation import Report

__all__ = ["main", "run_seeds"]

_CHUNK = 10
# A run makes much garbage and keeps little: rare collections save a tenth of its time.
_GC_THRESHOLDS = (50_000, 20, 20)


def run_seeds(first: int, count: int) -> tuple[Report, list[str]]:
    """These runs, one after another: what they did, and what went wrong."""
    # Simulated disks fail and relays vanish: the log of the library holds no news here.
    logging.getLogger("strata").setLevel(logging.CRITICAL)
    total, problems = Report(), []
    for seed in range(first, first + count):
        try:
            total.add(run_chaos(seed))
        except SimulationFailed as failure:
            problems.append(str(failure))
        except Exception as error:
            problems.append(f"seed {seed}: {error!r}")
    return total, problems


def _run_all(first: int, count: int, jobs: int) -> Iterator[tuple[int, Report, list[str]]]:
    chunks = [(start, min(_CHUNK, first + count - start)) for start in range(first, first + count, _CHUNK)]
    with ProcessPoolExecutor(jobs, initializer=gc.set_threshold, initargs=_GC_THRESHOLDS) as pool:
        yield from (
            (size, *result)
            for (_, size), result in zip(chunks, pool.map(run_seeds, *zip(*chunks, strict=True)), strict=True)
        )


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="strata.tools.sim", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=2_000, help="how many runs (default 2000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.jobs < 1 or arguments.first < 0:
        parser.error("--seeds and --jobs must be at least 1, --first at least 0")
    began_at = time.monotonic()
    total, problems = Report(), []
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("runs", total=arguments.seeds)
        for size, report, failures in _run_all(arguments.first, arguments.seeds, arguments.jobs):
            total.add(report)
            problems += failures
            progress.advance(bar, size)
    if arguments.json:
        print(msgspec.json.encode({**msgspec.to_builtins(total), "problems": problems}).decode())
    else:
        print(_text(total, problems, time.monotonic() - began_at))
    return 1 if problems else 0


def _text(total: Report, problems: list[str], seconds: float) -> str:
    checks = total.checks
    settled = sorted(total.converged_after) or [0.0]
    faults = [f"{count} {name.replace('_', ' ')}" for name, count in total.faults.most_common()]
    lines = [
        f"{total.runs} runs passed, {len(problems)} failed, in {seconds:.0f} s "
        f"for {total.virtual_seconds / 3600:.0f} hours of virtual time",
        f"{checks.messages} messages checked, {checks.deliveries} deliveries, {checks.logs} logs compared, "
        f"{checks.order_pairs} pairs in causal order",
        f"{checks.delivered_events} times told delivered, {checks.delivery_errors} times told not, "
        f"{checks.unobtainable} lost with the disks of all who had them",
        f"all agreed after the last fault within {settled[len(settled) // 2]:.0f} s (median), "
        f"{settled[-1 - len(settled) // 20]:.0f} s (p95), {settled[-1]:.0f} s (most)",
        "faults: " + ", ".join(faults),
    ]
    return "\n".join(lines + problems)


if __name__ == "__main__":
    sys.exit(main())
