"""`strata-pipeline erase`: what a relay has erased from its log goes from the lake as well.

The relay's tombstones say what. The files of each finished day that still holds such packets are written
anew without them; the rows stay among the quarantined ones, empty, as they are in the log. The manifests
stay, and a record beside the chain tells what the batches hold since (`lake.erasures`).
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from blake3 import blake3
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from strata.protocol.errors import InvalidInput
from strata.protocol.lake import (
    ErasedBatch,
    Erasure,
    Manifest,
    Span,
    day_of,
    day_text,
    encode_erasure,
    seal_erasure,
    told,
)
from strata.protocol.tombstones import Tombstone, read_tombstone

from strata_pipeline.datasets import Packets
from strata_pipeline.errors import LakeBusy, LakeError, LogError
from strata_pipeline.jobs.failures import translate_failures
from strata_pipeline.jobs.rewriting import write_day
from strata_pipeline.lake import files
from strata_pipeline.lake.checking import Unit, batch_name
from strata_pipeline.lake.contents import Contents
from strata_pipeline.lake.delta import is_published, publish
from strata_pipeline.lake.erasing import RECORD, TOMBSTONES, finish_erasure, mark
from strata_pipeline.lake.generations import check_day
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.layout import listed
from strata_pipeline.lake.rows import cut, read_places
from strata_pipeline.log.database import connect, read_tombstones
from strata_pipeline.transforms.checking import check_batch

__all__ = ["ErasedFrom", "erase"]

_EMPTY: Final = {
    "timestamp": (0, pa.int64()),
    "expires_at": (0, pa.int64()),
    "author_id": ("", pa.string()),
    "content_type": ("", pa.string()),
    "body": (b"", pa.binary()),
    "annotation": (None, pa.binary()),
}
"""What a relay leaves of an erased row beside its place."""


@dataclass(slots=True)
class ErasedFrom:
    """The progress of a run."""

    tombstones: int = 0
    """How many the relay has of what the lake has reached."""
    days: int = 0
    """Days whose files were written anew."""
    packets: int = 0
    """Packets that are no longer in the lake."""
    waiting: int = 0
    """Packets that stay for now: their day is not over, or jobs read the lake all the time."""
    copies: list[str] = field(default_factory=list)
    """Folders in `_aside`, which may hold copies of what was erased; nothing is deleted there."""


def erase(
    spark: SparkSession,
    url: str,
    path: str | Path,
    *,
    patience: float = 600.0,
    progress: Callable[[ErasedFrom], None] = lambda done: None,
) -> ErasedFrom:
    """Take out of the lake what the relay of this database has erased.

    Reading the tables `packets`, `log_head` and `tombstones` is enough. The files of a day change places
    while no other job of ours reads the lake; when the jobs do not end within `patience` seconds, the day
    waits for the next run, as the day does that is not over. `progress` is called after each day. Old files
    are deleted at once, those that a compaction has kept of the same days included. Raises `LakeError`,
    `LakeBusy`, `LogError`, `LogUnavailable`. Whenever the job is cut off, each day holds all of its packets,
    or none of the erased; the next run, or whoever next writes to the lake, finishes what was complete.
    """
    done = ErasedFrom()
    with contextlib.closing(connect(url)) as connection, Lake.replace(path) as lake:
        by_day: dict[int, list[bytes]] = defaultdict(list)
        for sequence, text in read_tombstones(connection, lake.reached):
            by_day[day_of(sequence)].append(text)
            done.tombstones += 1
        for day, texts in sorted(by_day.items()):
            found = _still_there(lake, day, texts)
            if not found:
                continue
            if day < day_of(lake.reached) and _erase_from_day(spark, lake, day, found, patience):
                done.days += 1
                done.packets += len(found)
                if is_published(lake):
                    publish(Lake.open(path), days=[day])
            else:
                done.waiting += len(found)
            progress(done)
        done.copies = [str(folder) for folder in listed(lake.aside)] if done.packets else []
    return done


_Found = dict[int, tuple[Tombstone, bytes]]
"""Tombstones by sequence, each with its text."""


def _still_there(lake: Lake, day: int, texts: Sequence[bytes]) -> _Found:
    """The tombstones of packets that the files of a day hold. Raises `LogError` for a bad one."""
    found: _Found = {}
    for text in texts:
        try:
            tombstone = read_tombstone(text)
        except InvalidInput as error:
            raise LogError(f"the database has a tombstone that does not hold: {error.reason}") from None
        found[tombstone.sequence] = tombstone, text
    places = read_places(lake.folders_of_day(lake.packets, day))
    there = places.filter(pc.is_in(places["sequence"], value_set=pa.array(list(found), pa.int64())))
    kept = {}
    for row in there.select(["sequence", "packet_id"]).to_pylist():
        sequence, packet_id = row["sequence"], f"0x{row['packet_id'].hex()}"
        if found[sequence][0].packet_id != packet_id:
            raise LogError(
                f"the tombstone of {sequence} names packet {found[sequence][0].packet_id}, and the lake has "
                f"{packet_id} there: this is the log of another relay. Nothing was erased from that day"
            )
        kept[sequence] = found[sequence]
    return dict(sorted(kept.items()))


class _Folders(NamedTuple):
    """The folders that hold a day."""

    packets: list[Path]
    quarantine: list[Path]


def _erase_from_day(spark: SparkSession, lake: Lake, day: int, found: _Found, patience: float) -> bool:
    """Whether it could be done."""
    manifests = lake.erasures.told(lake.chain.of_day(day))
    if any(one.format == 1 for one in manifests):
        raise LakeError(f"{day_text(day)} has batches of format 1: run strata-pipeline migrate-lake first")
    old = _Folders(lake.folders_of_day(lake.packets, day), lake.folders_of_day(lake.quarantine, day))
    check_day(day, Unit(manifests, *old))
    staged = lake.staged_erasure
    files.remove(staged)
    new = _write(spark, lake, day, found, manifests)
    tombstones = b"".join(text + b"\n" for _, text in found.values())
    record = seal_erasure(
        Erasure(
            number=len(lake.erasures.records),
            day=day,
            written_at=int(time.time()),
            batches=_batches(manifests, old, new, list(found)),
            tombstones=blake3(tombstones).hexdigest(),
            erased=len(found),
            previous=lake.erasures.tip,
        )
    )
    check_day(day, Unit(told(manifests, [record]), *new))
    for folder in (new.packets[0], new.quarantine[0]):
        mark(folder.parent, record.number)
    (staged / TOMBSTONES).write_bytes(tombstones)
    files.make_durable(staged)
    try:
        with lake.unread(patience):
            files.write_new(staged / RECORD, encode_erasure(record))
            finish_erasure(lake)
    except LakeBusy:
        files.remove(staged)
        files.remove_if_empty(lake.staging)
        return False
    lake.erasures.load()
    return True


def _write(
    spark: SparkSession, lake: Lake, day: int, found: _Found, manifests: Sequence[Manifest]
) -> _Folders:
    """Write the day's new files: packets as a compaction does, quarantined rows into one file."""
    folder = f"{lake.day_folder(day).name}/batch={_whole(manifests)}"
    packets, quarantine = (
        lake.staged_erasure / root.name / folder for root in (lake.packets, lake.quarantine)
    )
    for one in (packets.parent, quarantine):
        files.make_folder(one)
    gone = spark.createDataFrame([(sequence,) for sequence in found], "sequence bigint")
    with translate_failures(f"erasing from {day_text(day)}"):
        left = Packets.read(spark, lake, [day]).join(F.broadcast(gone), "sequence", "left_anti")
        write_day(left, packets, sum(one.body_bytes for one in manifests))
    rows = _emptied([tombstone for tombstone, _ in found.values()])
    aside = lake.folders_of_day(lake.quarantine, day)
    kept = [pads.dataset(one, format="parquet").to_table(columns=rows.column_names) for one in aside]
    pq.write_table(
        pa.concat_tables([*(one.cast(rows.schema) for one in kept), rows]).sort_by("sequence"),
        quarantine / "part-0.parquet",
        compression="zstd",
    )
    return _Folders([packets], [quarantine])


