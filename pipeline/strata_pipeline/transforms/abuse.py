"""Whom the relay should slow down or block, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import functions as F

from strata_pipeline.datasets.traffic import REASON_PREFIX, Abuse, AuthorHours, Bursts
from strata_pipeline.errors import UsageError
from strata_pipeline.transforms.traffic import HOUR_SECONDS

__all__ = ["Thresholds", "judge"]


@dataclass(frozen=True)
class Thresholds:
    """From where on an author's traffic is abuse. The defaults hit nobody who writes, and no bot that
    reports.

    Raises `UsageError` for values that make no sense.
    """

    burst_hours: int = 3
    """Hours with a burst: limit."""
    limit_copies: int = 600
    """Near-duplicates within one hour, one in six seconds: limit."""
    block_copies: int = 6_000
    """The same: block."""
    copies_share: float = 0.8
    """Share of an hour's texts that must be near-duplicates for either."""
    hours: int = 24
    """How long a verdict holds after the last hour that gave cause."""

    def __post_init__(self) -> None:
        if min(self.burst_hours, self.limit_copies, self.block_copies, self.hours) < 1:
            raise UsageError("thresholds of abuse are at least 1")
        if not 0 < self.copies_share <= 1:
            raise UsageError("the share of near-duplicates is above 0 and at most 1")
        if self.block_copies < self.limit_copies:
            raise UsageError("an author is blocked for more near-duplicates than limited, or for as many")


def judge(hours: AuthorHours, bursts: Bursts, thresholds: Thresholds, now: int) -> Abuse:
    """The authors with cause, one row each: the harder verdict, and what for. `now` is in Unix seconds.

    A verdict runs from the last hour that gave cause, so an old lake accuses nobody, and running again
    changes nothing. Hours later than `now`, of a clock that had jumped, count as now.
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
    copying = (
        hours.frame.where(is_copying)
        .groupBy("author_id")
        .agg(F.max("near_duplicates").alias("copies"), F.max("hour_at").alias("last_at"))
        .select(
            "author_id",
            F.when(F.col("copies") >= thresholds.block_copies, 3).otherwise(2).alias("weight"),
            F.format_string(f"{REASON_PREFIX}%d near-duplicates within an hour", F.col("copies")).alias(
                "reason"
            ),
            "last_at",
        )
    )
    ends = F.least(F.col("last_at") + HOUR_SECONDS, F.lit(now)) + thresholds.hours * HOUR_SECONDS
    worst = F.max(F.struct("weight", "last_at", "reason"))
    found = bursty.unionByName(copying).groupBy("author_id").agg(worst.alias("worst"))
    verdict = F.when(F.col("worst.weight") == 3, "block").otherwise("limit")
    last = found.select("author_id", verdict.alias("verdict"), F.col("worst.reason"), F.col("worst.last_at"))
    return Abuse(last.withColumn("expires_at", ends).where(F.col("expires_at") > now))
