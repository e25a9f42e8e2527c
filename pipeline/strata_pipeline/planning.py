"""How a job divides its work: by the amount of work, and not by the number of cores alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

__all__ = ["joined_in_place", "packed", "parallelism", "planned", "shuffled_once"]

_SHUFFLED = "spark.sql.shuffle.partitions"
_CLEANED = "spark.sql.classic.shuffleDependency.fileCleanup.enabled"
_BY_ALL_KEYS = "spark.sql.requireAllClusterKeysForCoPartition"
_OPENING = "spark.sql.files.openCostInBytes"
_OPENING_BYTES = 2**16
_PARTITION_ROWS = 300_000
"""About 200 bytes of each row are shuffled: a partition of 60 MB is sorted and aggregated in memory."""
_MOST_PARTITIONS = 100_000
"""A forged manifest may tell of any number of rows, and an audit must come to the point of saying so."""


def parallelism(spark: SparkSession) -> int:
    """The number of tasks that run at a time; over Spark Connect, which does not report it, the number of
    shuffle partitions."""
    try:
        return int(spark.sparkContext.defaultParallelism)
    except PySparkException:
        return int(spark.conf.get(_SHUFFLED) or 2)


@contextlib.contextmanager
def planned(spark: SparkSession, rows: int) -> Iterator[None]:
    """Within the block, give a shuffle enough partitions for `rows` rows, and never fewer than were set.

    Adaptive planning in Spark merges partitions that turn out small.
    """
    most = min(_MOST_PARTITIONS, -(-rows // _PARTITION_ROWS))
    with _setting(spark, _SHUFFLED, str(max(int(spark.conf.get(_SHUFFLED) or 0), most))):
        yield


@contextlib.contextmanager
def packed(spark: SparkSession) -> Iterator[None]:
    """Within the block, a task reads as many small files as there are for each core.

    Spark takes opening a file for as much work as reading 4 MiB, so a day of small batches makes a task of
    each 32 files. For tasks that connect to a database, that is too few.
    """
    with _setting(spark, _OPENING, str(_OPENING_BYTES)):
        yield


@contextlib.contextmanager
def shuffled_once(spark: SparkSession) -> Iterator[None]:
    """Within the block, what a query has shuffled leaves the disk when the query ends.

    Otherwise it stays until Java collects garbage, and a compaction would keep on the disk everything that it
    sorts. Not for jobs that use a frame more than once: Spark computes again, from the beginning, those parts
    of a kept frame that no query has needed yet.
    """
    with _setting(spark, _CLEANED, "true"):
        yield


@contextlib.contextmanager
def joined_in_place(spark: SparkSession) -> Iterator[None]:
    """Within the block, rows that lie together by some of the columns of a join stay where they are.

    Otherwise Spark shuffles them again by all of these columns. Not for rows that lie together by a column of
    few values: a task has all rows of a value.
    """
    with _setting(spark, _BY_ALL_KEYS, "false"):
        yield


@contextlib.contextmanager
def _setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    before = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.set(name, str(before))
