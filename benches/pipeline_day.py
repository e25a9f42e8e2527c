"""A synthetic day of a relay, as large as asked for: what archive, compact, audit and traffic take for it.

The log has a small day, the large one, and a small one after it, so that the large day is finished. Its
packets are really signed. Each job is a program of its own, as an operator runs it, and reads what the one
before has left: the audit and the report read a compacted day. The log goes before the compaction begins.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from strata_pipeline.lake.lake import Lake
from strata_pipeline.log.spans import DEFAULT_BATCH_ROWS

from benches.job_memory import job_command, run
from benches.measures import Measure
from benches.pipeline_log import Made, append, empty_log

__all__ = ["BYTES_A_ROW", "check_space", "measure"]

BYTES_A_ROW = 2_000
"""On the disk at a time for each row: the log with its indexes, and the lake beside it."""
_WAL_BYTES = 1_200_000_000
"""What the database keeps besides, however small the log."""
_DAY = 86_400
_SMALL = 1_000
_BATCHES = 24
"""The large day has so many at least."""
_MOST_AUTHORS = 100_000


def check_space(folder: Path, rows: int) -> None:
    """Raise `SystemExit` where the disk of a folder is too small for a day of so many rows."""
    needed, free = rows * BYTES_A_ROW + _WAL_BYTES, shutil.disk_usage(folder).free
    if needed > free:
        raise SystemExit(
            f"a day of {rows:,} rows takes about {needed / 1e9:,.1f} GB of disk, {BYTES_A_ROW:,} bytes a row "
            f"and a little more, and {folder} has {free / 1e9:,.1f} GB free: name another folder with "
            "--folder, or fewer --rows"
        )


def measure(rows: int, folder: Path, say: Callable[[str], None]) -> list[Measure]:
    """The figures of a day of so many rows; log and lake are made in `folder`, and are gone afterwards."""
    check_space(folder, rows)
    lake, log = folder / "day-lake", folder / "day-log"
    # Yesterday, so that none of it is from the future.
    day = (int(time.time()) // _DAY - 1) * _DAY
    authors = min(_MOST_AUTHORS, max(200, rows // 50))
    measures: list[Measure] = []
    with empty_log(log) as server:
        append(server.url, Made(_SMALL, True, day - _DAY // 2))
        run(job_command("archive", lake, "--database-url", server.url))
        tip = Lake.open(lake).tip
        say(f"day: a log of {rows:,} signed packets of {authors:,} authors")
        began = time.perf_counter()
        append(server.url, Made(rows, True, day, _DAY - 1, _SMALL, authors, varied=True))
        append(server.url, Made(_SMALL, True, day + _DAY, first=_SMALL + rows))
        size = _size(log)
        say(f"day: made in {time.perf_counter() - began:,.0f} s, {size / rows:,.0f} bytes a row")
        size_of_batch = str(min(DEFAULT_BATCH_ROWS, max(1, rows // _BATCHES)))
        options = ("--database-url", server.url, "--batch-rows", size_of_batch)
        measures += _step("archive", rows, lake, say, *options)
    shutil.rmtree(log)
    measures += _step("compact", rows, lake, say)
    measures += _step("audit", rows, lake, say, "--since", tip, name="audit --since")
    measures += _step("traffic", rows, lake, say, "--days", "2", "--output", str(folder / "day-report"))
    measures.append(Measure("day", "log, bytes a row", size / rows, "bytes"))
    for done in (lake, folder / "day-report"):
        shutil.rmtree(done)
    return measures


def _step(
    job: str, rows: int, lake: Path, say: Callable[[str], None], *options: str, name: str = ""
) -> list[Measure]:
    """A job, run as a program."""
    ran = run(job_command(job, lake, *options))
    told = json.loads(ran.told.splitlines()[-1])
    if job in ("archive", "audit") and told["packets"] != rows + _SMALL:
        raise SystemExit(f"{job} tells of {told['packets']:,} packets and not of {rows + _SMALL:,}")
    what = f"{rows:,} rows, {name or job}"
    if job == "compact" and told["days"] != 1:
        raise SystemExit(f"{told['days']} days were compacted, and not the large one alone")
    files = sum(1 for _ in (lake / "packets").rglob("*.parquet"))
    say(f"day: {what}: {ran.seconds:,.1f} s, {ran.peak_mb:,.0f} MB, {files} files")
    sizes = {"lake, bytes a row": _size(lake) / rows}
    return [
        Measure("day", what, rows / ran.seconds, "rows/s", details=sizes),
        Measure("day", f"{what}, time", ran.seconds, "s"),
        Measure("day", f"{what}, peak memory", ran.peak_mb, "MB", details=ran.details),
        Measure("day", f"{what}, files of packets after it", files, "files"),
    ]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
