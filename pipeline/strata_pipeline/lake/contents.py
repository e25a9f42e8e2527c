"""Rows in the files of a lake, read without Spark, some thousands at a time and with their file and row
number; and their second digest (`strata_pipeline.lake_format.digest`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3
from strata.protocol.sequences import Span

from strata_pipeline.lake.footers import check_footer
from strata_pipeline.lake.layout import is_visible
from strata_pipeline.lake.rows import rows_in
from strata_pipeline.lake_format import NOTHING, OTHERS, ContentsDigest, others_hash

__all__ = [
    "GROUP_ROWS",
    "UNREADABLE",
    "Contents",
    "Rows",
    "contents_of",
    "groups_within",
    "parquet_files",
    "read_rows",
]

UNREADABLE: Final = (OSError, ValueError, pa.ArrowException)
"""What reading a Parquet file with arbitrary bytes can raise."""

GROUP_ROWS: Final = 2**15
"""The most rows in a row group of a large file. Checks read a day in pieces of 250,000 sequences, and with
them every row group that holds one of these: in groups of 128 MiB, Parquet's default, each row nine times."""
_RECORD_BYTES = 104
_READ_ROWS = 2_048
"""Bodies have up to some hundred KiB each, so memory use stays below a few hundred MiB."""


_NUMBER, _BYTES, _TEXT = (pa.int64(),), (pa.binary(), pa.large_binary()), (pa.string(), pa.large_string())
_TYPES: Final[Mapping[str, Sequence[pa.DataType]]] = {
    **dict.fromkeys(("sequence", "received_at", "timestamp", "expires_at"), _NUMBER),
    "size": (pa.int32(),),
    **dict.fromkeys(("packet_id", "body", "annotation"), _BYTES),
    **dict.fromkeys(("author_id", "content_type", "reason", "detail"), _TEXT),
}
"""The types that a column may have: a stranger who can write files may choose any type."""


class Rows(NamedTuple):
    """Consecutive rows of a file."""

    file: Path
    first: int
    """The number of the first of them in the file, from 0."""
    columns: pa.RecordBatch


def parquet_files(folders: Iterable[Path]) -> list[Path]:
    """The files below folders that some reader of Parquet reads, sorted by name.

    DuckDB and Polars select files by the end of their names, including hidden ones. A link to a folder counts
    as a file: some readers follow it, no writer of a lake makes one, and reading it as a file fails.
    """
    there = [str(folder) for folder in folders if folder.is_dir()]
    return sorted(Path(path) for folder in there for path in _read_below(folder, False))


def _read_below(folder: str, is_hidden: bool) -> Iterator[str]:
    """The files of one folder; `is_hidden` is whether it is hidden or lies in a hidden one."""
    try:
        with os.scandir(folder) as found:
            entries = list(found)
    except PermissionError:
        return
    for entry in entries:
        hidden = is_hidden or not is_visible(entry.name)
        if entry.is_dir(follow_symlinks=False):
            yield from _read_below(entry.path, hidden)
        elif (not hidden or os.path.splitext(entry.name)[1] == ".parquet") and (
            entry.is_symlink() or entry.is_file()
        ):
            yield entry.path


def read_rows(
    files: Iterable[Path], columns: Sequence[str], span: Span | None = None, *, absent: bool = False
) -> Iterator[Rows]:
    """All rows of files, or at least those in a span: row groups that hold none of them, by the statistics,
    are skipped.

    Raises OSError, and ValueError for a file that is not Parquet, lacks a column, has it with another type or
    has two of one name; if columns may be `absent`, those that a file lacks are null.
    """
    for path in files:
        check_footer(path)
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _check_names(path, names)
            there = [name for name in columns if name in names]
            missing = [name for name in columns if name not in names]
            if missing and not (absent and "sequence" in there):
                raise ValueError(f"{path} has no column {', '.join(missing)}")
            for name in there:
                found = file.schema_arrow.field(name).type
                if found not in _TYPES.get(name, (found,)):
                    raise ValueError(f"{path} has a column {name} of type {found}")
            for group, first in groups_within(file.metadata, span):
                is_large = file.metadata.row_group(group).num_rows > _READ_ROWS
                for batch in file.iter_batches(
                    _READ_ROWS, row_groups=[group], columns=there, use_threads=is_large
                ):
                    rows = batch
                    for name in missing:
                        rows = rows.append_column(name, pa.nulls(batch.num_rows))
                    yield Rows(path, first, rows)
                    first += batch.num_rows


