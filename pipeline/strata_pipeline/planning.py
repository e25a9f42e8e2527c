"""How a job divides its work: by what there is to do, and not by the cores alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

__all__ = ["parallelism", "planned"]

_SHUFFLED = "spark.sql.shuffle.partitions"
_PARTITION_ROWS = 300_000
"""Some 200 bytes of a row are shuffled: a partition of 60 MB is sorted and aggregated in memory."""


def parallelism(spark: SparkSession) -> int:
    """How many tasks run at a time; over Spark Connect, where nobody tells, as many as a shuffle has."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except PySparkException:
        return int(spark.conf.get(_SHUFFLED) or 2)


@contextlib.contextmanager
def planned(spark: SparkSession, rows: int) -> Iterator[None]:
    """Meanwhile a shuffle has partitions enough for so many rows, and never fewer than were set.

    Where Spark plans adaptively, it joins partitions that turn out small.
    """
    before = int(spark.conf.get(_SHUFFLED) or 0)
    spark.conf.set(_SHUFFLED, str(max(before, -(-rows // _PARTITION_ROWS))))
    try:
        yield
    finally:
        spark.conf.set(_SHUFFLED, str(before))
