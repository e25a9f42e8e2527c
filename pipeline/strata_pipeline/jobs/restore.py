"""`strata-pipeline restore`: put a lake back into a relay's database, each packet at its old place.

The log grows at its end, by a part of a batch in each transaction. So it is always the beginning of the lake,
and the next run can continue after any interruption. Each batch is checked against its manifest, and each
packet against its id, before the batch enters the log. A packet that a peer had brought gets back the time at
which the first relay received it.

An erased packet comes back as the relay had left it: an empty row at its place, whose id stays known, with
its tombstone if the lake has that. Of any other quarantined row, which was damaged in the old log, only the
place comes back: an empty row with a mark, whose id is not known. So a day with such rows can still be proven
to be in the lake, and a relay serves none of these rows. The abuse table and the relay's secrets are not
restored.
The new relay can validate cursors that the old one gave out only if the rows of `relay_secrets` and
`log_terms` are copied from a backup before the restore. Packets that were acknowledged after the lake's last
batch are lost, so a restore that has added rows begins a new epoch of the log: readers that were further
ahead are notified.
"""

from __future__ import annotations

import functools
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow.compute as pc
from adbc_driver_postgresql import dbapi as adbc
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from strata.protocol.sequences import Span, day_of
from strata.protocol.tombstones import Tombstone

from strata_pipeline.datasets import Packets
from strata_pipeline.errors import LakeError, LogError
from strata_pipeline.jobs.failures import translate_failures
from strata_pipeline.lake.batches import Batch, leading_days_with_holes
from strata_pipeline.lake.checking import batch_name, chunks
from strata_pipeline.lake.contents import UNREADABLE
from strata_pipeline.lake.places import AnyLake, open_lake
from strata_pipeline.lake.witnesses import Times
from strata_pipeline.lake_format import Manifest
from strata_pipeline.log import restoring
from strata_pipeline.log.restoring import Head
from strata_pipeline.planning import packed
from strata_pipeline.transforms.emptying import read_aside
from strata_pipeline.transforms.restoring import stage_packets, staged_aside

__all__ = ["Restored", "restore"]

DEFAULT_CHUNK_ROWS = 50_000


@dataclass(slots=True)
class Restored:
    """The progress of a run."""

    packets: int = 0
    """The number of packets that this run has put into the log."""
    reached: int = 0
    """The sequence at which the log ends."""
    left: int = 0
    """The number of packets of the lake that are not in the log yet."""
    epoch: int = 0
    """The epoch of the log that this run has begun; 0 if nothing was restored."""
    erased: int = 0
    """The number of empty rows that this run has added for packets that were erased."""
    damaged: int = 0
    """The number of empty rows that this run has added for rows that were damaged when archived."""


class _Aside(NamedTuple):
    """The places of a batch's quarantined rows, in order."""

    erased: Sequence[int] = ()
    damaged: Sequence[int] = ()

    def within(self, span: Span) -> tuple[int, int]:
        """The number of each that lie in a span."""
        erased, damaged = (bisect_right(one, span.up_to) - bisect_right(one, span.after) for one in self)
        return erased, damaged


_Tombstones = Callable[[int], Mapping[int, tuple[Tombstone, bytes]]]
"""Returns the lake's tombstones of a day by their places. Raises `LakeError`."""


