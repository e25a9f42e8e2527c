"""`strata-pipeline copy`: copy a lake from a disk into a bucket, or back, batch by batch. It needs no Spark.

The copy gets the same manifests, so that the same tips prove it, and the same records of erasures
(`copy_erasures`). Each batch is compared with its manifest and the later erasures before it is committed, in
the same way as an archive commits. So a copy that was stopped is a complete lake, shorter than the source,
and the next run continues it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from strata.protocol.sequences import day_of

from strata_pipeline.errors import LakeError
from strata_pipeline.jobs.copy_erasures import bring_erasures, check_erasures_begin, listed_ahead
from strata_pipeline.jobs.copy_files import Source, extract, put_files
from strata_pipeline.lake.checking import chunks
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.places import AnyLake, open_lake, write_lake
from strata_pipeline.lake_format import Manifest

__all__ = ["Copied", "copy_lake"]


@dataclass(slots=True)
class Copied:
    """The progress of a run."""

    batches: int = 0
    """The number of batches that this run has copied."""
    packets: int = 0
    reached: int = 0
    """The sequence up to which the copy holds the log."""
    left: int = 0
    """The number of packets that are not copied yet."""
    tip: str = ""
    """The hash of the copy's last manifest, which the source has too."""
    erasures: int = 0
    """The number of records of erasures that this run has copied."""


def copy_lake(
    source: str | Path,
    target: str | Path,
    *,
    patience: float = 600.0,
    progress: Callable[[Copied], None] = lambda done: None,
) -> Copied:
    """Bring the lake at `target`, which need not exist yet, up to date with the lake at `source`.

    A compacted day is copied batch by batch, as it was archived. `progress` is called before each batch. Rows
    that were erased from the source are erased from the target first; on a disk this waits up to `patience`
    seconds for jobs that read it. Raises `LakeError` if the target, by its manifests and erasures, is not a
    beginning of the source or if a batch is damaged, `LakeBusy`, `ObjectStoreError`, `UsageError`.
    """
    lake = open_lake(source)
    done = Copied()
    with lake.held(), write_lake(target, copying=True) as copy:
        if lake.is_half_copied:  # or rows were erased from a day that has ended since it was opened
            lake.load()
        _check_beginning(lake, copy)
        check_erasures_begin(lake, copy)
        done.erasures = bring_erasures(lake, copy, patience)
        done.left = _packets(lake) - _packets(copy)
        for day in lake.days():  # of whose manifests a year has millions, so one day's at a time are read
            if day >= day_of(copy.reached):
                _copy_day(lake, copy, day, done, progress)
                if isinstance(copy, Lake):  # so that the next run does not read the manifests of all days
                    copy.seal()
        done.reached, done.tip = copy.reached, copy.tip
    progress(done)
    return done


def _packets(lake: AnyLake) -> int:
    return sum(map(lake.rows_of, lake.days()))


def _copy_day(
    lake: AnyLake, copy: AnyLake, day: int, done: Copied, progress: Callable[[Copied], None]
) -> None:
    """Add the batches of a day that the copy does not have."""
    missing = [one for one in lake.chain.of_day(day) if one.number >= copy.chain.end.number]
    sealed = iter(missing)
    for some in chunks(lake.erasures.told(missing)):
        with lake.at_hand(some) as layout:
            there = Source.of(layout, day)
            for now in some:
                progress(done)
                manifest = next(sealed)
                _copy(there, manifest, now, lake.witnesses.text_of(manifest), copy)
                done.batches += 1
                done.packets += now.packets
                done.left -= now.packets


def _check_beginning(lake: AnyLake, copy: AnyLake) -> None:
    number = copy.chain.end.number
    if number and (number > lake.chain.end.number or lake.chain.one(number - 1).hash != copy.tip):
        raise LakeError(
            f"{copy.place} is not the beginning of {lake.place}: it is another lake, or has gone on by "
            "itself. Nothing was changed"
        )


def _copy(source: Source, manifest: Manifest, now: Manifest, witnesses: bytes, copy: AnyLake) -> None:
    """Add a batch with its file of witnesses; `now` says what the batch holds after erasures."""
    if isinstance(copy, Lake):
        staged = copy.stage(manifest.span)
        extract(source, now, staged)
        packets, quarantine = (
            folder if (folder := staged / root).is_dir() else None for root in ("packets", "quarantine")
        )
        copy.commit(manifest, packets, quarantine, witnesses)
        return
    objects = listed_ahead(copy, now)
    attempt = copy.begin(manifest.span)
    if objects is None:
        with tempfile.TemporaryDirectory(prefix="strata-copy-") as name:
            extract(source, now, Path(name))
            objects = put_files(Path(name), copy.store, attempt.object_name)
    copy.adopt(manifest, now, attempt, objects, witnesses)
