"""Replacing the files of a day by others with the same rows, and what happens to the old ones.

A job that plans to read a day holds the names of its files. So the old files leave the table's folder in one
step, while none of our own jobs reads. Other readers find them by the day's links (`day_links`), until a
later run deletes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from strata.protocol.sequences import day_text, parse_day

from strata_pipeline.errors import LakeBusy, LakeError
from strata_pipeline.lake import files
from strata_pipeline.lake.checking import Unit, unit_faults
from strata_pipeline.lake.faults import Fault
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.layout import span_over
from strata_pipeline.lake.retired import retired

__all__ = ["Check", "check_day", "check_own", "delete_retired", "replace_day", "staged_day"]

Check = Callable[[Unit], Iterable[Fault]]
"""Finds the faults of files, in this process or in tasks."""


def staged_day(lake: Lake, day: int) -> Path:
    """The folder into which a day's new files are to be written: one folder `batch=…` for all batches.

    Raises `LakeError` as `check_own` does.
    """
    check_own(lake, day)
    spans = lake.batches(day)
    staged = lake.staging / lake.day_folder(day).name
    files.remove(staged)
    # Not left to Spark: an archive that is just finishing a batch removes `_staging` if it is empty.
    files.make_folder(staged)
    return staged / f"batch={span_over(spans)}"


def replace_day(lake: Lake, day: int, staged: Path, patience: float, check: Check = unit_faults) -> Path:
    """Replace a day's files by new ones, which were written into the folder of `staged_day`.

    Return the folder in which the old ones stay. Raises `LakeError` if the new files do not hold what the
    manifests say, and `LakeBusy` if jobs still read the lake after `patience` seconds; then the day stays as
    it is.
    """
    manifests = lake.erasures.told(lake.chain.of_day(day))
    unit = Unit(manifests, [staged], lake.folders_of_day(lake.quarantine, day))
    try:
        check_day(day, unit, check)
    except LakeError:
        files.remove(staged.parent)
        files.remove_if_empty(lake.staging)
        raise
    files.make_durable(staged.parent)
    folder = lake.day_folder(day)
    kept = lake.links.keep_files(folder.name, int(time.time()))
    try:
        with lake.unread(patience):
            lake.links.point_to_kept(folder.name, kept)
            files.exchange(folder, staged.parent)
            lake.links.current(folder.name)
    except LakeBusy:
        files.remove(kept)
        files.remove_if_empty(lake.retired)
        raise
    files.remove(staged.parent)
    files.remove_if_empty(lake.staging)
    return kept


def delete_retired(lake: Lake, now: int, grace: int, erased_grace: int = 0) -> int:
    """Delete the files that were replaced `grace` seconds before `now` or earlier; return how many folders.

    Those that hold what was erased since are deleted `erased_grace` seconds after the erasure. Files of a day
    are deleted only if the day itself is there.
    """
    deleted = 0
    for one in list(retired(lake)):
        erased = [
            record.written_at for record in lake.erasures.of_day(parse_day(one.day.removeprefix("day=")))
        ]
        is_due = now - one.at >= grace or any(one.at <= at <= now - erased_grace for at in erased)
        if is_due and (lake.packets / one.day).is_dir():
            lake.links.delete_kept(one.folder, one.day)
            deleted += 1
    files.remove_if_empty(lake.retired)
    return deleted


def check_own(lake: Lake, day: int) -> None:
    """Raise `LakeError` if the folders of a day hold anything that readers see and no manifest names: what is
    replaced is deleted later, and new files would not have it."""
    for one in (*lake.foreign(beyond=True, day=day), *lake.strays(day)):
        raise LakeError(
            f"{one} is not of the lake, and would be lost if {day_text(day)} were written anew: the day "
            "stays as it is. Move it away, and run audit"
        )


def check_day(day: int, unit: Unit, check: Check = unit_faults) -> None:
    """Raise `LakeError` unless files of a day hold what its manifests say, and nothing else."""
    for fault in check(unit):
        raise LakeError(
            f"the manifests and the files of {day_text(day)} disagree: {fault.detail}; "
            "the day stays as it is. Run audit"
        )
