"""Erased packets at other places of a lake than their tombstones name. No Spark.

A relay signs one tombstone for an id. A log may have had the packet at two places: after its duplicate index
has forgotten the id, an import stores it again, and the lake of such a log holds it twice. An id is the hash
of a packet, so every row that has the id has what was to be erased.

Only places and ids are read, but of the whole lake; what was searched for the same tombstones is noted, and
not read again (`lake.searched`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from blake3 import blake3
from strata.protocol.sequences import day_text
from strata.protocol.tombstones import told_place

from strata_pipeline.errors import LakeError
from strata_pipeline.jobs.failures import Refused
from strata_pipeline.lake.contents import UNREADABLE
from strata_pipeline.lake.footers import footer_of
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.places import AnyLake
from strata_pipeline.lake.rows import checked_files
from strata_pipeline.lake.searched import SearchedDays
from strata_pipeline.lake.stores.object_file import open_object
from strata_pipeline.lake.stores.objects import ObjectStore, several
from strata_pipeline.lake_format import Erasure, StoredObject, line_elsewhere
from strata_pipeline.log.database import LogTombstone

__all__ = ["ErasedIds", "Line", "lines_elsewhere", "recorded"]

Line = tuple[int, bytes]
"""The place of a row to be erased, and its line in the file of a record."""
_PLACES: Final = pa.schema(
    [("sequence", pa.int64()), ("received_at", pa.int64()), ("packet_id", pa.binary())]
)
_AT_ONCE: Final = 8


class ErasedIds:
    """The ids of all packets that a relay has erased."""

    def __init__(self, tombstones: Iterable[LogTombstone]) -> None:
        self._tombstones = {one.packet_id: one for one in tombstones}
        self._ids = pa.array(list(self._tombstones), pa.binary())

    @property
    def hash(self) -> str:
        """A hash over what `elsewhere` searches for: these ids, and the places that it leaves out."""
        hashed = blake3()
        for one in sorted(self._tombstones.values()):
            hashed.update(b"%d %s\n" % (one.sequence, one.packet_id.hex().encode()))
        return hashed.hexdigest()

    def elsewhere(self, lake: AnyLake, day: int) -> list[Line]:
        """The rows of a day with such an id at another place than that of its tombstone, in order. Rows that
        are empty already are among them. Raises `LakeError` for a file that cannot be read."""
        try:
            return sorted(line for some in self._lines(lake, day) for line in some)
        except UNREADABLE as error:
            raise LakeError(
                f"{day_text(day)} has a file that cannot be read: {error}; so it is not known whether erased "
                "packets are there too. Run audit, and bring the file back from a copy of the lake"
            ) from None

    def _lines(self, lake: AnyLake, day: int) -> Iterator[list[Line]]:
        reached = lake.reached
        if isinstance(lake, ObjectLake):
            objects = [one for root in ("packets", "quarantine") for one in lake.objects_of_day(day, root)]
            yield from several(lambda one: self._among(_rows_of(lake.store, one), reached), objects, _AT_ONCE)
            return
        for folder in (one for some in lake.day(day) for one in some):
            yield self._among(checked_files(folder, _PLACES).to_batches(), reached)

    def _among(self, batches: Iterable[pa.RecordBatch], reached: int) -> list[Line]:
        # Statistics are not believed: a file with false ones must not hide what is to be erased.
        rows = (
            row
            for batch in batches
            for row in batch.filter(pc.is_in(batch["packet_id"], value_set=self._ids)).to_pylist()
        )
        return [
            self._line(**row)
            for row in rows
            if 0 < (row["sequence"] or 0) <= reached
            and row["sequence"] != self._tombstones[row["packet_id"]].sequence
        ]

    def _line(self, sequence: int, received_at: int | None, packet_id: bytes) -> Line:
        text = self._tombstones[packet_id].text
        return sequence, line_elsewhere(text, sequence, told_place(packet_id, received_at or 0)[1])


def lines_elsewhere(lake: AnyLake, ids: ErasedIds, refused: Refused) -> tuple[list[Line], int]:
    """The lines of `elsewhere` for a whole lake, and the number of days that were read for them.

    A day is not read, and has no lines, if it is noted that all its lines for these ids are recorded.
    """
    found, read = list[Line](), 0
    searched = SearchedDays(lake, ids.hash)
    try:
        for day in lake.days():
            with refused.put_off():
                if searched.has(day):
                    continue
                read += 1
                lines = ids.elsewhere(lake, day)
                found += lines
                if not lines or {text for _, text in lines} <= recorded(lake, lake.erasures.of_day(day)):
                    searched.add(day)
    finally:
        searched.keep()
    return found, read


def recorded(lake: AnyLake, records: Iterable[Erasure]) -> set[bytes]:
    """The lines that some records of erasures have: their rows are erased, or the record would not be
    valid."""
    lines: set[bytes] = set()
    for record in records:
        with contextlib.suppress(LakeError):  # an audit reports it; here the files are read instead
            lines.update(lake.erasures.text_of(record).splitlines())
    return lines


def _rows_of(store: ObjectStore, told: StoredObject) -> Iterator[pa.RecordBatch]:
    with open_object(store, told.name, told.size) as file:
        try:
            footer_of(file)
        except ValueError as error:
            raise ValueError(f"{store.url(told.name)}: {error}") from None
        for batch in pq.ParquetFile(file).iter_batches(columns=_PLACES.names):
            yield batch.cast(_PLACES)
