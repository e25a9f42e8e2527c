"""Recovery from an interrupted writer, under its lock. Nothing that readers see is deleted.

A killed archive leaves one batch in `_staging`, and perhaps in sight of readers, that begins where the chain
ends. If its manifest is beside it in `_staging`, the batch is compared with it and, if complete, put in
place. Otherwise the visible folders are moved into `_aside`; the log still has the rows. No crash leaves any
other folders in sight that the chain does not name: then the chain is truncated or foreign, or the lake is
being copied, and nothing is changed or written.

A killed compaction leaves files of a day in `_staging` and, on a file system that cannot exchange two
folders, perhaps no files of the day in sight. Then the old files are brought back; otherwise they are kept
for readers.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import NoReturn

from strata.protocol.sequences import Span

from strata_pipeline.errors import LakeError
from strata_pipeline.lake import files
from strata_pipeline.lake.contents import UNREADABLE, contents_of
from strata_pipeline.lake.erasure_commit import finish_erasure
from strata_pipeline.lake.layout import (
    BATCH,
    STAGED_MANIFEST,
    STAGED_WITNESSES,
    LakeLayout,
    batch_path,
    listed,
    span_of,
)
from strata_pipeline.lake.retired import retire
from strata_pipeline.lake.rows import digest_of, read_places
from strata_pipeline.lake_format import Manifest, decode, read_witnesses, witnesses_name

__all__ = ["recover_batches", "recover_days"]

_STAGED_DAY = re.compile(r"(day=\d{4}-\d\d-\d\d)(\.old)?")
_DRAFT = re.compile(r"_\d{10}\.jsonl?\.\d+")
_SHOWN = 3


def recover_batches(lake: LakeLayout) -> list[Path]:
    """Complete or move aside the batch that a killed archive has left; return the paths of what was moved.

    Raises `LakeError` if more than that is in sight, or less than the chain names.
    """
    staged = [folder for folder in listed(lake.staging) if BATCH.fullmatch(folder.name)]
    spans = {span_of(folder) for folder in staged}
    unknown = lake.foreign(beyond=True)
    strangers = [
        folder
        for folder in unknown
        if span_of(folder) not in spans
        or span_of(folder).after != lake.reached
        or folder.parent.name != batch_path(span_of(folder)).parent.name
    ]
    if strangers:
        _refuse(lake, strangers)
    _check_last_is_there(lake)
    _remove_drafts(lake.manifests_folder)
    moved = []
    for span in sorted(spans):
        if not _complete(lake, span):
            for root in (lake.packets, lake.quarantine):
                left = root / batch_path(span)
                if left in unknown:
                    moved.append(files.move(left, lake.aside, f"{root.name}-{span.day}-{left.name}"))
            _remove_witnesses(lake, span)
            lake.discard(span)
    files.remove_if_empty(lake.staging)
    return moved


def recover_days(lake: LakeLayout) -> list[Path]:
    """Bring back or retire the files of days that a killed compaction has left, and finish an erasure that
    is complete; return the paths of what was moved aside."""
    _remove_drafts(lake.erased)
    finish_erasure(lake)
    left = [(path, match) for path in listed(lake.staging) if (match := _STAGED_DAY.fullmatch(path.name))]
    # Old files first, so that they are brought back before new ones are looked at.
    left.sort(key=lambda one: one[1][2] is None)
    moved = []
    for path, match in left:
        day = lake.packets / match[1]
        is_old = path.name != match[1]
        if day.exists():
            retire(lake, path, match[1])
        elif is_old:
            files.place(path, day)
        else:
            moved.append(files.move(path, lake.aside, path.name))
    files.remove_if_empty(lake.staging)
    return moved


def _remove_drafts(folder: Path) -> None:
    """Remove drafts that never got the name of a record: no other process writes here now."""
    for draft in listed(folder):
        if _DRAFT.fullmatch(draft.name):
            draft.unlink()


def _complete(lake: LakeLayout, span: Span) -> bool:
    """Put a staged batch in place if it is the next of the chain, and complete; return whether it was."""
    try:
        manifest = _next_staged(lake, span)
        if manifest is None or not _is_whole(lake, lake.staged_batch(span), manifest):
            return False
    except (*UNREADABLE, LakeError):
        return False
    lake.publish(manifest)
    return True


def _next_staged(lake: LakeLayout, span: Span) -> Manifest | None:
    """The manifest of a staged batch if it is the next of the chain. Raises OSError, `LakeError`."""
    manifest = decode((lake.staged_batch(span) / STAGED_MANIFEST).read_bytes(), STAGED_MANIFEST)
    follows = manifest.number == lake.chain.end.number and manifest.previous == lake.tip
    return manifest if follows and manifest.span == span else None


def _remove_witnesses(lake: LakeLayout, span: Span) -> None:
    """Remove the witnesses of a batch that is archived again, if they were already in place."""
    with contextlib.suppress(*UNREADABLE, LakeError):
        manifest = _next_staged(lake, span)
        if manifest is not None and manifest.witnesses:
            (lake.witnesses_folder / witnesses_name(manifest)).unlink(missing_ok=True)


def _is_whole(lake: LakeLayout, staged: Path, manifest: Manifest) -> bool:
    """Whether the rows and witnesses of a batch, staged and already in place, are what its manifest says.

    Raises OSError, ValueError, `LakeError` if they cannot be read.
    """
    if manifest.witnesses:
        told = staged / STAGED_WITNESSES
        there = told if told.exists() else lake.witnesses_folder / witnesses_name(manifest)
        read_witnesses(there.read_bytes(), manifest)
    path = batch_path(manifest.span)
    packets, quarantine = (
        [folder for folder in (staged / root.name, root / path) if folder.exists()]
        for root in (lake.packets, lake.quarantine)
    )
    [manifest] = lake.erasures.told([manifest])  # a copy has the record before the batch
    places = read_places([*packets, *quarantine])
    if places.num_rows != manifest.packets + manifest.quarantined or digest_of(places) != manifest.rows:
        return False
    return contents_of(packets, quarantine, manifest.span) == manifest.contents


def _check_last_is_there(lake: LakeLayout) -> None:
    last = next(lake.chain.backwards(), None)
    if last is None:
        return
    [last] = lake.erasures.told([last])
    told = (("packets", last.packets), ("quarantine", last.quarantined))
    for (root, rows), folders in zip(told, lake.folders_of(last.span), strict=True):
        if rows and not folders:
            raise LakeError(
                f"the lake's last manifest, {last.number}, tells of {rows} rows under {root}/"
                f"{batch_path(last.span)}, and that is not there: the chain is another lake's, or the lake "
                "is being copied. Complete the copy, or bring the files back; nothing was changed"
            )


def _refuse(lake: LakeLayout, strangers: list[Path]) -> NoReturn:
    shown = ", ".join(str(folder.relative_to(lake.root)) for folder in strangers[:_SHOWN])
    more = f" and {len(strangers) - _SHOWN} more" if len(strangers) > _SHOWN else ""
    if not lake.chain.end.number:
        raise LakeError(
            f"{lake.root} has {len(strangers)} folders of batches ({shown}{more}) and no manifests: bring "
            f"{lake.manifests_folder.name} back from a copy of the lake, or archive into another folder; "
            "nothing was changed"
        )
    beyond = [folder for folder in strangers if span_of(folder).up_to > lake.reached]
    if len(beyond) == len(strangers):
        raise LakeError(
            f"the chain ends with manifest {lake.chain.end.number - 1}, at {lake.reached}, and there are "
            f"{len(strangers)} folders of batches behind it ({shown}{more}): manifests are missing. Bring "
            f"{lake.manifests_folder.name} back from a copy of the lake, or complete the copy; nothing was "
            "changed"
        )
    raise LakeError(
        f"{shown}{more}: none of the lake's batches. Was it copied here? Move it away, or bring the "
        f"{lake.manifests_folder.name} back that tell of it; nothing was changed"
    )
