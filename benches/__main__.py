"""`python -m benches`: run the benchmarks, all or those named."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import resource
import sys
from collections.abc import Coroutine, Mapping, Sequence

import uvloop
from rich.console import Console
from rich.progress import Progress as Bar

from benches import (
    besieged,
    catchup,
    channel_absence,
    channel_convergence,
    channel_crowd,
    channel_engine,
    channels,
    checks,
    fanout,
    federation,
    hostile,
    identities,
    idle,
    latency,
    opening,
    publish,
    scaling,
    soak,
)
from benches.attacks import ATTACKS, TLS_ATTACKS
from benches.bare import SignatureCost, StoreCost, signature_cost, store_cost
from benches.daemon import RelayProcess
from benches.measures import BRIEF, FULL, Measure, Plan, Progress, as_json, print_table
from benches.peer import BenchError

__all__ = ["NAMES", "main", "run"]

NAMES = (
    "publish",
    "fanout",
    "latency",
    "catchup",
    "idle",
    "checks",
    "identities",
    "opening",
    "hostile",
    "channels",
    "absence",
    "convergence",
    "engine",
    "crowd",
    "pace",
    "scaling",
    "federation",
    "soak",
)
_ASKED_FOR = frozenset({"soak"})
"""Benchmarks that run only if they are named, because they take long."""

_SETTINGS: Mapping[str, Mapping[str, object]] = {"hostile": hostile.SETTINGS}
"""Settings of the relay that a benchmark runs on, if they differ from the defaults."""
_ON_THE_LOG = frozenset({"publish", "catchup"})
"""Benchmarks that need to know how fast the log alone is."""


async def run(names: Sequence[str], plan: Plan, progress: Progress, *, serve: str | None) -> list[Measure]:
    """Run these benchmarks, each on its own relay. Raises `BenchError` if a measurement is void."""
    progress("measuring the limits")
    signature = signature_cost(plan.limit_seconds)
    store = await store_cost(plan.catchup_packets) if _ON_THE_LOG.intersection(names) else None
    measures: list[Measure] = []
    for name in names:
        if (found := _without_relay(name, plan, progress)) is not None:
            measures += found
            continue
        if name in ("scaling", "federation"):
            module = scaling if name == "scaling" else federation
            work = module.measure(plan, progress, serve)
            measures += await _in_time(name, work, 4 * plan.timeout)  # four relays, and a server
            continue
        if name == "opening":
            measures += await _in_time(name, opening.measure(plan, progress, serve), 6 * plan.timeout)
            continue
        progress(f"{name}: starting a relay")
        with RelayProcess(serve, _SETTINGS.get(name)) as relay:
            work = _one(name, relay, plan, progress, signature, store)
            measures += await _in_time(name, work, plan.timeout)
    return measures


async def _in_time(name: str, work: Coroutine[None, None, list[Measure]], seconds: float) -> list[Measure]:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise BenchError(f"{name} did not end within {seconds:.0f} s") from None


def _without_relay(name: str, plan: Plan, progress: Progress) -> list[Measure] | None:
    """The measures of a benchmark that runs in process; None if it needs a relay."""
    match name:
        case "checks":
            return checks.measure(plan, progress)
        case "convergence":
            size = channels.plan_of(plan)
            return channel_convergence.as_measures(
                size.losses, size.seeds, size.convergence_messages, progress
            )
        case "pace":
            return channel_crowd.as_measures(plan, progress)
        case "engine":
            return channel_engine.as_measures(channels.plan_of(plan).histories, progress)
    return None


async def _one(
    name: str,
    relay: RelayProcess,
    plan: Plan,
    progress: Progress,
    signature: SignatureCost,
    store: StoreCost | None,
) -> list[Measure]:
    match name:
        case "publish":
            assert store is not None
            return await publish.measure(relay, plan, progress, signature, store)
        case "fanout":
            return await fanout.measure(relay, plan, progress)
        case "latency":
            return await latency.measure(relay, plan, progress, signature)
        case "catchup":
            assert store is not None
            return await catchup.measure(relay, plan, progress, store)
        case "idle":
            return await idle.measure(relay, plan, progress)
        case "identities":
            return await identities.measure(relay, plan, progress)
        case "hostile":
            return await hostile.measure(relay, plan, progress)
        case "channels":
            return await channels.measure(relay, plan, progress)
        case "absence":
            return await channel_absence.measure(relay, channels.plan_of(plan).histories, progress)
        case "crowd":
            return await channel_crowd.measure(relay, plan, progress)
    raise ValueError(name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run, print. 0: done, 1: a measurement was void, or a soak failed."""
    options = _parsed(arguments)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    names = [name for name in NAMES if (name in options.names if options.names else name not in _ASKED_FOR)]
    plan = BRIEF if options.brief else FULL
    if options.identities is not None:
        plan = dataclasses.replace(plan, opening_identities=options.identities)
    seconds = plan.attack_seconds if options.seconds is None else options.seconds
    costs: list[besieged.Cost] = []
    try:
        others = [] if options.attack else [name for name in names if name != "soak"]
        measures = uvloop.run(run(others, plan, _progress, serve=options.serve)) if others else []
        if "soak" in names:
            measures += _soak(options)
        if "hostile" in names and sys.platform == "linux" and (seconds or options.attack):
            costs = uvloop.run(
                besieged.besiege(
                    options.attack or (),
                    seconds,
                    _progress,
                    serve=options.serve,
                    stored=plan.catchup_packets,
                    rounds=options.rounds,
                )
            )
    except BenchError as error:
        print(f"void: {error}", file=sys.stderr)
        return 1
    # The findings of a soak are not figures to compare: they hold or they do not.
    code = int(any(measure.bench == "soak" and measure.met is False for measure in measures))
    if options.json:
        machine = {
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        }
        report: dict[str, object] = {"machine": machine, "measures": as_json(measures)}
        print(json.dumps(report | (besieged.as_json(costs) if costs else {}), indent=2))
        return code
    if measures:
        print_table(measures)
    if costs:
        besieged.print_costs(costs)
    return code


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benches", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="bench", help=f"any of {', '.join(NAMES)}; default all but soak"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--brief", action="store_true", help="see that everything works; figures mean nothing"
    )
    parser.add_argument(
        "--serve", metavar="COMMAND", help="start the relay with this instead of python -m relayd"
    )
    parser.add_argument(
        "--attack",
        metavar="NAME",
        action="append",
        choices=[*ATTACKS, *TLS_ATTACKS, besieged.ALL],
        help="hostile: make this attack alone; may be repeated",
    )
    parser.add_argument("--minutes", type=float, help="soak: how long it goes on (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="soak: what its clients do (default: 1)")
    parser.add_argument(
        "--seconds", type=float, help="hostile: how long each attack goes on (default: 3, with --brief none)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="hostile: how often each attack is made; the calmest go counts (default: 1)",
    )
    parser.add_argument("--identities", type=int, metavar="N", help="opening: how many the log has")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    return options


def _soak(options: argparse.Namespace) -> list[Measure]:
    minutes = options.minutes or (0.1 if options.brief else 20.0)
    plan = soak.SoakPlan(60.0 * minutes, places=8 if options.brief else 40, seed=options.seed)
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("soak", total=1.0)
        work = soak.measure(plan, _progress, options.serve, lambda share: bar.update(task, completed=share))
        return uvloop.run(work)


def _progress(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
