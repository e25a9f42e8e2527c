"""`strata-pipeline audit`: verify the lake against its manifests, its authors and the log.

chain        manifests 0, 1, 2, …, each bound to the previous one
batches      the rows in the files agree with the manifests, by count and digests, and no reader finds others
packets      each id recomputed, each signature verified, no packet twice
erasures     a tombstone of the relay for each row that was taken out since, and nothing left of the row
log          with a database: the same rows at the same places
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.lake import GENESIS, Erasure, Manifest, Span, StoredObject
from strata.protocol.tombstones import Tombstone

from strata_pipeline.datasets import Packets, Quarantine
from strata_pipeline.errors import LakeError, PipelineError, UsageError, log_too_short
from strata_pipeline.jobs.failures import translate_failures
from strata_pipeline.lake.checking import Piece, Unit, batch_name, batches_faults, pieces, places_faults
from strata_pipeline.lake.contents import UNREADABLE, parquet_files, read_rows
from strata_pipeline.lake.faults import About, Fault
from strata_pipeline.lake.kinds import kind_of
from strata_pipeline.lake.places import AnyLake, open_lake
from strata_pipeline.lake.stores.shelves import Shelf
from strata_pipeline.log.database import connect, log_state
from strata_pipeline.planning import parallelism, planned
from strata_pipeline.transforms.comparing import differences, doubled
from strata_pipeline.transforms.signatures import keys_by_authors
from strata_pipeline.transforms.verifying import verify_packets

__all__ = ["Audited", "Finding", "audit"]

_PORTION = 50_000
_LISTED = 1000
"""At most this many findings of a kind are listed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault that an audit found."""

    about: About
    """`batch`, `row`, `packet`, `erasure`, `log`, `folder`, or `file`."""
    reason: str
    sequence: int | None = None
    packet_id: str | None = None
    detail: str | None = None
    file: str | None = None
    row: int | None = None
    """The number of the row in its file, from 0."""


@dataclass(slots=True)
class Audited:
    """The result of an audit."""

    batches: int = 0
    packets: int = 0
    quarantined: int = 0
    erased: int = 0
    """Rows that were erased from the lake since they were archived; they count as quarantined."""
    left_behind: int = 0
    """In a bucket: objects that interrupted writers have left, or that were replaced and not deleted yet; no
    part of the lake, and no fault."""
    after: int = 0
    """The sequence behind which this audit has read; 0 for a whole one."""
    reached: int = 0
    tip: str = ""
    """The hash of the lake's last manifest: where all of it holds, the next audit can begin there."""
    compared_up_to: int | None = None
    """The sequence up to which lake and log were compared; None without a log."""
    behind: int = 0
    """Packets that the log had beyond the lake when the audit began."""
    counts: dict[str, int] = field(default_factory=dict)
    """The number of findings by `about: reason`."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether there is no finding."""
        return not self.counts

    def found(self, counts: Counter[str], listed: list[Finding]) -> None:
        """Add findings; of those in `listed` as many as may be listed of their kind."""
        free = {name: _LISTED - self.counts.get(name, 0) for name in counts}
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        for one in listed:
            free[f"{one.about}: {one.reason}"] -= 1
            if free[f"{one.about}: {one.reason}"] >= 0:
                self.findings.append(one)


