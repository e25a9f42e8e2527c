"""Places and ids in the files of a lake, read without Spark, and their digest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
from strata.protocol.sequences import DAY_SECONDS, Span

from strata_pipeline.lake.footers import check_footer
from strata_pipeline.lake_format import RowsDigest, row_bytes

__all__ = [
    "PLACES",
    "add_rows",
    "checked_files",
    "cut",
    "digest_of",
    "places_at",
    "read_places",
    "received_on",
    "rows_in",
]

PLACES = ("sequence", "received_at", "packet_id", "size")
_ROW_BYTES = 48
_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)
_NO_PLACES = pa.schema(
    [("sequence", pa.int64()), ("received_at", pa.int64()), ("packet_id", pa.binary()), ("size", pa.int32())]
).empty_table()


def read_places(folders: Iterable[Path], span: Span | None = None) -> pa.Table:
    """The columns `PLACES` of all rows below these folders, or of the rows in a span, in log order.

    Raises OSError, ValueError and `pa.ArrowException` for a file that does not have rows of a lake.
    """
    within = None
    if span is not None:
        within = (pads.field("sequence") > span.after) & (pads.field("sequence") <= span.up_to)
    return _sorted(checked_files(folder).to_table(filter=within) for folder in folders)


def places_at(folders: Iterable[Path], sequences: Sequence[int]) -> pa.Table:
    """The rows of `read_places` that have one of these sequences. Raises what that function raises.

    All rows are looked at, some at a time: a file with false statistics must not hide what is to be erased.
    """
    wanted = pa.array(sequences, pa.int64())
    return _sorted(
        pa.Table.from_batches([batch.filter(pc.is_in(batch["sequence"], value_set=wanted))])
        for folder in folders
        for batch in checked_files(folder).to_batches()
    )


def checked_files(folder: Path, columns: pa.Schema = _NO_PLACES.schema) -> pads.Dataset:
    """The files below a folder, of which there may be none, with some `columns`; those that a file lacks are
    null. Raises what `read_places` raises."""
    rows = pads.dataset(folder, schema=columns, format="parquet")
    for name in rows.files:
        check_footer(Path(name))
    return rows


def _sorted(tables: Iterable[pa.Table]) -> pa.Table:
    return pa.concat_tables([_NO_PLACES, *tables]).sort_by("sequence")


def rows_in(rows: _Rows, span: Span) -> _Rows:
    """The rows whose sequences lie in a span; rows of a damaged file without a sequence lie in none."""
    sequences = rows.column("sequence")
    within = pc.and_(pc.greater(sequences, span.after), pc.less_equal(sequences, span.up_to))
    return rows if pc.all(within, skip_nulls=False).as_py() else rows.filter(within)


def cut(rows: pa.Table, spans: Iterable[Span]) -> Iterator[pa.Table]:
    """The rows of `read_places` that lie in each of these spans, span by span."""
    sequences = rows["sequence"].to_numpy()
    for span in spans:
        first, end = np.searchsorted(sequences, span, side="right")
        yield rows.slice(int(first), int(end - first))


def digest_of(rows: pa.Table) -> str:
    """The digest of rows of `read_places`."""
    digest = RowsDigest()
    add_rows(digest, rows)
    return digest.hexdigest()


def received_on(day: int, at: int) -> int:
    """The time at which a row of a day was received, limited to plausible values if somebody has altered it.

    Time never goes back in a log, so a later time would become that of all packets that follow; and JSON has
    no exact numbers beyond 2⁵³.
    """
    return max(0, min(at, (day + 1) * DAY_SECONDS - 1))


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
    columns = (_whole(sequences).to_pylist(), _whole(received).to_pylist(), ids.to_pylist())
    return b"".join(row_bytes(sequence, at, one or b"") for sequence, at, one in zip(*columns, strict=True))


def _whole(numbers: pa.Array) -> pa.Array:
    """In a damaged file a number may be missing. None of ours is negative, so the digest then differs."""
    return pc.fill_null(numbers, -1)


def _big_endian(numbers: pa.Array) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    raw: np.ndarray[tuple[int], np.dtype[np.int64]] = _whole(numbers).to_numpy(zero_copy_only=False)
    return raw.astype(">i8").view(np.uint8).reshape(-1, 8)
