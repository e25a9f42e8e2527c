"""Erased packets at other places of a lake than their tombstones name. No Spark.

A relay signs one tombstone for an id. A log may have had the packet at two places: after its duplicate index
has forgotten the id, an import stores it again, and the lake of such a log holds it twice. An id is the hash
of a packet, so every row that has the id has what was to be erased.

Only places and ids are read, but of the whole lake.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from strata.protocol.lake import StoredObject, day_text, line_elsewhere
from strata.protocol.tombstones import told_place

from strata_pipeline.errors import LakeError
from strata_pipeline.lake.contents import UNREADABLE
from strata_pipeline.lake.footers import footer_of
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.places import AnyLake
from strata_pipeline.lake.rows import checked_files
from strata_pipeline.lake.stores.object_file import open_object
from strata_pipeline.lake.stores.objects import ObjectStore, several
from strata_pipeline.log.database import LogTombstone

__all__ = ["ErasedIds", "Line"]

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


def _rows_of(store: ObjectStore, told: StoredObject) -> Iterator[pa.RecordBatch]:
    with open_object(store, told.name, told.size) as file:
        try:
            footer_of(file)
        except ValueError as error:
            raise ValueError(f"{store.url(told.name)}: {error}") from None
        for batch in pq.ParquetFile(file).iter_batches(columns=_PLACES.names):
            yield batch.cast(_PLACES)
