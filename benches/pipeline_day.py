"""A synthetic day of a relay, as large as asked for: what archive, compact, audit and traffic take for it.

The log has a small day, the large one, and a small one after it, so that the large day is finished. Its
packets are really signed. The log is made and archived in portions, and goes before the compaction begins:
the disk has one portion of the log beside the lake, and later the lake twice. Each job is a program of its
own, as an operator runs it, and reads what the one before has left: the audit and the report read a compacted
day. The files that the compaction has replaced are gone by then, as after a day's grace.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from strata_pipeline.jobs.rewriting import SORTED_BYTES
from strata_pipeline.lake.generations import delete_retired
from strata_pipeline.lake.lake import Lake
from strata_pipeline.log.spans import DEFAULT_BATCH_ROWS

from benches.disk_use import taken, watched
from benches.job_memory import Ran, job_command, run, together
from benches.measures import Measure
from benches.pipeline_lakes import batches_added
from benches.pipeline_log import append, empty_log
from benches.pipeline_packets import Made, made_rows
from benches.pipeline_portions import PORTION_ROWS, DayLog, InLake

__all__ = ["AUDITED_ROWS", "check_space", "measure"]

_LOG_BYTES = 1_150
"""On the disk for each row that the log has at a time, with its indexes."""
_WAL_BYTES = 2 * 2**30
"""So large the database lets its WAL grow, however small the log is."""
_ARCHIVED_BYTES = 300
"""For each row in the lake, as archived."""
_COMPACTED_BYTES = 560
"""For each row while a day is compacted: the old files and the new ones."""
_SORTED_BYTES = 360
"""And for each row that is sorted at a time."""
_BODY_BYTES = 600
"""Of a packet, about."""
_DAY = 86_400
_SMALL = 1_000
_BATCHES = 24
"""The large day has so many at least."""
_MOST_AUTHORS = 100_000
_TOLD_ROWS = 5_000_000
AUDITED_ROWS = 10_000_000
"""The newest of the day, which the audit since a tip reads."""


def check_space(folder: Path, rows: int, portion_rows: int = PORTION_ROWS) -> None:
    """Raise `SystemExit` where the disk of a folder is too small for a day of so many rows."""
    needed, free = _space(rows, portion_rows), shutil.disk_usage(folder).free
    if needed > free:
        raise SystemExit(
            f"a day of {rows:,} rows takes about {needed / 1e9:,.1f} GB of disk, and {folder} has "
            f"{free / 1e9:,.1f} GB free: name another folder with --folder, or fewer --rows"
        )


def _space(rows: int, portion_rows: int) -> int:
    """What a day takes on the disk at most: before the log goes, or while the day is compacted."""
    with_log = min(rows, portion_rows) * _LOG_BYTES + _WAL_BYTES + rows * _ARCHIVED_BYTES
    sorted_rows = min(rows, SORTED_BYTES // _BODY_BYTES)
    return max(with_log, rows * _COMPACTED_BYTES + sorted_rows * _SORTED_BYTES)


def measure(
    rows: int,
    folder: Path,
    say: Callable[[str], None],
    portion_rows: int = PORTION_ROWS,
    *,
    archived: int | None = None,
    audited: int = AUDITED_ROWS,
) -> list[Measure]:
    """The figures of a day of so many rows; log and lake are made in `folder`, and are gone afterwards.

    The newest `archived` rows, or all, come out of a log. The others are written into the lake as an archive
    writes them, in a third of the time. The audit since a tip reads the newest `audited` rows, in whole
    portions, of those that were archived.
    """
    check_space(folder, rows, portion_rows)
    steps = _Steps(rows, folder, say)
    tail = rows if archived is None else min(archived, rows)
    tips, done = _archive(steps, portion_rows, tail)
    shutil.rmtree(steps.log)
    measures = steps.figures("archive", together(done.runs), tail, done.packets)
    measures += steps.step("compact")
    with Lake.replace(steps.lake) as compacted:
        delete_retired(compacted, int(time.time()), grace=0)
    portions = min(len(tips), -(-audited // portion_rows))
    read = tail - (len(tips) - portions) * portion_rows
    measures += steps.step("audit", "--since", tips[-portions], name="audit --since", read=read)
    measures += steps.step("traffic", "--days", "2", "--output", str(folder / "day-report"))
    measures.append(Measure("day", "log, bytes a row", done.log_row_bytes, "bytes"))
    for made in (steps.lake, steps.spills, folder / "day-report"):
        shutil.rmtree(made, ignore_errors=True)
    return measures


def _archive(steps: _Steps, portion_rows: int, tail: int) -> tuple[list[str], InLake]:
    """The large day in the lake, and the tip of the lake before each portion of its `tail`, which comes out
    of a log."""
    rows = steps.rows
    # Yesterday, so that none of it is from the future.
    day = (int(time.time()) // _DAY - 1) * _DAY
    authors = min(_MOST_AUTHORS, max(200, rows // 50))
    made = Made(rows, True, day, _DAY - 1, _SMALL, authors, varied=True)
    after = Made(_SMALL, True, day + _DAY, first=_SMALL + rows)
    batch_rows = min(DEFAULT_BATCH_ROWS, max(1, rows // _BATCHES))
    with empty_log(steps.log, searched=False) as server:
        append(server.url, Made(_SMALL, True, day - _DAY // 2))
        steps.run("archive", "--database-url", server.url)
        steps.say(f"day: a log of {rows:,} signed packets of {authors:,} authors")
        if tail < rows:
            _write(steps, made, rows - tail, batch_rows)
            # The archive asks the log for the last packet that the lake has.
            append(server.url, made, range(rows - tail - 1, rows - tail))
        log = DayLog(server.url, steps.log, made, after, steps.say, portion_rows, first=rows - tail)
        tips: list[str] = []

        def archive() -> Ran:
            tips.append(Lake.open(steps.lake).tip)
            return steps.run("archive", "--database-url", server.url, "--batch-rows", str(batch_rows))

        return tips, log.archive(archive)


def _write(steps: _Steps, made: Made, rows: int, batch_rows: int) -> None:
    """Write so many packets of a day into the lake, without a log."""
    began, told = time.perf_counter(), 0
    batches = batches_added(steps.lake, partial(made_rows, made=made), rows, made.at // _DAY, batch_rows)
    for number, _ in enumerate(batches, 1):
        there = min(number * batch_rows, rows)
        if there - told >= _TOLD_ROWS or there == rows:
            told, seconds = there, time.perf_counter() - began
            steps.say(f"day: {there:,} of {rows:,} rows written into the lake in {seconds:,.0f} s")


@dataclass(slots=True)
class _Steps:
    """The jobs of a day and what they take."""

    rows: int
    folder: Path
    say: Callable[[str], None]
    disk_bytes: int = 0
    """The most that the folder took while jobs ran, since it was told last."""

    @property
    def lake(self) -> Path:
        return self.folder / "day-lake"

    @property
    def log(self) -> Path:
        return self.folder / "day-log"

    @property
    def spills(self) -> Path:
        """Where Spark puts what it sorts: on the disk that `check_space` has looked at."""
        return self.folder / "day-spark"

    def run(self, job: str, *options: str) -> Ran:
        """A job, run as a program."""
        with watched(self.folder) as peak:
            ran = run(job_command(job, self.lake, *options), {"SPARK_LOCAL_DIRS": str(self.spills)})
        self.disk_bytes = max(self.disk_bytes, peak.taken)
        return ran

    def step(self, job: str, *options: str, name: str = "", read: int | None = None) -> list[Measure]:
        """The figures of a job that does all at once, with all rows or with those that it reads."""
        ran = self.run(job, *options)
        told = json.loads(ran.told.splitlines()[-1])
        if job == "compact" and told["days"] != 1:
            raise SystemExit(f"{told['days']} days were compacted, and not the large one alone")
        packets = told["packets"] if job == "audit" else None
        return self.figures(name or job, ran, self.rows if read is None else read, packets)

    def figures(self, name: str, ran: Ran, rows: int, packets: int | None = None) -> list[Measure]:
        """The figures of a job that has read so many rows of the day, and that tells of so many packets where
        it counts them: of the small day after it as well."""
        if packets not in (None, rows + _SMALL):
            raise SystemExit(f"{name} tells of {packets:,} packets and not of {rows + _SMALL:,}")
        what, disk, self.disk_bytes = f"{self.rows:,} rows, {name}", self.disk_bytes, 0
        files = sum(1 for _ in (self.lake / "packets").rglob("*.parquet"))
        self.say(
            f"day: {what}: {rows:,} in {ran.seconds:,.1f} s, {ran.peak_mb:,.0f} MB, {files} files; "
            f"{disk / 1e9:,.2f} GB of disk at most"
        )
        sizes = {"lake, bytes a row": taken(self.lake) / self.rows}
        return [
            Measure("day", what, rows / ran.seconds, "rows/s", details=sizes),
            Measure("day", f"{what}, time", ran.seconds, "s"),
            Measure("day", f"{what}, peak memory", ran.peak_mb, "MB", details=ran.details),
            Measure("day", f"{what}, files of packets after it", files, "files"),
            Measure("day", f"{what}, peak of the disk", disk / 1e6, "MB"),
        ]
