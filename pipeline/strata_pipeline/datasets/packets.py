"""The rows of a lake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType
from strata.protocol.lake import day_text

from strata_pipeline.datasets.dataset import Dataset
from strata_pipeline.lake.lake import Lake
from strata_pipeline.schemas import schema

__all__ = ["Packets", "Quarantine"]


class Packets(Dataset, schema="packets"):
    """The packets of a lake."""

    @classmethod
    def of(cls, spark: SparkSession, lake: Lake, days: Sequence[int] | None = None) -> Self:
        """All packets of a lake, or those received on these days.

        A column that a file of an earlier schema lacks is null.
        """
        return cls(cls.read(spark, lake, days)) if lake.packets.is_dir() else cls.empty(spark)

    @classmethod
    def read(cls, spark: SparkSession, lake: Lake, days: Sequence[int] | None = None) -> DataFrame:
        """The same rows with the columns `day`, `batch` and `kind`, from the names of the folders."""
        folders = [StructField(name, StringType()) for name in ("day", "batch", "kind")]
        wanted = StructType([*schema("packets").fields, *folders])
        frame = spark.read.schema(wanted).parquet(str(lake.packets))
        return frame if days is None else frame.where(F.col("day").isin([day_text(day) for day in days]))


class Quarantine(Dataset, schema="quarantine"):
    """The rows of the log that a lake has put aside."""

    @classmethod
    def of(cls, spark: SparkSession, lake: Lake) -> Self:
        """All of them."""
        if not lake.quarantine.is_dir():
            return cls.empty(spark)
        return cls(spark.read.schema(schema("quarantine")).parquet(str(lake.quarantine)))
