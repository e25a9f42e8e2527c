"""What stands in a lake's files, read without Spark: places and ids, and their digest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
from strata.lake import RowsDigest, row_bytes

__all__ = ["PLACES", "add_rows", "read_places"]

PLACES = ("sequence", "received_at", "packet_id", "size")
_ROW_BYTES = 48


def read_places(*folders: Path | None) -> pa.Table:
    """`PLACES` of all rows below these folders, in log order. Bodies are not read."""
    tables = [
        pads.dataset(folder, format="parquet", partitioning="hive").to_table(columns=list(PLACES))
        for folder in folders
        if folder is not None
    ]
    if not tables:
        return pa.table({"sequence": pa.array([], pa.int64())})
    return pa.concat_tables(tables).sort_by("sequence")


def add_rows(digest: RowsDigest, rows: pa.Table) -> None:
    """Add rows of `read_places` to a digest."""
    for batch in rows.to_batches():
        digest.update_bytes(_rows_bytes(batch), batch.num_rows)


def _rows_bytes(batch: pa.RecordBatch) -> bytes:
    sequences, received, ids = (batch.column(name) for name in PLACES[:3])
    if all(length == 32 for length in pc.binary_length(ids).unique().to_pylist()):
        records = np.empty((batch.num_rows, _ROW_BYTES), np.uint8)
        records[:, 0:8] = _big_endian(sequences)
        records[:, 8:16] = _big_endian(received)
        fixed = ids.cast(pa.binary(32))
        buffer = fixed.buffers()[1]
        raw = np.frombuffer(buffer, np.uint8)[fixed.offset * 32 : (fixed.offset + len(fixed)) * 32]
        records[:, 16:] = raw.reshape(-1, 32)
        return records.tobytes()
    return b"".join(
        row_bytes(sequence, at, packet_id or b"")
        for sequence, at, packet_id in zip(
            sequences.to_pylist(), received.to_pylist(), ids.to_pylist(), strict=True
        )
    )


def _big_endian(numbers: pa.Array) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    return numbers.to_numpy(zero_copy_only=False).astype(">i8").view(np.uint8).reshape(-1, 8)
