"""An object of a bucket as a file, of which only the parts that are read are downloaded."""

from __future__ import annotations

import io
import os
from typing import Final

from strata_pipeline.lake.stores.objects import ObjectStore

__all__ = ["open_object"]

_AHEAD_BYTES: Final = 64 * 1024
"""Read at once where less is asked for: a footer and its end are small parts, one after the other."""


def open_object(store: ObjectStore, name: str, size: int) -> io.BufferedReader:
    """An object of this size, for reading. Reading raises what `get_range` raises."""
    return io.BufferedReader(_ObjectFile(store, name, size), _AHEAD_BYTES)


class _ObjectFile(io.RawIOBase):
    def __init__(self, store: ObjectStore, name: str, size: int) -> None:
        self._store = store
        self._name = name
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        found = self._store.get_range(self._name, self._at, end)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
