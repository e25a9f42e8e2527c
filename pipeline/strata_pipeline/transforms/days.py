"""The figures of whole days, from a single read of their packets."""

from __future__ import annotations

import functools
import math

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from strata.protocol.provenance import ORIGIN_TYPES

from strata_pipeline.datasets import Packets, Quarantine
from strata_pipeline.days.cohorts import SAMPLED
from strata_pipeline.days.figures import AUTHORS
from strata_pipeline.days.lags import GROWTH
from strata_pipeline.lake.kinds import CHANNEL, KINDS, OTHER

__all__ = ["count_days", "count_periods", "day_name"]

_DAY_OF_SEQUENCE = 32
"""The number of bits below the day in a sequence."""


def day_name() -> Column:
    """The day in a packet's sequence, as 2026-11-21, which is also in the name of its folder in the lake."""
    return F.date_from_unix_date(F.shiftright("sequence", _DAY_OF_SEQUENCE).cast("int")).cast("string")


def count_days(packets: Packets, quarantine: Quarantine) -> DataFrame:
    """Rows (day, what, name, packets, size, sketch), a few hundred for each day.

    `what` is kind, origin, lag, skew, author, sample or quarantine; `day` counts from 1970-01-01.
    """
    told = packets.frame.select(
        F.shiftright("sequence", _DAY_OF_SEQUENCE).alias("day"),
        "author_id",
        F.col("size").cast("long").alias("size"),
        (F.col("received_at") - F.col("timestamp")).alias("lag"),
        _kind().alias("kind"),
        _origin().alias("origin"),
    )
    # One exchange by author; everything else adds up its results.
    by_author = told.groupBy("day", "author_id", "kind", "origin", _bucket("lag").alias("bucket")).agg(
        F.count(F.lit(1)).alias("packets"), F.sum("size").alias("size"), F.min("lag").alias("least")
    )
    authors = by_author.groupBy("day", "author_id").agg(F.min("least").alias("least"))
    counted = F.count(F.lit(1)).alias("packets")
    aside = quarantine.frame.select(F.shiftright("sequence", _DAY_OF_SEQUENCE).alias("day"), "reason")
    frames = [
        _sums(by_author, "kind", "kind"),
        _sums(by_author.where("origin IS NOT NULL"), "origin", "origin"),
        _sums(by_author, "lag", "bucket"),
        _rows(authors.groupBy("day", _bucket("least").alias("bucket")).agg(counted), "skew", name="bucket"),
        _rows(
            authors.groupBy("day").agg(counted, F.hll_sketch_agg("author_id", AUTHORS).alias("sketch")),
            "author", sketch="sketch",
        ),
        _rows(_sample(authors), "sample", sketch="sample"),
        _rows(aside.groupBy("day", "reason").agg(counted), "quarantine", name="reason"),
    ]  # fmt: skip
    return functools.reduce(DataFrame.union, frames)


def count_periods(spark: SparkSession, sketches: list[tuple[str, bytes]]) -> dict[str, int]:
    """The approximate number of authors of each period, from the sketches of its days."""
    if not sketches:
        return {}
    frame = spark.createDataFrame(sketches, "period string, sketch binary")
    rows = frame.groupBy("period").agg(F.hll_sketch_estimate(F.hll_union_agg("sketch")).alias("authors"))
    return {row["period"]: row["authors"] for row in rows.collect()}


def _sums(by_author: DataFrame, what: str, name: str) -> DataFrame:
    sums = by_author.groupBy("day", name).agg(F.sum("packets").alias("packets"), F.sum("size").alias("size"))
    return _rows(sums, what, name=name, size="size")


def _sample(authors: DataFrame) -> DataFrame:
    """The `SAMPLED` least hashes of each day's authors. Each task drops hashes that cannot be among them."""
    by_hash = Window.partitionBy("day").orderBy("hash")
    hashed = authors.select("day", F.shiftrightunsigned(F.xxhash64("author_id"), 1).alias("hash"))
    least = hashed.withColumn("place", F.row_number().over(by_hash)).where(F.col("place") <= SAMPLED)
    digits = F.transform(F.array_sort(F.collect_list("hash")), lambda each: F.lpad(F.hex(each), 16, "0"))
    return least.groupBy("day").agg(
        F.unhex(F.array_join(digits, "")).alias("sample"), F.count(F.lit(1)).alias("packets")
    )


def _rows(
    frame: DataFrame,
    what: str,
    *,
    name: str | None = None,
    size: str | None = None,
    sketch: str | None = None,
) -> DataFrame:
    """The columns that all frames share; a missing one is null."""
    columns = (("name", name, "string"), ("packets", "packets", "long"), ("size", size, "long"),
               ("sketch", sketch, "binary"))  # fmt: skip
    return frame.select(
        "day",
        F.lit(what).alias("what"),
        *(
            (F.lit(None) if source is None else F.col(source)).cast(kind).alias(alias)
            for alias, source, kind in columns
        ),
    )


def _bucket(seconds: str) -> Column:
    """The bucket of a number of seconds, as in `days.lags`."""
    size = F.ceil(F.log1p(F.abs(seconds)) / F.lit(math.log(GROWTH)))
    return F.signum(seconds).cast("long") * size


def _kind() -> Column:
    """The folder of a packet, as `lake.kinds` names it."""
    is_topic = F.col("content_type").rlike(r"\A(/[^/]+){4}\z")
    name = F.when(F.col("content_type").isin(*sorted(KINDS)), F.col("content_type"))
    return name.when(is_topic, CHANNEL).otherwise(OTHER)


def _origin() -> Column:
    """The origin that a packet with media claims; null without media."""
    text = F.col("body").cast("string")
    claim = F.get_json_object(text, "$.provenance_header.origin_type")
    known = F.when(claim.isin(*sorted(ORIGIN_TYPES)), claim).when(claim.isNotNull(), "other")
    # Most packets have no media, and searching for the word costs much less than parsing.
    has_claim = text.contains('"origin_type"')
    return F.when(F.col("annotation").isNotNull(), "not proven").when(has_claim, known)
