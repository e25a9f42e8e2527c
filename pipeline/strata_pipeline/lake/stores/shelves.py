"""How a task gets the files of a batch: from a mounted disk, or from a bucket.

Objects downloaded from a bucket are compared with their listing, and lie in a folder on the task's machine
for as long as the task looks at them. So code that reads a batch always reads files, wherever the lake is.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from strata_pipeline.lake.faults import Fault
from strata_pipeline.lake.stores.objects import ObjectStore, several
from strata_pipeline.lake_format import StoredObject

__all__ = ["Bucket", "MountedDisk", "Shelf", "fault_of_object"]

_AT_ONCE = 8


class Shelf(Protocol):
    """Where the files of batches are. It is sent to executors."""

    def at_hand(
        self, objects: Sequence[StoredObject]
    ) -> contextlib.AbstractContextManager[tuple[Path, list[Fault]]]:
        """The folder below which the files of batches lie, and the faults of those of `objects`."""

    def told(self, fault: Fault, folder: Path) -> Fault:
        """A fault of files in the folder of `at_hand`, with their names in the lake, as text."""


class MountedDisk:
    """A mounted disk: folders have absolute paths, and their files are there."""

    @contextlib.contextmanager
    def at_hand(self, objects: Sequence[StoredObject]) -> Iterator[tuple[Path, list[Fault]]]:
        yield Path(), []

    def told(self, fault: Fault, folder: Path) -> Fault:
        file = None if fault.file is None else _as_text(fault.file)
        return fault._replace(detail=_as_text(fault.detail), file=file)


class Bucket:
    """A bucket, whose objects are downloaded for as long as they are looked at."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @contextlib.contextmanager
    def at_hand(self, objects: Sequence[StoredObject]) -> Iterator[tuple[Path, list[Fault]]]:
        with tempfile.TemporaryDirectory(prefix="strata-lake-") as name:
            folder = Path(name)
            found = list(several(lambda one: self._bring(one, folder), objects, _AT_ONCE))
            yield folder, [fault for fault in found if fault is not None]

    def told(self, fault: Fault, folder: Path) -> Fault:
        below = f"{folder}/"
        file = None if fault.file is None else fault.file.replace(below, f"{self._store.url()}/")
        return fault._replace(detail=fault.detail.replace(below, f"{self._store.url()}/"), file=file)

    def _bring(self, told: StoredObject, folder: Path) -> Fault | None:
        """Download an object, as it is; return its fault, if any."""
        path = folder / told.name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            content = self._store.get(told.name)
        except FileNotFoundError:
            return fault_of_object(told, None, self._store.url(told.name))
        path.write_bytes(content)
        return fault_of_object(told, content, self._store.url(told.name))


def _as_text(name: str) -> str:
    """The name of a file in a form that can be shown, if it is not text (Python then uses surrogates)."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def fault_of_object(told: StoredObject, content: bytes | None, where: str) -> Fault | None:
    """The fault of an object with these bytes (None if it is missing); None if there is no fault."""
    if content is None:
        return Fault("file", "missing", f"{where} is missing", file=where)
    if len(content) != told.size or blake3(content).hexdigest() != told.hash:
        return Fault("file", "changed", f"{where} has other bytes than were written", file=where)
    return None
