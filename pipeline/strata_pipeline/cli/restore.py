"""`strata-pipeline restore`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from strata_pipeline.cli.app import (
    Json,
    LakePlace,
    Master,
    SparkConf,
    day_given,
    failures_told,
    say,
    session_on,
)
from strata_pipeline.cli.progress import rows_shown

if TYPE_CHECKING:
    from strata_pipeline.jobs.restore import Restored

__all__ = ["restore_command"]


def restore_command(
    database_url: Annotated[
        str,
        typer.Option(
            envvar="STRATA_PIPELINE_RESTORE_URL",
            metavar="URL",
            help="The PostgreSQL to restore into, after `relayd migrate`; the role must own its tables.",
            show_default=False,
            show_envvar=True,
        ),
    ],
    lake: LakePlace,
    until: Annotated[
        str | None,
        typer.Option(metavar="DAY", help="The last day to restore, as 2026-11-21 (UTC).", show_default=False),
    ] = None,
    master: Master = None,
    conf: SparkConf = None,
    json: Json = False,
) -> None:
    """Restore the packets of a lake into a relay's database.

    Each packet returns to its place, and a relay on this database answers the same subscriptions with the
    same packets. An interrupted restore continues when you run it again; an extra run changes nothing. The
    run begins a new epoch of the log: readers that had advanced further than the lake are told what they may
    miss. To keep the old relay's cursors valid up to there, copy the rows of its tables relay_secrets and
    log_terms from a backup before the restore.
    """
    from strata_pipeline.jobs.restore import restore

    with failures_told():
        last_day = None if until is None else day_given("--until", until)
        with (
            session_on(lake, "restore", master, conf) as spark,
            rows_shown("restoring", json) as show,
        ):

            def progress(done: Restored) -> None:
                show(done.packets, done.packets + done.left)
                if json:
                    told = {"event": "progress", **msgspec.to_builtins(done)}
                    print(msgspec.json.encode(told).decode(), flush=True)

            done = restore(spark, database_url, lake, until=last_day, progress=progress)
    say(_told(done), json, event="done", **msgspec.to_builtins(done))


def _told(done: Restored) -> str:
    aside = f"; {done.erased:,} were erased, and stay so" if done.erased else ""
    aside += f"; {done.damaged:,} were damaged, and only keep their places" if done.damaged else ""
    if not done.epoch:
        return f"nothing to restore: the log ends at {done.reached}{aside}"
    return (
        f"restored {done.packets:,} packets; the log ends at {done.reached}, epoch {done.epoch} begins{aside}"
    )
