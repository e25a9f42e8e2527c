"""A finished day's packets written anew, as compaction and erasing do it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame

from strata_pipeline.lake import files
from strata_pipeline.schemas import schema

__all__ = ["FILE_BYTES", "write_day"]

FILE_BYTES: Final = 256 * 2**20
"""The approximate size of the bodies in a file."""


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
