"""`strata-pipeline audit`: verify the lake against its manifests, its authors and the log.

chain        manifests 0, 1, 2, … exist, each bound to the previous one
batches      the rows in the files agree with the manifests, by count and digests, and no reader finds others;
             quarantined rows are faulty
packets      each id is recomputed and each signature verified, and no packet is there twice
erasures     there is a tombstone of the relay for each row that was erased, and nothing left of the row
witnesses    the files that say when other relays first received packets are those of the manifests
log          with a database: it has the same rows at the same places, first received at the same times
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.sequences import Span, day_of

from strata_pipeline.datasets import Packets, Quarantine
from strata_pipeline.errors import PipelineError, UsageError, log_too_short
from strata_pipeline.jobs.audit_erasures import check_erasures
from strata_pipeline.jobs.audit_result import LISTED, Audited, Finding, add_faults, from_fault
from strata_pipeline.jobs.failures import translate_failures
from strata_pipeline.jobs.file_checks import files_faults
from strata_pipeline.lake.checking import Unit
from strata_pipeline.lake.faults import About, Fault
from strata_pipeline.lake.kinds import kind_of
from strata_pipeline.lake.layout import span_over
from strata_pipeline.lake.places import AnyLake, open_lake
from strata_pipeline.lake.witness_checks import surplus_witnesses, witnesses_faults
from strata_pipeline.lake.witnesses import FirstReceived, ReceivedAt
from strata_pipeline.lake_format import GENESIS, LakeError, Manifest
from strata_pipeline.log.database import connect, log_state
from strata_pipeline.planning import parallelism, planned
from strata_pipeline.transforms.comparing import differences, doubled, still_held
from strata_pipeline.transforms.put_aside import sound_rows
from strata_pipeline.transforms.signatures import keys_by_authors
from strata_pipeline.transforms.verifying import verify_packets
from strata_pipeline.transforms.witnessing import differing_witnesses, witnessed_rows

__all__ = ["Audited", "Finding", "audit"]

_PORTION = 50_000
_TIMES = "sequence long, packet_id binary, received_at long, content_type string, witnessed_at long"


def audit(
    spark: SparkSession,
    path: str | Path,
    *,
    url: str | None = None,
    bootstrap: Path | None = None,
    since: str = GENESIS,
    relays: Collection[str] = (),
    progress: Callable[[str, Audited], None] = lambda step, audited: None,
) -> Audited:
    """Check everything; return the findings. `progress` is called as each step begins.

    `relays` are the DIDs whose tombstones count. Without any, every tombstone counts that is signed by the
    relay that it names, and `Audited.erased_by` lists these relays.

    With `since`, the hash or the number of a manifest, only the batches after it, and the folders, are read:
    only a complete audit shows that batches which an earlier audit found good were not changed since. Raises
    `LakeError` for a lake without a chain of manifests and for a `since` that is not in it, `UsageError` for
    one that is neither a hash nor a number, and `PipelineError` if the audit cannot continue. An archive may
    run meanwhile: the next audit checks what it adds.
    """
    lake = open_lake(path)
    with lake.held():  # from here on nothing is erased, so the expected counts do not change
        if since == GENESIS:
            lake.chain.prove()  # summaries are checked here, and not trusted
            audited, days = _whole(lake), lake.days()
        else:
            if lake.is_half_copied:  # or rows were erased from a day that has ended since it was opened
                lake.load()
            gained = lake.erasures.told(lake.chain.after(since))
            audited, days = _gained(lake, gained), sorted({manifest.span.day for manifest in gained})
        with planned(spark, audited.packets + audited.quarantined):
            _look(spark, lake, days, audited, url, bootstrap, relays, progress)
        progress("done", audited)
    return audited


def _whole(lake: AnyLake) -> Audited:
    """The extent of an audit of all batches, without listing them: after years there are millions."""
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
    """The extent of an audit of these batches."""
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
    relays: Collection[str],
    progress: Callable[[str, Audited], None],
) -> None:
    progress("batches", audited)
    bound = _check_batches(spark, lake, days, audited)
    _check_names(lake, days, audited)
    _check_witness_names(lake, bound, audited)
    erased = check_erasures(lake, relays, audited)
    progress("packets", audited)
    with _damage_told(audited), translate_failures("verifying packets"):
        _verify(spark, lake, days, bootstrap, audited)
    # An unreadable file is a finding of its batch; the other files are still checked.
    there = None if audited.after == 0 else days
    new = F.col("sequence").between(audited.after + 1, lake.reached)
    packets = Packets(Packets.of(spark, lake, there, damaged=True).frame.where(new))
    progress("doubles", audited)
    with _damage_told(audited), translate_failures("looking for packets that are there twice"):
        _collect(doubled(packets).withColumn("reason", F.lit("doubled")), "packet", audited)
        if erased:
            _collect(still_held(packets, erased), "erasure", audited)
    if url is not None:
        progress("log", audited)
        _compare(spark, lake, packets, there, bound, url, audited)


def _verify(
    spark: SparkSession, lake: AnyLake, days: list[int], bootstrap: Path | None, audited: Audited
) -> None:
    """Verify all packets within this audit. It is not enough that no fault is found: the number of verified
    packets must be right too."""
    verified = 0
    unread: dict[str, None] = {}
    received = _received_first(lake)
    identities = _identities(spark, lake, days, audited.after)
    for authors, keys in keys_by_authors(identities, bootstrap, received=received):
        for units, _ in _portions(lake, days, audited.after):
            span = Span(audited.after, lake.reached)
            first = FirstReceived(lake.witnesses, (one for unit in units for one in unit.manifests))
            found = verify_packets(spark, lake.shelf, units, span, authors, keys, first.of)
            verified += found.packets
            unread |= dict.fromkeys(found.unread)
            listed = [from_fault(fault) for fault in sorted(found.listed, key=_place)]
            counts = {f"packet: {reason}": count for reason, count in found.counts.items()}
            audited.found(Counter(counts), listed)
    if not audited.counts and (unread or verified != audited.packets):
        why = next(iter(unread), f"{verified} of {audited.packets} packets were read")
        audited.found(Counter({"packet: unchecked": 1}), [Finding("packet", "unchecked", detail=why)])


def _identities(spark: SparkSession, lake: AnyLake, days: list[int], after: int) -> Packets:
    """The packets about keys, from all days; only their folders are read. If only packets of some days after
    a sequence are verified, these are about the keys of their authors: when each was first received is in a
    file of its batch, and an audit of what is new must not read the manifests of all older days for that."""
    kinds = sorted({kind_of(name) for name in IDENTITY_TYPES})
    rows = Packets.of_kinds(spark, lake, kinds).frame.where(F.col("sequence") <= lake.reached)
    if after:
        new = Packets.of(spark, lake, days, damaged=True).frame.where(F.col("sequence") > after)
        rows = rows.join(new.select("author_id").distinct(), "author_id", "left_semi")
    return Packets(rows)


def _received_first(lake: AnyLake) -> ReceivedAt:
    """When packets of any days were first received; only the files of their own batches are read."""

    def received(sequences: pa.Array, received_at: pa.Array) -> pa.Array:
        for day in sorted({day_of(sequence) for sequence in sequences.to_pylist()}):
            if lake.chain.may_have_witnesses(day):
                first = FirstReceived(lake.witnesses, lake.chain.of_day(day))
                received_at = first.of(sequences, received_at)
        return received_at

    return received


@contextlib.contextmanager
def _damage_told(audited: Audited) -> Iterator[None]:
    """Turn the failure of a step into a finding if damage was found before, which must be the cause."""
    try:
        yield
    except (PipelineError, LakeError) as error:
        if isinstance(error, UsageError) or not audited.counts:
            raise
        audited.found(Counter({"packet: unchecked": 1}), [Finding("packet", "unchecked", detail=str(error))])


@dataclass(slots=True)
class _Witnessed:
    """What the batches of an audit say of times at which other relays first received rows. Manifests are not
    kept: after years there are millions."""

    names: list[str]
    """The names of all files with such times, in order."""
    days: list[int] = field(default_factory=list)
    """The days with batches that have a file."""
    surplus: list[str] = field(default_factory=list)
    """The names of files that no manifest within the audit binds."""
    _taken: int = 0

    def add(self, manifests: Sequence[Manifest]) -> None:
        """Add batches that follow those before."""
        for one in manifests:
            if one.witnesses and one.span.day not in self.days[-1:]:
                self.days.append(one.span.day)
        if manifests:
            first, end = manifests[0].number, manifests[-1].number + 1
            self._take(manifests, first, end, bisect_left(self.names, f"{end:010}"))

    def end(self) -> None:
        """Say that there are no more batches. Files of later ones may be those of a running archive."""
        self._take((), 0, 0, len(self.names))

    def _take(self, manifests: Sequence[Manifest], first: int, end: int, up_to: int) -> None:
        self.surplus += surplus_witnesses(self.names[self._taken : up_to], manifests, first, end)
        self._taken = up_to


def _check_batches(spark: SparkSession, lake: AnyLake, days: list[int], audited: Audited) -> _Witnessed:
    """Check the batches in tasks, each of which holds ids and hashes of a few batches at a time in memory."""
    witnesses = lake.witnesses

    def also(unit: Unit) -> list[Fault]:
        aside = sound_rows(unit.quarantine, span_over(unit.manifests))
        return aside + witnesses_faults(witnesses, unit.manifests, unit.packets, unit.quarantine)

    bound = _Witnessed(witnesses.names())
    for units, known in _portions(lake, days, audited.after):
        bound.add([one for unit in units for one in unit.manifests if one.up_to > audited.after])
        with translate_failures("reading the lake"):
            found = files_faults(spark, lake.shelf, units, audited.after, also)
        add_faults([*known, *found], audited)
    bound.end()
    return bound


def _portions(lake: AnyLake, days: list[int], after: int) -> Iterator[tuple[list[Unit], list[Fault]]]:
    """The units to check, some tens of thousands of batches at a time, and the faults found in listing
    them."""
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


def _place(fault: Fault) -> int:
    return -1 if fault.sequence is None else fault.sequence


def _check_names(lake: AnyLake, days: list[int], audited: Audited) -> None:
    """Add files that readers see and that belong to no batch, and summaries that do not fit."""
    found, audited.left_behind = lake.unexpected(days)
    found += [Fault("file", "summary", why, file=path) for path, why in lake.chain.summary_faults()]
    add_faults(found, audited)


def _check_witness_names(lake: AnyLake, bound: _Witnessed, audited: Audited) -> None:
    """Add files of witnesses that no manifest within this audit binds."""
    kept = lake.kept_witnesses(bound.surplus) if bound.surplus else set()
    audited.left_behind += len(kept)
    why = "is bound by no manifest: a reader of these files would take its times for those of the lake"
    places = [lake.witnesses.place_of(name) for name in bound.surplus if name not in kept]
    add_faults([Fault("witness", "surplus", f"{one} {why}", file=one) for one in places], audited)


def _compare(
    spark: SparkSession,
    lake: AnyLake,
    packets: Packets,
    days: list[int] | None,
    bound: _Witnessed,
    url: str,
    audited: Audited,
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
            told = witnessed_rows(spark, lake.chain, lake.witnesses, bound.days, audited.after)
            found = found.unionByName(differing_witnesses(told, log.schema(_TIMES).load()))
            rows = _first(found)
            if len(rows) <= LISTED:
                # It is right that rows which retention has removed, even just now, are only in the lake.
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
    """Add findings: count all, and keep the first ones."""
    rows = _first(found)
    if len(rows) <= LISTED:
        _list(rows, about, audited)
        return
    counts = {f"{about}: {row['reason']}": row["count"] for row in found.groupBy("reason").count().collect()}
    audited.found(Counter(counts), [_finding(about, row.asDict()) for row in rows[:LISTED]])


def _first(found: DataFrame) -> list[Row]:
    """The findings to be listed, and one more if there are more."""
    columns = [column for column in ("sequence", "packet_id", "reason", "detail") if column in found.columns]
    return found.select(*columns).orderBy("sequence").limit(LISTED + 1).collect()


def _list(rows: list[Row], about: About, audited: Audited) -> None:
    """Add findings that are given in full, and count them."""
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
