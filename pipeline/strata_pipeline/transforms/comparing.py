"""Comparing the lake with the log."""

from __future__ import annotations

from collections.abc import Collection

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from strata_pipeline.datasets import Packets, Quarantine

__all__ = ["differences", "doubled", "fingerprints", "still_held"]


def fingerprints(rows: DataFrame) -> DataFrame:
    """The columns that are compared: `sequence`, `packet_id`, and a hash over all columns of the log."""
    columns: list[Column | str] = [
        "received_at",
        "timestamp",
        "expires_at",
        "packet_id",
        "author_id",
        "content_type",
        # xxhash64 skips nulls, and a null is not an empty value.
        F.isnull("expires_at"),
        F.isnull("annotation"),
        "body",
        "annotation",
    ]
    return rows.select("sequence", "packet_id", F.xxhash64(*columns).alias("row_hash"))


def differences(packets: Packets, quarantine: Quarantine, log: DataFrame) -> DataFrame:
    """The `sequence`, `packet_id` and `reason` of each place where lake and log differ.

    missing    the log has a row there and the lake does not
    surplus    the lake has a row there and the log does not
    altered    both have a row there, but not the same
    """
    columns = ["sequence", "received_at", "timestamp", "expires_at", "packet_id", "author_id", "content_type",
               "body", "annotation"]  # fmt: skip
    lake = packets.frame.select(*columns).unionByName(quarantine.frame.select(*columns))
    ours = fingerprints(lake).alias("lake")
    theirs = fingerprints(log).alias("log")
    joined = ours.join(theirs, F.col("lake.sequence") == F.col("log.sequence"), "full_outer")
    reason = (
        F.when(F.col("lake.sequence").isNull(), F.lit("missing"))
        .when(F.col("log.sequence").isNull(), F.lit("surplus"))
        .when(F.col("lake.row_hash") != F.col("log.row_hash"), F.lit("altered"))
    )
    return joined.select(
        F.coalesce("lake.sequence", "log.sequence").alias("sequence"),
        F.coalesce("log.packet_id", "lake.packet_id").alias("packet_id"),
        reason.alias("reason"),
    ).where("reason IS NOT NULL")


def doubled(packets: Packets) -> DataFrame:
    """The `packet_id` and `sequence` (the last place) of packets that the lake holds more than once."""
    return (
        packets.frame.groupBy("packet_id")
        .agg(F.count(F.lit(1)).alias("copies"), F.max("sequence").alias("sequence"))
        .where("copies > 1")
        .select("sequence", "packet_id")
    )


def still_held(packets: Packets, erased: Collection[str]) -> DataFrame:
    """The `sequence`, `packet_id`, `reason` and `detail` of packets that have ids of erased ones, which are
    given in hex."""
    rows = packets.frame
    names = [(bytes.fromhex(name.removeprefix("0x")),) for name in erased]
    ids = rows.sparkSession.createDataFrame(names, "packet_id binary")
    why = "it was erased at another place: strata-pipeline erase removes it here too"
    return (
        rows.select("sequence", "packet_id")
        .join(F.broadcast(ids), "packet_id", "left_semi")
        .withColumns({"reason": F.lit("held"), "detail": F.lit(why)})
    )
