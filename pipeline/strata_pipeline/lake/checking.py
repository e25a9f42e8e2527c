"""The files of a lake compared with its manifests, without Spark and without the log.

The rows that belong to a batch are compared with its manifest by count and digests. Also, every file in the
folders is read as a plain reader reads it, to find rows that belong to no batch. A fault names file and row
if the row is known; a digest shows only that some row of its batch is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from strata.protocol.sequences import Span

from strata_pipeline.lake.contents import UNREADABLE, Contents, Rows, parquet_files, read_rows
from strata_pipeline.lake.faults import Fault
from strata_pipeline.lake.footers import columns_of
from strata_pipeline.lake.kinds import kind_of
from strata_pipeline.lake.layout import LakeLayout, span_of, span_over
from strata_pipeline.lake.rows import cut, digest_of, read_places
from strata_pipeline.lake.statistics import false_statistics
from strata_pipeline.lake_format import Manifest, StoredObject
from strata_pipeline.schemas import schema

__all__ = [
    "Piece",
    "Unit",
    "batch_name",
    "batches_faults",
    "chunks",
    "piece_faults",
    "pieces",
    "places_faults",
    "unit_faults",
    "units_of_day",
]

_CHUNK_ROWS = 250_000
_LISTED = 1_000
_LEAST, _MOST = -(2**63), 2**63 - 1
_NOT_FOUND = "lies or is named so that some readers do not find it"
_UNKNOWN = "some readers refuse a lake whose files have different columns, and no digest covers this one"


class Unit(NamedTuple):
    """Batches of a day, and all the folders that have their rows, and no others' rows."""

    manifests: list[Manifest]
    packets: list[Path]
    quarantine: list[Path]
    objects: Sequence[StoredObject] = ()
    """In a bucket: the objects that make up these folders."""


class Piece(NamedTuple):
    """Consecutive batches of a unit, and the range of sequences for which only this piece is responsible.

    The first piece of a unit begins at the least possible number, and the last one ends at the greatest, so
    that a row that belongs to no batch is in one of the pieces.
    """

    manifests: list[Manifest]
    first: int
    last: int


def batch_name(manifest: Manifest) -> str:
    """The name of a batch in messages."""
    return f"batch {manifest.span} (manifest {manifest.number})"


def units_of_day(lake: LakeLayout, day: int, manifests: Sequence[Manifest]) -> list[Unit]:
    """A day's batches and folders, divided as finely as the folders allow."""
    packets, quarantine = (sorted(some, key=span_of) for some in lake.day(day))
    units: list[Unit] = []
    ends = 0
    left = list(reversed(manifests))
    while left:
        unit = Unit([left.pop()], [], [])
        span = unit.manifests[0].span
        ends = span.up_to
        grown = True
        while grown:
            grown = False
            for folders, mine in ((packets, unit.packets), (quarantine, unit.quarantine)):
                while folders and span_of(folders[0]).after < ends:
                    mine.append(folders.pop(0))
                    ends = max(ends, span_of(mine[-1]).up_to)
                    grown = True
            while left and left[-1].after < ends:
                unit.manifests.append(left.pop())
                ends = max(ends, unit.manifests[-1].up_to)
                grown = True
        units.append(unit)
    return units


def chunks(manifests: Iterable[Manifest]) -> Iterator[list[Manifest]]:
    """Consecutive batches, grouped as long as they have few rows together."""
    chunk: list[Manifest] = []
    rows = 0
    for manifest in manifests:
        more = manifest.packets + manifest.quarantined
        if chunk and rows + more > _CHUNK_ROWS:
            yield chunk
            chunk, rows = [], 0
        chunk.append(manifest)
        rows += more
    if chunk:
        yield chunk


def unit_faults(unit: Unit) -> Iterator[Fault]:
    """The faults of a unit's files, piece by piece."""
    for piece in pieces(unit.manifests):
        yield from piece_faults(unit, piece)


