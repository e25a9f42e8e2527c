"""`strata-pipeline erase`."""

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
    Url,
    failures_told,
    say,
    session_on,
)
from strata_pipeline.cli.progress import steps_shown

if TYPE_CHECKING:
    from strata_pipeline.jobs.erase import ErasedFrom

__all__ = ["erase_command"]


def erase_command(
    lake: LakePlace,
    database_url: Url,
    patience: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="On a disk: how long to wait for jobs that read the lake.", min=0
        ),
    ] = 600.0,
    grace: Annotated[
        int | None,
        typer.Option(
            metavar="SECONDS",
            help="How long replaced files are kept for readers: by default not at all, in a bucket an hour.",
            min=0,
            max=LONGEST_GRACE,
            show_default=False,
        ),
    ] = None,
    places_only: Annotated[
        bool,
        typer.Option(
            "--places-only",
            help="Look for a packet only at the place that its tombstone names, not in the whole lake.",
        ),
    ] = False,
    master: Master = None,
    conf: SparkConf = None,
    json: Json = False,
) -> None:
    """Remove from the lake what the relay has erased.

    These are the packets that relayd erase has removed from the log. The files of each finished day are
    rewritten without them, and the old files are deleted at once, unless a grace is given. A packet that the
    lake holds at several places is removed from all of them: for that, the ids of the whole lake are read
    whenever there are new tombstones, and otherwise those of days that have changed. Empty rows and the
    relay's signed tombstones stay, so that audit can still prove everything else. An archive may run at the
    same time. The current day waits for a later run. After a grace period, the next erase or compact deletes
    what still contains the packets.
    """
    from strata_pipeline.jobs.erase import erase

    with failures_told(), session_on(lake, "erase", master, conf) as spark:
        with steps_shown("erasing", json, spark) as show:

            def progress(done: ErasedFrom) -> None:
                show(f"{done.packets:,} packets in {done.days} days")

            done = erase(
                spark,
                database_url,
                lake,
                patience=patience,
                grace=grace,
                everywhere=not places_only,
                progress=progress,
            )
    text = f"erased {done.packets:,} packets from {done.days} days, of {done.tombstones:,} tombstones"
    if done.searched:
        text += f"; read the ids of {done.searched:,} days"
    if done.emptied:
        text += f"; emptied {done.emptied:,} rows in quarantine, which were damaged before they were archived"
    if done.waiting:
        text += f"; {done.waiting:,} packets wait: their day is not over, or is being read or written"
    if done.aside:
        text += (
            f"; {done.aside:,} rows in quarantine may hold more of it, and stay: their ids or times are not "
            "those of the tombstones. Archive the relay's log into a new lake to be without them"
        )
    if done.copies:
        text += f"; look for copies in {', '.join(done.copies)}"
    say(text, json, event="erased", **msgspec.to_builtins(done))