def restore(
    spark: SparkSession,
    url: str,
    path: str | Path,
    *,
    until: int | None = None,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
    progress: Callable[[Restored], None] = lambda done: None,
) -> Restored:
    """Bring the log of a migrated database up to the end of a lake, or of the day `until` (days since 1970).

    The log must be empty, or end somewhere in the lake and hold what the lake holds up to there; if it holds
    all of it and more, nothing is done. `progress` is called before each transaction, and at the end. Raises
    `LakeError` for a damaged lake, naming the batch, `LogError` for a log that is not a beginning of it, and
    `LogUnavailable`. Packets restored before an error stay, and running the job again continues.
    """
    lake = open_lake(path)
    days = [day for day in lake.days() if until is None or day <= until]
    if not days:
        raise LakeError("the lake holds nothing to restore: it is empty, or begins after that day")
    with lake.held(), restoring.writing(url) as connection:
        head = restoring.read_head(connection)
        held = _check_beginning(lake, days, connection, head)
        done = Restored(reached=head.sequence, left=sum(map(lake.rows_of, days)) - held)
        border = leading_days_with_holes(one for day in lake.days() for one in lake.chain.of_day(day))
        if head.sequence == 0 and border > head.removed_to:
            restoring.keep_below(connection, border)
            head = restoring.read_head(connection)
        # Cached for one day at a time, so that each signature is checked once, and not with each batch.
        tombstones = functools.lru_cache(maxsize=1)(functools.partial(_tombstones, lake))
        with restoring.staging(connection) as (table, was_killed):
            try:
                for some in _left(lake, days, head.sequence):
                    for batch, aside in _staged(spark, url, connection, table, lake, tombstones, some, head):
                        head = _move(connection, table, batch, aside, head, chunk_rows, done, progress)
            finally:  # a relay may continue from wherever this ends, and from where another was killed
                if done.packets or done.erased or done.damaged or was_killed:
                    done.epoch = restoring.begin_epoch(connection, int(time.time()))
    progress(done)
    return done


def _now(lake: AnyLake, day: int) -> list[Manifest]:
    """The manifests of a day, with what their batches hold now. After years a lake has millions of manifests,
    so they are read one day at a time."""
    return lake.erasures.told(lake.chain.of_day(day))


def _left(lake: AnyLake, days: Sequence[int], after: int) -> Iterator[list[Manifest]]:
    """The batches of these days that end after a sequence, a few of one day at a time."""
    for day in days:
        if day >= day_of(after):
            yield from chunks(one for one in _now(lake, day) if one.up_to > after)


def _staged(
    spark: SparkSession,
    url: str,
    connection: adbc.Connection,
    table: str,
    lake: AnyLake,
    tombstones: _Tombstones,
    manifests: list[Manifest],
    head: Head,
) -> Iterator[tuple[Batch, _Aside]]:
    """Stage small batches together or, if one of them is damaged, the ones before it one by one.

    Each batch that this yields, with the places of its quarantined rows, is in the staging table, and must be
    moved before the next one is requested.
    """
    try:
        with lake.at_hand(manifests) as layout:
            batch = Batch.read(layout, *manifests)
            times = lake.witnesses.times_of(manifests)
            _stage(spark, url, table, lake, batch, times, head)
            batch.check_contents()  # after the packets, whose faults are reported with their places
            aside = _stage_aside(url, table, tombstones, batch, times, head)
    except LakeError:
        if len(manifests) == 1:
            raise
        restoring.forget_staged(connection, table)
        for manifest in manifests:
            yield from _staged(spark, url, connection, table, lake, tombstones, [manifest], head)
    else:
        yield batch, aside


def _stage(
    spark: SparkSession, url: str, table: str, lake: AnyLake, batch: Batch, times: Times, head: Head
) -> None:
    if not batch.packets.num_rows:
        return
    after, up_to = max(batch.span.after, head.sequence), batch.span.up_to
    frame = Packets.of_batch(spark, lake, batch).frame
    packets = Packets(frame.where((F.col("sequence") > after) & (F.col("sequence") <= up_to)))
    with packed(spark), translate_failures("restoring"):
        faults = stage_packets(packets, url, table, batch.manifests[0].number, times).collect()
    if faults:
        first = min(faults, key=lambda fault: fault.sequence)
        raise LakeError(
            f"the lake's {batch_name(batch.manifest_of(first.sequence))} is damaged: the packet at "
            f"{first.sequence} does not hold ({first.reason}: {first.detail}). Bring its files back from a "
            "copy of the lake"
        )


