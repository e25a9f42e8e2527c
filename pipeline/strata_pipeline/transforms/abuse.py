"""The authors that the relay should slow down or block, and for how long."""

from __future__ import annotations

from pyspark.sql import functions as F

from strata_pipeline.datasets.traffic import REASON_PREFIX, Abuse, AuthorHours, Bursts
from strata_pipeline.transforms.thresholds import Thresholds
from strata_pipeline.transforms.traffic import HOUR_SECONDS

__all__ = ["judge"]


def judge(hours: AuthorHours, bursts: Bursts, thresholds: Thresholds, now: int) -> Abuse:
    """One row for each author who gave cause: the stricter verdict and its reason. `now` is in Unix seconds.

    A verdict runs from the last hour that gave cause for it, so an old lake accuses nobody, and a second run
    changes nothing. An hour later than `now`, from a clock that jumped, counts as `now`.
    """
    bursty = (
        bursts.frame.groupBy("author_id")
        .agg(
            F.count(F.lit(1)).alias("hours"),
            F.max("peak_packets").alias("peak"),
            F.max("hour_at").alias("last_at"),
        )
        .where(F.col("hours") >= thresholds.burst_hours)
        .select(
            "author_id",
            F.lit(1).alias("weight"),
            F.format_string(
                f"{REASON_PREFIX}bursts in %d hours, up to %d packets within a second",
                F.col("hours"),
                F.col("peak"),
            ).alias("reason"),
            "last_at",
        )
    )
    is_copying = (F.col("near_duplicates") >= thresholds.limit_copies) & (
        F.col("near_duplicates") >= thresholds.copies_share * F.col("texts")
    )
    weight = F.when(F.col("near_duplicates") >= thresholds.block_copies, 3).otherwise(2)
    # Each weight has its own last hour: an hour with few copies does not prolong a block for many.
    copying = (
        hours.frame.where(is_copying)
        .groupBy("author_id", weight.alias("weight"))
        .agg(F.max("near_duplicates").alias("copies"), F.max("hour_at").alias("last_at"))
        .select(
            "author_id",
            "weight",
            F.format_string(f"{REASON_PREFIX}%d near-duplicates within an hour", F.col("copies")).alias(
                "reason"
            ),
            "last_at",
        )
    )
    ends = F.least(F.col("last_at") + HOUR_SECONDS, F.lit(now)) + thresholds.hours * HOUR_SECONDS
    # Remove expired verdicts first: a stricter one among them would hide one that still holds.
    holding = bursty.unionByName(copying).withColumn("expires_at", ends).where(F.col("expires_at") > now)
    worst = F.max(F.struct("weight", "expires_at", "reason"))
    found = holding.groupBy("author_id").agg(worst.alias("worst"))
    verdict = F.when(F.col("worst.weight") == 3, "block").otherwise("limit")
    return Abuse(found.select("author_id", verdict.alias("verdict"), "worst.reason", "worst.expires_at"))
