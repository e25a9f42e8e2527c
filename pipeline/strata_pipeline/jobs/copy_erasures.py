"""Copying erasures: the records of the source lake, each put in one step with its rows.

A record is put before those batches of its day that the copy does not have yet, because these lack the erased
rows and are valid only with the record. Batches that the copy has are rewritten without the rows, and count
from the moment of the record, as after `erase` (`lake.erasing`, `lake.superseding`). In a bucket, a record is
part of a generation of its day, whose listing names the objects of all batches; those that the chain has not
reached count once their manifests are there.
"""

from __future__ import annotations

import tempfile
import time
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from strata_pipeline.errors import LakeError
from strata_pipeline.jobs.copy_files import DAMAGED_FILE, Source, extract, put_files, write_without
from strata_pipeline.jobs.publishing import publish_rewritten
from strata_pipeline.lake import files
from strata_pipeline.lake.attempts import object_name
from strata_pipeline.lake.checking import Unit, batch_name, chunks
from strata_pipeline.lake.contents import parquet_files
from strata_pipeline.lake.erasure_commit import mark, place_erasure, put_record
from strata_pipeline.lake.footers import check_footer
from strata_pipeline.lake.generations import check_day, check_own
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.layout import Folders
from strata_pipeline.lake.object_generations import batches_of
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.places import AnyLake
from strata_pipeline.lake.rewrite_attempts import Rewrite
from strata_pipeline.lake.superseding import Erasing, attempting, supersede
from strata_pipeline.lake_format import Erasure, Manifest, Part, StoredObject, told

__all__ = ["bring_erasures", "check_erasures_begin", "listed_ahead"]


def check_erasures_begin(lake: AnyLake, copy: AnyLake) -> None:
    """Raise `LakeError` unless the copy's erasures are the first ones of the lake, and the lake is
    complete."""
    if lake.is_half_copied:
        raise LakeError(
            f"{lake.place} is a copy that is not complete: it tells of erasures from days that it does not "
            "have. Run strata-pipeline copy into it again first; nothing was changed"
        )
    mine, theirs = ([record.hash for record in one.erasures.records] for one in (copy, lake))
    if mine != theirs[: len(mine)]:
        raise LakeError(
            f"the erasures from {copy.place} are not the first of those from {lake.place}: it was erased "
            "from by itself, and a copy gets erasures from the lake that it is a copy of. Copy the lake to "
            "another place, and delete this copy. Nothing was changed"
        )


def bring_erasures(lake: AnyLake, copy: AnyLake, patience: float) -> int:
    """Copy the records that a copy lacks, and erase the rows from its batches; return how many records.

    On a disk, days change places while no job of ours reads the copy. Raises `LakeBusy` if jobs still read it
    after `patience` seconds or if another process is working on its days, `LakeError` if rows are damaged,
    and `ObjectStoreError`; records that were already copied stay.
    """
    missing = lake.erasures.records[len(copy.erasures.records) :]
    if missing and isinstance(copy, Lake):
        with Lake.replace(copy.root) as opened:  # this finishes an interrupted erasure
            check_erasures_begin(lake, opened)
            for record in lake.erasures.records[len(opened.erasures.records) :]:
                _bring_to_disk(lake, opened, record, patience)
        copy.erasures.load()
    elif isinstance(copy, ObjectLake):
        ahead: dict[int, list[Part]] = {}
        for record in missing:
            _bring_to_bucket(lake, copy, record, ahead)
    if copy.erasures.records and copy.chain.end.number:
        publish_rewritten(copy.place)
    return len(missing)


def listed_ahead(copy: ObjectLake, manifest: Manifest) -> list[StoredObject] | None:
    """The objects of the next batch of a copy, if an erasure from its day has put them already; else None.

    `manifest` says what the batch holds now. Raises `LakeError` if the objects are not those of the batch.
    """
    generation = copy.generations.of_day(manifest.span.day)
    if generation is None:
        return None
    parts = copy.parts_of(manifest.span.day, generation)
    place = bisect_left(parts, manifest.up_to, key=lambda part: part.up_to)
    objects = parts[place].objects if place < len(parts) and parts[place].span == manifest.span else []
    aside = sum(one.rows for one in objects if one.name.startswith("quarantine/"))
    counts = sum(one.rows for one in objects) - aside, aside
    if counts != (manifest.packets, manifest.quarantined):
        raise LakeError(
            f"{copy.place} is not a copy of this lake: it has other objects of {batch_name(manifest)}. "
            "Copy the lake to another place"
        )
    return objects


def _concerned(copy: AnyLake, record: Erasure) -> list[Manifest]:
    """The batches of a copy from which a record erases."""
    hashes = {one.manifest for one in record.batches}
    return [one for one in copy.chain.of_day(record.day) if one.hash in hashes]


