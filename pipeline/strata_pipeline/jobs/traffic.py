"""`strata-pipeline traffic`: how much each author sends, how much at once, and how often the same text.

The texts and seconds that are read from a day are kept beside the tables. The next run reads only days that
are new or have changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from strata.protocol.sequences import day_text

from strata_pipeline.datasets.traffic import Abuse, AuthorHours, Bursts, Clusters, Hours, Seconds, Texts
from strata_pipeline.jobs.day_tables import DayTables, bring_up
from strata_pipeline.jobs.failures import translate_failures
from strata_pipeline.jobs.tables import (
    DayWindow,
    check_output,
    keep,
    rows_and_totals,
    rows_of,
    tables_of,
    write_page,
)
from strata_pipeline.lake.places import open_lake
from strata_pipeline.log.abuse import load_abuse
from strata_pipeline.planning import joined_in_place, planned
from strata_pipeline.reports.traffic import TrafficFigures, render_traffic
from strata_pipeline.transforms.abuse import judge
from strata_pipeline.transforms.bursts import find_bursts
from strata_pipeline.transforms.days import day_name
from strata_pipeline.transforms.near_duplicates import (
    find_clusters,
    find_meetings,
    find_near_duplicates,
    read_texts,
)
from strata_pipeline.transforms.thresholds import BURST_CEILING, BURST_FLOOR, Thresholds, check_counts
from strata_pipeline.transforms.traffic import (
    count_author_hours,
    count_hours,
    seconds_by_day,
    seconds_of,
    whole_seconds,
)

__all__ = ["TrafficOptions", "traffic"]

_MAX_HOURS = 100_000
_SHOWN_TYPES = 15
_SHOWN = 50
_FORMAT = 1


@dataclass(frozen=True)
class TrafficOptions:
    """The bounds of bursts and of abuse. Raises `UsageError` for values that make no sense."""

    burst_floor: int = BURST_FLOOR
    burst_ceiling: int = BURST_CEILING
    thresholds: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        check_counts(self.burst_floor, self.burst_ceiling)


@dataclass(frozen=True)
class _Tables:
    hours: Hours
    author_hours: AuthorHours
    bursts: Bursts
    clusters: Clusters
    abuse: Abuse


def traffic(
    spark: SparkSession,
    path: str | Path,
    *,
    days: int | None = None,
    output: str | Path | None = None,
    load_into: str | None = None,
    options: TrafficOptions | None = None,
    now: int | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> TrafficFigures:
    """The figures of the last `days` of a lake; None takes all days.

    With `output`, write into this folder the tables `hours`, `author_hours`, `bursts`, `clusters` and `abuse`
    as Parquet, `traffic.html`, and `traffic_days`, with which the next run into this folder reads no day
    twice. With `load_into`, bring the abuse table of this relay's database up to date. Verdicts expire
    relative to `now` (Unix seconds; by default the clock's). `progress` is called as each step begins. Raises
    `PipelineError` and `LakeError`; the lake is only read.
    """
    lake = open_lake(path)
    window = DayWindow(lake, days)
    folder = check_output(output, lake)
    asked = options or TrafficOptions()
    at = int(time.time()) if now is None else now
    with (
        lake.held(),
        planned(spark, window.rows),
        joined_in_place(spark),  # an hour of an author has few rows, and all counts are by author and hour
        translate_failures("traffic"),
    ):
        counted, parts, texts = _read(spark, window, folder, progress)
        progress("comparing texts")
        seconds, meetings = whole_seconds(parts), find_meetings(texts)
        near_duplicates = find_near_duplicates(texts, meetings)
        with keep(seconds, texts, meetings, near_duplicates), tables_of(spark, folder) as made:
            hours = made.once("hours", count_hours(seconds, near_duplicates))
            by_author = made.once("author_hours", count_author_hours(seconds, texts, near_duplicates))
            clusters = made.once("clusters", find_clusters(texts, near_duplicates))
            found = find_bursts(by_author, asked.burst_floor, asked.burst_ceiling)
            bursts = made.once("bursts", found)
            abuse = made.once("abuse", judge(by_author, bursts, asked.thresholds, at))
            progress("counting")
            figures = _figures(window, _Tables(hours, by_author, bursts, clusters, abuse), counted)
            loaded = [] if load_into is None else [row.asDict() for row in abuse.frame.toLocalIterator()]
        if folder is not None:
            progress("writing")
            write_page(folder / "traffic.html", render_traffic(figures))
        if load_into is not None:
            progress("loading the abuse table")
            load_abuse(load_into, loaded, at)
    return figures


def _read(
    spark: SparkSession, window: DayWindow, folder: Path | None, progress: Callable[[str], None]
) -> tuple[int, Seconds, Texts]:
    """The number of days that had to be read, and the seconds and texts of all days."""
    if folder is None:
        packets = window.packets(spark)
        return len(window.days), seconds_of(packets), read_texts(packets)

    def seconds_in(days: list[int]) -> DataFrame:
        return seconds_by_day(window.packets(spark, days=days))

    def texts_in(days: list[int]) -> DataFrame:
        texts = read_texts(window.packets(spark, days=days))
        return texts.frame.withColumn("day", day_name())

    seconds = DayTables(folder / "traffic_days" / "seconds", Seconds, _FORMAT)
    texts = DayTables(folder / "traffic_days" / "texts", Texts, _FORMAT)
    counted = bring_up([(seconds, seconds_in), (texts, texts_in)], window.lake, window.days, progress)
    shown = list(map(day_text, window.days))
    for table in (seconds, texts):
        table.keep_only(shown)  # they are large, and quote authors
    return len(counted), seconds.read(spark, shown), texts.read(spark, shown)


def _figures(window: DayWindow, tables: _Tables, counted: int) -> TrafficFigures:
    names = ("packets", "size", "near_duplicates")
    sums = [F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in names]
    hours = tables.hours.frame
    by_author = hours.groupBy("author_id").agg(*sums, F.max("peak_packets").alias("peak_packets"))
    types = hours.groupBy("content_type").agg(*sums)
    counted_authors = [*sums, F.count(F.lit(1)).alias("authors")]
    authors, totals = rows_and_totals(
        by_author, _SHOWN, F.desc("packets"), "author_id", totals=counted_authors
    )
    orders: dict[str, list[Column | str]] = {
        "bursts": [F.desc("peak_packets"), "author_id", "hour_at"],
        "clusters": [F.desc("copies"), "first_sequence"],
        "abuse": ["verdict", "author_id"],
    }
    shown: dict[str, list[dict[str, Any]]] = {}
    for name, order in orders.items():
        number = F.count(F.lit(1)).alias(name)
        shown[name], told = rows_and_totals(vars(tables)[name].frame, _SHOWN, *order, totals=[number])
        totals |= told
    return TrafficFigures(
        note=window.note,
        totals=totals | {"days": window.note.days, "counted": counted},
        hourly=rows_of(hours.groupBy("hour_at").agg(*sums).orderBy("hour_at"), _MAX_HOURS),
        authors=authors,
        types=rows_of(types.orderBy(F.desc("packets"), "content_type"), _SHOWN_TYPES),
        **shown,
    )
