"""What an erasure makes of rows and of batches, on a disk and in a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from strata.protocol.lake import ErasedBatch, LakeError, Manifest, Span
from strata.protocol.tombstones import Tombstone

from strata_pipeline.lake.checking import batch_name
from strata_pipeline.lake.contents import Contents
from strata_pipeline.lake.layout import Folders, listed, span_over
from strata_pipeline.lake.rows import cut, read_places
from strata_pipeline.transforms.checking import check_batch

__all__ = ["DAMAGED", "EMPTY", "emptied", "erased_batches"]

EMPTY: Final = {
    "timestamp": (0, pa.int64()),
    "expires_at": (0, pa.int64()),
    "author_id": ("", pa.string()),
    "content_type": ("", pa.string()),
    "body": (b"", pa.binary()),
    "annotation": (None, pa.binary()),
}
"""What a relay leaves of an erased row beside its place."""

DAMAGED: Final = b'{"restored":"damaged"}'
"""The annotation of a row that is as empty, and that nobody erased: it was damaged before it was archived,
and a restore has kept its place alone."""


def emptied(tombstones: Sequence[Tombstone]) -> pa.Table:
    """Rows as an archive puts them aside that finds them erased already."""
    columns = {
        "sequence": pa.array([one.sequence for one in tombstones], pa.int64()),
        "received_at": pa.array([one.received_at for one in tombstones], pa.int64()),
        "packet_id": pa.array([bytes.fromhex(one.packet_id[2:]) for one in tombstones], pa.binary()),
    }
    columns |= {name: pa.array([value] * len(tombstones), type_) for name, (value, type_) in EMPTY.items()}
    checked = check_batch(pa.RecordBatch.from_pydict(columns))
    return pa.Table.from_batches([checked]).drop_columns(["kind"])


def erased_batches(
    manifests: Sequence[Manifest], old: Folders, new: Folders, erased: Sequence[int]
) -> list[ErasedBatch]:
    """What the batches hold now from which something was erased. Raises `LakeError` where a row that was to
    stay has changed."""
    span = span_over(manifests)
    before, after = Contents.of(*old, span), Contents.of(*new, span)
    spans = [one.span for one in manifests]
    tables = zip(manifests, *(cut(read_places(folders), spans) for folders in new), strict=True)
    kinds = _kinds(new.packets, spans)
    changed = []
    for number, (manifest, packets, quarantined) in enumerate(tables):
        gone = [sequence for sequence in erased if manifest.after < sequence <= manifest.up_to]
        if before.digest(manifest.span, without=gone) != after.digest(manifest.span, without=gone):
            raise LakeError(f"rows of {batch_name(manifest)} changed while it was written anew: run audit")
        if gone:
            sizes = (pc.sum(table["size"]).as_py() or 0 for table in (packets, quarantined))
            changed.append(
                ErasedBatch(
                    manifest=manifest.hash,
                    packets=packets.num_rows,
                    quarantined=quarantined.num_rows,
                    contents=after.digest(manifest.span),
                    body_bytes=sum(sizes),
                    kinds=kinds[number],
                )
            )
    return changed


def _kinds(packets: Sequence[Path], spans: Sequence[Span]) -> list[dict[str, int]]:
    """How many packets of each kind lie in each of the spans."""
    counts: list[dict[str, int]] = [{} for _ in spans]
    for folder in (kind for batch in packets for kind in listed(batch)):
        for count, rows in zip(counts, cut(read_places([folder]), spans), strict=True):
            if rows.num_rows:
                count[folder.name.removeprefix("kind=")] = rows.num_rows
    return counts
