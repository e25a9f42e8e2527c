"""Rows of files that hold many batches, for a copy that asks for one batch after the other.

A compacted day has thousands of batches in a few files. Each row group is read once, and not once for each
batch that it has rows of.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from strata.protocol.sequences import Span

from strata_pipeline.lake.contents import groups_within
from strata_pipeline.lake.footers import check_footer
from strata_pipeline.lake.rows import rows_in

__all__ = ["RowGroups"]

_KEPT_BYTES: Final = 256 * 2**20
"""The most bytes of row groups that stay in memory, if these are more than one."""


class _Group(NamedTuple):
    path: Path
    number: int


class RowGroups:
    """Row groups of files. Those that were asked for last stay in memory."""

    def __init__(self) -> None:
        self._files: dict[Path, pq.FileMetaData] = {}
        self._kept: dict[_Group, pa.Table] = {}

    def rows(self, path: Path, span: Span) -> pa.Table:
        """The rows of a file in a span. Raises what reading a damaged file raises."""
        told = self._files.get(path)
        if told is None:
            told = self._files[path] = _footer(path)
        found = [rows_in(self._group(_Group(path, number)), span) for number, _ in groups_within(told, span)]
        return pa.concat_tables([told.schema.to_arrow_schema().empty_table(), *found])

    def _group(self, asked: _Group) -> pa.Table:
        rows = self._kept.pop(asked, None)
        if rows is None:
            rows = self._read(asked)
        self._kept[asked] = rows  # as the newest
        while len(self._kept) > 1 and sum(one.nbytes for one in self._kept.values()) > _KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        return rows

    def _read(self, asked: _Group) -> pa.Table:
        with pq.ParquetFile(asked.path, metadata=self._files[asked.path]) as file:
            return file.read_row_group(asked.number)


def _footer(path: Path) -> pq.FileMetaData:
    check_footer(path)
    told = pq.read_metadata(path)
    columns = told.schema.to_arrow_schema()
    place = columns.get_field_index("sequence")
    if place < 0 or columns.field(place).type != pa.int64():
        raise ValueError(f"{path} has no column of sequences")
    return told