def piece_faults(unit: Unit, piece: Piece) -> list[Fault]:
    """The faults of a piece: of its batches, and of all rows within its range of sequences."""
    faults = batches_faults(piece.manifests, unit.packets, unit.quarantine) if piece.manifests else []
    return faults + places_faults(unit, piece)


def batches_faults(
    manifests: Sequence[Manifest], packets: Sequence[Path], quarantine: Sequence[Path]
) -> list[Fault]:
    """The faults of consecutive batches whose rows lie in these folders."""
    span = span_over(manifests)
    try:
        sound, aside = read_places(packets, span), read_places(quarantine, span)
        contents = Contents.of(packets, quarantine, span)
    except UNREADABLE as error:
        return [Fault("batch", "unreadable", f"{batch_name(manifests[0])}: {error}", manifests[0].up_to)]
    spans = [manifest.span for manifest in manifests]
    tables = zip(manifests, cut(sound, spans), cut(aside, spans), strict=True)
    found = (_batch_fault(manifest, one, other, contents) for manifest, one, other in tables)
    return [fault for fault in found if fault is not None]


def _batch_fault(
    manifest: Manifest, packets: pa.Table, quarantined: pa.Table, contents: Contents
) -> Fault | None:
    name, at = batch_name(manifest), manifest.up_to
    counts = (packets.num_rows, quarantined.num_rows)
    if counts != (manifest.packets, manifest.quarantined):
        told = f"{manifest.packets} and {manifest.quarantined}"
        return Fault(
            "batch",
            "count",
            f"{name} has {counts[0]} packets and {counts[1]} quarantined rows, not {told}",
            at,
        )
    rows = pa.concat_tables([packets, quarantined]).sort_by("sequence") if counts[1] else packets
    if digest_of(rows) != manifest.rows:
        return Fault("batch", "digest", f"{name} holds other packets, or places, than its manifest says", at)
    if contents.digest(manifest.span) != manifest.contents:
        return Fault(
            "batch", "contents", f"a body, an annotation or a quarantined row of {name} was altered", at
        )
    return None


def pieces(manifests: Iterable[Manifest]) -> Iterator[Piece]:
    """The batches of a unit in pieces, so that no task checks a whole day; each sequence is in one piece."""
    found = list(chunks(manifests))
    first = _LEAST
    for number, chunk in enumerate(found, 1):
        last = chunk[-1].up_to if number < len(found) else _MOST
        yield Piece(chunk, first, last)
        first = last + 1


def places_faults(unit: Unit, piece: Piece) -> list[Fault]:
    """Rows of a piece that are in the wrong folder, or there twice; and files that are not Parquet files of a
    lake, have columns of their own, or have false statistics."""
    faults: list[Fault] = []
    seen: list[_Places] = []
    for folder in (*unit.packets, *unit.quarantine):
        has_kinds = folder in unit.packets
        columns = ["sequence", "packet_id", *(["content_type"] if has_kinds else [])]
        for path in parquet_files([folder]):
            is_first = piece.first == _LEAST  # what concerns the whole file is reported once
            if is_first and not _is_found(path, folder, has_kinds):
                faults.append(Fault("file", "stray", f"{path} {_NOT_FOUND}", file=str(path)))
            try:
                if is_first:
                    faults += _own_columns(path, has_kinds)
                for rows in read_rows([path], columns, Span(piece.first - 1, piece.last)):
                    places = _Places.of(rows, piece)
                    faults += _misplaced(rows, places, folder)
                    seen.append(places)
            except UNREADABLE as error:
                if is_first:
                    faults.append(_unreadable(path, error))
                continue
            try:
                faults += false_statistics(path, piece.first, piece.last)
            except UNREADABLE as error:
                faults.append(_unreadable(path, error))
    return [*faults, *_doubled(seen)][:_LISTED]


