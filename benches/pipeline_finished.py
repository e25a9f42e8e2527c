"""A finished day after its compaction: the number of its files, and the memory of the compaction. The lake is
made without a log."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from strata.protocol.sequences import day_text
from strata_pipeline.log.spans import DEFAULT_BATCH_ROWS

from benches.job_memory import job_command, run
from benches.measures import Measure
from benches.pipeline_lakes import add_copies, add_made
from benches.pipeline_packets import Made

__all__ = ["measure"]

_TARGET = 50
_DAY = 86_400
_AUTHORS = 100_000
_MADE = 1_000_000
"""Further packets are copies of these, with their own places and ids."""
_BATCHES = 4
"""The least number of batches, so that a small day has several too."""


def measure(rows: int, folder: Path, say: Callable[[str], None]) -> list[Measure]:
    """The figures for a day of `rows` packets."""
    lake, day = folder / "finished-lake", int(time.time()) // _DAY - 1
    say(f"finished: a lake of {rows:,} packets")
    whole = min(rows, _MADE)
    made = Made(whole, False, day * _DAY, _DAY - 1, authors=min(_AUTHORS, rows), varied=True)
    add_made(lake, made, min(DEFAULT_BATCH_ROWS, max(1, whole // _BATCHES)))
    add_copies(lake, rows)
    add_made(lake, Made(1, False, (day + 1) * _DAY, first=rows))
    finished = lake / "packets" / f"day={day_text(day)}"
    before = _files(finished)
    ran = run(job_command("compact", lake))
    if json.loads(ran.told.splitlines()[-1])["days"] != 1:
        raise SystemExit("the day was not compacted")
    after = _files(finished)
    sizes = {"bytes a row": sum(path.stat().st_size for path in finished.rglob("*.parquet")) / rows}
    shutil.rmtree(lake)
    say(f"finished: {before:,} files became {after:,} in {ran.seconds:,.0f} s, {ran.peak_mb:,.0f} MB")
    what = f"a day of {rows:,}"
    return [
        Measure("finished", f"{what}, files", after, "files", _TARGET, at_most=True, details=sizes),
        Measure("finished", f"{what}, compacted", rows / ran.seconds, "rows/s"),
        Measure("finished", f"{what}, peak memory", ran.peak_mb, "MB", details=ran.details),
    ]


def _files(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.parquet"))