def _emptied(tombstones: Sequence[Tombstone]) -> pa.Table:
    """Rows as an archive puts them aside that finds them erased already."""
    columns = {
        "sequence": pa.array([one.sequence for one in tombstones], pa.int64()),
        "received_at": pa.array([one.received_at for one in tombstones], pa.int64()),
        "packet_id": pa.array([bytes.fromhex(one.packet_id[2:]) for one in tombstones], pa.binary()),
    }
    columns |= {name: pa.array([value] * len(tombstones), type_) for name, (value, type_) in _EMPTY.items()}
    checked = check_batch(pa.RecordBatch.from_pydict(columns))
    return pa.Table.from_batches([checked]).drop_columns(["kind"])


def _batches(
    manifests: Sequence[Manifest], old: _Folders, new: _Folders, erased: Sequence[int]
) -> list[ErasedBatch]:
    """What the batches hold now from which something was erased. Raises `LakeError` where a row that was to
    stay has changed."""
    span = _whole(manifests)
    before, after = Contents.of(*old, span), Contents.of(*new, span)
    spans = [one.span for one in manifests]
    tables = zip(manifests, *(cut(read_places(folders), spans) for folders in new), strict=True)
    kinds = _kinds(new.packets[0], spans)
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


def _whole(manifests: Sequence[Manifest]) -> Span:
    """The sequences of a day."""
    return Span(manifests[0].after, manifests[-1].up_to)


def _kinds(packets: Path, spans: Sequence[Span]) -> list[dict[str, int]]:
    """How many packets of each kind lie in each of the spans."""
    counts: list[dict[str, int]] = [{} for _ in spans]
    for folder in listed(packets):
        for count, rows in zip(counts, cut(read_places([folder]), spans), strict=True):
            if rows.num_rows:
                count[folder.name.removeprefix("kind=")] = rows.num_rows
    return counts
