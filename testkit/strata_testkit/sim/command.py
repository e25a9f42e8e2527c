"""`strata simulate`: thousands of worlds in which things go wrong, and what they proved.

    strata simulate --worlds 20000                  # of every kind, with a progress bar
    strata simulate --worlds 1 --first 1996         # one world again
    strata simulate --worlds 50 --kind absence --gap 100000
    strata simulate --seeds 2000                    # only wild worlds, seeds 0 … 1999
    strata simulate --curve                         # what people and gaps cost
    strata simulate --planted                       # whether each planted fault is found

Exit code 1: a run broke the promise, or a planted fault was not found. The program prints the seed of each
run that failed, and its problems.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from strata_testkit.sim.chaos import run_chaos
from strata_testkit.sim.checking import SimulationFailed
from strata_testkit.sim.curve import ByGap, ByPeople, measure, rows
from strata_testkit.sim.planted import FAULTS, FaultFound, find
from strata_testkit.sim.simulation import Report
from strata_testkit.sim.worlds import KINDS, WILD, WorldSize, run_world

__all__ = ["SimulationRequest", "run_seeds", "run_worlds", "simulate"]

_CHUNK = 10
# A run makes much garbage and keeps little: collecting rarely saves a tenth of its time.
_GC_THRESHOLDS = (50_000, 20, 20)

A = TypeVar("A")
R = TypeVar("R")


def run_seeds(first: int, count: int) -> tuple[Report, list[str]]:
    """Run the wild worlds of these seeds, one after another. Returns the report and the problems."""
    return _run(first, count, run_chaos)


def run_worlds(
    first: int, count: int, kinds: Sequence[str] = (), size: WorldSize | None = None
) -> tuple[Report, list[str]]:
    """Run these worlds, one after another: of the mix, or of the given kinds in turn. See `run_seeds`."""

    def run(seed: int) -> Report:
        kind = kinds[seed % len(kinds)] if kinds else None
        return run_world(seed, kind, size=size)

    return _run(first, count, run)


def _run(first: int, count: int, run: Callable[[int], Report]) -> tuple[Report, list[str]]:
    # Simulated disks fail and relays vanish, so the library's log has nothing new to say.
    logging.getLogger("strata").setLevel(logging.CRITICAL)
    total, problems = Report(), []
    for seed in range(first, first + count):
        try:
            total.add(run(seed))
        except SimulationFailed as failure:
            problems.append(str(failure))
        except Exception as error:
            problems.append(f"seed {seed}: {error!r}")
    return total, problems


def _map(work: Callable[[A], R], tasks: Iterable[A], jobs: int) -> Iterator[R]:
    with ProcessPoolExecutor(jobs, initializer=gc.set_threshold, initargs=_GC_THRESHOLDS) as pool:
        yield from pool.map(work, list(tasks))


def _progress() -> Progress:
    return Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())


@dataclass(frozen=True, slots=True)
class SimulationRequest:
    """The options of the command line."""

    worlds: int | None = None
    kind: tuple[str, ...] = ()
    seeds: int = 2_000
    first: int = 0
    gap: int | None = None
    people: int | None = None
    curve: bool = False
    planted: bool = False
    jobs: int = 1
    as_json: bool = False


def simulate(request: SimulationRequest) -> int:
    """Run what was asked for and print the report; returns the exit code."""
    if request.curve:
        return _curve(request)
    if request.planted:
        return _planted(request)
    return _worlds(request)


def _worlds(request: SimulationRequest) -> int:
    began_at = time.monotonic()
    count = request.worlds if request.worlds is not None else request.seeds
    if request.worlds is None:
        run = run_seeds
    else:
        default = WorldSize()
        size = WorldSize(request.gap or default.gap, request.people or default.people)
        kinds = [*KINDS, WILD] if "all" in request.kind else request.kind
        run = partial(run_worlds, kinds=tuple(kinds), size=size)
    # A world of a chosen kind may be large, so these are handed out one by one.
    most = 1 if request.kind else _CHUNK
    end = request.first + count
    chunks = [(start, min(most, end - start)) for start in range(request.first, end, most)]
    total, problems = Report(), []
    with _progress() as progress:
        bar = progress.add_task("worlds", total=count)
        for (_, size_of_chunk), (report, failures) in zip(
            chunks, _map(partial(_chunk, run), chunks, request.jobs), strict=True
        ):
            total.add(report)
            problems += failures
            progress.advance(bar, size_of_chunk)
    if request.as_json:
        report_json = msgspec.to_builtins(total)
        report_json.pop("idles")
        print(msgspec.json.encode({**report_json, "problems": problems}).decode())
    else:
        print(_text(total, problems, time.monotonic() - began_at))
    return 1 if problems else 0


def _chunk(
    run: Callable[[int, int], tuple[Report, list[str]]], chunk: tuple[int, int]
) -> tuple[Report, list[str]]:
    return run(*chunk)


def _text(total: Report, problems: list[str], seconds: float) -> str:
    checks = total.checks
    settled = sorted(total.converged_after) or [0.0]
    faults = [f"{count} {name.replace('_', ' ')}" for name, count in total.faults.most_common()]
    lines = [
        f"{total.runs} runs passed, {len(problems)} failed, in {seconds:.0f} s "
        f"for {total.virtual_seconds / 3600:.0f} hours of virtual time",
        "worlds: " + ", ".join(f"{count} {name}" for name, count in total.worlds.most_common()),
        f"{checks.messages} messages checked, {checks.deliveries} deliveries, {checks.logs} logs compared, "
        f"{checks.order_pairs} pairs in causal order",
        f"{checks.acknowledgements} acknowledgements compared with the disk, "
        f"{checks.delivered_events} times told delivered, {checks.delivery_errors} times told not, "
        f"{checks.unobtainable} lost with the disks of all who had them, {checks.told_missing} told missing",
        f"{checks.sync_claims} claims to be synced compared, {checks.weighed} states weighed (most "
        f"{total.most_entries} items), {checks.idle_minutes:.0f} quiet minutes",
        f"all agreed after the last fault within {settled[len(settled) // 2]:.0f} s (median), "
        f"{settled[-1 - len(settled) // 20]:.0f} s (p95), {settled[-1]:.0f} s (most)",
        "traffic: "
        + ", ".join(f"{total.traffic[kind]} {kind}" for kind in ("content", "again", "sync", "repair"))
        + f", {total.messages_read} read from stores",
        "faults: " + ", ".join(faults),
    ]
    return "\n".join(lines + problems)


def _curve(request: SimulationRequest) -> int:
    wanted = list(rows(request.people or 30, request.gap or 1_000))
    measured: list[ByPeople | ByGap] = []
    with _progress() as progress:
        bar = progress.add_task("curve", total=len(wanted))
        for row in _map(measure, wanted, request.jobs):
            measured.append(row)
            progress.advance(bar)
    tables: dict[type[Any], list[Any]] = {ByPeople: [], ByGap: []}
    for row in measured:
        tables[type(row)].append(row)
    if request.as_json:
        named = {"by_people": tables[ByPeople], "by_gap": tables[ByGap]}
        print(msgspec.json.encode(named).decode())
        return 0
    console = Console(width=140)
    for kind, found in tables.items():
        columns = kind.__dataclass_fields__
        table = Table(title=kind.__doc__, title_justify="left")
        for column in columns:
            table.add_column(column.replace("_", " "), justify="right")
        for row in found:
            table.add_row(*[_cell(getattr(row, column)) for column in columns])
        console.print(table)
    return 0


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "never" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _planted(request: SimulationRequest) -> int:
    results: list[FaultFound] = []
    with _progress() as progress:
        bar = progress.add_task("planted faults", total=len(FAULTS))
        for found in _map(find, list(FAULTS), request.jobs):
            results.append(found)
            progress.advance(bar)
    missed = [each.fault for each in results if each.seed is None and not each.waits_for]
    if request.as_json:
        print(msgspec.json.encode({"planted": results, "problems": missed}).decode())
    else:
        for each in results:
            print(f"{each.fault:28} {_verdict(each)}")
        waiting = sum(bool(each.waits_for) for each in results)
        print(
            f"{len(results) - len(missed) - waiting} of {len(results)} planted faults found, "
            f"{waiting} wait for worlds that no channel survives"
        )
    return 1 if missed else 0


def _verdict(found: FaultFound) -> str:
    if found.waits_for:
        return f"waits for {found.waits_for}: no channel survives those worlds yet"
    if found.seed is None:
        return f"NOT FOUND in {found.worlds} worlds"
    return f"world {found.seed} of {found.kind}: {found.problem}"
