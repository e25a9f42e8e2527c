"""Traffic by author, type and hour."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from strata_pipeline.datasets import Packets
from strata_pipeline.datasets.traffic import AuthorHours, Hours, NearDuplicates, Seconds, Texts, WholeSeconds
from strata_pipeline.transforms.days import day_name

__all__ = [
    "HOUR_SECONDS",
    "count_author_hours",
    "count_hours",
    "seconds_by_day",
    "seconds_of",
    "whole_seconds",
]

HOUR_SECONDS = 3600


def seconds_of(packets: Packets) -> Seconds:
    """The seconds of authors and types, most of them in a single row."""
    return Seconds(seconds_by_day(packets))


def seconds_by_day(packets: Packets) -> DataFrame:
    """The same with the column `day`: the day of the log.

    The relay's clock can be set back, so a second may be in two days of the log. Nothing is shuffled: each
    task adds up what it reads, and packets of one second are next to each other.
    """
    columns = packets.frame.select(
        "author_id", "content_type", "received_at", "size", day_name().alias("day")
    )
    return columns.mapInArrow(_add_up, "author_id string, content_type string, received_at long, day string, "
                              "packets long, size long")  # fmt: skip


def _add_up(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    keys = ["author_id", "content_type", "received_at", "day"]
    for batch in batches:
        table = pa.Table.from_batches([batch])
        size = pc.cast(table["size"], pa.int64())
        sums = table.select(keys).append_column("size", size).group_by(keys, use_threads=False)
        added = sums.aggregate([("size", "count"), ("size", "sum")])
        yield from added.rename_columns([*keys, "packets", "size"]).to_batches()


def whole_seconds(seconds: Seconds) -> WholeSeconds:
    """Each second in one row. All that an author has sent in an hour is in one partition, so that counts by
    author and hour, or by more columns, need no other shuffle; an hour has few seconds, however much is
    sent."""
    keys = ["author_id", "content_type", "hour_at", "received_at"]
    together = seconds.frame.withColumn("hour_at", _hour("received_at")).repartition("author_id", "hour_at")
    return WholeSeconds(
        together.groupBy(*keys).agg(F.sum("packets").alias("packets"), F.sum("size").alias("size"))
    )


def count_hours(seconds: WholeSeconds, near_duplicates: NearDuplicates) -> Hours:
    """Packets, bytes, the fullest second and near-duplicates by author, type and hour."""
    keys = ["author_id", "content_type", "hour_at"]
    counted = seconds.frame.groupBy(*keys).agg(
        F.sum("packets").alias("packets"), F.sum("size").alias("size"), F.max("packets").alias("peak_packets")
    )  # fmt: skip
    again = _by_hour(near_duplicates.frame, keys, "near_duplicates")
    joined = counted.join(again, on=keys, how="left")
    return Hours(joined.withColumn("near_duplicates", F.coalesce("near_duplicates", F.lit(0))))


def count_author_hours(seconds: WholeSeconds, texts: Texts, near_duplicates: NearDuplicates) -> AuthorHours:
    """The same by author and hour, for all types together."""
    keys = ["author_id", "hour_at"]
    of_all_types = seconds.frame.groupBy(*keys, "received_at").agg(F.sum("packets").alias("packets"))
    counted = of_all_types.groupBy(*keys).agg(
        F.sum("packets").alias("packets"), F.max("packets").alias("peak_packets")
    )  # fmt: skip
    joined = counted.join(_by_hour(texts.frame, keys, "texts"), on=keys, how="left").join(
        _by_hour(near_duplicates.frame, keys, "near_duplicates"), on=keys, how="left"
    )
    names = ("texts", "near_duplicates")
    return AuthorHours(joined.withColumns({name: F.coalesce(name, F.lit(0)) for name in names}))


def _by_hour(frame: DataFrame, keys: list[str], name: str) -> DataFrame:
    return frame.withColumn("hour_at", _hour("received_at")).groupBy(*keys).agg(F.count(F.lit(1)).alias(name))


def _hour(column: str) -> Column:
    return F.col(column) - F.pmod(F.col(column), F.lit(HOUR_SECONDS))
