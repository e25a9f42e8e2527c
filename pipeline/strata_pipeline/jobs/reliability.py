"""`strata-pipeline reliability`: how reliably the messages of channels arrived."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F

from strata_pipeline.datasets import Packets
from strata_pipeline.datasets.channels import ChannelDays, ChannelMessages, ChannelPackets, Gaps, Silences
from strata_pipeline.jobs.failures import translate_failures
from strata_pipeline.jobs.tables import DayWindow, check_output, keep, rows_of, write_page, write_tables
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


def reliability(
    spark: SparkSession,
    path: str | Path,
    *,
    days: int | None = None,
    output: str | Path | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> ReliabilityFigures:
    """The figures of the lake's last `days`, all of them for None.

    With `output`, a folder: the tables `channel_days`, `gaps` and `silences` as Parquet, and
    `reliability.html`. A message that was sent before these days, and again in them, counts as one of theirs.
    `progress` is told what begins. Raises `PipelineError` and `LakeError`; the lake is only read.
    """
    lake = open_lake(path)
    window = DayWindow(lake, days)
    folder = check_output(output, lake)
    with lake.held(), planned(spark, window.rows), translate_failures("reliability"):
        progress("reading messages")
        packets = read_channels(window.packets(spark, CHANNEL))
        with keep(packets):
            messages = acknowledge(packets)
            with keep(messages):
                progress("following acknowledgements")
                gaps = _gaps(spark, window, packets)
                silences = find_silences(packets, messages)
                with keep(gaps, silences):
                    return _results(window, folder, packets, messages, gaps, silences, progress)


def _gaps(spark: SparkSession, window: DayWindow, packets: ChannelPackets) -> Gaps:
    """Messages that no packet carries, neither on these days nor on earlier days of the topic."""
    earlier = window.packets_before(spark, CHANNEL)
    if earlier is None:
        return find_gaps(packets)
    topics = find_gaps(packets).frame.select(F.col("content_topic").alias("content_type")).distinct()
    asked = Packets(earlier.frame.join(F.broadcast(topics), on="content_type", how="left_semi"))
    return find_gaps(packets, read_channels(asked))


def _results(
    window: DayWindow,
    folder: Path | None,
    packets: ChannelPackets,
    messages: ChannelMessages,
    gaps: Gaps,
    silences: Silences,
    progress: Callable[[str], None],
) -> ReliabilityFigures:
    table = channel_days(packets, messages, gaps, silences)
    with keep(table):
        progress("counting")
        figures = _figures(window, table, gaps, silences)
        if folder is not None:
            progress("writing")
            write_tables(folder, {"channel_days": table, "gaps": gaps, "silences": silences})
            write_page(folder / "reliability.html", render_reliability(figures))
        return figures


def _figures(window: DayWindow, table: ChannelDays, gaps: Gaps, silences: Silences) -> ReliabilityFigures:
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
    totals["silences"] = silences.frame.count()
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
        silences=rows_of(
            silences.frame.orderBy(F.desc("day"), F.desc("messages"), "content_topic", "sender_id"), _SHOWN
        ),
    )
