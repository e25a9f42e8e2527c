"""How an erasure takes effect: all of it or nothing.

New files of the day, the tombstones and the record are written into `_staging/erasure`. The file
`record.json` comes last: with it the erasure is complete, and if it is interrupted later, the next process
that opens the lake for writing finishes it. Then the files change places with the old ones, the record is put
beside the chain, and the old files are deleted, or stay for a grace that an operator has asked for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from strata_pipeline.errors import LakeBusy
from strata_pipeline.lake import files
from strata_pipeline.lake.layout import LakeLayout, is_stray, listed
from strata_pipeline.lake.retired import retired
from strata_pipeline.lake_format import Erasure, decode_erasure, encode_erasure

__all__ = ["RECORD", "TOMBSTONES", "finish_erasure", "mark", "place_erasure", "put_record"]

RECORD = "record.json"
TOMBSTONES = "tombstones.jsonl"
_MARK = "_erasure."
"""A file with this name and the record's number distinguishes a folder of new files from one of old files."""


def mark(folder: Path, number: int) -> None:
    """Mark a staged folder of a day as one with new files."""
    files.make_folder(folder)
    (folder / f"{_MARK}{number}").touch()


def put_record(lake: LakeLayout, record: Erasure, text: bytes) -> None:
    """Put a record and the text of its tombstones beside the chain. Raises `LakeError` if it exists."""
    target, tombstones = (lake.erased / name for name in lake.erasures.names(record.number))
    tombstones.unlink(missing_ok=True)  # without its record it belongs to nothing
    files.write_new(tombstones, text)
    files.write_new(target, encode_erasure(record))


def place_erasure(
    lake: LakeLayout,
    record: Erasure,
    tombstones: bytes,
    unread: AbstractContextManager[None],
    *,
    keep: bool = False,
) -> None:
    """Put an erasure into effect whose new files are staged and marked, while nobody reads. With `keep` the
    old files stay for their readers, and `delete_retired` deletes them.

    Raises `LakeBusy` if `unread` does; the staged files are then removed.
    """
    staged = lake.staged_erasure
    (staged / TOMBSTONES).write_bytes(tombstones)
    files.make_durable(staged)
    day = lake.day_folder(record.day).name
    kept = lake.links.keep_files(day, record.written_at) if keep else None
    try:
        with unread:
            files.write_new(staged / RECORD, encode_erasure(record))
            if kept is not None:
                lake.links.point_to_kept(day, kept)
            finish_erasure(lake, keep=keep)
    except LakeBusy:
        if kept is not None:
            files.remove(kept)
            files.remove_if_empty(lake.retired)
        files.remove(staged)
        files.remove_if_empty(lake.staging)
        raise
    lake.erasures.load()


def finish_erasure(lake: LakeLayout, *, keep: bool = False) -> Erasure | None:
    """Finish the erasure that is staged in a lake, from wherever it was interrupted; None if there is none.
    Without `keep` no replaced files of its day stay.

    An incomplete one is removed. Nobody else may read or replace the files of the day meanwhile.
    """
    staged = lake.staged_erasure
    if not (staged / RECORD).exists():
        files.remove(staged)
        return None
    record = decode_erasure((staged / RECORD).read_bytes(), f"{staged.name}/{RECORD}")
    day = lake.day_folder(record.day).name
    for root in (lake.packets, lake.quarantine):
        live, new = root / day, staged / root.name / day
        if (live / f"{_MARK}{record.number}").exists() or not new.exists():
            continue
        if live.exists():
            files.exchange(live, new)
        else:
            files.place(new, live)
    if not (lake.erased / lake.erasures.names(record.number)[0]).exists():
        put_record(lake, record, (staged / TOMBSTONES).read_bytes())
    if (lake.packets / day).exists():
        lake.links.current(day)
    # The old files hold what was to be erased.
    for old in list(retired(lake)):
        if old.day == day and not keep:
            lake.links.delete_kept(old.folder, day)
    files.remove_if_empty(lake.retired)
    for root in (lake.packets, lake.quarantine):
        # What came into the folder of the day since it was written anew is not the lake's.
        for stray in filter(is_stray, listed(staged / root.name / day)):
            files.move(stray, lake.aside, f"{root.name}-{day}-{stray.name}")
        files.remove(staged / root.name)
    files.remove(staged)
    files.remove_if_empty(lake.staging)
    return record
