"""`strata-pipeline compact`: the many small files of a finished day become a few large ones.

An archive that follows the log closely writes small batches. Once a day is over, its batches are rewritten as
one folder, sorted by kind and sequence, checked against every manifest of the day, and exchanged with the old
folders: a reader finds the old day or the new one, but not both. The manifests stay the same, because they
describe packets and not files. The old files are kept for a while, for readers that have begun to read them.

In a bucket nothing is exchanged: parts of the day are written as objects with other names, and a single put
makes these the ones that count (`object_days`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from pyspark.sql import SparkSession
from strata.protocol.sequences import day_text

from strata_pipeline.datasets import Packets
from strata_pipeline.errors import LakeBusy, LakeError, PipelineError, UsageError
from strata_pipeline.jobs.failures import Refused, translate_failures
from strata_pipeline.jobs.file_checks import files_faults
from strata_pipeline.jobs.object_days import compact_day
from strata_pipeline.jobs.parts import PartDone, PartWork
from strata_pipeline.jobs.publishing import publish_rewritten
from strata_pipeline.jobs.rewriting import FILE_BYTES, rewrite_parts, write_day
from strata_pipeline.lake import files
from strata_pipeline.lake.checking import Unit
from strata_pipeline.lake.delta import is_published, publish
from strata_pipeline.lake.faults import Fault
from strata_pipeline.lake.generations import delete_retired, replace_day, staged_day
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.places import AnyLake
from strata_pipeline.lake.rewrite_attempts import ERASED_GRACE, Grace
from strata_pipeline.lake.stores.schemes import is_object_place

__all__ = ["DEFAULT_GRACE", "DEFAULT_PATIENCE", "Compacted", "compact"]

DEFAULT_GRACE = 86_400
DEFAULT_PATIENCE = 600.0


@dataclass(slots=True)
class Compacted:
    """The progress of a run."""

    days: int = 0
    files_before: int = 0
    files_after: int = 0
    waiting: int = 0
    """Days that stay as they were because jobs read the lake all the time or, in a bucket, because another
    process rewrote the day meanwhile; the next run compacts them."""
    deleted: int = 0
    """Folders of files that an earlier run had replaced and this run deleted; in a bucket, objects."""
    sealed: int = 0
    """Finished days for which this run has written a summary of their manifests."""


def compact(
    spark: SparkSession,
    path: str | Path,
    *,
    again: Collection[int] = (),
    file_bytes: int = FILE_BYTES,
    grace: int = DEFAULT_GRACE,
    patience: float = DEFAULT_PATIENCE,
    delta: bool = False,
    progress: Callable[[Compacted], None] = lambda done: None,
) -> Compacted:
    """Compact every finished day of more than one batch. A day is finished when the lake has begun the next.

    The days of `again` are rewritten even if they are compact already: that repairs files whose statistics
    are false. `file_bytes` is the approximate size of the bodies in a file. Files that were replaced at least
    `grace` seconds ago are deleted. The files of a day change places while no other job of ours reads the
    lake; if the jobs do not end within `patience` seconds, the day waits for the next run. An existing Delta
    log is updated with each day; `delta` creates one. Raises `LakeError`, `LakeBusy`; `UsageError` if a day
    of `again` is not finished; the error of a damaged day once the other days are done. Whenever the job is
    interrupted, each day is complete, in its old files or in its new ones.

    In a bucket, small parts of a day become parts of about `file_bytes`, without any waiting: a process that
    opened the lake earlier can read the replaced objects for as long as `grace` says. There this also raises
    `ObjectStoreError`.
    """
    if is_object_place(path):
        return _compact_bucket(spark, str(path), again, file_bytes, grace, delta, progress)
    done, refused = Compacted(), Refused(LakeError, PipelineError)
    with Lake.replace(path) as lake:
        _require_finished(lake, again)
        done.deleted = delete_retired(
            lake, int(time.time()), grace, min(grace, int(ERASED_GRACE.total_seconds()))
        )
        for day in lake.finished_days():
            if len(lake.batches(day)) > 1 or day in again:
                with refused.put_off():
                    if _compact_day(spark, lake, day, file_bytes, patience, done) and is_published(lake):
                        publish(Lake.open(path), days=[day])
                progress(done)
        done.sealed = lake.chain.seal()
        if delta:
            publish(Lake.open(path))
        else:
            publish_rewritten(path)
    refused.tell(_told(done))
    return done


def _require_finished(lake: AnyLake, days: Collection[int]) -> None:
    for day in set(days).difference(lake.finished_days()):
        raise UsageError(f"{day_text(day)} is not a finished day of this lake: the last day may still grow")


def _told(done: Compacted) -> str:
    return f"{done.days:,} days were compacted" if done.days else ""


def _compact_bucket(
    spark: SparkSession,
    place: str,
    again: Collection[int],
    part_bytes: int,
    grace: int,
    delta: bool,
    progress: Callable[[Compacted], None],
) -> Compacted:
    def run(lake: ObjectLake, works: Sequence[PartWork]) -> list[PartDone]:
        with translate_failures(f"compacting {day_text(works[0].part.span.day)}"):
            return rewrite_parts(spark, lake, works)

    done, refused = Compacted(), Refused(LakeError)
    kept = timedelta(seconds=grace)
    with ObjectLake.replace(place, Grace(kept, min(kept, ERASED_GRACE))) as lake:
        _require_finished(lake, again)
        done.deleted, done.sealed = len(lake.left.deleted), lake.sealed
        for day in lake.finished_days():
            with refused.put_off():
                try:
                    became = compact_day(lake, day, run, part_bytes, again=day in again)
                except LakeBusy:
                    done.waiting += 1
                    continue
                if became is not None:
                    done.days += 1
                    done.files_before += became[0]
                    done.files_after += became[1]
                    if is_published(lake):
                        publish(ObjectLake.open(place), days=[day])
            progress(done)
    if delta:
        publish(ObjectLake.open(place))
    else:
        publish_rewritten(place)
    refused.tell(_told(done))
    return done


def _compact_day(
    spark: SparkSession, lake: Lake, day: int, file_bytes: int, patience: float, done: Compacted
) -> bool:
    """Compact a day; return whether it could be done."""
    staged = staged_day(lake, day)
    with translate_failures(f"compacting {day_text(day)}"):
        packets = Packets.read(spark, lake, [day])
        write_day(packets, staged, lake.chain.of_day(day), file_bytes=file_bytes)
    before, after = (files.count(folder, "*.parquet") for folder in (lake.day_folder(day), staged))

    def check(unit: Unit) -> list[Fault]:
        with translate_failures(f"checking {day_text(day)}"):
            return files_faults(spark, lake.shelf, [unit])

    try:
        replace_day(lake, day, staged, patience, check)
    except LakeBusy:
        files.remove(staged.parent)
        files.remove_if_empty(lake.staging)
        done.waiting += 1
        return False
    done.files_before += before
    done.files_after += after
    done.days += 1
    return True
