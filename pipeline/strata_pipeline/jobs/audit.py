"""`strata-pipeline audit`: verify the lake against its manifests, its authors and the log.

chain        manifests 0, 1, 2, …, each bound to the previous one
batches      the rows in the files agree with the manifests, by count and digests, and no reader finds others
packets      each id recomputed, each signature verified, no packet twice
log          with a database: the same rows at the same places
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from strata.protocol.lake import Manifest, manifests_of_day

from strata_pipeline.datasets import Packets, Quarantine
from strata_pipeline.errors import PipelineError, UsageError, log_too_short
from strata_pipeline.jobs.failures import translate_failures
from strata_pipeline.lake.checking import Fault, Unit, batches_faults, chunks, places_faults, units_of_day
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.layout import span_of
from strata_pipeline.log.database import connect, log_state
from strata_pipeline.transforms.comparing import differences, doubled
from strata_pipeline.transforms.signatures import Keys, verify_packets

__all__ = ["Audited", "Finding", "audit"]

_CORRUPT_FILES = "spark.sql.files.ignoreCorruptFiles"
_LISTED = 1000
"""At most this many findings of a kind are listed; all are counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault that an audit found."""

    about: str
    """`batch`, `row`, `packet`, `log`, `folder`, or `file`."""
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
    reached: int = 0
    tip: str = ""
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
        """Add findings."""
        for name, count in counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        self.findings += listed


def audit(
    spark: SparkSession,
    path: str | Path,
    *,
    url: str | None = None,
    bootstrap: Path | None = None,
    progress: Callable[[str, Audited], None] = lambda step, audited: None,
) -> Audited:
    """Check everything; the result has the faults. `progress` is called as each step begins.

    Raises `LakeError` for a lake without a chain of manifests, and `PipelineError` where the audit cannot go
    on. An archive may run meanwhile: the next audit checks what it adds.
    """
    lake = Lake.open(path)
    with lake.held():
        return _audit(spark, lake, url, bootstrap, progress)


def _audit(
    spark: SparkSession,
    lake: Lake,
    url: str | None,
    bootstrap: Path | None,
    progress: Callable[[str, Audited], None],
) -> Audited:
    audited = Audited(
        batches=len(lake.manifests),
        packets=sum(manifest.packets for manifest in lake.manifests),
        quarantined=sum(manifest.quarantined for manifest in lake.manifests),
        reached=lake.reached,
        tip=lake.tip,
    )
    # An unreadable file is a finding of its batch; the other files are checked all the same.
    damaged_too = spark.conf.get(_CORRUPT_FILES, "false")
    spark.conf.set(_CORRUPT_FILES, "true")
    try:
        _look(spark, lake, audited, url, bootstrap, progress)
    finally:
        spark.conf.set(_CORRUPT_FILES, damaged_too or "false")
    progress("done", audited)
    return audited


def _look(
    spark: SparkSession,
    lake: Lake,
    audited: Audited,
    url: str | None,
    bootstrap: Path | None,
    progress: Callable[[str, Audited], None],
) -> None:
    progress("batches", audited)
    _check_batches(spark, lake, audited)
    _check_folders(lake, audited)
    packets = Packets(Packets.of(spark, lake).frame.where(F.col("sequence") <= lake.reached))
    progress("packets", audited)
    with _damage_told(audited), translate_failures("verifying packets"):
        _collect(verify_packets(packets, Keys.of(packets, bootstrap)), "packet", audited)
    progress("doubles", audited)
    with _damage_told(audited), translate_failures("looking for packets that are there twice"):
        _collect(doubled(packets).withColumn("reason", F.lit("doubled")), "packet", audited)
    if url is not None:
        progress("log", audited)
        _compare(spark, lake, packets, url, audited)


@contextlib.contextmanager
def _damage_told(audited: Audited) -> Iterator[None]:
    """A step that fails because of damage that was found before is one more finding."""
    try:
        yield
    except PipelineError as error:
        if isinstance(error, UsageError) or not audited.counts:
            raise
        audited.found(Counter({"packet: unchecked": 1}), [Finding("packet", "unchecked", detail=str(error))])


def _check_batches(spark: SparkSession, lake: Lake, audited: Audited) -> None:
    """Check the batches in tasks; each task holds ids and hashes of some batches at a time in memory."""
    work: list[_Work] = []
    for day in lake.days():
        for unit in units_of_day(lake, day, manifests_of_day(lake.manifests, day)):
            folders = [str(one) for one in unit.packets], [str(one) for one in unit.quarantine]
            pieces = list(chunks(unit.manifests))
            work += [(msgspec.json.encode(piece), *folders, piece is pieces[0]) for piece in pieces]
    if not work:
        return
    slices = min(len(work), 4 * spark.sparkContext.defaultParallelism)
    with translate_failures("reading the lake"):
        found = spark.sparkContext.parallelize(work, slices).flatMap(_faults).collect()
    faults = [_fault(Fault(*fault)) for fault in found]
    audited.found(Counter(f"{one.about}: {one.reason}" for one in faults), faults)


_Work = tuple[bytes, list[str], list[str], bool]
"""Manifests, folders of packets, folders of quarantined rows, and whether to look for what is too much."""


def _faults(work: _Work) -> list[tuple[Any, ...]]:
    manifests = msgspec.json.decode(work[0], type=list[Manifest])
    packets, quarantine = ([Path(folder) for folder in folders] for folders in work[1:3])
    faults = batches_faults(manifests, packets, quarantine)
    if work[3]:
        faults += places_faults(Unit(manifests, packets, quarantine))
    return [tuple(fault) for fault in faults]


def _fault(fault: Fault) -> Finding:
    packet_id = None if fault.packet_id is None else f"0x{fault.packet_id.hex()}"
    return Finding(fault.about, fault.reason, fault.sequence, packet_id, fault.detail, fault.file, fault.row)


def _check_folders(lake: Lake, audited: Audited) -> None:
    found = [
        Finding("folder", "foreign", detail=f"{one} belongs to no manifest: a plain reader would read it")
        for one in _foreign(lake)
    ]
    found += [
        Finding(
            "file", "stray", detail=f"{one} lies outside batches: a plain reader would read it", file=str(one)
        )
        for one in lake.strays()
    ]
    audited.found(Counter(f"{one.about}: {one.reason}" for one in found), found)


def _foreign(lake: Lake) -> list[Path]:
    """Folders of no batch. An archive may run meanwhile: what it adds, and is about to add, is no fault."""
    if not lake.foreign(beyond=True):
        return []
    while True:
        now = Lake.open(lake.root)
        left = [
            folder
            for folder in now.foreign(beyond=True)
            if span_of(folder).after != now.reached or not now.staged_batch(span_of(folder)).is_dir()
        ]
        # Unless a batch was completed just now, between the two looks.
        if not left or Lake.open(lake.root).tip == now.tip:
            return left


def _compare(spark: SparkSession, lake: Lake, packets: Packets, url: str, audited: Audited) -> None:
    with contextlib.closing(connect(url)) as connection:
        state = log_state(connection)
        if state.head < lake.reached:
            raise log_too_short(state.head, lake.reached)
        audited.behind = sum(span.up_to - span.after for span in state.spans(lake.reached))
        audited.compared_up_to = lake.reached
        log = spark.read.format("relay_log").option("url", url).option("up_to", lake.reached)
        log = log.option("partitions", spark.sparkContext.defaultParallelism)
        quarantine = Quarantine(Quarantine.of(spark, lake).frame.where(F.col("sequence") <= lake.reached))
        with translate_failures("comparing with the log"):
            found = differences(packets, quarantine, log.load()).persist(StorageLevel.MEMORY_AND_DISK)
            try:
                found.count()
                # Rows that retention has removed, even just now, are rightly in the lake alone.
                gone = log_state(connection).removed_to
                _collect(
                    found.where((F.col("reason") != "surplus") | (F.col("sequence") > gone)), "log", audited
                )
            finally:
                found.unpersist()


def _collect(found: DataFrame, about: str, audited: Audited) -> None:
    """Count the findings, and keep the first ones."""
    columns = [column for column in ("sequence", "packet_id", "reason", "detail") if column in found.columns]
    rows = found.select(*columns).orderBy("sequence").limit(_LISTED + 1).collect()
    if not rows:
        return
    if len(rows) <= _LISTED:
        counts = Counter(f"{about}: {row.reason}" for row in rows)
    else:
        counts = Counter(
            {f"{about}: {r['reason']}": r["count"] for r in found.groupBy("reason").count().collect()}
        )
    audited.found(counts, [_finding(about, row.asDict()) for row in rows[:_LISTED]])


def _finding(about: str, row: dict[str, Any]) -> Finding:
    packet_id = row["packet_id"]
    return Finding(
        about,
        row["reason"],
        row["sequence"],
        None if packet_id is None else f"0x{bytes(packet_id).hex()}",
        row.get("detail"),
    )
