"""`strata-pipeline archive`."""

from __future__ import annotations

import io
import signal
import threading
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from strata_pipeline.cli.app import (
    Json,
    LakeFolder,
    Master,
    SparkConf,
    Url,
    failures_told,
    say,
    spark_conf,
)
from strata_pipeline.log.spans import DEFAULT_BATCH_ROWS

if TYPE_CHECKING:
    from strata_pipeline.jobs.archive import Archived

__all__ = ["archive_command"]


def archive_command(
    database_url: Url,
    lake: LakeFolder,
    continuous: Annotated[bool, typer.Option("--continuous", help="Follow the log until stopped.")] = False,
    interval: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="With --continuous: how often to look for new packets.", min=0.1
        ),
    ] = 10.0,
    batch_rows: Annotated[
        int, typer.Option(metavar="N", help="The most packets in a batch.", min=1)
    ] = DEFAULT_BATCH_ROWS,
    master: Master = None,
    conf: SparkConf = None,
    json: Json = False,
) -> None:
    """Bring a lake up to the head of the relay's log.

    Each packet is archived once, and every packet_id is recomputed. Ctrl-C or SIGTERM ends the job after the
    current batch. Whatever happens, the next run goes on where this one stopped.
    """
    from strata_pipeline.jobs.archive import archive
    from strata_pipeline.session import open_session

    stopped = threading.Event()

    def follow() -> bool:
        return continuous and not stopped.wait(interval)

    with failures_told(), open_session("archive", master=master, conf=spark_conf(conf)) as spark:
        signal.signal(signal.SIGTERM, lambda *_: stopped.set())
        signal.signal(signal.SIGINT, lambda *_: stopped.set())
        with _progress_bar(enabled=not json) as bar:
            task = bar.add_task("archiving", total=None)
            told = 0

            def progress(done: Archived) -> None:
                nonlocal told
                rows = done.packets + done.quarantined
                bar.update(task, completed=rows, total=rows + done.behind)
                if json and done.batches > told:
                    say("", json, event="batch", **msgspec.to_builtins(done))
                told = done.batches

            done = archive(
                spark,
                database_url,
                lake,
                batch_rows=batch_rows,
                follow=follow,
                stopped=stopped.is_set,
                progress=progress,
            )
    say(_told(done), json, event="done", **msgspec.to_builtins(done))


def _progress_bar(*, enabled: bool) -> Progress:
    console = Console(stderr=True)
    if not (enabled and console.is_terminal):  # a log gets nothing, not even the sequence that hides the bar
        console = Console(file=io.StringIO())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


def _told(done: Archived) -> str:
    aside = f", {done.quarantined:,} more put aside in quarantine" if done.quarantined else ""
    counts = f"{done.packets:,} packets in {done.batches:,} batches"
    moved = f"; {len(done.moved_aside)} broken folders were moved into _aside" if done.moved_aside else ""
    return f"archived {counts}{aside}; the lake stands at {done.reached}{moved}"
