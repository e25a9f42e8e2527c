"""Checking the files of a lake on all cores (`lake.checking`), in tasks that have some batches each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession

from strata_pipeline.lake.checking import Piece, Unit, piece_faults, pieces
from strata_pipeline.lake.faults import Fault
from strata_pipeline.lake.stores.shelves import Shelf
from strata_pipeline.lake_format import Manifest, StoredObject
from strata_pipeline.planning import parallelism

__all__ = ["files_faults"]

_TASKS_PER_CORE = 4
Also = Callable[[Unit], list[Fault]]
"""Finds further faults in some batches."""
_Work = tuple[bytes, list[str], list[str], bytes, int, int]
_WORK_DDL = (
    "manifests binary, packets array<string>, quarantine array<string>, objects binary, first bigint, "
    "last bigint"
)
"""Manifests, folders of packets, folders of quarantined rows, the objects in these (in a bucket), and the
range of sequences in which to look for surplus rows. Work is a piece of a unit, and never a whole day."""
_FAULTS_DDL = (
    "about string, reason string, detail string, sequence bigint, packet_id binary, file string, row bigint"
)
_FAULTS = pa.schema(
    [
        ("about", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("sequence", pa.int64()),
        ("packet_id", pa.binary()),
        ("file", pa.string()),
        ("row", pa.int64()),
    ]
)


def files_faults(
    spark: SparkSession, shelf: Shelf, units: Iterable[Unit], after: int = 0, also: Also | None = None
) -> list[Fault]:
    """The faults in the files of units, of batches after a sequence, and those that `also` finds."""

    def check(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _faults(rows, shelf, also)

    work = [one for unit in units for one in _work(unit, after)]
    if not work:
        return []
    slices = min(len(work), _TASKS_PER_CORE * parallelism(spark))
    asked = spark.createDataFrame(work, _WORK_DDL).repartition(slices)
    return [Fault(*fault) for fault in asked.mapInArrow(check, _FAULTS_DDL).collect()]


def _work(unit: Unit, after: int) -> Iterator[_Work]:
    """The batches of a unit, as work for tasks."""
    folders = [str(one) for one in unit.packets], [str(one) for one in unit.quarantine]
    objects = msgspec.json.encode(unit.objects)
    for manifests, first, last in pieces(unit.manifests):
        # On a compacted day, earlier batches lie in the files of new ones.
        new = [one for one in manifests if one.up_to > after]
        yield msgspec.json.encode(new), *folders, objects, first, last


def _faults(rows: Iterator[pa.RecordBatch], shelf: Shelf, also: Also | None) -> Iterator[pa.RecordBatch]:
    for batch in rows:
        for work in batch.to_pylist():
            manifests = msgspec.json.decode(work["manifests"], type=list[Manifest])
            objects = msgspec.json.decode(work["objects"], type=list[StoredObject])
            with shelf.at_hand(objects) as (folder, faults):
                packets, quarantine = (
                    [folder / name for name in work[root]] for root in ("packets", "quarantine")
                )
                unit = Unit(manifests, packets, quarantine)
                faults += piece_faults(unit, Piece(manifests, work["first"], work["last"]))
                if manifests and also is not None:
                    faults += also(unit)
                told = [shelf.told(fault, folder)._asdict() for fault in faults]
            if told:
                yield pa.RecordBatch.from_pylist(told, schema=_FAULTS)
