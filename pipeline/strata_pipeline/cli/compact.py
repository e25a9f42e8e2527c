"""`strata-pipeline compact`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from strata_pipeline.cli.app import (
    LONGEST_GRACE,
    Json,
    LakePlace,
    Master,
    SparkConf,
    day_given,
    failures_told,
    say,
    session_on,
)
from strata_pipeline.cli.progress import steps_shown

if TYPE_CHECKING:
    from strata_pipeline.jobs.compact import Compacted

__all__ = ["compact_command"]


def compact_command(
    lake: LakePlace,
    grace: Annotated[
        int,
        typer.Option(
            metavar="SECONDS",
            help="How long replaced files are kept for their readers.",
            min=0,
            max=LONGEST_GRACE,
        ),
    ] = 86_400,
    patience: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="On a disk: how long to wait for jobs that read the lake.", min=0
        ),
    ] = 600.0,
    day: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DAY",
            help="Rewrite this day (2026-11-21) even if it is compact; may repeat.",
            show_default=False,
        ),
    ] = None,
    delta: Annotated[
        bool,
        typer.Option(
            "--delta", help="Publish the lake as a Delta table; one that is there is kept in step anyway."
        ),
    ] = False,
    master: Master = None,
    conf: SparkConf = None,
    json: Json = False,
) -> None:
    """Rewrite the small files of finished days as large ones.

    The contents of the lake stay the same, and an archive may run at the same time. Replaced files move from
    the table's folder to _retired, where readers that have listed generations/ find them, and a later run
    deletes them after the grace period. A day waits for the next run while other
    jobs read it. In a bucket nothing waits, and replaced objects stay where they are until a later run
    deletes them. Finished days get a summary of their manifests, which makes opening the lake faster.

    With `--day`, files whose statistics are false (`audit` says `file: statistics`) are repaired.
    """
    from strata_pipeline.jobs.compact import compact

    with failures_told():
        again = [day_given("--day", each) for each in day or ()]
        with (
            session_on(lake, "compact", master, conf) as spark,
            steps_shown("compacting", json, spark) as show,
        ):

            def progress(done: Compacted) -> None:
                show(f"{done.days} days done")

            done = compact(
                spark, lake, again=again, grace=grace, patience=patience, delta=delta, progress=progress
            )
    text = f"compacted {done.days} days: {done.files_before} files became {done.files_after}"
    if done.sealed:
        text += f"; {done.sealed} finished days have a summary now"
    if done.waiting:
        text += f"; {done.waiting} days wait for the next run"
    say(text, json, event="compacted", **msgspec.to_builtins(done))
