"""The footers of Parquet files, read strictly: whatever a footer says twice must agree.

pyarrow reads any footer, and some damaged ones end the process, which no handler can prevent: if a column has
another type than in the schema, for example. Readers also differ in what they believe: one finds a column by
its place and another one by its name, one takes the number of rows from here and another one from there.

Whether its statistics are those of the rows is for `lake.statistics` to find out.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal

import msgspec
from msgspec import Meta, Struct, field

from strata_pipeline.lake.thrift import decode

__all__ = [
    "BYTES",
    "INT32",
    "INT64",
    "WIDTHS",
    "ColumnChunk",
    "ColumnData",
    "ColumnStatistics",
    "Count",
    "EncodingCount",
    "Footer",
    "RowGroup",
    "Told",
    "check_content",
    "check_end",
    "check_footer",
    "columns_of",
    "footer_of",
]

INT32, INT64, BYTES = 1, 2, 6
"""The physical types of a lake's columns."""
WIDTHS: Final = {INT32: 4, INT64: 8}
"""The bytes of a value in statistics."""
_TEXT: Final = 0
_SIGNED: Final = {4: 17, 8: 18}
"""What other programs than ours declare numbers of so many bytes as."""
_OF_SPARK: Final = b"org.apache.spark.sql.parquet.row.metadata"
"""The note from which Spark takes the columns of a file, if it is there, instead of from the schema."""
_TO_SPARK: Final = {
    "long": INT64,
    "integer": INT32,
    "string": BYTES,
    "string collate UTF8_BINARY": BYTES,  # the same, as a Spark Connect server writes it
    "binary": BYTES,
}
_MAGIC: Final = b"PAR1"
_MOST_BYTES: Final = 8 * 2**20
"""The most bytes of a footer. One with a hundred row groups, and with values of 4 KiB each, has three."""
_KNOWN: Final = 4_096

Count = Annotated[int, Meta(ge=0)]
_Sizes = list[Count]


class Told(Struct, frozen=True):
    """A struct of Parquet, with the members that we know; readers skip others. A member of type None must not
    be there: with it, the rows are elsewhere."""


class ColumnStatistics(Told, frozen=True):
    """Bounds of values, and the number of nulls."""

    old_max: bytes | None = field(default=None, name="1S")
    old_min: bytes | None = field(default=None, name="2S")
    null_count: Count | None = field(default=None, name="3L")
    max: bytes | None = field(default=None, name="5S")
    min: bytes | None = field(default=None, name="6S")
    is_max_exact: bool | None = field(default=None, name="7B")
    is_min_exact: bool | None = field(default=None, name="8B")


class _Sized(Told, frozen=True):
    bytes_in_all: Count | None = field(default=None, name="1L")
    by_repetition: _Sizes | None = field(default=None, name="2A")
    by_definition: _Sizes | None = field(default=None, name="3A")


class EncodingCount(Told, frozen=True, order=True):
    """The number of pages of a type with an encoding."""

    page_type: int = field(name="1I")
    encoding: int = field(name="2I")
    count: int = field(name="3I")


class ColumnData(Told, frozen=True):
    """Where the values of a column are in a row group, and their statistics."""

    type: int = field(name="1I")
    encodings: list[int] = field(name="2A")
    path: list[bytes] = field(name="3A")
    codec: int = field(name="4I")
    values: Count = field(name="5L")
    raw_size: Count = field(name="6L")
    size: Count = field(name="7L")
    first_page_at: Count = field(name="9L")
    dictionary_at: Annotated[int, Meta(gt=0)] | None = field(default=None, name="11L")
    statistics: ColumnStatistics | None = field(default=None, name="12R")
    encoding_counts: list[EncodingCount] | None = field(default=None, name="13A")
    bloom_filter_at: int | None = field(default=None, name="14L")
    sizes: _Sized | None = field(default=None, name="16R")
    index_page_at: None = field(default=None, name="10L")

    @property
    def begins_at(self) -> int:
        """The place of its first page."""
        return self.first_page_at if self.dictionary_at is None else self.dictionary_at


class ColumnChunk(Told, frozen=True):
    """A column of a row group."""

    file_offset: int = field(name="2L")
    data: ColumnData = field(name="3R")
    offsets_at: Count | None = field(default=None, name="4L")
    offsets_bytes: Count | None = field(default=None, name="5I")
    index_at: Count | None = field(default=None, name="6L")
    index_bytes: Count | None = field(default=None, name="7I")
    other_file: None = field(default=None, name="1S")
    encryption: None = field(default=None, name="8R")
    encrypted: None = field(default=None, name="9S")

    @property
    def name(self) -> str:
        """The name of the column."""
        return self.data.path[0].decode(errors="replace")


