"""`strata-pipeline report`: a site of static pages about a lake; each day is read once.

The figures of a day are kept beside the pages. The next report reads only days that are new or have
changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.dataset as pads
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from strata.protocol.sequences import day_text

from strata_pipeline.datasets import Quarantine
from strata_pipeline.days.figures import DayFigures, KindTotals, forget_changed, keep_days, week_of
from strata_pipeline.errors import UsageError
from strata_pipeline.jobs.failures import translate_failures
from strata_pipeline.jobs.tables import DayWindow, check_output, portions, write_page
from strata_pipeline.lake.contents import UNREADABLE
from strata_pipeline.lake.places import open_lake
from strata_pipeline.planning import planned
from strata_pipeline.reports.site import RelayScore, SiteFigures, render_site
from strata_pipeline.transforms.days import count_days, count_periods

__all__ = ["Reported", "report"]

_MOST_SCORES = 100_000
_AT = re.compile(r"at=(\d{1,12})")
_BESIDE = (
    ("Traffic", "traffic.html"),
    ("Trust", "trust.html"),
    ("Reliability of channels", "reliability.html"),
)


@dataclass(frozen=True, slots=True)
class Reported:
    """The result of a report."""

    tip: str
    days: int
    """The number of days that the report shows."""
    counted: int
    """How many of them were read for it; an earlier report had kept the figures of the others."""
    packets: int
    pages: list[str]
    """The files of the site, the index first."""


def report(
    spark: SparkSession,
    path: str | Path,
    output: str | Path,
    *,
    days: int | None = None,
    scores: str | Path | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Reported:
    """Write the site about the last `days` of a lake into a folder; None takes all days.

    `scores` is the folder of `reputation --output`. `progress` is called as each step begins. Raises
    `PipelineError` and `LakeError`; the lake is only read.
    """
    lake = open_lake(path)
    window = DayWindow(lake, days)
    folder = check_output(output, lake)
    assert folder is not None
    history = [] if scores is None else _scores(Path(scores))
    numbers = {day_text(day): day for day in lake.days()}
    with lake.held(), translate_failures("report"):
        current = forget_changed(
            folder / "days", lambda day: lake.mark_of(numbers[day]) if day in numbers else ""
        )
        found = {day: current[day_text(day)] for day in window.days if day_text(day) in current}
        missing = [day for day in window.days if day not in found]
        for portion in portions(missing, progress):
            counted = _count(spark, window, portion)
            keep_days(folder / "days", counted.values())
            found |= counted
        progress("adding up authors")
        shown = [found[day] for day in window.days]
        sketches = [(period, one.sketch) for one in shown if one.sketch
                    for period in (week_of(one.day), one.day[:7])]  # fmt: skip
        periods = count_periods(spark, sketches)
    progress("writing")
    others = [(title, file) for title, file in _BESIDE if (folder / file).exists()]
    site = render_site(SiteFigures(window.note, shown, periods, history, others))
    for name, text in site.items():
        write_page(folder / name, text)
    pages = sorted(site, key=lambda name: (name != "index.html", name))
    return Reported(lake.tip, len(shown), len(missing), sum(one.packets for one in shown), pages)


def _count(spark: SparkSession, window: DayWindow, days: list[int]) -> dict[int, DayFigures]:
    lake, packets = window.lake, window.packets(spark, days=days)
    aside = Quarantine(Quarantine.of(spark, lake, days).frame.where(F.col("sequence") <= lake.reached))
    with planned(spark, sum(map(lake.chain.rows_of, days))):
        rows = count_days(packets, aside).collect()
    return {day: _figures(day_text(day), lake.mark_of(day), [row for row in rows if row["day"] == day])
            for day in days}  # fmt: skip


def _figures(day: str, tip: str, rows: list[Row]) -> DayFigures:
    told: dict[str, dict[Any, Row]] = {}
    for row in rows:
        told.setdefault(row["what"], {})[row["name"]] = row
    author = told.get("author", {}).get(None)
    sample = told.get("sample", {}).get(None)

    def packets(what: str) -> dict[str, int]:
        return {name: row["packets"] for name, row in sorted(told.get(what, {}).items())}

    return DayFigures(
        day=day,
        tip=tip,
        kinds={
            name: KindTotals(row["packets"], row["size"])
            for name, row in sorted(told.get("kind", {}).items())
        },
        origins=packets("origin"),
        lags={int(name): count for name, count in packets("lag").items()},
        skews={int(name): count for name, count in packets("skew").items()},
        authors=0 if author is None else author["packets"],
        sketch=b"" if author is None else bytes(author["sketch"]),
        sample=b"" if sample is None else bytes(sample["sketch"]),
        quarantined=packets("quarantine"),
    )


def _scores(folder: Path) -> list[RelayScore]:
    """The newest scores that `reputation` has kept. Raises `UsageError`."""
    history = folder / "relay_score_history"
    there = [(_AT.fullmatch(one.name), one) for one in history.glob("at=*")]
    times = [(int(match[1]), one) for match, one in there if match is not None]
    found: list[RelayScore] = []
    is_there = False
    for at, one in sorted(times, reverse=True):
        try:
            scores = pads.dataset(one, format="parquet")
            if not scores.files:  # left by a run that was killed
                continue
            rows = scores.to_table(columns=["url", "score", "standing"])
        except UNREADABLE as error:
            raise UsageError(f"{one} cannot be read: {error}. Remove it, or run reputation again") from None
        is_there = True
        found += [RelayScore(at, **row) for row in rows.to_pylist()]
        if len(found) > _MOST_SCORES:
            break
    if not is_there:
        raise UsageError(f"{folder} has no relay_score_history: run reputation with --output {folder}")
    return found