def _unreadable(path: Path, error: Exception) -> Fault:
    return Fault("batch", "unreadable", str(error), file=str(path))


def _own_columns(path: Path, has_kinds: bool) -> Iterator[Fault]:
    """A fault for a file with columns that a lake does not have: `kind` would displace the folders' one."""
    known = schema("packets" if has_kinds else "quarantine").names
    strangers = [name for name in columns_of(path) if name not in known]
    if strangers:
        why = f"{path} has a column {strangers[0]!r}: {_UNKNOWN}"
        yield Fault("file", "columns", why, file=str(path))


def _is_found(path: Path, folder: Path, has_kinds: bool) -> bool:
    """Whether every reader finds a file in the folder of a batch: the views and many others look for
    `*.parquet` in the folders of kinds, or in that of the batch, and not below these."""
    below = path.relative_to(folder).parent
    is_kind = has_kinds and re.fullmatch(r"kind=[^/]*", below.as_posix()) is not None
    return path.suffix == ".parquet" and (is_kind or below == Path())


class _Places(NamedTuple):
    """Sequences in a file, and the numbers of their rows in it."""

    path: Path
    sequences: np.ndarray[tuple[int], np.dtype[np.int64]]
    rows: np.ndarray[tuple[int], np.dtype[np.int64]]

    @classmethod
    def of(cls, rows: Rows, piece: Piece) -> _Places:
        """The sequences of a piece; a row without a sequence belongs to the first one, before all others."""
        column = rows.columns.column("sequence")
        if not pa.types.is_int64(column.type):
            raise ValueError(f"{rows.file}: sequences are of type {column.type}")
        sequences = pc.fill_null(column, _LEAST).to_numpy(zero_copy_only=False)
        within = np.flatnonzero((sequences >= piece.first) & (sequences <= piece.last))
        return cls(rows.file, sequences[within], rows.first + within)


def _misplaced(rows: Rows, places: _Places, folder: Path) -> Iterator[Fault]:
    span = span_of(folder)
    wrong = (places.sequences <= span.after) | (places.sequences > span.up_to)
    why = f"its sequence is none of those of {folder.name}"
    for row in places.rows[wrong][:_LISTED].tolist():
        yield _row_fault("outside", why, rows, row)
    below = rows.file.relative_to(folder).parts
    kind = next((name.removeprefix("kind=") for name in below if name.startswith("kind=")), None)
    if "content_type" not in rows.columns.schema.names:
        return
    told = rows.columns.column("content_type").dictionary_encode()
    others = [
        n for n, name in enumerate(told.dictionary.to_pylist()) if name is None or kind_of(name) != kind
    ]
    if others:
        indices = told.indices.to_numpy(zero_copy_only=False)[places.rows - rows.first]
        for row in places.rows[np.isin(indices, others)][:_LISTED].tolist():
            why = f"its content type belongs elsewhere than in kind={kind}"
            yield _row_fault("misplaced", why, rows, row)


def _doubled(seen: list[_Places]) -> Iterator[Fault]:
    if not seen:
        return
    found, counts = np.unique(np.concatenate([places.sequences for places in seen]), return_counts=True)
    doubles = found[(counts > 1) & (found != _LEAST)][:_LISTED]
    if not len(doubles):
        return
    told: set[int] = set()
    for path, sequences, rows in seen:
        for place in np.flatnonzero(np.isin(sequences, doubles)).tolist():
            sequence = int(sequences[place])
            if sequence in told:
                why = "another row has the same sequence"
                yield Fault("row", "doubled", why, sequence, file=str(path), row=int(rows[place]))
            told.add(sequence)


def _row_fault(reason: str, why: str, rows: Rows, row: int) -> Fault:
    place = row - rows.first
    sequence, packet_id = (rows.columns.column(name)[place].as_py() for name in ("sequence", "packet_id"))
    return Fault("row", reason, why, sequence, packet_id, str(rows.file), row)
