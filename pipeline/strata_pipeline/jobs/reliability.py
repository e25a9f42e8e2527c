"""`strata-pipeline reliability`: how reliably the messages of channels arrived.

The messages of a day, without their contents, are kept beside the tables. The next run reads only days that
are new or have changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from strata.protocol.sequences import day_text

from strata_pipeline.datasets import Packets
from strata_pipeline.datasets.channels import ChannelDays, ChannelPackets, Gaps, Silences
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
from strata_pipeline.lake.kinds import CHANNEL
from strata_pipeline.lake.places import open_lake
from strata_pipeline.planning import planned
from strata_pipeline.reports.reliability import ReliabilityFigures, render_reliability
from strata_pipeline.transforms.acknowledgements import acknowledge
from strata_pipeline.transforms.channel_reading import read_channels
from strata_pipeline.transforms.reliability import channel_days, find_gaps, find_silences

__all__ = ["reliability"]

_MAX_DAYS = 10_000
_SHOWN_DAYS = 500
_SHOWN = 200
_FORMAT = 1


def reliability(
    spark: SparkSession,
    path: str | Path,
    *,
    days: int | None = None,
    output: str | Path | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> ReliabilityFigures:
    """The figures of the last `days` of a lake; None takes all days.

    With `output`, write into this folder the tables `channel_days`, `gaps` and `silences` as Parquet,
    `reliability.html`, and `reliability_days`, with which the next run into this folder reads no day twice. A
    message that was sent before these days, and again on one of them, counts as one of theirs.
    `progress` is called as each step begins. Raises `PipelineError` and `LakeError`; the lake is only read.
    """
    lake = open_lake(path)
    window = DayWindow(lake, days)
    folder = check_output(output, lake)
    with lake.held(), planned(spark, window.rows), translate_failures("reliability"):
        channels = _Channels(spark, window, folder, progress)
        packets = channels.of(window.days)
        with keep(packets):
            messages = acknowledge(packets)
            with keep(messages), tables_of(spark, folder) as made:
                progress("following acknowledgements")
                gaps = made.once("gaps", _gaps(window, packets, channels))
                silences = made.once("silences", find_silences(packets, messages))
                table = made.once("channel_days", channel_days(packets, messages, gaps, silences))
                progress("counting")
                figures = _figures(window, table, gaps, silences, channels.counted)
    if folder is not None:
        progress("writing")
        write_page(folder / "reliability.html", render_reliability(figures))
    return figures


class _Channels:
    """The packets of channels by day: read once, and kept if there is a folder for them."""

    def __init__(
        self, spark: SparkSession, window: DayWindow, folder: Path | None, progress: Callable[[str], None]
    ) -> None:
        self._spark = spark
        self._window = window
        self._progress = progress
        kept = None if folder is None else DayTables(folder / "reliability_days", ChannelPackets, _FORMAT)
        self._kept = kept
        self.counted = 0
        """The number of days that had to be read."""

    def of(self, days: list[int], topics: DataFrame | None = None) -> ChannelPackets:
        """The packets of these days; with `topics`, only those with such a `content_topic`."""
        if self._kept is None:
            self._progress("reading messages")
            self.counted += len(days)
            return self._read(days, topics)
        read = [(self._kept, lambda missing: self._read(missing).frame)]
        self.counted += len(bring_up(read, self._window.lake, days, self._progress))
        kept = self._kept.read(self._spark, map(day_text, days))
        return kept if topics is None else ChannelPackets(_only(kept.frame, topics, "content_topic"))

    def _read(self, days: list[int], topics: DataFrame | None = None) -> ChannelPackets:
        packets = self._window.packets(self._spark, CHANNEL, days=days)
        return read_channels(
            packets if topics is None else Packets(_only(packets.frame, topics, "content_type"))
        )


def _only(rows: DataFrame, topics: DataFrame, column: str) -> DataFrame:
    """The rows of these topics."""
    named = F.broadcast(topics.withColumnRenamed("content_topic", column))
    return rows.join(named, on=column, how="left_semi")


def _gaps(window: DayWindow, packets: ChannelPackets, channels: _Channels) -> Gaps:
    """Messages that no packet carries, on these days or on earlier days of the topic."""
    gaps = find_gaps(packets)
    if not window.earlier or gaps.frame.isEmpty():
        return gaps
    topics = gaps.frame.select("content_topic").distinct()
    return find_gaps(packets, channels.of(window.earlier, topics))


def _figures(
    window: DayWindow, table: ChannelDays, gaps: Gaps, silences: Silences, counted: int
) -> ReliabilityFigures:
    never = F.round(F.col("unacknowledged") * F.col("messages")).cast("long")
    summed = {name: F.col(name) for name in ("messages", "retransmissions", "gaps", "unreadable")}
    summed["unacknowledged"] = never
    sums: list[Column] = [F.coalesce(F.sum(column), F.lit(0)).alias(name) for name, column in summed.items()]
    counts = [
        F.count_distinct(F.when(F.col("readable"), F.struct("content_topic", "channel_id"))).alias(
            "channels"
        ),
        F.count(F.lit(1)).alias("channel_days"),
        F.count_if("readable").alias("readable_days"),
    ]
    totals: dict[str, Any] = rows_of(table.frame.agg(*sums, *counts), 1)[0]
    quiet = [F.desc("day"), F.desc("messages"), F.asc("content_topic"), F.asc("sender_id")]
    shown, told = rows_and_totals(
        silences.frame, _SHOWN, *quiet, totals=[F.count(F.lit(1)).alias("silences")]
    )
    totals |= told | {"days": window.note.days, "counted": counted}
    worst = [
        F.desc("day"),
        F.desc("messages"),
        F.desc("packets"),
        F.asc("content_topic"),
        F.asc("channel_id"),
    ]
    return ReliabilityFigures(
        note=window.note,
        totals=totals,
        daily=rows_of(table.frame.groupBy("day").agg(*sums).orderBy("day"), _MAX_DAYS),
        channel_days=rows_of(table.frame.orderBy(*worst), _SHOWN_DAYS),
        gaps=rows_of(gaps.frame.orderBy(F.desc("named_at"), "content_topic", "message_id"), _SHOWN),
        silences=shown,
    )
