"""`strata-pipeline audit`: verify the lake against its manifests, its authors and the log.

chain        manifests 0, 1, 2, …, each bound to the previous one
batches      the rows in the files agree with the manifests: count and digest
packets      each id recomputed, each signature verified, no packet twice
log          with a database: the same rows at the same places
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from strata.protocol.lake import Manifest

from strata_pipeline.datasets import Packets, Quarantine
from strata_pipeline.errors import log_too_short
from strata_pipeline.jobs.failures import translate_failures
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.rows import digest_of, read_places
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
    """`batch`, `packet`, `log`, or `folder`."""
    reason: str
    sequence: int | None = None
    packet_id: str | None = None
    detail: str | None = None


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
    with translate_failures("verifying packets"):
        _collect(verify_packets(packets, Keys.of(packets, bootstrap)), "packet", audited)
    progress("doubles", audited)
    with translate_failures("looking for packets that are there twice"):
        _collect(doubled(packets).withColumn("reason", F.lit("doubled")), "packet", audited)
    if url is not None:
        progress("log", audited)
        _compare(spark, lake, packets, url, audited)


def _check_batches(spark: SparkSession, lake: Lake, audited: Audited) -> None:
    """Check the batches in tasks; each task holds the ids of one batch at a time in memory."""
    if not lake.manifests:
        return
    work = [(msgspec.json.encode(manifest), [str(f) for f in lake.folders_of(manifest.span)])
            for manifest in lake.manifests]  # fmt: skip
    slices = min(len(work), 4 * spark.sparkContext.defaultParallelism)
    with translate_failures("reading the lake"):
        faults = spark.sparkContext.parallelize(work, slices).map(_batch_fault).collect()
    wrong = [Finding("batch", *fault) for fault in faults if fault is not None]
    audited.found(Counter(f"batch: {finding.reason}" for finding in wrong), wrong)


def _batch_fault(work: tuple[bytes, list[str]]) -> tuple[str, int, None, str] | None:
    manifest = msgspec.json.decode(work[0], type=Manifest)
    name = f"batch {manifest.span} (manifest {manifest.number})"
    try:
        rows = read_places((Path(folder) for folder in work[1]), manifest.span)
    except (OSError, ValueError) as error:  # Arrow's errors are ValueErrors
        return "unreadable", manifest.up_to, None, f"{name}: {error}"
    expected = manifest.packets + manifest.quarantined
    if rows.num_rows != expected:
        return "count", manifest.up_to, None, f"{name} has {rows.num_rows} rows and must have {expected}"
    if digest_of(rows) != manifest.rows:
        return (
            "digest",
            manifest.up_to,
            None,
            f"{name} holds other packets, or places, than its manifest says",
        )
    return None


def _check_folders(lake: Lake, audited: Audited) -> None:
    foreign = [
        Finding("folder", "foreign", detail=f"{folder} belongs to no manifest: a plain reader would read it")
        for folder in lake.foreign()
    ]
    audited.found(Counter(f"folder: {finding.reason}" for finding in foreign), foreign)


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
