"""The commands that the test kit adds to `strata`: `conformance` and `simulate`.

Each imports what it needs when it runs, so that `strata --help` answers at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from strata.tools.cli.options import DEFAULT_RELAY, ContextOption, JsonOption, PinsOption, UrlArgument

__all__ = ["add_commands"]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the app of `strata`, which finds this function by its entry point."""
    app.command("conformance")(_conformance)
    app.command("simulate")(_simulate)


def _conformance(
    url: UrlArgument = DEFAULT_RELAY,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="ROWS", help="Only these rows or checks, such as R-152,R-1*; may repeat."
        ),
    ] = None,
    level: Annotated[
        Literal["MUST", "SHOULD", "MAY"],
        typer.Option("--level", help="Judge rows that bind at least this much."),
    ] = "MAY",
    limits: Annotated[
        bool, typer.Option("--limits", help="Run the checks that flood the relay too.")
    ] = False,
    identity: Annotated[
        Path | None,
        typer.Option(
            "--identity", metavar="FILE", help="The key file to authenticate with, where a check needs it."
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, max=64, metavar="N", help="Run this many checks at a time.")
    ] = 8,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, metavar="SECONDS", help="End the run after this long.")
    ] = 300.0,
    list_only: Annotated[bool, typer.Option("--list", help="Show the checks and exit.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Publish to a relay on another machine without asking.")
    ] = False,
    pins: PinsOption = None,
    context: ContextOption = None,
    json: JsonOption = False,
) -> None:
    """Judge a relay from outside, row by row of RFC-0004.

    Exit code 1 if a MUST does not hold.
    """
    from strata_testkit.conformance.command import ConformanceRequest, conformance, list_checks
    from strata_testkit.conformance.model import Keyword

    request = ConformanceRequest(
        url,
        only=tuple(only or ()),
        level=Keyword(level),
        limits=limits,
        identity=identity,
        pins=pins,
        concurrency=concurrency,
        timeout=timeout,
        yes=yes,
        as_json=json,
    )
    list_checks(request) if list_only else conformance(request)


def _simulate(
    worlds: Annotated[
        int | None,
        typer.Option(
            "--worlds", min=1, metavar="N", help="Run this many worlds: of the mix, or of the kinds."
        ),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", metavar="KIND", help="Only worlds of this kind; may repeat; `all` is each in turn."
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, metavar="N", help="Without --worlds: run this many wild worlds.")
    ] = 2_000,
    first: Annotated[int, typer.Option("--first", min=0, metavar="SEED", help="The first seed.")] = 0,
    gap: Annotated[
        int | None,
        typer.Option(
            "--gap",
            min=2,
            max=100_000,
            metavar="N",
            help="The most messages that somebody misses.  [default: 400; for --curve 1000]",
        ),
    ] = None,
    people: Annotated[
        int | None,
        typer.Option(
            "--people",
            min=2,
            max=1_000,
            metavar="N",
            help="The most participants of a crowd.  [default: 36; for --curve 30]",
        ),
    ] = None,
    curve: Annotated[bool, typer.Option("--curve", help="Measure traffic and catch-up by size.")] = False,
    planted: Annotated[
        bool,
        typer.Option("--planted", help="Break channels on purpose, and see whether each fault is found."),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, metavar="N", help="Processes.  [default: one for each core]"),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Run channels in simulated worlds in which things go wrong.

    Exit code 1 if a promise was broken, or a planted fault was not found. The seed of each run that failed is
    printed.
    """
    from strata_testkit.sim.command import SimulationRequest, simulate
    from strata_testkit.sim.worlds import KINDS, WILD

    chosen = tuple(kind or ())
    if unknown := {*chosen} - {*KINDS, WILD, "all"}:
        raise typer.BadParameter(
            f"no kind of world is called {min(unknown)}; there are {', '.join([*KINDS, WILD, 'all'])}",
            param_hint="--kind",
        )
    if chosen and worlds is None:
        raise typer.BadParameter("--kind needs --worlds, the number of worlds")
    request = SimulationRequest(
        worlds=worlds,
        kind=chosen,
        seeds=seeds,
        first=first,
        gap=gap,
        people=people,
        curve=curve,
        planted=planted,
        jobs=jobs or os.cpu_count() or 1,
        as_json=json,
    )
    raise typer.Exit(simulate(request))
