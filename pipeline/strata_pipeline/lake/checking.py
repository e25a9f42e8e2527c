"""The files of a lake held against its manifests, without Spark and without the log.

The rows that belong to a batch are held against its manifest by count and digests. And every file in the
folders is read as a plain reader reads it, to find what belongs to no batch. A fault names file and row where
a row can be told; a digest only tells that a row of its batch is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from strata.protocol.lake import Manifest, Span, StoredObject

from strata_pipeline.lake.contents import Contents, parquet_files, read_rows
from strata_pipeline.lake.faults import Fault
from strata_pipeline.lake.kinds import kind_of
from strata_pipeline.lake.layout import LakeLayout, span_of
from strata_pipeline.lake.rows import cut, digest_of, read_places

__all__ = ["Unit", "batch_name", "batches_faults", "chunks", "places_faults", "units_of_day"]

_CHUNK_ROWS = 250_000
_LISTED = 1_000


class Unit(NamedTuple):
    """Batches of a day, and all the folders that have rows of them and of no others."""

    manifests: list[Manifest]
    packets: list[Path]
    quarantine: list[Path]
    objects: Sequence[StoredObject] = ()
    """In a bucket: the objects that make these folders."""


def batch_name(manifest: Manifest) -> str:
    """The name of a batch in messages."""
    return f"batch {manifest.span} (manifest {manifest.number})"


def units_of_day(lake: LakeLayout, day: int, manifests: Sequence[Manifest]) -> list[Unit]:
    """A day's batches and folders, as finely divided as folders allow."""
    packets, quarantine = (
        sorted(lake.folders_of_day(root, day), key=span_of) for root in (lake.packets, lake.quarantine)
    )
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
    """Batches that follow each other, together as long as they are small."""
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


def batches_faults(
    manifests: Sequence[Manifest], packets: Sequence[Path], quarantine: Sequence[Path]
) -> list[Fault]:
    """The faults of batches that follow each other, whose rows lie in these folders."""
    span = Span(manifests[0].after, manifests[-1].up_to)
    try:
        sound, aside = read_places(packets, span), read_places(quarantine, span)
        contents = Contents.of(packets, quarantine, span) if manifests[-1].format > 1 else Contents()
    except (OSError, ValueError) as error:  # Arrow's errors are ValueErrors
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
    if manifest.format > 1 and contents.digest(manifest.span) != manifest.contents:
        return Fault(
            "batch", "contents", f"a body, an annotation or a quarantined row of {name} was altered", at
        )
    return None


def places_faults(unit: Unit) -> list[Fault]:
    """Rows that are in a folder and should not be there, or are there twice; files that are none."""
    faults: list[Fault] = []
    seen: list[tuple[Path, np.ndarray[tuple[int], np.dtype[np.int64]]]] = []
    for folder in (*unit.packets, *unit.quarantine):
        columns = ["sequence", "packet_id", *(["content_type"] if folder in unit.packets else [])]
        for path in parquet_files([folder]):
            places = []
            try:
                for _, first, rows in read_rows([path], columns):
                    faults += _misplaced(path, first, rows, folder)
                    places.append(rows.column("sequence").to_numpy(zero_copy_only=False))
            except (OSError, ValueError) as error:
                faults.append(Fault("batch", "unreadable", str(error), file=str(path)))
            if places:
                seen.append((path, np.concatenate(places)))
    return [*faults, *_doubled(seen)][:_LISTED]


def _misplaced(path: Path, first: int, rows: pa.RecordBatch, folder: Path) -> Iterator[Fault]:
    sequences = rows.column("sequence").to_numpy(zero_copy_only=False)
    span = span_of(folder)
    wrong = (sequences <= span.after) | (sequences > span.up_to)
    why = f"its sequence is none of those of {folder.name}"
    for row in np.flatnonzero(wrong)[:_LISTED].tolist():
        yield _row_fault("outside", why, path, first, rows, row)
    kind = next((name.removeprefix("kind=") for name in path.parts if name.startswith("kind=")), None)
    if "content_type" not in rows.schema.names:
        return
    told = rows.column("content_type").dictionary_encode()
    others = [
        n for n, name in enumerate(told.dictionary.to_pylist()) if name is None or kind_of(name) != kind
    ]
    if others:
        indices = told.indices.to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(np.isin(indices, others))[:_LISTED].tolist():
            yield _row_fault("misplaced", f"its content type belongs elsewhere than in kind={kind}", path,
                             first, rows, row)  # fmt: skip


def _doubled(seen: list[tuple[Path, np.ndarray[tuple[int], np.dtype[np.int64]]]]) -> Iterator[Fault]:
    if not seen:
        return
    found, counts = np.unique(np.concatenate([places for _, places in seen]), return_counts=True)
    doubles = found[counts > 1][:_LISTED]
    if not len(doubles):
        return
    told: set[int] = set()
    for path, places in seen:
        for row in np.flatnonzero(np.isin(places, doubles)).tolist():
            sequence = int(places[row])
            if sequence in told:
                why = "another row has the same sequence"
                yield Fault("row", "doubled", why, sequence, file=str(path), row=row)
            told.add(sequence)


def _row_fault(reason: str, why: str, path: Path, first: int, rows: pa.RecordBatch, row: int) -> Fault:
    sequence, packet_id = (rows.column(name)[row].as_py() for name in ("sequence", "packet_id"))
    return Fault("row", reason, why, sequence, packet_id, str(path), first + row)