def audit(
    spark: SparkSession,
    path: str | Path,
    *,
    url: str | None = None,
    bootstrap: Path | None = None,
    since: str = GENESIS,
    progress: Callable[[str, Audited], None] = lambda step, audited: None,
) -> Audited:
    """Check everything; the result has the faults. `progress` is called as each step begins.

    With `since`, the hash or the number of a manifest, only the batches after it are read, and folders: that
    what an earlier audit has found good was not changed since, only a whole audit tells. Raises `LakeError`
    for a lake without a chain of manifests and for a `since` that is not in it, `UsageError` for one that
    names no manifest, and `PipelineError` where the audit cannot go on. An archive may run meanwhile: the
    next audit checks what it adds.
    """
    lake = open_lake(path)
    with lake.held():  # from here on nothing is erased: what must be there is counted as it stays
        if since == GENESIS:
            lake.chain.prove()  # the summaries are to be checked, and not to be believed
            audited, days = _whole(lake), lake.days()
        else:
            if lake.is_half_copied:  # or was erased from a day that has ended since it was opened
                lake.load()
            gained = lake.erasures.told(lake.chain.after(since))
            audited, days = _gained(lake, gained), sorted({manifest.span.day for manifest in gained})
        with planned(spark, audited.packets + audited.quarantined):
            _look(spark, lake, days, audited, url, bootstrap, progress)
        progress("done", audited)
    return audited


def _whole(lake: AnyLake) -> Audited:
    """What an audit of all batches is about. No list of them: after years there are millions."""
    days = lake.days()
    erased = sum(lake.chain.rows_of(day) - lake.rows_of(day) for day in days)
    return Audited(
        batches=lake.chain.end.number,
        packets=sum(map(lake.rows_of, days)),
        quarantined=sum(map(lake.chain.quarantined_of, days)) + erased,
        reached=lake.reached,
        tip=lake.tip,
    )


def _gained(lake: AnyLake, gained: list[Manifest]) -> Audited:
    """What an audit of these batches is about."""
    return Audited(
        batches=len(gained),
        packets=sum(manifest.packets for manifest in gained),
        quarantined=sum(manifest.quarantined for manifest in gained),
        after=gained[0].after if gained else lake.reached,
        reached=lake.reached,
        tip=lake.tip,
    )


def _look(
    spark: SparkSession,
    lake: AnyLake,
    days: list[int],
    audited: Audited,
    url: str | None,
    bootstrap: Path | None,
    progress: Callable[[str, Audited], None],
) -> None:
    progress("batches", audited)
    _check_batches(spark, lake, days, audited)
    _check_names(lake, days, audited)
    _check_erasures(lake, audited)
    progress("packets", audited)
    with _damage_told(audited), translate_failures("verifying packets"):
        _verify(spark, lake, days, bootstrap, audited)
    # An unreadable file is a finding of its batch; the other files are looked at all the same.
    there = None if audited.after == 0 else days
    new = F.col("sequence").between(audited.after + 1, lake.reached)
    packets = Packets(Packets.of(spark, lake, there, damaged=True).frame.where(new))
    progress("doubles", audited)
    with _damage_told(audited), translate_failures("looking for packets that are there twice"):
        _collect(doubled(packets).withColumn("reason", F.lit("doubled")), "packet", audited)
    if url is not None:
        progress("log", audited)
        _compare(spark, lake, packets, there, url, audited)


def _verify(
    spark: SparkSession, lake: AnyLake, days: list[int], bootstrap: Path | None, audited: Audited
) -> None:
    """Verify all packets that this audit is about. That each was is more than that no fault was found."""
    verified = 0
    unread: dict[str, None] = {}
    for authors, keys in keys_by_authors(_identities(spark, lake), bootstrap):
        for units, _ in _portions(lake, days, audited.after):
            span = Span(audited.after, lake.reached)
            found = verify_packets(spark, lake.shelf, units, span, authors, keys)
            verified += found.packets
            unread |= dict.fromkeys(found.unread)
            listed = [_from_fault(fault) for fault in sorted(found.listed, key=_place)]
            counts = {f"packet: {reason}": count for reason, count in found.counts.items()}
            audited.found(Counter(counts), listed)
    if not audited.counts and (unread or verified != audited.packets):
        why = next(iter(unread), f"{verified} of {audited.packets} packets were read")
        audited.found(Counter({"packet: unchecked": 1}), [Finding("packet", "unchecked", detail=why)])