def _gone(lake: AnyLake, copy: AnyLake, record: Erasure) -> pa.Table:
    """The empty rows that the lake has for a record's tombstones, for batches that the copy has."""
    stones = lake.erasures.tombstones(record)
    wanted = pa.array([one.sequence for one in stones if one.sequence <= copy.reached], pa.int64())
    with lake.quarantine_at_hand(record.day) as layout:
        paths = parquet_files(layout.folders_of_day(layout.quarantine, record.day))
        within = pc.is_in(pads.field("sequence"), value_set=wanted)
        try:
            for path in paths:
                check_footer(path)
            tables = [pads.dataset(path, format="parquet").to_table(filter=within) for path in paths]
        except DAMAGED_FILE as error:
            raise LakeError(
                f"{lake.place} has a file that cannot be read: {error}. Run audit there; the erasures before "
                "are copied"
            ) from None
    found = [table for table in tables if table.num_rows]
    if sum(table.num_rows for table in found) != len(wanted):
        raise LakeError(
            f"{lake.place} does not have the empty rows that its erasure {record.number} tells of. Run "
            "audit there; the erasures before are copied"
        )
    return pa.concat_tables(found, promote_options="default").sort_by("sequence")


def _bring_to_disk(lake: AnyLake, copy: Lake, record: Erasure, patience: float) -> None:
    text = lake.erasures.text_of(record)
    concerned = _concerned(copy, record)
    if not concerned:
        put_record(copy, record, text)
        copy.erasures.load()
        return
    _stage(lake, copy, record, concerned)
    place_erasure(copy, record, text, copy.unread(patience))


def _stage(lake: AnyLake, copy: Lake, record: Erasure, concerned: Sequence[Manifest]) -> None:
    """Rewrite the files of a day, as far as the copy has it."""
    day, staged = record.day, copy.staged_erasure
    check_own(copy, day)
    files.remove(staged)
    files.make_folder(staged)
    spans = [one.span for one in concerned]
    new = write_without(copy.day(day), _gone(lake, copy, record), spans, copy.root, staged, _name_of(record))
    manifests = told(copy.erasures.told(copy.chain.of_day(day)), [record])
    check_day(day, Unit(manifests, *new))
    for root in (copy.packets, copy.quarantine):
        mark(staged / root.name / copy.day_folder(day).name, record.number)


def _name_of(record: Erasure) -> str:
    """The beginning of the names of files that a record has changed; an archive never uses it."""
    return f"erased-{record.number:010}"


def _bring_to_bucket(lake: AnyLake, copy: ObjectLake, record: Erasure, ahead: dict[int, list[Part]]) -> None:
    """Copy one record; `ahead` are parts of days, after the end of the chain, that this run has made."""
    text = lake.erasures.text_of(record)
    with attempting(copy, record.day) as rewrite:
        parts = _rewritten(lake, copy, rewrite, record)
        # Not those of an earlier run, which may hold rows that the lake has erased since.
        if record.day not in ahead:
            ahead[record.day] = _made_ahead(lake, copy, rewrite)
    erasing = Erasing(record.batches, text, record=record)
    supersede(copy, rewrite, [*parts, *ahead[record.day]], int(time.time()), erasing)


def _rewritten(lake: AnyLake, copy: ObjectLake, rewrite: Rewrite, record: Erasure) -> list[Part]:
    """The parts of a day that the copy has, rewritten where a record erases from them."""
    manifests = told(copy.erasures.told(copy.chain.of_day(record.day)), [record])
    hashes = {one.hash for one in _concerned(copy, record)}
    if not hashes:
        return copy.parts(record.day) if manifests else []
    gone, parts = _gone(lake, copy, record), copy.parts(record.day)
    return [
        _without(copy, rewrite, part, inside, gone, _name_of(record))
        if any(one.hash in hashes for one in inside)
        else part
        for part, inside in zip(parts, batches_of(parts, manifests), strict=True)
    ]


def _without(
    copy: ObjectLake, rewrite: Rewrite, part: Part, manifests: list[Manifest], gone: pa.Table, name: str
) -> Part:
    with (
        copy.shelf.at_hand(part.objects) as (folder, faults),
        tempfile.TemporaryDirectory(prefix="strata-copy-") as made,
    ):
        if faults:
            raise LakeError(f"{faults[0].detail}; the day stays as it is. Copy the lake to another place")
        new = write_without(Folders.below(folder), gone, [part.span], folder, Path(made), name)
        check_day(rewrite.day, Unit(manifests, *new))
        return _put(copy, rewrite, part, Path(made))


def _made_ahead(lake: AnyLake, copy: ObjectLake, rewrite: Rewrite) -> list[Part]:
    """A part for each batch of a day that the copy does not have yet, with what the batch holds now."""
    manifests = lake.erasures.told(lake.chain.of_day(rewrite.day))
    parts = []
    for some in chunks(one for one in manifests if one.after >= copy.reached):
        with lake.at_hand(some) as layout:
            source = Source.of(layout, rewrite.day)
            for manifest in some:
                with tempfile.TemporaryDirectory(prefix="strata-copy-") as made:
                    extract(source, manifest, Path(made))
                    part = Part(after=manifest.after, up_to=manifest.up_to, objects=[])
                    parts.append(_put(copy, rewrite, part, Path(made)))
    return parts


def _put(copy: ObjectLake, rewrite: Rewrite, part: Part, folder: Path) -> Part:
    """Put the files in a folder as the objects of a part."""

    def name_of(root: str, kind: str | None) -> str:
        return object_name(rewrite.name, part.span, root, kind)

    return Part(after=part.after, up_to=part.up_to, objects=put_files(folder, copy.store, name_of))
