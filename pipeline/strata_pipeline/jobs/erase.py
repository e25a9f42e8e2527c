"""`strata-pipeline erase`: erase from the lake what a relay has erased from its log.

The relay's tombstones name the packets. The files of each finished day that still holds such packets, at the
places of the tombstones or elsewhere, are rewritten without them; the rows become quarantined rows, empty, as
they are in the log. The manifests stay, and a record beside the chain says what the batches hold since then
(`lake.erasures`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from strata.protocol.errors import InvalidInput
from strata.protocol.sequences import day_of, day_text

from strata_pipeline.datasets import Packets
from strata_pipeline.errors import LakeBusy, LakeError, LogError
from strata_pipeline.jobs.elsewhere import ErasedIds, Line, lines_elsewhere, recorded
from strata_pipeline.jobs.failures import Refused, translate_failures
from strata_pipeline.jobs.object_days import Found, RemovedRows, erase_from_day, still_there
from strata_pipeline.jobs.parts import PartDone, PartWork, packets_there
from strata_pipeline.jobs.publishing import publish_rewritten
from strata_pipeline.jobs.rewriting import rewrite_parts, write_day
from strata_pipeline.jobs.same_log import check_same_log
from strata_pipeline.lake import files
from strata_pipeline.lake.checking import Unit, units_of_day
from strata_pipeline.lake.contents import UNREADABLE
from strata_pipeline.lake.delta import is_published, publish
from strata_pipeline.lake.erasure_commit import mark, place_erasure
from strata_pipeline.lake.generations import check_day, check_own, delete_retired
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.layout import Folders, listed, span_over
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.places import AnyLake
from strata_pipeline.lake.retired import not_retired
from strata_pipeline.lake.rewrite_attempts import ERASED_GRACE, Grace
from strata_pipeline.lake.rows import checked_files, places_at
from strata_pipeline.lake.stores.schemes import is_object_place
from strata_pipeline.lake_format import Manifest, read_tombstone_line, told
from strata_pipeline.log.database import connect, read_tombstones
from strata_pipeline.transforms.emptying import emptied, erased_batches, held_aside

if TYPE_CHECKING:
    from adbc_driver_postgresql import dbapi as adbc

__all__ = ["ErasedFrom", "erase"]

_NEVER: Final = 2**40


@dataclass(slots=True)
class ErasedFrom:
    """The progress of a run."""

    tombstones: int = 0
    """The number of tombstones that the relay has up to the end of the lake."""
    days: int = 0
    """Days whose files were rewritten."""
    packets: int = 0
    """Packets that are no longer in the lake."""
    searched: int = 0
    """Days whose ids were read, because they may have packets at other places than the tombstones name."""
    waiting: int = 0
    """Packets and quarantined rows that stay for now, because their day is not over, because jobs read the
    lake all the time or, in a bucket, because another process rewrote the day meanwhile."""
    deleted: int = 0
    """In a bucket: objects that this run has deleted, which it or earlier runs had replaced. On a disk:
    folders of files that an earlier run with a grace had replaced."""
    aside: int = 0
    """Quarantined rows at places of tombstones whose id or time differs from that in the tombstone. Whether
    they are what was erased cannot be determined, so they stay."""
    emptied: int = 0
    """Quarantined rows, damaged before they were archived, of which only the place is left now."""
    copies: list[str] = field(default_factory=list)
    """Folders in `_aside`, and those in `_retired` that are not the lake's own. They may hold copies of what
    was erased, and are not deleted."""


def erase(
    spark: SparkSession,
    url: str,
    path: str | Path,
    *,
    patience: float = 600.0,
    grace: int | None = None,
    everywhere: bool = True,
    progress: Callable[[ErasedFrom], None] = lambda done: None,
) -> ErasedFrom:
    """Erase from the lake what the relay of this database has erased: with `everywhere`, at all places that
    the lake has it at, for which ids are read that were not yet searched for all tombstones, and else at that
    of its tombstone.

    Read access to the tables `packets`, `log_head` and `tombstones` is enough. The files of a day change
    places while no other job of ours reads the lake; if the jobs do not end within `patience` seconds, the
    day waits for the next run, like the day that is not over. `progress` is called after each day. Old files
    are deleted at once, including those that a compaction has kept of the same days; with `grace` they stay
    that many seconds for readers that have begun, and then the next run, or compact, deletes them. Raises
    `LakeError`, `LakeBusy`, `LogError`, `LogUnavailable`; an error that concerns only one day is raised once
    the other days are done. Whenever the job is interrupted, each day holds all of its packets, or none of
    the erased ones; the next run, or the next process that writes to the lake, finishes an erasure that was
    complete.

    In a bucket nothing waits. Replaced objects stay for `grace` seconds, by default an hour, for processes
    that opened the lake earlier; after that the next run, or compact, deletes them, or this run if `grace`
    is 0. There this also raises `ObjectStoreError`.
    """
    if is_object_place(path):
        kept = ERASED_GRACE if grace is None else timedelta(seconds=grace)
        return _erase_from_bucket(spark, url, str(path), kept, everywhere, progress)
    done, refused = ErasedFrom(), Refused(LakeError, LogError)
    with contextlib.closing(connect(url)) as connection, Lake.replace(path) as lake:
        done.deleted = delete_retired(lake, int(time.time()), _NEVER, grace or 0)
        asked = _asked(lake, connection, everywhere, done, refused)
        for day, texts in _by_day(lake, asked):
            with refused.put_off():
                found, aside, others, strangers = _still_there(lake, day, _read(texts))
                done.aside += others
                if not found:
                    _refuse(strangers)
                    continue
                if not lake.may_grow(day) and _erase_from_day(
                    spark, lake, day, found, aside, patience, keep=bool(grace)
                ):
                    done.days += 1
                    done.packets += len(found) - len(aside)
                    done.emptied += len(aside)
                    if is_published(lake):
                        publish(Lake.open(path), days=[day])
                else:
                    done.waiting += len(found)
                progress(done)
                _refuse(strangers)
        publish_rewritten(path)
        if done.days:
            done.copies = [str(folder) for folder in (*listed(lake.aside), *not_retired(lake))]
    refused.tell(_told(done))
    return done


def _erase_from_bucket(
    spark: SparkSession,
    url: str,
    place: str,
    grace: timedelta,
    everywhere: bool,
    progress: Callable[[ErasedFrom], None],
) -> ErasedFrom:
    def run(lake: ObjectLake, works: Sequence[PartWork]) -> list[PartDone]:
        with translate_failures("erasing"):
            return rewrite_parts(spark, lake, works)

    done, refused = ErasedFrom(), Refused(LakeError, LogError)
    kept = Grace(erased=grace)
    with contextlib.closing(connect(url)) as connection, ObjectLake.replace(place, kept) as lake:
        done.deleted = len(lake.left.deleted)
        finished = set(lake.finished_days())
        asked = _asked(lake, connection, everywhere, done, refused)
        for day, texts in _by_day(lake, asked):
            with refused.put_off():
                found, others = still_there(lake, day, _read(texts))
                done.aside += others
                try:
                    gone = (
                        erase_from_day(lake, day, found, run) if found and day in finished else RemovedRows()
                    )
                except LakeBusy:
                    done.waiting += len(found)
                    continue
                done.days += bool(gone.rows)
                done.packets += gone.packets
                done.emptied += gone.emptied
                done.waiting += 0 if day in finished else len(found)
                if gone.rows and is_published(lake):
                    publish(ObjectLake.open(place), days=[day])
                progress(done)
                _refuse(gone.strangers)
        publish_rewritten(place)
        if done.days and not grace:
            lake.tidy(kept)
            done.deleted += len(lake.left.deleted)
    refused.tell(_told(done))
    return done


def _told(done: ErasedFrom) -> str:
    return f"{done.packets:,} packets were erased from {done.days:,} days" if done.days else ""


def _refuse(strangers: Sequence[str]) -> None:
    """Raise `LogError` if there is another packet at the place of a tombstone."""
    if strangers:
        more = f", and at {len(strangers) - 1:,} more places" if strangers[1:] else ""
        raise LogError(
            f"{strangers[0]}{more}: this is the log of another relay, or the lines for relayd erase --places "
            "were those of another lake. Nothing was erased there"
        )


def _asked(
    lake: AnyLake, connection: adbc.Connection, everywhere: bool, done: ErasedFrom, refused: Refused
) -> list[Line]:
    """The lines for all places at which there may be something to erase, in order. If a row has the id of
    another tombstone than that of its place, its own id counts, and the last line of a place is that."""
    tombstones = read_tombstones(connection)
    lines = [(one.sequence, one.text) for one in tombstones if one.sequence <= lake.reached]
    done.tombstones = len(lines)
    if tombstones and everywhere:
        with refused.put_off():
            # A place distinguishes two relays, and an id does not: both may have had the packet.
            check_same_log(lake, connection)
            others, done.searched = lines_elsewhere(lake, ErasedIds(tombstones), refused)
            lines += others
    return sorted(lines, key=lambda line: line[0])  # the sort is stable


def _by_day(lake: AnyLake, lines: Sequence[Line]) -> Iterator[tuple[int, list[bytes]]]:
    """The texts of lines, which are given in order, by day.

    Lines that a record of the lake has are left out. Otherwise each run would read again every day from which
    anything was ever erased.
    """
    for day, some in groupby(lines, lambda one: day_of(one[0])):
        known = recorded(lake, lake.erasures.of_day(day))
        if texts := [text for _, text in some if text not in known]:
            yield day, texts


def _read(texts: Sequence[bytes]) -> Found:
    """Tombstones by the sequence of the row to be erased, each with its line. Raises `LogError` for a bad
    one."""
    found = {}
    for text in texts:
        try:
            tombstone, _ = read_tombstone_line(text)
        except InvalidInput as error:
            raise LogError(f"the database has a tombstone that does not hold: {error.reason}") from None
        found[tombstone.sequence] = tombstone, text
    return found


class _There(NamedTuple):
    """What there is to erase from a day on a disk."""

    found: Found
    aside: list[int]
    """The sequences of those that are quarantined."""
    others: int
    """The number of quarantined rows that may or may not be what was erased."""
    strangers: list[str]
    """A sentence for each place that has another packet than its tombstone names."""


def _still_there(lake: Lake, day: int, asked: Found) -> _There:
    """The tombstones for which the files of a day still hold the packet, or a quarantined row."""
    folders, stones = lake.day(day), [tombstone for tombstone, _ in asked.values()]
    try:
        packets, strangers = packets_there(folders.packets, stones)
        held = held_aside(folders.quarantine, stones)
    except UNREADABLE as error:
        raise LakeError(
            f"{day_text(day)} has a file that cannot be read: {error}; the day stays as it is. Run audit, "
            "and bring the file back from a copy of the lake"
        ) from None
    order = sorted(one.sequence for one in (*packets, *held.full))
    found = {n: asked[n] for n in order}
    return _There(found, [one.sequence for one in held.full], len(held.others), strangers)


def _erase_from_day(
    spark: SparkSession,
    lake: Lake,
    day: int,
    found: Found,
    aside: Sequence[int],
    patience: float,
    *,
    keep: bool,
) -> bool:
    """Erase packets from a day; return whether it could be done."""
    manifests = lake.erasures.told(lake.chain.of_day(day))
    check_own(lake, day)
    old = lake.day(day)
    for unit in units_of_day(lake, day, manifests):
        check_day(day, unit)
    files.remove(lake.staged_erasure)
    new = _write(spark, lake, old, day, list(found), aside, manifests)
    tombstones = b"".join(text + b"\n" for _, text in found.values())
    batches = erased_batches(manifests, old, new, list(found))
    record = lake.erasures.next(day, int(time.time()), batches, tombstones, emptied=len(aside))
    check_day(day, Unit(told(manifests, [record]), *new))
    for folder in (new.packets[0], new.quarantine[0]):
        mark(folder.parent, record.number)
    try:
        place_erasure(lake, record, tombstones, lake.unread(patience), keep=keep)
    except LakeBusy:
        return False
    return True


def _write(
    spark: SparkSession,
    lake: Lake,
    old: Folders,
    day: int,
    erased: Sequence[int],
    aside: Sequence[int],
    manifests: Sequence[Manifest],
) -> Folders:
    """Write the day's new files: packets as in a compaction, quarantined rows into one file."""
    folder = f"{lake.day_folder(day).name}/batch={span_over(manifests)}"
    packets, quarantine = (
        lake.staged_erasure / root.name / folder for root in (lake.packets, lake.quarantine)
    )
    for one in (packets.parent, quarantine):
        files.make_folder(one)
    gone = spark.createDataFrame([(sequence,) for sequence in erased], "sequence bigint")
    with translate_failures(f"erasing from {day_text(day)}"):
        left = Packets.read(spark, lake, [day]).join(F.broadcast(gone), "sequence", "left_anti")
        write_day(left, packets, manifests)
    rows = emptied(places_at([*old.packets, *old.quarantine], erased))
    stays = ~pads.field("sequence").isin(pa.array(aside, pa.int64()))
    kept = [checked_files(one, rows.schema).to_table(filter=stays) for one in old.quarantine]
    pq.write_table(
        pa.concat_tables([*kept, rows]).sort_by("sequence"),
        quarantine / "part-0.parquet",
        compression="zstd",
    )
    return Folders([packets], [quarantine])
