"""The statistics in Parquet files compared with the rows. Most readers skip what these exclude: so a file
with false ones shows less to a query than it holds.

Bounds of numbers must be exact, because some programs answer `min` and `max` from them. Those of bytes may
be shortened and need only cover all values. Numbers of rows and nulls must be right, for each row group and
page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from strata_pipeline.lake.faults import Fault
from strata_pipeline.lake.footers import (
    BYTES,
    WIDTHS,
    ColumnChunk,
    ColumnStatistics,
    Footer,
    RowGroup,
    footer_of,
)
from strata_pipeline.lake.pages import DataPage, PageBounds, bounds_of, pages_of

__all__ = ["false_statistics"]

_READ_ROWS: Final = 2_048
_NOWHERE: Final = -(2**63)
_DESCENDING: Final = 2


def false_statistics(path: Path, first: int, last: int) -> Iterator[Fault]:
    """A fault for each column of a row group of which the file tells something false.

    For the row groups whose first sequence, by the statistics, is one from `first` to `last`: each is looked
    at once, whoever divides all sequences among tasks. Raises OSError and ValueError.
    """
    with path.open("rb") as file, pq.ParquetFile(path) as rows:
        footer = footer_of(file)
        for number, group in enumerate(footer.groups):
            if not first <= _begins_with(footer, group) <= last:
                continue
            for name, why in _false_columns(file, rows, number, group):
                told = f"{path}, row group {number}: column {name}: {why}"
                yield Fault("file", "statistics", told, file=str(path))


def _begins_with(footer: Footer, group: RowGroup) -> int:
    names = [one.name for one in footer.schema[1:]]
    if b"sequence" not in names:
        return _NOWHERE
    told = group.columns[names.index(b"sequence")].data.statistics
    least = None if told is None else told.min or told.old_min
    return _NOWHERE if least is None or len(least) != 8 else int.from_bytes(least, "little", signed=True)


def _false_columns(
    file: BinaryIO, rows: pq.ParquetFile, number: int, group: RowGroup
) -> list[tuple[str, str]]:
    """The names of columns with false statements about their pages or, if there are none, their values."""
    columns: list[_Column] = []
    faults = []
    for chunk in group.columns:
        # Readers believe these, no writer of a lake writes them, and whether they are true is not checked.
        if chunk.data.bloom_filter_at is not None:
            faults.append((chunk.name, "it has a bloom filter"))
        if group.sorted_by:
            faults.append((chunk.name, "its row group is said to be sorted"))
        try:
            pages = pages_of(file, chunk)
            columns.append(_Column(chunk, pages, bounds_of(file, chunk, pages)))
        except ValueError as error:
            faults.append((chunk.name, str(error)))
    if faults:
        return faults
    for batch in rows.iter_batches(_READ_ROWS, row_groups=[number], use_threads=False):
        for column, values in zip(columns, batch.columns, strict=True):
            column.add(values)
    return [(column.name, why) for column in columns if (why := column.fault()) is not None]


class _Seen:
    """The bounds of values, and the number of nulls among them."""

    def __init__(self) -> None:
        self.least: Any = None
        self.greatest: Any = None
        self.nulls = 0

    def add(self, values: pa.Array) -> None:
        found = pc.min_max(values)
        self.include(found["min"].as_py(), found["max"].as_py(), values.null_count)

    def include(self, least: Any, greatest: Any, nulls: int) -> None:
        self.nulls += nulls
        if least is not None:
            self.least = least if self.least is None else min(self.least, least)
            self.greatest = greatest if self.greatest is None else max(self.greatest, greatest)


class _Column:
    """A column of a row group, whose rows are added in order."""

    def __init__(self, chunk: ColumnChunk, pages: Sequence[DataPage], bounds: PageBounds | None) -> None:
        self.name = chunk.name
        self._chunk = chunk
        self._pages = pages
        self._bounds = bounds
        self._seen = [_Seen() for _ in pages]
        self._page = 0
        self._row = 0

    def add(self, rows: pa.Array) -> None:
        """Add the next rows."""
        if self._chunk.data.type == BYTES:
            rows = rows.cast(pa.large_binary())
        elif not pa.types.is_integer(rows.type):
            raise ValueError(f"numbers are read as {rows.type}")
        begun = self._row
        self._row += len(rows)
        if self._row > self._chunk.data.values:
            raise ValueError("a column has more rows than told")
        while begun < self._row:
            page = self._pages[self._page]
            there = min(self._row, page.first + page.rows) - begun
            self._seen[self._page].add(rows.slice(len(rows) - self._row + begun, there))
            begun += there
            if begun == page.first + page.rows:
                self._page += 1

    def fault(self) -> str | None:
        """The first false statement about these rows; None if there is none."""
        return next(self._faults(), None)

    def _faults(self) -> Iterator[str]:
        data = self._chunk.data
        if self._row != data.values:
            yield f"it is said to have {data.values} rows, and has {self._row}"
        whole = _Seen()
        for seen in self._seen:
            whole.include(seen.least, seen.greatest, seen.nulls)
        yield from _false(data.statistics, whole, data.type)
        levels = None if data.sizes is None else data.sizes.by_definition
        if levels and len(levels) > 1 and levels != [whole.nulls, data.values - whole.nulls]:
            yield "its counts by level are not those of the rows"
        for number, (page, seen) in enumerate(zip(self._pages, self._seen, strict=True)):
            if page.nulls not in (None, seen.nulls):
                yield f"page {number}: it is said to have {page.nulls} nulls, and has {seen.nulls}"
            for why in _false(page.statistics, seen, data.type):
                yield f"page {number}: {why}"
        if self._bounds is not None:
            yield from _false_index(self._bounds, self._pages, self._seen, data.type)


def _false(told: ColumnStatistics | None, seen: _Seen, kind: int) -> Iterator[str]:
    if told is None:
        return
    if told.null_count not in (None, seen.nulls):
        yield f"it is said to have {told.null_count} nulls, and has {seen.nulls}"
    is_number = kind in WIDTHS
    exact = is_number or bool(told.is_min_exact), is_number or bool(told.is_max_exact)
    if not _cover(told.min, told.max, seen, kind, exact):
        yield "its bounds are not those of the rows"
    # Programs compare the bytes of these older bounds in different ways.
    if not _cover(told.old_min, told.old_max, seen, kind, exact) or (
        not is_number and told.old_min != told.old_max
    ):
        yield "its older bounds are not those of the rows"


def _false_index(
    told: PageBounds, pages: Sequence[DataPage], seen: Sequence[_Seen], kind: int
) -> Iterator[str]:
    if told.are_null != [one.least is None for one in seen]:
        yield "its index is wrong about pages of nulls only"
        return
    if told.null_counts is not None and told.null_counts != [one.nulls for one in seen]:
        yield "its index counts other nulls than its pages have"
    levels = [n for page, one in zip(pages, seen, strict=True) for n in (one.nulls, page.rows - one.nulls)]
    if told.by_definition and len(told.by_definition) != len(pages) and told.by_definition != levels:
        yield "its index counts other nulls than its pages have"
    all_pairs = zip(told.mins, told.maxs, strict=True)
    pairs = [pair for pair, is_null in zip(all_pairs, told.are_null, strict=True) if not is_null]
    full = [one for one in seen if one.least is not None]
    if not all(_cover(*pair, one, kind) for pair, one in zip(pairs, full, strict=True)):
        yield "its index has other bounds than its pages"
        return
    for bounds in zip(*pairs, strict=True):
        order = [_value(one, kind) for one in bounds]
        if told.order and order != sorted(order, reverse=told.order == _DESCENDING):
            yield "its index tells another order than its bounds have"


def _cover(
    least: bytes | None,
    greatest: bytes | None,
    seen: _Seen,
    kind: int,
    exact: tuple[bool, bool] = (False, False),
) -> bool:
    """Whether bounds cover all values or, if they are to be `exact`, are the least and the greatest one."""
    if least is None and greatest is None:
        return True
    if seen.least is None or any(
        one is not None and len(one) != WIDTHS.get(kind, len(one)) for one in (least, greatest)
    ):
        return False
    low = seen.least if least is None else _value(least, kind)
    high = seen.greatest if greatest is None else _value(greatest, kind)
    is_low = low == seen.least if exact[0] else low <= seen.least
    return bool(is_low and (high == seen.greatest if exact[1] else high >= seen.greatest))


def _value(told: bytes, kind: int) -> Any:
    return told if kind == BYTES else int.from_bytes(told, "little", signed=True)