def _identities(spark: SparkSession, lake: AnyLake) -> Packets:
    """The packets that tell of keys, whenever they came; their folders alone are read."""
    kinds = sorted({kind_of(name) for name in IDENTITY_TYPES})
    rows = Packets.of_kinds(spark, lake, kinds).frame
    return Packets(rows.where(F.col("sequence") <= lake.reached))


@contextlib.contextmanager
def _damage_told(audited: Audited) -> Iterator[None]:
    """A step that fails because of damage that was found before is one more finding."""
    try:
        yield
    except PipelineError as error:
        if isinstance(error, UsageError) or not audited.counts:
            raise
        audited.found(Counter({"packet: unchecked": 1}), [Finding("packet", "unchecked", detail=str(error))])


def _check_batches(spark: SparkSession, lake: AnyLake, days: list[int], audited: Audited) -> None:
    """Check the batches in tasks; each task holds ids and hashes of some batches at a time in memory."""
    shelf: Shelf = lake.shelf

    def check(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _faults(rows, shelf)

    for units, known in _portions(lake, days, audited.after):
        work = [one for unit in units for one in _work(unit, audited.after)]
        slices = min(len(work), 4 * parallelism(spark))
        found = []
        if work:
            with translate_failures("reading the lake"):
                asked = spark.createDataFrame(work, _WORK_DDL).repartition(slices)
                found = asked.mapInArrow(check, _FAULTS_DDL).collect()
        _add([*known, *(Fault(*fault) for fault in found)], audited)


_Work = tuple[bytes, list[str], list[str], bytes, int, int]
_WORK_DDL = (
    "manifests binary, packets array<string>, quarantine array<string>, objects binary, first bigint, "
    "last bigint"
)
"""Manifests, folders of packets, folders of quarantined rows, the objects that make them (in a bucket), and
the sequences among which to look for what is too much: work is a piece of a unit, and never a whole day."""
_FAULTS_DDL = (
    "about string, reason string, detail string, sequence bigint, packet_id binary, file string, row bigint"
)
_FAULTS = pa.schema(
    [
        ("about", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("sequence", pa.int64()),
        ("packet_id", pa.binary()),
        ("file", pa.string()),
        ("row", pa.int64()),
    ]
)


def _portions(lake: AnyLake, days: list[int], after: int) -> Iterator[tuple[list[Unit], list[Fault]]]:
    """What there is to check, some tens of thousands of batches at a time, and faults found by that."""
    portion: list[Unit] = []
    faults: list[Fault] = []
    batches = 0
    for day in days:
        units, some = lake.units(day)
        faults += [fault for fault in some if fault.sequence is None or fault.sequence > after]
        for unit in units:
            if unit.manifests[-1].up_to <= after:
                continue
            portion.append(unit)
            batches += len(unit.manifests)
            if batches >= _PORTION:
                yield portion, faults
                portion, faults, batches = [], [], 0
    if portion or faults:
        yield portion, faults


def _work(unit: Unit, after: int) -> Iterator[_Work]:
    """The batches of a unit, as tasks are asked to check them."""
    folders = [str(one) for one in unit.packets], [str(one) for one in unit.quarantine]
    objects = msgspec.json.encode(unit.objects)
    for manifests, first, last in pieces(unit.manifests):
        # Of a compacted day, earlier batches lie in the files of new ones.
        new = [one for one in manifests if one.up_to > after]
        yield msgspec.json.encode(new), *folders, objects, first, last


def _faults(rows: Iterator[pa.RecordBatch], shelf: Shelf) -> Iterator[pa.RecordBatch]:
    for batch in rows:
        for work in batch.to_pylist():
            manifests = msgspec.json.decode(work["manifests"], type=list[Manifest])
            objects = msgspec.json.decode(work["objects"], type=list[StoredObject])
            with shelf.at_hand(objects) as (folder, faults):
                packets, quarantine = (
                    [folder / name for name in work[root]] for root in ("packets", "quarantine")
                )
                if manifests:
                    faults += batches_faults(manifests, packets, quarantine)
                piece = Piece(manifests, work["first"], work["last"])
                faults += places_faults(Unit(manifests, packets, quarantine), piece)
                told = [shelf.told(fault, folder)._asdict() for fault in faults]
            if told:
                yield pa.RecordBatch.from_pylist(told, schema=_FAULTS)


def _add(faults: list[Fault], audited: Audited) -> None:
    found = [_from_fault(fault) for fault in faults]
    audited.found(Counter(f"{one.about}: {one.reason}" for one in found), found)


def _from_fault(fault: Fault) -> Finding:
    told = None if fault.packet_id is None else f"0x{fault.packet_id.hex()}"
    return Finding(fault.about, fault.reason, fault.sequence, told, fault.detail, fault.file, fault.row)


def _place(fault: Fault) -> int:
    return -1 if fault.sequence is None else fault.sequence


def _check_names(lake: AnyLake, days: list[int], audited: Audited) -> None:
    """What lies where readers look and belongs to no batch, and summaries that do not fit."""
    found, audited.left_behind = lake.unexpected(days)
    found += [Fault("file", "summary", why, file=path) for path, why in lake.chain.summary_faults()]
    _add(found, audited)


def _check_erasures(lake: AnyLake, audited: Audited) -> None:
    """Each tombstone holds and has a row of which only the place is left. Those of a day are in memory."""
    if lake.is_half_copied:
        why = (
            "the lake tells of erasures from a day that its chain does not reach the end of: its copy is not "
            "complete, or manifests are missing. Run strata-pipeline copy again, or bring _manifests back "
            "from a copy of the lake"
        )
        _add([Fault("erasure", "unreached", why)], audited)
    by_day: dict[int, list[Erasure]] = {}
    for record in lake.erasures.records:
        audited.erased += record.erased
        by_day.setdefault(record.day, []).append(record)
    for day, records in by_day.items():
        found: list[Finding] = []
        left: dict[int, Tombstone] = {}
        # Only a whole audit has read all manifests anyway.
        manifests = [] if audited.after else lake.chain.of_day(day)
        held = {one.hash: (one, one.packets) for one in manifests}
        for record in records:
            try:
                stones = {one.sequence: one for one in lake.erasures.tombstones(record)}
            except LakeError as error:
                found.append(Finding("erasure", "tombstones", detail=str(error)))
            else:
                left |= stones
                found += _miscounted(record, held, sorted(stones))
            held |= {one.manifest: (held[one.manifest][0], one.packets) for one in record.batches
                     if one.manifest in held}  # fmt: skip
        # A copy brings a record before the batches that it tells of.
        left = {sequence: one for sequence, one in left.items() if sequence <= lake.reached}
        try:
            for row in _rows_at(lake, day, sorted(left)) if left else ():
                tombstone = left[row["sequence"]]
                place = row["received_at"], f"0x{(row['packet_id'] or b'').hex()}"
                is_empty = not (row["body"] or row["author_id"] or row["annotation"])
                if is_empty and place == (tombstone.received_at, tombstone.packet_id):
                    del left[row["sequence"]]
        except LakeError as error:  # of a bucket's day an object or a listing is lost: a finding by itself
            found.append(Finding("erasure", "unchecked", detail=str(error)))
            left = {}
        found += [
            Finding("erasure", "row", sequence, one.packet_id, "there is no empty row for this tombstone")
            for sequence, one in left.items()
        ]
        audited.found(Counter(f"{one.about}: {one.reason}" for one in found), found)


def _miscounted(
    record: Erasure, held: Mapping[str, tuple[Manifest, int]], stones: list[int]
) -> Iterator[Finding]:
    """Where a record takes more packets, or fewer, than it has tombstones for: as a whole, and of the batches
    `held`, with what they had before."""
    if record.erased != len(stones):
        why = f"erasure {record.number} takes {record.erased} packets, and has tombstones for {len(stones)}"
        yield Finding("erasure", "count", detail=why)
    told = {one.manifest: one.packets for one in record.batches}
    for name, (manifest, before) in held.items():
        taken = before - told.get(name, before)
        there = bisect_right(stones, manifest.up_to) - bisect_right(stones, manifest.after)
        if taken != there:
            why = f"erasure {record.number} takes {taken} packets out of {batch_name(manifest)}"
            why += f", and has tombstones for {there}"
            yield Finding("erasure", "count", manifest.up_to, detail=why)


def _rows_at(lake: AnyLake, day: int, sequences: list[int]) -> Iterator[dict[str, Any]]:
    """The quarantined rows of a day at these places, the first at each; the files are read once."""
    columns = ["sequence", "received_at", "packet_id", "author_id", "body", "annotation"]
    wanted = set(sequences)
    with lake.quarantine_at_hand(day) as layout:
        folders = layout.folders_of_day(layout.quarantine, day)
        for path in parquet_files(folders):
            with contextlib.suppress(*UNREADABLE):  # a finding of its batch
                for _, _, rows in read_rows([path], columns):
                    is_wanted = pc.is_in(rows.column("sequence"), pa.array(sequences, pa.int64()))
                    for row in rows.filter(is_wanted).to_pylist():
                        if row["sequence"] in wanted:
                            wanted.remove(row["sequence"])
                            yield row


def _compare(
    spark: SparkSession, lake: AnyLake, packets: Packets, days: list[int] | None, url: str, audited: Audited
) -> None:
    with contextlib.closing(connect(url)) as connection:
        state = log_state(connection)
        if state.head < lake.reached:
            raise log_too_short(state.head, lake.reached)
        audited.behind = sum(span.up_to - span.after for span in state.spans(lake.reached))
        audited.compared_up_to = lake.reached
        log = spark.read.format("relay_log").option("url", url).option("up_to", lake.reached)
        log = log.option("after", audited.after).option("partitions", parallelism(spark))
        aside = Quarantine.of(spark, lake, days, damaged=True).frame
        quarantine = Quarantine(aside.where(F.col("sequence").between(audited.after + 1, lake.reached)))
        with translate_failures("comparing with the log"):
            found = differences(packets, quarantine, log.load())
            rows = _first(found)
            if len(rows) <= _LISTED:
                # Rows that retention has removed, even just now, are rightly in the lake alone.
                gone = log_state(connection).removed_to
                _list([row for row in rows if row.reason != "surplus" or row.sequence > gone], "log", audited)
                return
            found = found.persist(StorageLevel.MEMORY_AND_DISK)
            try:
                found.count()
                gone = log_state(connection).removed_to
                _collect(
                    found.where((F.col("reason") != "surplus") | (F.col("sequence") > gone)), "log", audited
                )
            finally:
                found.unpersist()


def _collect(found: DataFrame, about: About, audited: Audited) -> None:
    """Count the findings, and keep the first ones."""
    rows = _first(found)
    if len(rows) <= _LISTED:
        _list(rows, about, audited)
        return
    counts = {f"{about}: {row['reason']}": row["count"] for row in found.groupBy("reason").count().collect()}
    audited.found(Counter(counts), [_finding(about, row.asDict()) for row in rows[:_LISTED]])


def _first(found: DataFrame) -> list[Row]:
    """The findings to be listed, and one more where there are more."""
    columns = [column for column in ("sequence", "packet_id", "reason", "detail") if column in found.columns]
    return found.select(*columns).orderBy("sequence").limit(_LISTED + 1).collect()


def _list(rows: list[Row], about: About, audited: Audited) -> None:
    """Add findings, and count them: these are all."""
    counts = Counter(f"{about}: {row.reason}" for row in rows)
    audited.found(counts, [_finding(about, row.asDict()) for row in rows])


def _finding(about: About, row: dict[str, Any]) -> Finding:
    packet_id = row["packet_id"]
    return Finding(
        about,
        row["reason"],
        row["sequence"],
        None if packet_id is None else f"0x{bytes(packet_id).hex()}",
        row.get("detail"),
    )
