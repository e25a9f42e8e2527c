"""An audit since a tip: its rate for growing numbers of new packets, behind a small old lake and behind a
large one. The lakes are made without a log; the new packets have real signatures."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from strata_pipeline.lake.lake import Lake

from benches.job_memory import Ran, job_command, run
from benches.measures import Measure, tenfold
from benches.pipeline_lakes import add_copies, add_made, add_same
from benches.pipeline_packets import Made

__all__ = ["measure"]

_TARGET = 30_000
_DAY = 86_400
_OLD_DAYS = 5
_SMALL_OLD = 10_000
_MADE = 50_000
"""The packets made for each old day; further ones are copies of them."""
_FIRST_NEW = 100_000
_BATCH_ROWS = 100_000
_AUTHORS = 20_000


def measure(rows: int, old: int, folder: Path, say: Callable[[str], None]) -> list[Measure]:
    """Audits of 10⁵, 10⁶, … and of `rows` new packets; the larger old lake has `old`."""
    day = int(time.time()) // _DAY - 1
    sizes = tenfold(_FIRST_NEW, rows)
    olds = sorted({min(_SMALL_OLD, old), old})
    lakes, tips, found = [folder / f"since-{before}" for before in olds], [], {}
    for lake, before in zip(lakes, olds, strict=True):
        say(f"since: an old lake of {before:,} packets")
        for number in range(_OLD_DAYS):
            size, at = before // _OLD_DAYS, (day - _OLD_DAYS + number) * _DAY
            made = min(_MADE, size)
            add_made(lake, Made(made, False, at, _DAY - 1, number * _MADE, _AUTHORS, varied=True))
            add_copies(lake, size)
        tips.append(Lake.open(lake).tip)
    there = 0
    for size in sizes:
        # The numbers continue those of the old days, so that no packet is in a lake twice.
        first, at = _OLD_DAYS * _MADE + there, day * _DAY + there // 1000
        add_made(lakes[0], Made(size - there, True, at, 60, first, _AUTHORS, varied=True), _BATCH_ROWS)
        for lake in lakes[1:]:
            add_same(lake, lakes[0])
        for lake, before, tip in zip(lakes, olds, tips, strict=True):
            found[before, size] = _audit(lake, tip, size, say, before)
        there = size
    for lake in lakes:
        shutil.rmtree(lake)
    return [
        measured
        for (before, size), ran in found.items()
        for measured in (
            Measure(
                "since",
                f"audit of {size:,} new packets behind {before:,}",
                size / ran.seconds,
                "/s",
                _TARGET if size == sizes[-1] else None,
                limit=size / found[olds[0], size].seconds,
                limit_name=f"behind {olds[0]:,}",
                details={"seconds, with the start of Spark": ran.seconds},
            ),
            Measure(
                "since",
                f"audit of {size:,} behind {before:,}, packets for a second of the processor",
                size / max(ran.cpu_seconds, 1e-9),
                "/s",
                limit=size / max(found[olds[0], size].cpu_seconds, 1e-9),
                limit_name=f"behind {olds[0]:,}",
            ),
            Measure("since", f"audit of {size:,} behind {before:,}, peak memory", ran.peak_mb, "MB"),
        )
    ]


def _audit(lake: Path, tip: str, size: int, say: Callable[[str], None], before: int) -> Ran:
    ran = run(job_command("audit", lake, "--since", tip))
    told = json.loads(ran.told.splitlines()[-1])
    if told["packets"] != size:
        raise SystemExit(f"the audit tells of {told['packets']:,} packets and not of {size:,}")
    say(
        f"since: {size:,} new behind {before:,}: {size / ran.seconds:,.0f}/s, {ran.cpu_seconds:,.0f} s of "
        f"the processor, {ran.peak_mb:,.0f} MB"
    )
    return ran
