"""What rows and batches become in an erasure, on a disk and in a bucket."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
from strata.protocol.sequences import Span
from strata.protocol.tombstones import Tombstone, told_place

from strata_pipeline.lake.checking import batch_name, chunks
from strata_pipeline.lake.contents import Contents
from strata_pipeline.lake.layout import Folders, listed, span_of, span_over
from strata_pipeline.lake.rows import checked_files, cut, read_places
from strata_pipeline.lake_format import ErasedBatch, LakeError, Manifest
from strata_pipeline.transforms.checking import check_batch

__all__ = ["DAMAGED", "EMPTY", "HeldAside", "emptied", "erased_batches", "held_aside", "read_aside"]

EMPTY: Final = {
    "timestamp": (0, pa.int64()),
    "expires_at": (0, pa.int64()),
    "author_id": ("", pa.string()),
    "content_type": ("", pa.string()),
    "body": (b"", pa.binary()),
    "annotation": (None, pa.binary()),
}
"""The columns of an erased row as a relay leaves them, beside its place."""

DAMAGED: Final = b'{"restored":"damaged"}'
"""The annotation of a row that is just as empty but was not erased: it was damaged before it was archived,
and a restore has kept only its place."""


_PLACES: Final = (("sequence", pa.int64()), ("received_at", pa.int64()), ("packet_id", pa.binary()))
_ASIDE: Final = pa.schema([*_PLACES, *((name, type_) for name, (_, type_) in EMPTY.items())])
_IS_ERASED: Final = functools.reduce(
    operator.and_,
    (
        pads.field(name).is_null() if value is None else pads.field(name) == pa.scalar(value, type_)
        for name, (value, type_) in EMPTY.items()
    ),
)


class HeldAside(NamedTuple):
    """Tombstones whose places have a quarantined row that is not empty."""

    full: list[Tombstone]
    """Those whose row is the erased one: place, time and id are those of the tombstone."""
    others: list[Tombstone]
    """Those whose row has another id or time: whether it is the erased one cannot be determined."""


def emptied(places: pa.Table) -> pa.Table:
    """Rows of `read_places`, emptied as if an archive had found them already erased and quarantined them.

    They keep their times and ids, which a manifest binds, and which a tombstone may not be able to express.
    """
    columns = {name: places[name].combine_chunks() for name, _ in _PLACES}
    columns |= {name: pa.array([value] * len(places), type_) for name, (value, type_) in EMPTY.items()}
    checked = check_batch(pa.RecordBatch.from_pydict(columns))
    return pa.Table.from_batches([checked]).drop_columns(["kind"])


def read_aside(folders: Sequence[Path], span: Span | None = None) -> pa.Table:
    """The places and ids of quarantined rows, or of those in a span, in log order, with `is_erased`: whether
    the row is as empty as a relay leaves an erased one.

    `folders` are folders of quarantined rows. Raises OSError, ValueError and `pa.ArrowException`.
    """
    if not folders:
        return pa.schema([*_PLACES, ("is_erased", pa.bool_())]).empty_table()
    within = None
    if span is not None:
        within = (pads.field("sequence") > span.after) & (pads.field("sequence") <= span.up_to)
    columns = {name: pads.field(name) for name, _ in _PLACES} | {"is_erased": _IS_ERASED}
    found = [checked_files(folder, _ASIDE).to_table(columns, filter=within) for folder in folders]
    rows = pa.concat_tables(found).sort_by("sequence")
    place = rows.schema.get_field_index("is_erased")
    return rows.set_column(place, "is_erased", pc.fill_null(rows["is_erased"], False))


def held_aside(folders: Sequence[Path], tombstones: Sequence[Tombstone]) -> HeldAside:
    """The tombstones for which quarantined rows in these folders hold something. Raises what `read_aside`
    raises."""
    held = HeldAside([], [])
    if not tombstones:
        return held
    asked = {one.sequence: one for one in tombstones}
    rows = read_aside(folders)
    is_asked = pc.is_in(rows["sequence"], value_set=pa.array(list(asked), pa.int64()))
    for row in rows.filter(pc.and_(is_asked, pc.invert(rows["is_erased"]))).to_pylist():
        one = asked[row["sequence"]]
        place = told_place(row["packet_id"] or b"", row["received_at"] or 0)
        (held.full if place == (one.packet_id, one.received_at) else held.others).append(one)
    return held


def erased_batches(
    manifests: Sequence[Manifest], old: Folders, new: Folders, erased: Sequence[int]
) -> list[ErasedBatch]:
    """What the batches from which something was erased hold now. Raises `LakeError` if a row that was to stay
    has changed.

    The digests of a few batches at a time are in memory: those of a day of 10⁸ rows would take 20 GB.
    """
    return [one for some in chunks(manifests) for one in _erased_batches(some, old, new, erased)]


def _erased_batches(
    manifests: Sequence[Manifest], old: Folders, new: Folders, erased: Sequence[int]
) -> Iterator[ErasedBatch]:
    span = span_over(manifests)
    spans = [one.span for one in manifests]
    old, new = (Folders(*(_concerned(some, span) for some in folders)) for folders in (old, new))
    before, after = Contents.of(*old, span), Contents.of(*new, span)
    tables = zip(manifests, *(cut(read_places(folders, span), spans) for folders in new), strict=True)
    kinds = _kinds(new.packets, spans)
    for number, (manifest, packets, quarantined) in enumerate(tables):
        gone = [sequence for sequence in erased if manifest.after < sequence <= manifest.up_to]
        if before.digest(manifest.span, without=gone) != after.digest(manifest.span, without=gone):
            raise LakeError(f"rows of {batch_name(manifest)} changed while it was written anew: run audit")
        if gone:
            sizes = (pc.sum(table["size"]).as_py() or 0 for table in (packets, quarantined))
            yield ErasedBatch(
                manifest=manifest.hash,
                packets=packets.num_rows,
                quarantined=quarantined.num_rows,
                contents=after.digest(manifest.span),
                body_bytes=sum(sizes),
                kinds=kinds[number],
            )


def _concerned(folders: Sequence[Path], span: Span) -> list[Path]:
    """The folders, of which a day may have thousands, that may hold rows of a span."""
    return [folder for folder in folders if span_of(folder).overlaps(span)]


def _kinds(packets: Sequence[Path], spans: Sequence[Span]) -> list[dict[str, int]]:
    """The number of packets of each kind in each of the spans."""
    counts: list[dict[str, int]] = [{} for _ in spans]
    for folder in (kind for batch in packets for kind in listed(batch)):
        for count, rows in zip(counts, cut(read_places([folder], span_over(spans)), spans), strict=True):
            if rows.num_rows:
                count[folder.name.removeprefix("kind=")] = rows.num_rows
    return counts
