"""Traffic by author, type and hour."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from strata_pipeline.datasets import Packets
from strata_pipeline.datasets.traffic import AuthorHours, Hours, NearDuplicates, Texts

__all__ = ["HOUR_SECONDS", "count_author_hours", "count_hours"]

HOUR_SECONDS = 3600


def count_hours(packets: Packets, near_duplicates: NearDuplicates) -> Hours:
    """Packets, bytes, the fullest second and near-duplicates by author, type and hour."""
    keys = ["author_id", "content_type", "hour_at"]
    counted = _seconds(packets).groupBy(*keys).agg(
        F.sum("packets").alias("packets"), F.sum("size").alias("size"), F.max("packets").alias("peak_packets")
    )  # fmt: skip
    again = _by_hour(near_duplicates.frame, keys, "near_duplicates")
    joined = counted.join(again, on=keys, how="left")
    return Hours(joined.withColumn("near_duplicates", F.coalesce("near_duplicates", F.lit(0))))


def count_author_hours(packets: Packets, texts: Texts, near_duplicates: NearDuplicates) -> AuthorHours:
    """The same by author and hour, for all types together."""
    keys = ["author_id", "hour_at"]
    seconds = _seconds(packets).groupBy(*keys, "received_at").agg(F.sum("packets").alias("packets"))
    counted = seconds.groupBy(*keys).agg(
        F.sum("packets").alias("packets"), F.max("packets").alias("peak_packets")
    )
    joined = counted.join(_by_hour(texts.frame, keys, "texts"), on=keys, how="left").join(
        _by_hour(near_duplicates.frame, keys, "near_duplicates"), on=keys, how="left"
    )
    names = ("texts", "near_duplicates")
    return AuthorHours(joined.withColumns({name: F.coalesce(name, F.lit(0)) for name in names}))


def _seconds(packets: Packets) -> DataFrame:
    """Grouped by second too, so that all tasks share the work for an author with half the traffic."""
    return packets.frame.groupBy(
        "author_id", "content_type", "received_at", _hour("received_at").alias("hour_at")
    ).agg(F.count(F.lit(1)).alias("packets"), F.sum(F.col("size").cast("long")).alias("size"))


def _by_hour(frame: DataFrame, keys: list[str], name: str) -> DataFrame:
    return frame.withColumn("hour_at", _hour("received_at")).groupBy(*keys).agg(F.count(F.lit(1)).alias(name))


def _hour(column: str) -> Column:
    return F.col(column) - F.pmod(F.col(column), F.lit(HOUR_SECONDS))