class Contents:
    """The digest records of rows, added in any order."""

    def __init__(self) -> None:
        self._sequences: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        self._records: list[np.ndarray[tuple[int, int], np.dtype[np.uint8]]] = []
        self._is_sorted = False

    @classmethod
    def of(cls, packets: Iterable[Path], quarantine: Iterable[Path], span: Span) -> Self:
        """The records of a span, from folders of packets and of quarantined rows. Raises OSError and
        ValueError."""
        contents = cls()
        contents._add(packets, span, quarantined=False)
        contents._add(quarantine, span, quarantined=True)
        return contents

    def _add(self, folders: Iterable[Path], span: Span, *, quarantined: bool) -> None:
        """Add the rows of a span below folders of packets, or below folders of quarantined rows."""
        self._is_sorted = False
        columns = ["sequence", "body", "annotation", *(OTHERS if quarantined else ())]
        for _, _, rows in read_rows(parquet_files(folders), columns, span):
            found = rows_in(rows, span)
            self._sequences.append(found.column("sequence").to_numpy(zero_copy_only=False))
            self._records.append(_records(found, quarantined))

    def digest(self, span: Span, *, without: Sequence[int] = ()) -> str:
        """The digest of the added rows that lie in a span, `without` those with these sequences."""
        if not self._sequences:
            return ContentsDigest().hexdigest()
        if not self._is_sorted:  # once: a day has thousands of batches
            sequences, records = np.concatenate(self._sequences), np.concatenate(self._records)
            order = np.argsort(sequences, kind="stable")
            self._sequences, self._records = [sequences[order]], [records[order]]
            self._is_sorted = True
        first, end = np.searchsorted(self._sequences[0], [span.after, span.up_to], side="right")
        records = self._records[0][first:end]
        if without:
            records = records[~np.isin(self._sequences[0][first:end], without)]
        digest = ContentsDigest()
        digest.update_bytes(records.tobytes())
        return digest.hexdigest()


def contents_of(packets: Iterable[Path], quarantine: Iterable[Path], span: Span) -> str:
    """The second digest of a batch in these folders. Raises OSError and ValueError."""
    return Contents.of(packets, quarantine, span).digest(span)


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Raise ValueError for a name that is there twice, or is not in lower case: DuckDB and Spark ignore case,
    and DuckDB reads the first of `BODY` and `body`."""
    name = next((one for one in names if one != one.casefold() or names.count(one) > 1), None)
    if name is not None:
        raise ValueError(f"{path} has a column {name!r}, by which readers may take one column for another")


def groups_within(metadata: pq.FileMetaData, span: Span | None) -> Iterator[tuple[int, int]]:
    """The row groups that may hold rows of a span, each with the number of its first row."""
    first = 0
    place = metadata.schema.to_arrow_schema().get_field_index("sequence")
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if span is None or _may_hold(group.column(place).statistics, span):
            yield number, first
        first += group.num_rows


def _may_hold(told: pq.Statistics | None, span: Span) -> bool:
    """Whether a group may hold rows of a span; a row without a sequence may be in any."""
    if told is None or not told.has_min_max or not told.has_null_count or told.null_count:
        return True
    return bool(told.max > span.after and told.min <= span.up_to)


def _records(rows: pa.RecordBatch, quarantined: bool) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    records = np.zeros((rows.num_rows, _RECORD_BYTES), np.uint8)
    sequences: np.ndarray[tuple[int], np.dtype[np.int64]] = rows.column("sequence").to_numpy(
        zero_copy_only=False
    )
    records[:, 0:8] = sequences.astype(">i8").view(np.uint8).reshape(-1, 8)
    records[:, 8:40] = _hashes(rows.column("body"))
    records[:, 40:72] = _hashes(rows.column("annotation"))
    if quarantined:
        others = [others_hash(row) for row in rows.select(list(OTHERS)).to_pylist()]
        records[:, 72:104] = np.frombuffer(b"".join(others), np.uint8).reshape(-1, 32)
    return records


def _hashes(column: pa.Array) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]] | int:
    if column.null_count == len(column):
        return 0
    joined = b"".join(NOTHING if value is None else blake3(value).digest() for value in column.to_pylist())
    return np.frombuffer(joined, np.uint8).reshape(-1, 32)
