"""A finished day's packets written anew, as compaction and erasing do it, on a disk and in a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from strata_pipeline.jobs.parts import PartDone, PartWork, rewrite_part
from strata_pipeline.lake import files
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.schemas import schema

__all__ = ["FILE_BYTES", "rewrite_parts", "write_day"]

FILE_BYTES: Final = 256 * 2**20
"""The approximate size of the bodies in a file, and in a part of a bucket's day."""
_DONE: Final = pa.schema([("done", pa.binary())])


def write_day(packets: DataFrame, folder: Path, body_bytes: int, file_bytes: int = FILE_BYTES) -> None:
    """Write packets, whose bodies take `body_bytes`, by kind and in order of sequence into a new folder."""
    (
        packets.repartitionByRange(max(1, -(-body_bytes // file_bytes)), "kind", "sequence")
        .sortWithinPartitions("kind", "sequence")
        .select(*schema("packets").names, "kind")
        .write.partitionBy("kind")
        .parquet(str(folder))
    )
    files.without_notes(folder)


def rewrite_parts(spark: SparkSession, lake: ObjectLake, works: Sequence[PartWork]) -> list[PartDone]:
    """Write parts of a bucket's day anew, a task for each."""
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
