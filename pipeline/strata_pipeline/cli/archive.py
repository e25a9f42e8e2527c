"""`strata-pipeline archive`."""

from __future__ import annotations

import queue
import signal
import threading
import time
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from strata_pipeline.cli.app import (
    Json,
    LakePlace,
    Master,
    SparkConf,
    Url,
    failures_told,
    say,
    spark_conf,
)
from strata_pipeline.cli.progress import rows_shown
from strata_pipeline.cli.watching import MetricsFile, watched
from strata_pipeline.errors import UsageError
from strata_pipeline.log.spans import DEFAULT_BATCH_ROWS

if TYPE_CHECKING:
    from strata_pipeline.jobs.archive import Archived
    from strata_pipeline.metrics import JobMetrics

__all__ = ["Stopping", "archive_command"]


def archive_command(
    database_url: Url,
    lake: LakePlace,
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
    delta: Annotated[
        bool,
        typer.Option("--delta", help="Publish the lake as a Delta table, once a minute and at the end."),
    ] = False,
    metrics_file: MetricsFile = None,
    metrics_listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="With --continuous: answer Prometheus here, at /metrics."),
    ] = None,
    master: Master = None,
    conf: SparkConf = None,
    json: Json = False,
) -> None:
    """Bring a lake up to date with the relay's log.

    Each packet is archived once, and every packet_id is recomputed. Ctrl-C or SIGTERM ends the job after the
    current batch. If it is interrupted, the next run continues where this one stopped.
    """
    from strata_pipeline.jobs.archive import archive
    from strata_pipeline.session import open_session

    stopping = Stopping()

    def follow() -> bool:
        return continuous and not stopping.wait(interval)

    with failures_told():
        if metrics_listen is not None and not continuous:
            raise UsageError("--metrics-listen needs --continuous; use --metrics-file for a run that ends")
        with (
            watched("archive", lake, metrics_file, metrics_listen) as metrics,
            open_session("archive", master=master, conf=spark_conf(conf)) as spark,
            rows_shown("archiving", json) as show,
        ):
            signal.signal(signal.SIGTERM, stopping.ask)
            signal.signal(signal.SIGINT, stopping.ask)
            counting = _Counting(metrics)

            def progress(done: Archived) -> None:
                rows = done.packets + done.quarantined
                show(rows, rows + done.behind)
                if json and done.batches > counting.batches:
                    say("", json, event="batch", **msgspec.to_builtins(done))
                counting.update(done)

            done = archive(
                spark,
                database_url,
                lake,
                batch_rows=batch_rows,
                delta=delta,
                follow=follow,
                stopped=stopping.is_asked,
                progress=progress,
            )
    say(_told(done), json, event="done", **msgspec.to_builtins(done))


class Stopping:
    """Whether a signal has asked to stop. A signal handler may run in the middle of `wait` or of another run
    of itself, in which a lock, such as that of an event, would wait for itself for ever."""

    def __init__(self) -> None:
        self._asked = queue.SimpleQueue[None]()  # its `put` is reentrant

    def ask(self, *_: object) -> None:
        """Record a signal; for use as a handler."""
        self._asked.put(None)

    def is_asked(self) -> bool:
        """Whether a signal has come."""
        return not self._asked.empty()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for a signal; return whether one has come."""
        try:
            self._asked.get(timeout=min(seconds, threading.TIMEOUT_MAX))
        except queue.Empty:
            return False
        self._asked.put(None)
        return True


class _Counting:
    """Adds to the metrics what a run has done since the last update."""

    def __init__(self, metrics: JobMetrics) -> None:
        self._metrics = metrics
        self._told: dict[str, int] = {}

    @property
    def batches(self) -> int:
        """The number of batches that the metrics include."""
        return self._told.get("batches", 0)

    def update(self, done: Archived) -> None:
        """Take over the progress, and write."""
        for name in ("batches", "packets", "quarantined", "body_bytes"):
            value = getattr(done, name)
            self._metrics.add(f"strata_archive_{name}", value - self._told.get(name, 0))
            self._told[name] = value
        self._metrics.set("strata_archive_behind_packets", done.behind)
        self._metrics.set("strata_archive_moved_aside", len(done.moved_aside))
        self._metrics.set("strata_lake_broken", 0)
        if not done.behind:
            self._metrics.set("strata_archive_head_reached_seconds", time.time())
        self._metrics.write()


def _told(done: Archived) -> str:
    aside = f", {done.quarantined:,} more put aside in quarantine" if done.quarantined else ""
    counts = f"{done.packets:,} packets in {done.batches:,} batches"
    moved = f"; {len(done.moved_aside)} broken folders were moved into _aside" if done.moved_aside else ""
    if done.deleted:
        moved += f"; {len(done.deleted)} objects of interrupted archives were deleted"
    if done.left_behind:
        moved += f"; {len(done.left_behind)} objects of interrupted archives are left for a later run"
    return f"archived {counts}{aside}; the lake stands at {done.reached}{moved}"
