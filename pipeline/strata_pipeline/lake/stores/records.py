"""Small files that are written once and as a whole: manifests, summaries, records of erasures.

The few operations are the same on a disk and in a bucket, so that a chain need not know where it lies. They
raise OSError for a file that does not exist or cannot be read. Whoever reads says how many bytes there may
be: an audit must survive what a stranger has put into a copy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from strata_pipeline.lake import files
from strata_pipeline.lake.stores.limits import RECORD_BYTES, check_size
from strata_pipeline.lake.stores.objects import ObjectStore

__all__ = ["DiskRecords", "ObjectRecords", "Records"]

_RECORDS = r"[\d-]+\.json"
"""The names of records."""


class Records(Protocol):
    """Small files under names."""

    def place(self, name: str = "") -> str:
        """Where a file is, for messages."""

    def names(self, folder: str = "") -> list[str]:
        """The names of the files and folders here, or in a folder here, in order."""

    def all_exist(self, names: Iterable[str]) -> Iterator[bool]:
        """Whether each file exists, in this order."""

    def leading(self, names: Iterable[str]) -> list[str]:
        """The names, which are in order, up to the first that does not exist."""

    def has_any(self, names: Sequence[str]) -> bool:
        """Whether any of these names, which are in order, exists."""

    def read(self, name: str, most: int = RECORD_BYTES) -> bytes:
        """The contents of a file. Raises `LakeError` if it has more than `most` bytes."""

    def read_all(self, names: Iterable[str], most: int = RECORD_BYTES) -> Iterator[bytes]:
        """The contents of each file, in this order, not all in memory at once. Raises as `read` does."""

    def replace(self, name: str, content: bytes) -> None:
        """Write a file, replacing any other."""

    def tidy(self, folder: str = "", names: str = _RECORDS) -> None:
        """Remove the drafts of files with such `names`, a pattern, that killed writers left here or in a
        folder here. No other process may be writing there."""


class DiskRecords:
    """The records in a folder on a disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, name: str = "") -> str:
        return str(self.folder / name)

    def names(self, folder: str = "") -> list[str]:
        path = self.folder / folder
        return sorted(one.name for one in path.iterdir()) if path.is_dir() else []

    def all_exist(self, names: Iterable[str]) -> Iterator[bool]:
        return map(self._exists, names)

    def leading(self, names: Iterable[str]) -> list[str]:
        return list(takewhile(self._exists, names))  # not listed: after years a folder has millions

    def has_any(self, names: Sequence[str]) -> bool:
        return any(map(self._exists, names))

    def read(self, name: str, most: int = RECORD_BYTES) -> bytes:
        with (self.folder / name).open("rb") as file:
            check_size(file.name, os.fstat(file.fileno()).st_size, most)
            return file.read()

    def read_all(self, names: Iterable[str], most: int = RECORD_BYTES) -> Iterator[bytes]:
        return (self.read(name, most) for name in names)

    def replace(self, name: str, content: bytes) -> None:
        path = self.folder / name
        path.unlink(missing_ok=True)
        files.write_new(path, content)

    def tidy(self, folder: str = "", names: str = _RECORDS) -> None:
        # What `files.write_new` names a draft; other files are not ours.
        is_draft = re.compile(rf"_{names}\.\d+").fullmatch
        for left in (self.folder / folder).glob("_*"):
            if is_draft(left.name) and left.is_file():
                left.unlink()

    def _exists(self, name: str) -> bool:
        return os.path.exists(f"{self.folder}/{name}")  # fast: opening a lake checks 10,000 names


class ObjectRecords:
    """The records below a name in a bucket."""

    def __init__(self, store: ObjectStore, folder: str) -> None:
        self._store = store
        self._folder = folder

    def place(self, name: str = "") -> str:
        return self._store.url(self._key(name))

    def names(self, folder: str = "") -> list[str]:
        return self._names(self._key(folder))

    def all_exist(self, names: Iterable[str]) -> Iterator[bool]:
        return self._store.all_exist(map(self._key, names))

    def leading(self, names: Iterable[str]) -> list[str]:
        there: set[str] | None = None
        found = []
        for name in names:
            if there is None:
                there = set(self._names(self._folder, name))
            if name not in there:
                break
            found.append(name)
        return found

    def has_any(self, names: Sequence[str]) -> bool:
        return not set(names).isdisjoint(self._names(self._folder, names[0]))

    def read(self, name: str, most: int = RECORD_BYTES) -> bytes:
        return self._store.get(self._key(name), most)

    def read_all(self, names: Iterable[str], most: int = RECORD_BYTES) -> Iterator[bytes]:
        return self._store.get_all(map(self._key, names), most)

    def replace(self, name: str, content: bytes) -> None:
        self._store.put(self._key(name), content)

    def tidy(self, folder: str = "", names: str = _RECORDS) -> None:
        return None  # an object is put as a whole or not at all, so there are no drafts

    def _names(self, folder: str, first: str = "") -> list[str]:
        """The names directly below a folder, from `first` on."""
        # The store lists what comes after a key, and a prefix of the first name comes before it.
        after = f"{folder}/{first[:-1]}" if first else ""
        below = (key.removeprefix(f"{folder}/") for key in self._store.keys(folder, after))
        return [name for name in below if "/" not in name]

    def _key(self, name: str) -> str:
        return f"{self._folder}/{name}" if name else self._folder