class RowGroup(Told, frozen=True):
    """Consecutive rows of a file."""

    columns: list[ColumnChunk] = field(name="1A")
    raw_size: int = field(name="2L")
    rows: Count = field(name="3L")
    sorted_by: list[Any] | None = field(default=None, name="4A")
    begins_at: int | None = field(default=None, name="5L")
    size: int | None = field(default=None, name="6L")
    ordinal: int | None = field(default=None, name="7H")


class _Nothing(Told, frozen=True):
    pass


class _Integer(Told, frozen=True):
    bits: int = field(name="1Y")
    is_signed: Literal[True] = field(name="2B")


class _Logical(Told, frozen=True):
    text: _Nothing | None = field(default=None, name="1R")
    integer: _Integer | None = field(default=None, name="10R")


class _Element(Told, frozen=True):
    name: bytes = field(name="4S")
    type: Literal[1, 2, 6] | None = field(default=None, name="1I")
    repetition: Literal[0, 1] | None = field(default=None, name="3I")
    children: int | None = field(default=None, name="5I")
    converted: int | None = field(default=None, name="6I")
    field_id: int | None = field(default=None, name="9I")
    logical: _Logical | None = field(default=None, name="10R")

    @property
    def is_plain(self) -> bool:
        """Whether it is declared as what a lake has: numbers as signed ones of their width, bytes as bytes or
        text."""
        logical = self.logical or _Logical()
        width = WIDTHS.get(self.type or BYTES)
        if width is None:
            return self.converted in (None, _TEXT) and logical.integer is None
        bits = None if logical.integer is None else logical.integer.bits
        return self.converted in (None, _SIGNED[width]) and logical.text is None and bits in (None, 8 * width)


class _Note(Told, frozen=True):
    key: bytes = field(name="1S")
    value: bytes | None = field(default=None, name="2S")


class _SparkField(Struct, frozen=True):
    name: str
    type: str


class _SparkSchema(Struct, frozen=True):
    fields: list[_SparkField]


class _ByType(Told, frozen=True):
    by_type: _Nothing = field(name="1R")


class Footer(Told, frozen=True):
    """All that a footer says."""

    version: int = field(name="1I")
    schema: list[_Element] = field(name="2A")
    rows: int = field(name="3L")
    groups: list[RowGroup] = field(name="4A")
    notes: list[_Note] | None = field(default=None, name="5A")
    created_by: bytes | None = field(default=None, name="6S")
    orders: list[_ByType] | None = field(default=None, name="7A")
    encryption: None = field(default=None, name="8R")
    signing_key: None = field(default=None, name="9S")


def check_footer(path: Path) -> None:
    """Raise ValueError, with the name of the file, for one whose footer no writer of a lake has written; and
    OSError. A file that was found good is not read again while it stays as it is."""
    columns_of(path)


def columns_of(path: Path) -> tuple[str, ...]:
    """The names of a file's columns. Raises what `check_footer` raises."""
    told = path.stat()
    return _checked(path, told.st_ino, told.st_size, told.st_mtime_ns)


@functools.lru_cache(_KNOWN)
def _checked(path: Path, inode: int, size: int, modified_at: int) -> tuple[str, ...]:
    with path.open("rb") as file:
        try:
            columns = footer_of(file).schema[1:]
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return tuple(sys.intern(one.name.decode(errors="replace")) for one in columns)


def check_content(content: bytes) -> None:
    """Raise ValueError if these bytes are a file whose footer no writer of a lake has written."""
    footer_of(io.BytesIO(content))


def check_end(end: bytes, size: int) -> None:
    """Raise ValueError unless the last bytes of a file of this `size` have the whole footer, and a writer of
    a lake has written it."""
    begin = len(end) - 8 - int.from_bytes(end[-8:-4], "little")
    if begin < 0 or end[-4:] != _MAGIC:
        raise ValueError("it is not a Parquet file, or its footer is longer than these bytes")
    _decoded(end[begin:-8], size - len(end) + begin)


def footer_of(file: BinaryIO) -> Footer:
    """The footer of a file. Raises ValueError if no writer of a lake has written it."""
    end = file.seek(0, os.SEEK_END) - 8
    file.seek(max(0, end))
    size, magic = file.read(4), file.read(4)
    begin = end - int.from_bytes(size, "little")
    file.seek(0)
    if not len(_MAGIC) <= begin < end or file.read(len(_MAGIC)) != _MAGIC or magic != _MAGIC:
        raise ValueError("it is not a Parquet file")
    if end - begin > _MOST_BYTES:
        raise ValueError(f"its footer has {end - begin} bytes, and may have {_MOST_BYTES}")
    file.seek(begin)
    return _decoded(file.read(end - begin), begin)


