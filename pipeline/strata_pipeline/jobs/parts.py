"""Rewriting parts of a day in a bucket, each in one task, for compaction and erasing. No Spark.

A task downloads the objects of a part, writes the same rows by kind and in order of sequence into few new
objects, downloads these again, and compares them with the manifests. With tombstones, the rows of packets
become empty quarantined rows. Nothing counts until all parts of the day are verified.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from strata.protocol.sequences import Span
from strata.protocol.tombstones import Tombstone, told_place

from strata_pipeline.datasets.objects import ARROW, OBJECT_BYTES, put_rows
from strata_pipeline.errors import LakeError, ObjectStoreError
from strata_pipeline.lake.attempts import object_name
from strata_pipeline.lake.checking import Unit
from strata_pipeline.lake.generations import check_day
from strata_pipeline.lake.layout import Folders
from strata_pipeline.lake.object_generations import batches_of
from strata_pipeline.lake.rows import places_at
from strata_pipeline.lake.stores.objects import ObjectStore
from strata_pipeline.lake.stores.shelves import Bucket
from strata_pipeline.lake_format import GENESIS, ErasedBatch, Erasure, Manifest, Part, StoredObject, told
from strata_pipeline.schemas import schema
from strata_pipeline.transforms.emptying import emptied, erased_batches, held_aside

__all__ = ["PacketsThere", "PartDone", "PartWork", "groups_of", "packets_there", "rewrite_part"]

_AT_ONCE_BYTES: Final = 4 * OBJECT_BYTES
"""The most bytes of files that are read together. A larger batch is not compacted, but rows can be erased."""


class PartWork(msgspec.Struct, frozen=True):
    """The input of a task."""

    attempt: str
    part: Part
    """The part as it should become, with the objects that have its rows now."""
    manifests: list[Manifest]
    """The manifests of its batches, with what these hold now."""
    tombstones: list[Tombstone] = []
    """The tombstones of packets that may be in it."""


class PartDone(msgspec.Struct, frozen=True):
    """The result of a task."""

    part: Part
    """The part with the objects that the task has put, or with the old ones if nothing had to be done."""
    batches: list[ErasedBatch] = []
    """What the batches from which rows were erased hold now."""
    erased: list[int] = []
    """The sequences of these rows, in order."""
    emptied: int = 0
    """How many of them were quarantined when they were archived."""
    strangers: list[str] = []
    """See `PacketsThere`."""


class PacketsThere(NamedTuple):
    """What packets lie at the places of tombstones."""

    found: list[Tombstone]
    """The tombstones of these packets, in order of sequence."""
    strangers: list[str]
    """A sentence for each place that has another packet than its tombstone names."""


def groups_of(parts: Sequence[Part], manifests: Sequence[Manifest], part_bytes: int) -> list[list[Part]]:
    """Groups of parts of a day, each of which is to become one part of about `part_bytes` of bodies.

    For the parts that a run has made, each group is a single part again.
    """
    sizes = [sum(one.body_bytes for one in inside) for inside in batches_of(parts, manifests)]
    groups: list[list[Part]] = []
    room = 0
    for part, size in zip(parts, sizes, strict=True):
        if not groups or size > room:
            groups.append([])
            room = part_bytes
        groups[-1].append(part)
        room -= size
    return groups


def rewrite_part(store: ObjectStore, work: PartWork) -> PartDone:
    """Rewrite a part. Raises `LakeError` for a damaged part, and `ObjectStoreError`; the objects that it puts
    do not count yet."""
    shelf = Bucket(store)
    with _brought(shelf, store, work.part.objects) as (old, faults):
        if faults:
            raise LakeError(f"{faults[0]}; the day stays as it is. Bring it back from a copy of the lake")
        packets, strangers = packets_there(old.packets, work.tombstones)
        aside = held_aside(old.quarantine, work.tombstones).full
        gone = sorted((*packets, *aside), key=lambda one: one.sequence)
        if work.tombstones:
            if not gone:
                return PartDone(work.part, strangers=strangers)
            # What the batches hold afterwards is computed from what they hold now.
            check_day(work.part.span.day, Unit(work.manifests, *old))
        writer = _Writer(store, work.attempt, work.part.span)
        objects = writer.write(old, gone)
        with _brought(shelf, store, objects) as (new, faults):
            if faults:
                raise ObjectStoreError(f"{faults[0]}, just now: nothing was committed. Run this again")
            sequences = [one.sequence for one in gone]
            batches = erased_batches(work.manifests, old, new, sequences) if gone else []
            manifests = told(work.manifests, [_preview(batches)])
            check_day(work.part.span.day, Unit(manifests, *new))
    part = Part(after=work.part.after, up_to=work.part.up_to, objects=objects)
    return PartDone(part, batches, sequences, len(aside), strangers)


@contextlib.contextmanager
def _brought(
    shelf: Bucket, store: ObjectStore, objects: Sequence[StoredObject]
) -> Iterator[tuple[Folders, list[str]]]:
    """The folders of downloaded objects, and what is wrong with these."""
    with shelf.at_hand(objects) as (folder, faults):
        try:
            yield Folders.below(folder), [fault.detail for fault in faults]
        except LakeError as error:
            raise LakeError(str(error).replace(f"{folder}/", f"{store.url()}/")) from None


def packets_there(folders: Sequence[Path], tombstones: Sequence[Tombstone]) -> PacketsThere:
    """What packets lie in these folders at the places of tombstones."""
    there = PacketsThere([], [])
    if not tombstones:
        return there
    rows = places_at(folders, [one.sequence for one in tombstones]).to_pylist()
    names = {row["sequence"]: told_place(row["packet_id"] or b"", row["received_at"] or 0)[0] for row in rows}
    for one in sorted(tombstones, key=lambda one: one.sequence):
        name = names.get(one.sequence)
        if name == one.packet_id:
            there.found.append(one)
        elif name is not None:
            there.strangers.append(
                f"the tombstone of {one.sequence} names packet {one.packet_id}, and the lake has {name} there"
            )
    return there


def _preview(batches: list[ErasedBatch]) -> Erasure:
    return Erasure(
        number=0, day=0, written_at=0, batches=batches, tombstones="", erased=0, previous=GENESIS
    )  # fmt: skip


class _Writer:
    """Puts the rows of a part. It keeps in memory the rows of one batch and kind, or of one file of these,
    and the rows that were not put yet."""

    def __init__(self, store: ObjectStore, attempt: str, span: Span) -> None:
        self._store = store
        self._attempt = attempt
        self._span = span
        self._gathered: dict[str | None, list[pa.Table]] = {}
        self._sizes: dict[str, int] = {}
        self._put: list[StoredObject] = []

    def write(self, folders: Folders, gone: Sequence[Tombstone]) -> list[StoredObject]:
        """Put all rows of folders, in order, those in `gone` as empty ones; return the objects."""
        sequences = pa.array([one.sequence for one in gone], pa.int64())
        for batch in folders.packets:
            for folder in sorted(batch.iterdir()):
                for paths in _portions(sorted(folder.iterdir())):
                    rows = _rows(paths, _PACKETS)
                    stays = rows.filter(pc.invert(pc.is_in(rows["sequence"], value_set=sequences)))
                    self._add(folder.name.removeprefix("kind="), stays)
        aside = _rows([path for batch in folders.quarantine for path in sorted(batch.iterdir())], _QUARANTINE)
        if gone:
            stays = aside.filter(pc.invert(pc.is_in(aside["sequence"], value_set=sequences)))
            places = places_at([*folders.packets, *folders.quarantine], [one.sequence for one in gone])
            empty = _conformed(emptied(places), _QUARANTINE)
            aside = pa.concat_tables([stays, empty]).sort_by("sequence")
        for kind in sorted(self._gathered, key=str):
            self._flush("packets", kind)
        self._gathered = {None: [aside]}
        self._flush("quarantine", None)
        return self._put

    def _add(self, kind: str, rows: pa.Table) -> None:
        self._gathered.setdefault(kind, []).append(rows)
        self._sizes[kind] = self._sizes.get(kind, 0) + rows.nbytes
        if self._sizes[kind] >= OBJECT_BYTES:
            self._flush("packets", kind)
            self._sizes[kind] = 0

    def _flush(self, root: str, kind: str | None) -> None:
        rows = pa.concat_tables(self._gathered.pop(kind))
        if not rows.num_rows:
            return
        objects = -(-rows.nbytes // OBJECT_BYTES)
        step = -(-rows.num_rows // objects)
        for first in range(0, rows.num_rows, step):
            name = object_name(self._attempt, self._span, root, kind)
            self._put.append(put_rows(self._store, name, rows.slice(first, step)))


def _columns(name: str) -> pa.Schema:
    return pa.schema([(one.name, ARROW[one.dataType.simpleString()]) for one in schema(name).fields])


_PACKETS: Final = _columns("packets")
_QUARANTINE: Final = _columns("quarantine")


def _portions(paths: Sequence[Path]) -> list[list[Path]]:
    """The files of a batch, all together if they fit into memory, else one by one: rows need no order."""
    fits = sum(path.stat().st_size for path in paths) <= _AT_ONCE_BYTES
    return [list(paths)] if fits else [[path] for path in paths]


def _rows(paths: Sequence[Path], wanted: pa.Schema) -> pa.Table:
    """All rows of files, in order of sequence."""
    tables = [_conformed(pq.ParquetFile(path).read(), wanted) for path in paths]
    return pa.concat_tables([wanted.empty_table(), *tables]).sort_by("sequence")


def _conformed(rows: pa.Table, wanted: pa.Schema) -> pa.Table:
    """The columns of a schema; a missing column is null."""
    columns = [
        rows[one.name].cast(one.type) if one.name in rows.schema.names else pa.nulls(rows.num_rows, one.type)
        for one in wanted
    ]
    return pa.Table.from_arrays(columns, schema=wanted)
