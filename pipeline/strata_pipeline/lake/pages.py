"""The pages of a column in a Parquet file, as their headers tell, and the index of them.

A reader without a filter reads the pages of a column one after the other. A reader with a filter asks the
index first, and reads only the pages that the index names; so the index must name all of them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, BinaryIO, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta, field

from strata_pipeline.lake.footers import ColumnChunk, ColumnStatistics, Count, EncodingCount, Told
from strata_pipeline.lake.thrift import decode

__all__ = ["DataPage", "PageBounds", "bounds_of", "pages_of"]

_HEADER_BYTES: Final = (512, 32 * 2**10)
"""The bytes of most headers, and the most of one, which has up to four values of 4 KiB."""
_DICTIONARY = 2
_AS_COUNTED: Final = {3: 0}
"""Some programs count the later kind of data pages as the first."""
_INDEX_BYTES: Final = 8 * 2**20
"""The most bytes of an index, which has two values of 64 bytes for each page."""


class _DataPage(Told, frozen=True):
    values: Annotated[int, Meta(gt=0)] = field(name="1I")
    encoding: int = field(name="2I")
    definition: int = field(name="3I")
    repetition: int = field(name="4I")
    statistics: ColumnStatistics | None = field(default=None, name="5R")


class _LaterDataPage(Told, frozen=True):
    values: Annotated[int, Meta(gt=0)] = field(name="1I")
    nulls: int = field(name="2I")
    rows: int = field(name="3I")
    encoding: int = field(name="4I")
    statistics: ColumnStatistics | None = field(default=None, name="8R")


class _Dictionary(Told, frozen=True):
    values: Count = field(name="1I")
    encoding: int = field(name="2I")
    is_sorted: bool | None = field(default=None, name="3B")


class _Header(Told, frozen=True):
    type: Literal[0, 2, 3] = field(name="1I")
    raw_size: Count = field(name="2I")
    size: Count = field(name="3I")
    checksum: int | None = field(default=None, name="4I")
    data: _DataPage | None = field(default=None, name="5R")
    dictionary: _Dictionary | None = field(default=None, name="7R")
    later_data: _LaterDataPage | None = field(default=None, name="8R")

    @property
    def values(self) -> _DataPage | _LaterDataPage | None:
        """What it says of a page with values."""
        return self.data or self.later_data

    @property
    def is_of_one_type(self) -> bool:
        """Whether it has the struct of its type, and no other."""
        there = [self.data, self.dictionary, self.later_data]
        return [one is not None for one in there] == [self.type == kind for kind in (0, 2, 3)]


class _Location(Told, frozen=True):
    at: int = field(name="1L")
    size: int = field(name="2I")
    first: int = field(name="3L")


class _Offsets(Told, frozen=True):
    locations: list[_Location] = field(name="1A")
    bytes_in_all: list[int] | None = field(default=None, name="2A")


class PageBounds(Told, frozen=True):
    """What an index says of each page: whether it has nulls only, its bounds, and its number of nulls."""

    are_null: list[bool] = field(name="1A")
    mins: list[bytes] = field(name="2A")
    maxs: list[bytes] = field(name="3A")
    order: Annotated[int, Meta(ge=0, le=2)] = field(name="4I")
    """0: none, 1: both bounds ascend, 2: both descend."""
    null_counts: list[int] | None = field(default=None, name="5A")
    by_repetition: list[int] | None = field(default=None, name="6A")
    by_definition: list[int] | None = field(default=None, name="7A")
    """For each page, the number of nulls and that of values, unless there can be no nulls."""


class DataPage(NamedTuple):
    """A page with values."""

    at: int
    size: int
    first: int
    """The number of its first row in the row group."""
    rows: int
    nulls: int | None
    """How many nulls its header tells of; only the later kind of pages has this."""
    statistics: ColumnStatistics | None


def pages_of(file: BinaryIO, chunk: ColumnChunk) -> list[DataPage]:
    """The pages with values of a column of a row group.

    Raises ValueError unless they are what footer and index say, and have as many values as there are rows.
    """
    data = chunk.data
    pages: list[DataPage] = []
    found: Counter[tuple[int, int]] = Counter()
    at, rows = data.begins_at, 0
    end = at + data.size
    while at < end:
        header, size = _header(file, at, end)
        if (header.type == _DICTIONARY) != (at == data.dictionary_at):
            raise ValueError("its dictionary is not where the footer says")
        if header.values is not None:
            if not pages and at != data.first_page_at:
                raise ValueError("its first values are not where the footer says")
            later, values = header.later_data, header.values.values
            if later is not None and later.rows != values:
                raise ValueError(f"a page is said to have {later.rows} rows, and has {values} values")
            nulls = None if later is None else later.nulls
            pages.append(DataPage(at, size, rows, values, nulls, header.values.statistics))
            rows += values
        told = header.values or header.dictionary
        found[_AS_COUNTED.get(header.type, header.type), -1 if told is None else told.encoding] += 1
        at += size
    if at != end or rows != data.values:
        raise ValueError(f"its pages have {rows} values for {data.values} rows, or other sizes than told")
    _check_encodings(found, data.encodings, data.encoding_counts)
    _check_offsets(file, chunk, pages)
    return pages


def bounds_of(file: BinaryIO, chunk: ColumnChunk, pages: Sequence[DataPage]) -> PageBounds | None:
    """What the index of a column says of its pages; None if there is none. Raises ValueError."""
    if chunk.index_at is None or chunk.index_bytes is None:
        return None
    told = msgspec.convert(_read(file, chunk.index_at, chunk.index_bytes), PageBounds)
    sizes = {len(told.are_null), len(told.mins), len(told.maxs), len(told.null_counts or told.mins)}
    if sizes != {len(pages)}:
        raise ValueError("its index has other pages")
    return told


def _header(file: BinaryIO, at: int, end: int) -> tuple[_Header, int]:
    """The header of the page at a place, and the bytes of both."""
    for most in _HEADER_BYTES:
        file.seek(at)
        with contextlib.suppress(ValueError):
            told, size = decode(file.read(min(most, end - at)))
            header = msgspec.convert(told, _Header)
            break
    else:
        raise ValueError("a page has no header that a writer of a lake writes")
    if not header.is_of_one_type:
        raise ValueError("a page is of two types")
    return header, size + header.size


def _check_encodings(
    found: Counter[tuple[int, int]], told: Sequence[int], counts: Sequence[EncodingCount] | None
) -> None:
    """Spark looks for a value in the dictionary alone if all pages are told to refer to it."""
    if any(encoding not in told for kind, encoding in found if kind != _DICTIONARY):
        raise ValueError("its pages have other encodings than told")
    said: Counter[tuple[int, int]] = Counter()
    for one in counts or ():
        said[_AS_COUNTED.get(one.page_type, one.page_type), one.encoding] += one.count
    if counts is not None and found != said:
        raise ValueError("its pages have other encodings than told")


def _check_offsets(file: BinaryIO, chunk: ColumnChunk, pages: Sequence[DataPage]) -> None:
    if chunk.offsets_at is None or chunk.offsets_bytes is None:
        if chunk.index_at is not None:
            raise ValueError("its index has no places of pages")
        return
    told = msgspec.convert(_read(file, chunk.offsets_at, chunk.offsets_bytes), _Offsets)
    if [(one.at, one.size, one.first) for one in told.locations] != [page[:3] for page in pages]:
        raise ValueError("its pages are not where its index says")


def _read(file: BinaryIO, at: int, size: int) -> dict[str, object]:
    if size > _INDEX_BYTES:
        raise ValueError(f"its index has {size} bytes, and may have {_INDEX_BYTES}")
    file.seek(at)
    told, end = decode(file.read(size))
    if end != size:
        raise ValueError("its index has another size than told")
    return told