def _decoded(data: bytes, begin: int) -> Footer:
    """A footer from its bytes, which begin at a place in the file."""
    try:
        told, read = decode(data)
        footer = msgspec.convert(told, Footer)
        if read != len(data):
            raise ValueError("something follows it")
        _check_whole(footer, begin)
    except ValueError as error:  # of msgspec too
        raise ValueError(f"no writer of a lake has written its footer: {error}") from None
    return footer


def _check_whole(footer: Footer, end: int) -> None:
    """Check that a footer agrees with itself, and names no place beyond the rows, which `end` there."""
    root, *columns = footer.schema or [_Element(b"")]
    if root.type is not None or root.children != len(columns):
        raise ValueError("its schema is not a list of columns")
    if any(one.type is None or one.children is not None for one in columns):
        raise ValueError("a column has no type, or columns of its own")
    if not all(one.is_plain for one in columns):
        raise ValueError("a column is declared as another type than it has")
    if footer.orders is not None and len(footer.orders) != len(columns):
        raise ValueError("it orders other columns than it has")
    for note in footer.notes or ():
        if note.key == _OF_SPARK and _told_to_spark(note) != [(one.name, one.type) for one in columns]:
            raise ValueError("its note for Spark tells of other columns than it has")
    if footer.rows != sum(group.rows for group in footer.groups):
        raise ValueError("it counts other rows than its row groups have")
    for number, group in enumerate(footer.groups):
        try:
            _check_group(group, columns, end)
            if group.ordinal not in (None, number):
                raise ValueError("it has the number of another one")
        except ValueError as error:
            raise ValueError(f"row group {number}: {error}") from None


def _told_to_spark(note: _Note) -> list[tuple[bytes, int | None]]:
    fields = msgspec.json.decode(note.value or b"", type=_SparkSchema).fields
    return [(one.name.encode(), _TO_SPARK.get(one.type)) for one in fields]


def _check_group(group: RowGroup, columns: list[_Element], end: int) -> None:
    if len(group.columns) != len(columns):
        raise ValueError("it has other columns than the schema")
    for chunk, column in zip(group.columns, columns, strict=True):
        try:
            _check_chunk(chunk, column, group.rows, end)
        except ValueError as error:
            raise ValueError(f"column {column.name.decode(errors='replace')}: {error}") from None
    # By its size Spark decides which task reads the group; with a false one, none does.
    if group.size is not None and group.size != sum(one.data.size for one in group.columns):
        raise ValueError("it has another size than its columns together")
    if group.begins_at is not None and columns and group.begins_at != group.columns[0].data.begins_at:
        raise ValueError("it begins elsewhere than its first column")


def _check_chunk(chunk: ColumnChunk, column: _Element, rows: int, end: int) -> None:
    data = chunk.data
    if data.path != [column.name] or data.type != column.type:
        raise ValueError("it has another name or type than in the schema")
    if data.values != rows:
        raise ValueError(f"it has {data.values} values for {rows} rows")
    # pyarrow writes a dictionary for no rows, and no page.
    if rows and data.dictionary_at is not None and data.dictionary_at >= data.first_page_at:
        raise ValueError("its dictionary follows its values")
    if data.begins_at < len(_MAGIC) or data.begins_at + data.size > end:
        raise ValueError("its pages are not in the file")
    for at, size in ((chunk.offsets_at, chunk.offsets_bytes), (chunk.index_at, chunk.index_bytes)):
        if (at is None) != (size is None) or (at or 0) + (size or 0) > end:
            raise ValueError("its index is not in the file")
    _check_statistics(data.statistics, column.type)
    _check_sizes(data.sizes, column)


def _check_statistics(told: ColumnStatistics | None, kind: int | None) -> None:
    width = WIDTHS.get(kind or BYTES)
    if told is None or width is None:
        return
    bounds = (told.old_min, told.old_max, told.min, told.max)
    if any(one is not None and len(one) != width for one in bounds):
        raise ValueError("its bounds are not numbers of its type")


def _check_sizes(told: _Sized | None, column: _Element) -> None:
    if told is None:
        return
    levels = 1 + (column.repetition or 0)
    wrong = (len(told.by_repetition or []), len(told.by_definition or []))
    if wrong[0] not in (0, 1) or wrong[1] not in (0, levels):
        raise ValueError("its counts by level are those of another column")
    if told.bytes_in_all is not None and column.type != BYTES:
        raise ValueError("it counts the bytes of numbers")
