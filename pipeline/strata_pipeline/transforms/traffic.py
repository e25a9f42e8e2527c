"""Traffic by author, type and hour."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from strata_pipeline.datasets import Packets
from strata_pipeline.datasets.traffic import AuthorHours, Hours, NearDuplicates, Seconds, Texts
from strata_pipeline.transforms.days import day_name

__all__ = ["HOUR_SECONDS", "count_author_hours", "count_hours", "seconds_by_day", "seconds_of"]

HOUR_SECONDS = 3600


def seconds_of(packets: Packets) -> Seconds:
    """A row for each packet."""
    size = F.col("size").cast("long").alias("size")
    one = F.lit(1).cast("long").alias("packets")
    return Seconds(packets.frame.select("author_id", "content_type", "received_at", one, size))


def seconds_by_day(packets: Packets) -> DataFrame:
    """A row for each second of an author and type, with the column `day`, that of the log.

    The relay's clock can be set back, so a second may be in two days of the log.
    """
    keys = ["author_id", "content_type", "received_at"]
    counted = packets.frame.groupBy(*keys, day_name().alias("day")).agg(
        F.count(F.lit(1)).alias("packets"), F.sum(F.col("size").cast("long")).alias("size")
    )
    return counted.repartition("day", _hour("received_at"))  # a large day is not one task's


def count_hours(seconds: Seconds, near_duplicates: NearDuplicates) -> Hours:
    """Packets, bytes, the fullest second and near-duplicates by author, type and hour."""
    keys = ["author_id", "content_type", "hour_at"]
    counted = _whole(seconds, *keys).groupBy(*keys).agg(
        F.sum("packets").alias("packets"), F.sum("size").alias("size"), F.max("packets").alias("peak_packets")
    )  # fmt: skip
    again = _by_hour(near_duplicates.frame, keys, "near_duplicates")
    joined = counted.join(again, on=keys, how="left")
    return Hours(joined.withColumn("near_duplicates", F.coalesce("near_duplicates", F.lit(0))))


def count_author_hours(seconds: Seconds, texts: Texts, near_duplicates: NearDuplicates) -> AuthorHours:
    """The same by author and hour, for all types together."""
    keys = ["author_id", "hour_at"]
    counted = _whole(seconds, *keys).groupBy(*keys).agg(
        F.sum("packets").alias("packets"), F.max("packets").alias("peak_packets")
    )  # fmt: skip
    joined = counted.join(_by_hour(texts.frame, keys, "texts"), on=keys, how="left").join(
        _by_hour(near_duplicates.frame, keys, "near_duplicates"), on=keys, how="left"
    )
    names = ("texts", "near_duplicates")
    return AuthorHours(joined.withColumns({name: F.coalesce(name, F.lit(0)) for name in names}))


def _whole(seconds: Seconds, *keys: str) -> DataFrame:
    """Grouped by second too, so that all tasks share the work for an author with half the traffic."""
    by_second = seconds.frame.withColumn("hour_at", _hour("received_at")).groupBy(*keys, "received_at")
    return by_second.agg(F.sum("packets").alias("packets"), F.sum("size").alias("size"))


def _by_hour(frame: DataFrame, keys: list[str], name: str) -> DataFrame:
    return frame.withColumn("hour_at", _hour("received_at")).groupBy(*keys).agg(F.count(F.lit(1)).alias(name))


def _hour(column: str) -> Column:
    return F.col(column) - F.pmod(F.col(column), F.lit(HOUR_SECONDS))
