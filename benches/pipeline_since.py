"""An audit since a tip: its rate for ever more new packets, behind an old lake that is small and one that is
large. The lakes are made without a log; the new packets are really signed."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from strata_pipeline.lake.lake import Lake

from benches.job_memory import run
from benches.measures import Measure
from benches.pipeline_lakes import add_made
from benches.pipeline_log import Made

__all__ = ["measure"]

_TARGET = 30_000
_DAY = 86_400
_OLD_DAYS = 5
_SMALL_OLD = 10_000
_FIRST_NEW = 100_000
_BATCH_ROWS = 100_000
_AUTHORS = 20_000


def measure(rows: int, old: int, folder: Path, say: Callable[[str], None]) -> list[Measure]:
    """Audits of 10⁵, 10⁶, … and of `rows` new packets; the larger old lake has `old`."""
    day = int(time.time()) // _DAY - 1
    sizes = _sizes(rows)
    lakes, tips, found = {}, {}, {}
    for before in sorted({min(_SMALL_OLD, old), old}):
        lake = folder / f"since-{before}"
        say(f"since: an old lake of {before:,} packets")
        for number in range(_OLD_DAYS):
            first = before * number // _OLD_DAYS
            size = before * (number + 1) // _OLD_DAYS - first
            at = (day - _OLD_DAYS + number) * _DAY
            add_made(lake, Made(size, False, at, _DAY - 1, first, _AUTHORS, varied=True))
        lakes[before], tips[before] = lake, Lake.open(lake).tip
    there = 0
    for size in sizes:
        for before, lake in lakes.items():
            # The numbers go on behind those of the larger old lake: no packet is in a lake twice.
            made = Made(
                size - there, True, day * _DAY + there // 1000, 60, old + there, _AUTHORS, varied=True
            )
            add_made(lake, made, _BATCH_ROWS)
            found[before, size] = _audit(lake, tips[before], size, say, before)
        there = size
    for lake in lakes.values():
        shutil.rmtree(lake)
    return [
        measured
        for (before, size), (seconds, peak) in found.items()
        for measured in (
            Measure(
                "since",
                f"audit of {size:,} new packets behind {before:,}",
                size / seconds,
                "/s",
                _TARGET if size == sizes[-1] else None,
                limit=size / found[min(lakes), size][0],
                limit_name=f"behind {min(lakes):,}",
                details={"seconds, with the start of Spark": seconds},
            ),
            Measure("since", f"audit of {size:,} behind {before:,}, peak memory", peak, "MB"),
        )
    ]


def _sizes(rows: int) -> list[int]:
    sizes, size = [], _FIRST_NEW
    while size < rows:
        sizes.append(size)
        size *= 10
    return [*sizes, rows]


def _audit(lake: Path, tip: str, size: int, say: Callable[[str], None], before: int) -> tuple[float, float]:
    command = [sys.executable, "-m", "strata_pipeline", "audit", "--lake", str(lake), "--since", tip]
    ran = run([*command, "--master", "local[2]", "--json"])
    told = json.loads(ran.told.splitlines()[-1])
    if told["packets"] != size:
        raise SystemExit(f"the audit tells of {told['packets']:,} packets and not of {size:,}")
    say(f"since: {size:,} new behind {before:,}: {size / ran.seconds:,.0f}/s, {ran.peak_mb:,.0f} MB")
    return ran.seconds, ran.peak_mb
