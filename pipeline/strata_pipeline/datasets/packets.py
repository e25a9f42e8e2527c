"""The rows of a lake."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Self

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType
from strata.protocol.sequences import day_text

from strata_pipeline.datasets.dataset import Dataset
from strata_pipeline.datasets.objects import read_objects
from strata_pipeline.globs import for_spark
from strata_pipeline.lake.batches import Batch
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.places import AnyLake
from strata_pipeline.schemas import schema

__all__ = ["Packets", "Quarantine"]


class Packets(Dataset, schema="packets"):
    """The packets of a lake."""

    @classmethod
    def of(
        cls,
        spark: SparkSession,
        lake: AnyLake,
        days: Sequence[int] | None = None,
        *,
        kinds: Collection[str] | None = None,
        damaged: bool = False,
    ) -> Self:
        """All packets of a lake, or only those received on these days, or those in the folders of these
        `kinds`; with `damaged`, as far as they can be read."""
        return cls(cls.read(spark, lake, days, kinds=kinds, damaged=damaged))

    @classmethod
    def of_kinds(cls, spark: SparkSession, lake: AnyLake, kinds: Collection[str]) -> Self:
        """The packets of these kinds on all days, as far as they can be read."""
        if not isinstance(lake, ObjectLake):
            return cls.of(spark, lake, kinds=kinds, damaged=True)
        objects = lake.objects_of_kinds(kinds)
        return cls(read_objects(spark, lake.store, objects, schema("packets"), damaged=True))

    @classmethod
    def read(
        cls,
        spark: SparkSession,
        lake: AnyLake,
        days: Sequence[int] | None = None,
        *,
        kinds: Collection[str] | None = None,
        damaged: bool = False,
    ) -> DataFrame:
        """The same rows with the columns `day`, `batch` and `kind`, from the names of the folders."""
        names = [StructField(name, StringType()) for name in ("day", "batch", "kind")]
        wanted = StructType([*schema("packets").fields, *names])
        if isinstance(lake, ObjectLake):
            objects = lake.objects_of_days(days, "packets", kinds=kinds, damaged=damaged)
            return read_objects(spark, lake.store, objects, wanted, damaged=damaged)
        rows = _read(spark, lake, "packets", wanted, days, "batch=*/kind=*", damaged)
        # Spark does not read the files of other folders.
        return rows if kinds is None else rows.where(F.col("kind").isin(*kinds))

    @classmethod
    def of_batch(cls, spark: SparkSession, lake: AnyLake, batch: Batch) -> Self:
        """The packets in the folders of batches that were read together; these may also hold packets of other
        batches."""
        if isinstance(lake, ObjectLake):
            objects = lake.objects(batch.manifests, "packets")
            return cls(read_objects(spark, lake.store, objects, schema("packets")))
        reader = spark.read.schema(schema("packets")).option("basePath", str(lake.packets))
        return cls(reader.parquet(*map(for_spark, batch.folders)))


class Quarantine(Dataset, schema="quarantine"):
    """The rows of the log that a lake has quarantined."""

    @classmethod
    def of(
        cls, spark: SparkSession, lake: AnyLake, days: Sequence[int] | None = None, *, damaged: bool = False
    ) -> Self:
        """All quarantined rows, or those of these days; with `damaged`, as far as they can be read."""
        wanted = schema("quarantine")
        if isinstance(lake, ObjectLake):
            objects = lake.objects_of_days(days, "quarantine", damaged=damaged)
            return cls(read_objects(spark, lake.store, objects, wanted, damaged=damaged))
        return cls(_read(spark, lake, "quarantine", wanted, days, "batch=*", damaged))


def _read(
    spark: SparkSession,
    lake: Lake,
    name: str,
    wanted: StructType,
    days: Sequence[int] | None,
    pattern: str,
    damaged: bool,
) -> DataFrame:
    """The rows in the folders of batches of these days, or of all days."""
    root = lake.root / name
    named = root.glob("day=*") if days is None else (root / f"day={day_text(day)}" for day in days)
    there = [day for day in named if next(day.glob(pattern), None) is not None]
    if not there:
        return spark.createDataFrame([], wanted)
    reader = spark.read.schema(wanted).option("basePath", str(root))
    # Set for this read alone, and not for everything that the session reads.
    reader = reader.option("ignoreCorruptFiles", str(damaged).lower())
    try:
        frame = reader.parquet(*map(for_spark, there))
        _ = frame.schema  # Spark Connect does not look at the files before this
        return frame
    except (PySparkException, Py4JError):
        # Spark cannot handle a file beside the folders. It is left out here, and the audit names it.
        return reader.parquet(*(f"{for_spark(day)}/{pattern}" for day in there))
