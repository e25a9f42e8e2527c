"""The note of the days that were searched for erased packets, so that they are not read again.

_searched/erased.json

`strata-pipeline erase` reads the ids of the whole lake. Most of them it has read before, for the same
tombstones. So it notes, for one set of tombstones, each day in which there was nothing left to erase, with a
mark: a hash over all that decides which rows a day has.

- Its manifests, and the records of its erasures. The files of a batch are there before its manifest.
- In a bucket, which objects count: a generation may change that although no object is new.
- What the system or the store says about each file without reading it. A file that was damaged when it was
  searched may be brought back from a copy later.

A mark is taken before its day is read, so that a change meanwhile shows as well. The note proves nothing, and
no other job reads it. Whoever deletes it makes the next run search the whole lake.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Final, Literal

import msgspec
import pyarrow as pa
import pyarrow.dataset as pads
from blake3 import blake3
from strata.protocol.sequences import day_text

from strata_pipeline.errors import LakeError, PipelineError
from strata_pipeline.lake.attempts import ROOTS
from strata_pipeline.lake.contents import UNREADABLE
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.places import AnyLake
from strata_pipeline.lake.stores.limits import NOTE_BYTES
from strata_pipeline.lake.stores.objects import ObjectStore
from strata_pipeline.lake.stores.records import DiskRecords, ObjectRecords
from strata_pipeline.lake_format import StoredObject

__all__ = ["SearchedDays"]

_FOLDER: Final = "_searched"
_NAME: Final = "erased.json"
_NO_COLUMNS: Final = pa.schema([])


class _Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tombstones: str
    """A hash over what was searched for."""
    days: dict[str, str]
    """The mark of each day."""
    format: Literal[1] = 1


class SearchedDays:
    """The days of a lake that were searched for some tombstones, of which `tombstones` is a hash."""

    def __init__(self, lake: AnyLake, tombstones: str) -> None:
        self._lake = lake
        self._tombstones = tombstones
        self._there: dict[str, str] = {}
        if isinstance(lake, ObjectLake):
            self._records: DiskRecords | ObjectRecords = ObjectRecords(lake.store, _FOLDER)
            self._there = _hashes_of_objects(lake.store)
        else:
            self._records = DiskRecords(lake.root / _FOLDER)
        self._stored = self._read()
        is_same = self._stored is not None and self._stored.tombstones == tombstones
        self._days = dict(self._stored.days) if self._stored and is_same else {}
        self._marks: dict[int, str] = {}

    def has(self, day: int) -> bool:
        """Whether a day was searched as it is now. It is to be asked before the day is read."""
        # If the mark cannot be told, reading the day says why.
        with contextlib.suppress(*UNREADABLE, LakeError):
            self._marks[day] = self._mark(day)
            return self._days.get(day_text(day)) == self._marks[day]
        return False

    def add(self, day: int) -> None:
        """Note that there was nothing left to erase in a day, as it was when `has` was asked."""
        if day in self._marks:
            self._days[day_text(day)] = self._marks[day]

    def keep(self) -> None:
        """Write the note, if it has changed, and remove what runs that were killed have left of it: `erase`
        holds a lock, so no other run is at work. If that fails, the next run reads more, and nothing is
        lost."""
        there = set(map(day_text, self._lake.days()))
        days = {day: mark for day, mark in sorted(self._days.items()) if day in there}
        note = _Note(self._tombstones, days)
        content = msgspec.json.encode(note)
        with contextlib.suppress(OSError):
            self._records.tidy(names=re.escape(_NAME))
        if note != self._stored and len(content) <= NOTE_BYTES:
            with contextlib.suppress(OSError, LakeError, PipelineError):
                self._records.replace(_NAME, content)

    def _read(self) -> _Note | None:
        try:
            return msgspec.json.decode(self._records.read(_NAME, NOTE_BYTES), type=_Note)
        except (OSError, LakeError, msgspec.DecodeError):
            return None

    def _mark(self, day: int) -> str:
        lake, mark = self._lake, blake3(self._lake.mark_of(day).encode())
        for line in _objects(lake, day) if isinstance(lake, ObjectLake) else _files(lake, day):
            mark.update(b"\n" + line.encode(errors="surrogateescape"))
        mark.update(self._there.get(f"day={day_text(day)}", "").encode())
        return mark.hexdigest()


def _files(lake: Lake, day: int) -> Iterator[str]:
    """A line for each file with rows of a day. No tool that copies files can set the time of their last
    change."""
    for folder in (one for some in lake.day(day) for one in some):
        for path in sorted(pads.dataset(folder, schema=_NO_COLUMNS, format="parquet").files):
            told = (lake.root / path).stat()
            name = path.removeprefix(str(lake.root))
            yield f"{name} {told.st_size} {told.st_mtime_ns} {told.st_ctime_ns}"


def _objects(lake: ObjectLake, day: int) -> Iterable[str]:
    """What tells the objects with rows of a day: a generation, or a line for each object of its batches."""
    generation = lake.generations.of_day(day)
    if generation is not None:
        return [generation.hash]
    return [_line(one) for root in ROOTS for one in lake.objects_of_day(day, root)]


def _line(told: StoredObject) -> str:
    return f"{told.name} {told.size} {told.hash}"


def _hashes_of_objects(store: ObjectStore) -> dict[str, str]:
    """For each folder of a day, a hash over all objects there as the store lists them."""
    hashes: dict[str, blake3] = {}
    for one in (one for root in ROOTS for one in store.listed(root)):
        line = f"{one.name} {one.modified_at.timestamp()} {one.version}\n"
        hashes.setdefault(one.name.split("/")[1], blake3()).update(line.encode())
    return {folder: found.hexdigest() for folder, found in hashes.items()}
