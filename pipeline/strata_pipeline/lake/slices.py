"""The packets of a lake, divided among tasks that read files themselves, without Spark's own reader.

A packet takes a row of a file to Python in a microsecond or two here, and in twenty by way of the JVM. Spark
also passes over a file it cannot read without a word; a task that reads it tells of that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
from strata.protocol.lake import Span, StoredObject

from strata_pipeline.lake.checking import Unit
from strata_pipeline.lake.contents import parquet_files, read_rows
from strata_pipeline.lake.rows import rows_in

__all__ = ["Slice", "rows_of", "slices"]

_MOST = 4
"""Into so many slices a file is divided at the most: each task that has one decodes all of it."""


class Slice(msgspec.Struct, frozen=True):
    """A file of packets, or some of its rows."""

    file: bytes
    """A path, or below the folder to which the object is brought; whoever may write there may choose a name
    that is no text."""
    size: int
    objects: tuple[StoredObject, ...] = ()
    """In a bucket: the object to bring."""
    number: int = 0
    among: int = 1
    """Of the portions of the file, each `among`th, from portion `number` on."""


def slices(units: Iterable[Unit], tasks: int) -> list[Slice]:
    """All files of packets of these units, the largest first; those that would keep one of so many tasks
    busy for longer than its share are divided. An object that cannot be brought is one of them."""
    files = [one for unit in units for one in _files(unit)]
    share = max(1, sum(one.size for one in files) // max(1, tasks))
    found = [part for one in files for part in _divided(one, share)]
    return sorted(found, key=lambda one: (-one.size // one.among, one.file, one.number))


def rows_of(one: Slice, folder: Path, columns: Sequence[str], span: Span) -> Iterator[pa.RecordBatch]:
    """The rows of a slice that lie in a span. A column that the file lacks is null.

    `folder` is where the object was brought. Raises OSError, and ValueError for a file that is not Parquet.
    """
    portions = read_rows([folder / os.fsdecode(one.file)], columns, span, absent=True)
    for number, (_, _, rows) in enumerate(portions):
        if number % one.among == one.number:
            yield rows_in(rows, span)


def _files(unit: Unit) -> Iterator[Slice]:
    if unit.objects:
        for told in unit.objects:
            if told.name.startswith("packets/"):
                yield Slice(os.fsencode(told.name), told.size, (told,))
        return
    for path in parquet_files(unit.packets):
        size = 0
        with contextlib.suppress(OSError):  # whoever reads it is told what is wrong with it
            size = path.stat().st_size
        yield Slice(os.fsencode(path), size)


def _divided(one: Slice, share: int) -> Iterator[Slice]:
    among = max(1, min(_MOST, -(-one.size // share)))
    for number in range(among):
        yield msgspec.structs.replace(one, number=number, among=among)
