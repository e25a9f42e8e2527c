"""Where a lake has its Delta log, and which files the log may name, on a disk and in a bucket."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.transaction import AddAction
from strata.protocol.sequences import Span

from strata_pipeline.errors import LakeError, ObjectStoreError
from strata_pipeline.lake import files
from strata_pipeline.lake.contents import UNREADABLE
from strata_pipeline.lake.footers import check_content, check_end, check_footer
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.layout import batch_path, span_of
from strata_pipeline.lake.object_lake import DELTA_LOG, ObjectLake
from strata_pipeline.lake.places import AnyLake
from strata_pipeline.lake_format import StoredObject

__all__ = ["DeltaOnDisk", "DeltaPlace", "delta_log", "place_of"]

_BOUNDED = ("sequence", "received_at", "timestamp")
"""The columns by whose least and greatest values a reader may skip a file."""
_AT_ONCE = 16
_is_commit = re.compile(r"\d{20}\.json").fullmatch
_decoration = re.compile(r"\x1b\[[0-9;]*m|↳")
_FOOTER_BYTES = 64 * 2**10
"""Footers are rarely longer. A footer is at the end of a file, so only the end is requested."""


class DeltaPlace(Protocol):
    """The place of the Delta log of one lake."""

    @property
    def table(self) -> str:
        """The address under which readers of Delta open the table."""

    @property
    def options(self) -> dict[str, str] | None:
        """The storage options that they need to reach it."""

    @property
    def log(self) -> str:
        """Where the log is, for messages."""

    def version(self) -> int | None:
        """The version of its last commit; None if there is no log."""

    def is_outdated(self) -> bool:
        """Whether days were rewritten since the lake was read, which `files` would not see."""

    def commit(self, version: int) -> bytes:
        """The commit of a version, as the log has it."""

    def failed(self, error: OSError) -> Exception:
        """The error to raise if the log could not be reached."""

    def alone(self) -> AbstractContextManager[None]:
        """Exclude other publishers, where that is possible."""

    def put_log_away(self) -> None:
        """Move the log aside, or delete it."""

    def files(self, days: Collection[int], known: Collection[str]) -> dict[str, AddAction | None]:
        """The files of these days up to the end of the chain, by their names in the log; None for known ones,
        which are not opened. Raises `LakeError`."""


def place_of(lake: AnyLake) -> DeltaPlace:
    """The place of the Delta log of a lake."""
    return _InBucket(lake) if isinstance(lake, ObjectLake) else DeltaOnDisk(lake)


def delta_log(lake: Lake) -> Path:
    """The folder of the log of a lake on a disk."""
    return lake.links.folder / PurePosixPath(DELTA_LOG).name


class DeltaOnDisk:
    """A folder beside the links of the days, by which a version can be read until the files that it names are
    deleted. Folders decide what counts, so what a batch adds is in its own.

    In a bucket only listings of days say which objects count.
    """

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self.table = str(lake.links.folder)
        self.options: dict[str, str] | None = None
        self.log = str(delta_log(lake))

    def version(self) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            return _last_version(os.listdir(self.log))
        return None

    def is_outdated(self) -> bool:
        return False  # folders are always read as they are now

    def commit(self, version: int) -> bytes:
        return Path(self.log, _commit_name(version)).read_bytes()

    def put_commit(self, version: int, text: bytes) -> bool:
        """Put the commit of a version, whole and durably; return False if there is one already."""
        try:
            files.write_new(Path(self.log, _commit_name(version)), text)
        except LakeError:
            return False
        return True

    def failed(self, error: OSError) -> Exception:
        return error

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with files.awaited(self._lake.root / "_delta_lock"):
            files.make_folder(self._lake.links.folder)
            yield

    def put_log_away(self) -> None:
        if Path(self.log).exists():
            files.move(Path(self.log), self._lake.aside, "delta_log")

    def files(self, days: Collection[int], known: Collection[str]) -> dict[str, AddAction | None]:
        found: dict[str, AddAction | None] = {}
        for day in sorted(days):
            for folder in self._lake.folders_of_day(self._lake.packets, day):
                if span_of(folder).up_to > self._lake.reached:
                    continue  # a batch that is not committed yet
                for name, path in self._named(folder):
                    found[name] = None if name in known else _on_disk(name, path)
        return found

    def batch(self, span: Span) -> list[AddAction] | None:
        """The files of a batch with these sequences; None if it has no own folder. Raises `LakeError`."""
        folder = self._lake.packets / batch_path(span)
        if not folder.is_dir():
            return None
        return [_on_disk(name, path) for name, path in self._named(folder)]

    def _named(self, folder: Path) -> Iterator[tuple[str, Path]]:
        """The files of a batch, each with its name in the log."""
        link = self._lake.links.current(folder.parent.name).relative_to(self._lake.links.folder)
        for path in sorted(folder.glob("kind=*/*.parquet")):
            yield (link / path.relative_to(folder.parent)).as_posix(), path


class _InBucket:
    """A commit puts a file only if there is none of that version, as in the lake's own chain."""

    def __init__(self, lake: ObjectLake) -> None:
        self._lake = lake
        self.table = lake.store.url("packets")
        self.log = lake.store.url(DELTA_LOG)

    @property
    def options(self) -> dict[str, str] | None:
        """The lake's own settings, and nothing else from the environment."""
        told = {f"aws_{name}": value for name, value in self._lake.store.settings.items()}
        return told | {"allow_http": str(self._lake.store.plain_http).lower()}

    def version(self) -> int | None:
        return _last_version(PurePosixPath(name).name for name in self._lake.store.keys(DELTA_LOG))

    def is_outdated(self) -> bool:
        return self._lake.generations.has_more()

    def commit(self, version: int) -> bytes:
        return self._lake.store.get(f"{DELTA_LOG}/{_commit_name(version)}")

    def failed(self, error: OSError) -> Exception:
        told = " ".join(_decoration.sub("", str(error)).split())
        return ObjectStoreError(f"the object store, at {self.log}: {told}")

    def alone(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def put_log_away(self) -> None:
        # The last version first: a run that is killed leaves an older version, and the next run continues.
        self._lake.store.delete(sorted(self._lake.store.keys(DELTA_LOG), reverse=True))

    def files(self, days: Collection[int], known: Collection[str]) -> dict[str, AddAction | None]:
        objects = {
            one.name.removeprefix("packets/"): one
            for day in sorted(days)
            for one in self._lake.objects_of_day(day, "packets")
        }
        new = [name for name in objects if name not in known]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            actions = dict(zip(new, pool.map(self._action, map(objects.__getitem__, new)), strict=True))
        return {name: actions.get(name) for name in objects}

    def _action(self, one: StoredObject) -> AddAction:
        where = self._lake.store.url(one.name)
        try:
            end = self._lake.store.get_end(one.name, one.size, _FOOTER_BYTES)
            try:
                check_end(end, one.size)
            except ValueError:
                end = self._lake.store.get(one.name)
                check_content(end)
            footer = pq.read_metadata(pa.BufferReader(end))
        except UNREADABLE as error:
            raise _unreadable(where, error) from None
        return _action(one.name.removeprefix("packets/"), one.size, time.time(), footer)


def _commit_name(version: int) -> str:
    return f"{version:020}.json"


def _last_version(names: Iterable[str]) -> int | None:
    # As many digits each: the greatest name is that of the last version.
    last = max((name for name in names if _is_commit(name)), default=None)
    return None if last is None else int(last.partition(".")[0])


def _on_disk(name: str, path: Path) -> AddAction:
    told = path.stat()
    try:
        check_footer(path)  # pyarrow may end the process when it is asked for false statistics
        footer = pq.read_metadata(path)
    except UNREADABLE as error:
        raise _unreadable(str(path), error) from None
    return _action(name, told.st_size, told.st_mtime, footer)


def _unreadable(where: str, error: Exception) -> LakeError:
    return LakeError(f"{where} cannot be read: {error}. Run audit")


def _action(name: str, size: int, modified_at: float, footer: pq.FileMetaData) -> AddAction:
    parts = (part.partition("=") for part in PurePosixPath(name).parts[:-1] if "=" in part)
    values: Mapping[str, str | None] = {partition: value for partition, _, value in parts}
    return AddAction(name, size, values, int(modified_at * 1000), True, json.dumps(_stats(footer)))


def _stats(footer: pq.FileMetaData) -> dict[str, object]:
    least: dict[str, int] = {}
    greatest: dict[str, int] = {}
    for group in map(footer.row_group, range(footer.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            bounds = column.statistics
            if column.path_in_schema in _BOUNDED and bounds is not None and bounds.has_min_max:
                name = column.path_in_schema
                least[name] = min(least.get(name, bounds.min), bounds.min)
                greatest[name] = max(greatest.get(name, bounds.max), bounds.max)
    return {"numRecords": footer.num_rows, "minValues": least, "maxValues": greatest, "nullCount": {}}
