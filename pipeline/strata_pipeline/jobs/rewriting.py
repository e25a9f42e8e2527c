"""Rewriting a finished day's packets, for compaction and erasing, on a disk and in a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from strata_pipeline.jobs.parts import PartDone, PartWork, rewrite_part
from strata_pipeline.lake import files
from strata_pipeline.lake.contents import GROUP_ROWS
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake_format import Manifest
from strata_pipeline.planning import shuffled_once
from strata_pipeline.schemas import schema

__all__ = ["FILE_BYTES", "SORTED_BYTES", "rewrite_parts", "stretches", "write_day"]

FILE_BYTES: Final = 256 * 2**20
"""The approximate size of the bodies in a file, and in a part of a day in a bucket."""
SORTED_BYTES: Final = 8 * 2**30
"""The most bytes of bodies that are sorted at a time: Spark sorts on the disk, beside old and new files."""
_MOST_FILES: Final = 10_000
"""In a stretch: a forged manifest may tell of any number of bytes."""
_DONE: Final = pa.schema([("done", pa.binary())])


def write_day(
    packets: DataFrame,
    folder: Path,
    manifests: Sequence[Manifest],
    *,
    file_bytes: int = FILE_BYTES,
    sorted_bytes: int = SORTED_BYTES,
) -> None:
    """Write the packets of a day's manifests, by kind and in order of sequence, into a new folder.

    A day of more than `sorted_bytes` is written in stretches of its sequences, one after the other.
    """
    with shuffled_once(packets.sparkSession):
        for stretch in stretches(manifests, sorted_bytes):
            body_bytes = sum(one.body_bytes for one in stretch)
            (
                packets.where(F.col("sequence").between(stretch[0].after + 1, stretch[-1].up_to))
                .repartitionByRange(
                    max(1, min(_MOST_FILES, -(-body_bytes // file_bytes))), "kind", "sequence"
                )
                .sortWithinPartitions("kind", "sequence")
                .select(*schema("packets").names, "kind")
                .write.mode("append")
                .partitionBy("kind")
                .options(**files.WRITER_OPTIONS)
                .option("parquet.block.row.count.limit", GROUP_ROWS)
                .parquet(str(folder))
            )
    files.without_notes(folder)


def stretches(manifests: Sequence[Manifest], most: int) -> Iterator[list[Manifest]]:
    """Consecutive manifests, divided as evenly as whole manifests allow into stretches with at most about
    `most` bytes of bodies each."""
    total = sum(one.body_bytes for one in manifests)
    number = max(1, -(-total // most))
    stretch: list[Manifest] = []
    passed, ended = 0, 1
    for one in manifests:
        stretch.append(one)
        passed += one.body_bytes
        if passed * number >= ended * total > 0:
            yield stretch
            stretch, ended = [], passed * number // total + 1
    if stretch:
        yield stretch


def rewrite_parts(spark: SparkSession, lake: ObjectLake, works: Sequence[PartWork]) -> list[PartDone]:
    """Rewrite parts of a day in a bucket, in one task for each."""
    store = lake.store

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for asked in batch.column("work").to_pylist():
                done = rewrite_part(store, msgspec.json.decode(asked, type=PartWork))
                yield pa.RecordBatch.from_pylist([{"done": msgspec.json.encode(done)}], schema=_DONE)

    if not works:
        return []
    asked = spark.createDataFrame([(msgspec.json.encode(one),) for one in works], "work binary")
    rows = asked.repartition(len(works)).mapInArrow(run, "done binary").collect()
    return [msgspec.json.decode(bytes(row.done), type=PartDone) for row in rows]
