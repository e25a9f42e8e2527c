"""Writing the files of batches for a copy, and what an erasure leaves of them. It needs no Spark."""

from __future__ import annotations

import contextlib
import os
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from blake3 import blake3
from strata.protocol.sequences import Span

from strata_pipeline.errors import LakeError
from strata_pipeline.jobs.copy_groups import RowGroups
from strata_pipeline.lake.checking import batch_name, batches_faults
from strata_pipeline.lake.contents import UNREADABLE, parquet_files, read_rows
from strata_pipeline.lake.footers import check_footer
from strata_pipeline.lake.layout import Folders, LakeLayout, batch_path, span_of
from strata_pipeline.lake.rows import rows_in
from strata_pipeline.lake.stores.objects import ObjectStore
from strata_pipeline.lake_format import Manifest, StoredObject

__all__ = ["DAMAGED_FILE", "BatchFolders", "Source", "extract", "put_files", "write_without"]

DAMAGED_FILE: Final = (ValueError, pa.ArrowException)
"""What reading a damaged file raises, and writing another one does not."""
_ROOTS: Final = ("packets", "quarantine")
_GATHERED_BYTES: Final = 64 * 2**20


class BatchFolders:
    """Folders of a day's batches, found by the spans in their names: a day may have a hundred thousand, and
    each of its batches is searched for among them."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._there = sorted((span_of(one), one) for one in folders)
        self._begins = [span.after for span, _ in self._there]
        # Where all folders up to each one end: a folder that belongs to no batch may span any others.
        self._ends = list(accumulate((span.up_to for span, _ in self._there), max))

    def overlapping(self, span: Span) -> list[tuple[Span, Path]]:
        """The folders that may have rows of a span, in order."""
        first = bisect_right(self._ends, span.after)
        last = bisect_left(self._begins, span.up_to)
        return [one for one in self._there[first:last] if one[0].overlaps(span)]


class Source(NamedTuple):
    """The folders of a day's batches, and what was read of files that have rows of several batches."""

    packets: BatchFolders
    quarantine: BatchFolders
    groups: RowGroups

    @classmethod
    def of(cls, layout: LakeLayout, day: int) -> Self:
        """The folders of a day."""
        packets, quarantine = map(BatchFolders, layout.day(day))
        return cls(packets, quarantine, RowGroups())


def extract(source: Source, manifest: Manifest, folder: Path) -> None:
    """Write the files of a batch, by root and kind, into a folder.

    `manifest` says what the batch holds now. Raises `LakeError` unless the files hold just that.
    """
    why = _written(source, manifest, folder)
    if why is None:
        made = ([one] if (one := folder / root).is_dir() else [] for root in _ROOTS)
        faults = batches_faults([manifest], *made)
        why = faults[0].detail if faults else _too_much(manifest, parquet_files([folder]))
    if why is not None:
        raise LakeError(
            f"the lake's {batch_name(manifest)} is damaged: {why}. Bring its files back from a copy of the "
            "lake; the batches before it are copied"
        )


def _written(source: Source, manifest: Manifest, folder: Path) -> str | None:
    """Write the files of a batch; return why one cannot be read, or None."""
    for root, folders in zip(_ROOTS, (source.packets, source.quarantine), strict=True):
        for span, batch in folders.overlapping(manifest.span):
            for path in parquet_files([batch]):
                target = folder / root / path.relative_to(batch)
                if span == manifest.span:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)
                    continue
                try:
                    _cut(source.groups, path, manifest.span, target)
                except DAMAGED_FILE as error:
                    return str(error)
    return None


def _too_much(manifest: Manifest, paths: Sequence[Path]) -> str | None:
    """How files exceed the rows of a batch, all of which are there; None if they do not."""
    try:
        rows = sum(pq.read_metadata(path).num_rows for path in paths)
    except UNREADABLE as error:
        return str(error)
    more = rows - manifest.packets - manifest.quarantined
    return f"it has {more} rows that are not its own" if more else None