def _stage_aside(
    url: str, table: str, tombstones: _Tombstones, batch: Batch, times: Times, head: Head
) -> _Aside:
    """Stage the places of a batch's quarantined rows, with their tombstones."""
    span = Span(max(batch.span.after, head.sequence), batch.span.up_to)
    try:
        rows = read_aside(batch.aside, span)
    except UNREADABLE as error:
        raise LakeError(f"the lake's {batch_name(batch.manifests[0])} cannot be read: {error}") from None
    if not rows.num_rows:
        return _Aside()
    staged = staged_aside(rows, tombstones(span.day), batch.manifests[0].number, times)
    restoring.write_staged(url, table, iter(staged.to_batches()))
    is_erased = rows["is_erased"]
    places = (rows["sequence"].filter(mask).to_pylist() for mask in (is_erased, pc.invert(is_erased)))
    return _Aside(*places)


def _tombstones(lake: AnyLake, day: int) -> Mapping[int, tuple[Tombstone, bytes]]:
    return {
        tombstone.sequence: (tombstone, text)
        for record in lake.erasures.of_day(day)
        for tombstone, text in lake.erasures.signed_tombstones(record)
    }


def _move(
    connection: adbc.Connection,
    table: str,
    batch: Batch,
    aside: _Aside,
    head: Head,
    chunk_rows: int,
    done: Restored,
    progress: Callable[[Restored], None],
) -> Head:
    for part in batch.parts(head.sequence, chunk_rows):
        progress(done)
        erased, damaged = aside.within(part.span)
        head = restoring.move(connection, table, batch.manifests[0].number, part, erased + damaged, head)
        done.packets += part.packets
        done.erased += erased
        done.damaged += damaged
        done.left -= part.packets
        done.reached = head.sequence
    restoring.forget_staged(connection, table)
    return head


def _check_beginning(lake: AnyLake, days: Sequence[int], connection: adbc.Connection, head: Head) -> int:
    """The number of packets of the lake that the log holds.

    Raises `LogError` unless the log begins like the lake.
    The check compares the last row of each batch, the last row of all, and their number. Rows that retention
    has removed from the log since count as held.
    """
    end = min(head.sequence, lake.chain.of_day(days[-1])[-1].up_to)
    packets = aside = removed = 0
    cut: Manifest | None = None
    for day in days:
        manifests = [one for one in _now(lake, day) if one.after < end]
        if not manifests:
            break
        gone = [one for one in manifests if one.up_to <= min(head.removed_to, end)]
        kept = [one for one in manifests if one.up_to > head.removed_to]
        whole = [one for one in kept if one.up_to <= end]
        cut = kept[-1] if len(kept) > len(whole) else None
        found = restoring.ids_at(connection, [one.up_to for one in whole])
        for one in whole:
            _compare(one.up_to, found.get(one.up_to), one.last_packet_id)
        removed += sum(one.packets for one in gone)
        packets += sum(one.packets for one in whole)
        aside += sum(one.quarantined for one in whole)
    if cut is not None:
        batch = _read(lake, cut)
        place = batch.rows.filter(pc.field("sequence") == end)
        if not place.num_rows:
            raise _foreign(f"it ends at {end}, where the lake has no packet")
        there = restoring.ids_at(connection, [end]).get(end)
        _compare(end, there, place["packet_id"][0].as_py().hex())
        packets += batch.packets_up_to(end)
        aside += batch.quarantined_up_to(end)
    stored = restoring.stored_rows(connection, Span(head.removed_to, end))
    if stored != packets + aside:
        raise _foreign(f"it has {stored} rows up to {end}, and the lake {packets + aside}")
    return packets + removed


def _read(lake: AnyLake, manifest: Manifest) -> Batch:
    with lake.at_hand([manifest]) as layout:
        return Batch.read(layout, manifest)


def _compare(sequence: int, found: bytes | None, wanted: str) -> None:
    if found is None or found.hex() != wanted:
        has = "no packet" if found is None else f"0x{found.hex()}"
        raise _foreign(f"it has {has} at {sequence}, and the lake 0x{wanted}")


def _foreign(why: str) -> LogError:
    return LogError(
        f"the database's log is not the beginning of what the lake holds: {why}. Restore into an empty "
        "database (relayd migrate makes one), or one that this lake was archived from"
    )
