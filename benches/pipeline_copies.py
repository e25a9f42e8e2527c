"""Copies and restores of lakes with many small batches, as from an archive that looks every ten seconds."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from strata_pipeline.lake.lake import Lake

from benches.job_memory import Ran, job_command, run
from benches.measures import Measure
from benches.pipeline_lakes import add_made, add_rows
from benches.pipeline_log import empty_log
from benches.pipeline_packets import Made, Row, made_rows

__all__ = ["measure"]

_DAY = 86_400
_BATCH_ROWS = 5
_DAYS = 4
"""Days that have as many batches together as one day has alone."""


def measure(batches: int, folder: Path, say: Callable[[str], None]) -> list[Measure]:
    """The figures for a finished day of so many batches, for four days of a quarter of them, and for the
    day after its compaction."""
    measures: list[Measure] = []
    for days in (1, _DAYS):
        lake = folder / f"copies-{days}"
        _make(lake, days, batches // days, say)
        what = f"{batches // days:,} batches a day, {days} day{'s' * (days > 1)}"
        measures += _copied(what, lake, batches, folder, say)
        if days == 1:
            measures += _restored(what, lake, batches, folder, say)
            run(job_command("compact", lake))
            measures += _copied(f"{what}, compacted", lake, batches, folder, say)
        shutil.rmtree(lake)
    return measures


def _make(lake: Path, days: int, batches: int, say: Callable[[str], None]) -> None:
    say(f"copies: {days} × {batches:,} batches of {_BATCH_ROWS} packets")
    last = int(time.time()) // _DAY - 1
    for number in range(days):
        day = last - days + number
        made = Made(batches * _BATCH_ROWS, False, day * _DAY, _DAY - 1, number * batches * _BATCH_ROWS)
        add_rows(lake, partial(_rows, made=made), made.rows, day, _BATCH_ROWS)
    add_made(lake, Made(1, False, last * _DAY))  # so that the days before it are finished


def _rows(numbers: range, *, made: Made) -> list[Row]:
    return made_rows(numbers, made=made)


def _copied(what: str, lake: Path, batches: int, folder: Path, say: Callable[[str], None]) -> list[Measure]:
    copy = folder / "copies-copy"
    command = [sys.executable, "-m", "strata_pipeline", "copy", "--lake", str(lake), "--to", str(copy)]
    done, again = run(command), run(command)
    if Lake.open(copy).tip != Lake.open(lake).tip:
        raise SystemExit("the copy has another tip")
    shutil.rmtree(copy)
    return [
        *_measures(f"{what}, copy", batches, done, say),
        Measure("copies", f"{what}, a copy with nothing to do", again.seconds, "s", details=again.details),
    ]


def _restored(what: str, lake: Path, batches: int, folder: Path, say: Callable[[str], None]) -> list[Measure]:
    with empty_log(folder / "copies-log") as server:
        done = run(job_command("restore", lake, "--database-url", server.url))
    shutil.rmtree(folder / "copies-log", ignore_errors=True)
    return _measures(f"{what}, restore", batches, done, say)


def _measures(what: str, batches: int, ran: Ran, say: Callable[[str], None]) -> list[Measure]:
    say(f"{what}: {ran.seconds:,.0f} s, {ran.cpu_seconds:,.0f} s of the processor, {ran.peak_mb:,.0f} MB")
    return [
        Measure("copies", what, batches / ran.seconds, "batches/s", details=ran.details),
        Measure("copies", f"{what}, peak memory", ran.peak_mb, "MB"),
    ]