def put_files(
    folder: Path, store: ObjectStore, name_of: Callable[[str, str | None], str]
) -> list[StoredObject]:
    """Put the files below a folder as objects, whose names `name_of` makes from root and kind."""
    objects = []
    for path in parquet_files([folder]):
        root, *below, _ = path.relative_to(folder).parts
        kinds = [one.removeprefix("kind=") for one in below if one.startswith("kind=")]
        content = path.read_bytes()
        one = StoredObject(
            name=name_of(root, kinds[0] if kinds else None),
            size=len(content),
            rows=pq.read_metadata(path).num_rows,
            hash=blake3(content).hexdigest(),
        )
        store.put(one.name, content)
        objects.append(one)
    return objects


def write_without(
    old: Folders, gone: pa.Table, spans: Sequence[Span], base: Path, target: Path, name: str
) -> Folders:
    """Write the files of a day, which lie below `base`, to `target`, without the contents of some rows.

    `gone` has these rows as they are to be quarantined, in place of packets and of rows that are already
    quarantined. They are written into a file with this `name` for each of the `spans` that has any. A file
    that changes gets a new name, which begins with `name` too: a Delta log assumes that a name always means
    the same file.
    """
    taken: list[pa.Array] = []
    for number, path in enumerate(parquet_files([*old.packets, *old.quarantine])):
        same = target / path.relative_to(base)
        other = same.with_name(f"{name}-{number}.parquet")
        try:
            taken += _write_rest(path, same, other, gone["sequence"])
        except DAMAGED_FILE as error:
            raise LakeError(
                f"{path} cannot be read: {error}. Run audit, and bring the file back from a copy of the lake"
            ) from None
    aside = gone.filter(pc.is_in(gone["sequence"], value_set=pa.chunked_array(taken, pa.int64())))
    for span in spans:
        rows = rows_in(aside, span)
        if rows.num_rows:
            folder = target / "quarantine" / batch_path(span)
            folder.mkdir(parents=True, exist_ok=True)
            pq.write_table(rows, folder / f"{name}.parquet", compression="zstd")
    return Folders.below(target)


def _cut(groups: RowGroups, path: Path, span: Span, target: Path) -> None:
    """Copy the rows of a file that lie in a span."""
    rows = groups.rows(path, span)
    if rows.num_rows:
        target.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, target, compression="zstd")


def _write_rest(path: Path, same: Path, other: Path, sequences: pa.ChunkedArray) -> list[pa.Array]:
    """Write the rows of a file without those with these sequences; return which of these it had.

    If it had none, the file becomes `same`, else `other`. If no rows stay, neither a file nor a folder is
    made.
    """
    check_footer(path)
    found = pq.read_table(path, columns=["sequence"], partitioning=None)["sequence"]
    taken: pa.ChunkedArray = found.filter(pc.is_in(found, value_set=sequences))
    if not len(taken):
        _link(path, same)
    elif len(taken) < len(found):
        other.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(other, pq.read_schema(path), compression="zstd") as writer:
            for rows in _rest(path, sequences):
                writer.write_table(rows)
    return list(taken.chunks)


def _rest(path: Path, sequences: pa.ChunkedArray) -> Iterator[pa.Table]:
    """The rows of a file without those with these sequences, as many at a time as fit easily into memory."""
    gathered: list[pa.RecordBatch] = []
    columns = pq.read_schema(path).names
    for _, _, rows in read_rows([path], columns):
        stays = pc.invert(pc.is_in(rows.column("sequence"), value_set=sequences))
        gathered.append(rows.filter(stays))
        if sum(one.nbytes for one in gathered) >= _GATHERED_BYTES:
            yield pa.Table.from_batches(gathered)
            gathered = []
    if gathered:
        yield pa.Table.from_batches(gathered)


def _link(path: Path, target: Path) -> None:
    """Give a file a second name, which is safe because files of a lake are never modified; else copy it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        os.link(path, target)
        return
    shutil.copyfile(path, target)
