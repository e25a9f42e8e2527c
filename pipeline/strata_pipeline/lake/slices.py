"""The packets of a lake, divided among tasks that read the files themselves, without Spark's own reader.

Here a row of a file gets into Python in a microsecond or two; by way of the JVM that takes twenty. Also,
Spark silently skips a file that it cannot read; a task that reads it can report the fault.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
from strata.protocol.sequences import Span

from strata_pipeline.lake.checking import Unit
from strata_pipeline.lake.contents import parquet_files, read_rows
from strata_pipeline.lake.rows import rows_in
from strata_pipeline.lake_format import StoredObject

__all__ = ["Slice", "rows_of", "slices"]

_MOST = 4
"""The most slices into which a file is divided, because each task that has one decodes the whole file."""


class Slice(msgspec.Struct, frozen=True):
    """A file of packets, or some of its rows."""

    file: bytes
    """Its path: absolute, or below the folder to which the object is downloaded. Bytes, because a stranger
    who can write there may choose a name that is not text."""
    size: int
    objects: tuple[StoredObject, ...] = ()
    """In a bucket: the object to download."""
    number: int = 0
    among: int = 1
    """The slice has every `among`th portion of the file, from portion `number` on."""


def slices(units: Iterable[Unit], tasks: int) -> list[Slice]:
    """All files of packets of these units, the largest first; a file larger than the share of one of `tasks`
    tasks is divided. Objects that cannot be downloaded are included."""
    files = [one for unit in units for one in _files(unit)]
    share = max(1, sum(one.size for one in files) // max(1, tasks))
    found = [part for one in files for part in _divided(one, share)]
    return sorted(found, key=lambda one: (-one.size // one.among, one.file, one.number))


def rows_of(one: Slice, folder: Path, columns: Sequence[str], span: Span) -> Iterator[pa.RecordBatch]:
    """The rows of a slice that lie in a span. A column that the file lacks is null.

    `folder` is where the object was downloaded. Raises OSError, and ValueError if a file is not Parquet.
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
        with contextlib.suppress(OSError):  # reading it will report what is wrong
            size = path.stat().st_size
        yield Slice(os.fsencode(path), size)


def _divided(one: Slice, share: int) -> Iterator[Slice]:
    among = max(1, min(_MOST, -(-one.size // share)))
    for number in range(among):
        yield msgspec.structs.replace(one, number=number, among=among)
