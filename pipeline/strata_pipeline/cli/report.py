"""`strata-pipeline report`."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from strata_pipeline.cli.app import (
    Json,
    LakePlace,
    Master,
    SparkConf,
    failures_told,
    named,
    say,
    session_on,
)
from strata_pipeline.cli.progress import steps_shown
from strata_pipeline.cli.report_parts import Days

__all__ = ["report_command"]


def report_command(
    lake: LakePlace,
    output: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Write the pages to this folder; it keeps the figures of days as well.",
            show_default=False,
            callback=named,
        ),
    ],
    days: Days = None,
    scores: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The folder of reputation --output, for a page about relays.",
            callback=named,
        ),
    ] = None,
    master: Master = None,
    conf: SparkConf = None,
    json: Json = False,
) -> None:
    """Write a site of static pages about a lake: open index.html.

    The pages show lag and clocks, authors by day, week and month, cohorts, bytes with a forecast, provenance
    and quarantine. They need no network. A day is read once: the next report into the same folder reads only
    days that are new or have grown. Reports of traffic, trust and reliability in the same folder are linked.
    """
    from strata_pipeline.jobs.report import report

    with failures_told(), session_on(lake, "report", master, conf) as spark:
        with steps_shown("report", json, spark) as progress:
            done = report(spark, lake, output, days=days, scores=scores, progress=progress)
    text = f"{done.packets:,} packets in {done.days:,} days, {done.counted:,} of these read now"
    text += f"; see {output}/index.html"
    say(text, json, event="done", **msgspec.to_builtins(done))
