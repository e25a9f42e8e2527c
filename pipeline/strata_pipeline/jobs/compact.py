"""`strata-pipeline compact`: the many small files of a finished day become a few large ones.

An archive that follows the log closely writes small batches. Once a day is over, its batches are rewritten as
one folder, sorted by kind and sequence, checked against every manifest of the day, and exchanged with the old
one in a single step: a reader finds the old day or the new one, never both and never neither. The manifests
stay the same, for they describe packets and not files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession
from strata.protocol.lake import Manifest, Span, day_of, day_text, manifests_of_day

from strata_pipeline.datasets import Packets
from strata_pipeline.errors import LakeError
from strata_pipeline.jobs.failures import translate_failures
from strata_pipeline.lake import files
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.rows import digest_of, read_places
from strata_pipeline.schemas import schema

__all__ = ["Compacted", "compact"]

DEFAULT_FILE_BYTES = 256 * 2**20


@dataclass(slots=True)
class Compacted:
    """The progress of a run."""

    days: int = 0
    files_before: int = 0
    files_after: int = 0


def compact(
    spark: SparkSession,
    path: str | Path,
    *,
    file_bytes: int = DEFAULT_FILE_BYTES,
    progress: Callable[[Compacted], None] = lambda done: None,
) -> Compacted:
    """Compact every finished day of more than one batch. A day is finished when the lake has begun the next.

    `file_bytes` is the approximate size of the bodies in a file. Raises `LakeError`, `LakeBusy`. Whenever the
    job is cut off, each day is whole, in its old files or in its new ones.
    """
    done = Compacted()
    with Lake.write(path) as lake:
        for day in lake.days():
            if day < day_of(lake.reached) and len(lake.batches(day)) > 1:
                _compact_day(spark, lake, day, file_bytes, done)
                progress(done)
    return done


def _compact_day(spark: SparkSession, lake: Lake, day: int, file_bytes: int, done: Compacted) -> None:
    manifests = manifests_of_day(lake.manifests, day)
    staged = lake.staging / f"day={day_text(day)}"
    files.remove(staged)
    first, last = _span_of_folders(lake, day)
    body_bytes = sum(manifest.body_bytes for manifest in manifests)
    target = staged / f"batch={Span(first.after, last.up_to)}"
    with translate_failures(f"compacting {day_text(day)}"):
        (
            Packets.read(spark, lake, [day])
            .repartitionByRange(max(1, -(-body_bytes // file_bytes)), "kind", "sequence")
            .sortWithinPartitions("kind", "sequence")
            .select(*schema("packets").names, "kind")
            .write.partitionBy("kind")
            .parquet(str(target))
        )
    files.without_notes(target)
    _check(lake, manifests, target)
    files.make_durable(staged)
    done.files_before += files.count(lake.day_folder(day), "*.parquet")
    done.files_after += files.count(staged, "*.parquet")
    files.exchange(lake.day_folder(day), staged)
    files.remove(lake.staging)
    done.days += 1


def _span_of_folders(lake: Lake, day: int) -> tuple[Span, Span]:
    spans = lake.batches(day)
    return spans[0], spans[-1]


def _check(lake: Lake, manifests: list[Manifest], compacted: Path) -> None:
    """The new files must hold what the manifests say, or the old ones stay."""
    for manifest in manifests:
        aside = [
            folder for folder in lake.folders_of(manifest.span) if folder.is_relative_to(lake.quarantine)
        ]
        rows = read_places([compacted, *aside], manifest.span)
        if rows.num_rows != manifest.packets + manifest.quarantined or digest_of(rows) != manifest.rows:
            raise LakeError(
                f"manifest {manifest.number} and the files of {day_text(manifest.span.day)} disagree: the "
                "day stays as it is. Run audit"
            )
