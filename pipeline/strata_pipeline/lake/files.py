"""Atomic and durable operations on the files of a lake, on a disk that is mounted on this machine.

A batch is written into `_staging`, flushed to the disk, and renamed. So no reader ever sees half a batch,
whatever was killed and when. Names that begin with `_` are invisible to Spark and to every other reader of
Parquet.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from strata_pipeline.errors import LakeBusy, LakeError

__all__ = [
    "count",
    "exchange",
    "locked",
    "make_durable",
    "place",
    "remove",
    "without_notes",
    "write_new",
]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a lake; the system releases it when the process ends. Raises `LakeBusy`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LakeBusy(f"another process writes into {path.parent}; wait for it, or stop it") from None
        yield


def write_new(path: Path, content: bytes) -> None:
    """Write a new file as a whole or not at all. Raises `LakeError` if the name is taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"_{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)  # as a rename, but it never replaces
    except FileExistsError:
        raise LakeError(f"{path} is there already") from None
    finally:
        draft.unlink(missing_ok=True)
    _sync(path.parent)


def make_durable(folder: Path) -> None:
    """Flush a folder and every file below it to the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            _sync(Path(root, name))
        _sync(Path(root))


def place(source: Path, target: Path) -> None:
    """Rename a folder to where readers see it. Raises `LakeError` if the name is taken."""
    if target.exists():
        raise LakeError(f"{target} is there already")
    for parent in reversed(target.parents):
        if not parent.exists():
            parent.mkdir(exist_ok=True)
            _sync(parent.parent)
    os.rename(source, target)
    _sync(target.parent)


def exchange(one: Path, other: Path) -> None:
    """Exchange two folders in one step where the system can do that, else in three."""
    if not _exchange_at_once(one, other):
        aside = one.with_name(f"_{one.name}.aside")
        os.rename(one, aside)
        os.rename(other, one)
        os.rename(aside, other)
    _sync(one.parent)
    _sync(other.parent)


def without_notes(folder: Path) -> None:
    """Remove the marker files of Spark and Hadoop."""
    for note in [*folder.rglob("_SUCCESS"), *folder.rglob("*.crc")]:
        note.unlink()


def count(folder: Path, pattern: str) -> int:
    """The number of files below a folder whose name fits a pattern."""
    return sum(1 for _ in folder.rglob(pattern))


def remove(folder: Path) -> None:
    """Remove a folder with its contents, if it exists."""
    if folder.exists():
        shutil.rmtree(folder)


def _exchange_at_once(one: Path, other: Path) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    paths = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    if rename(*paths, ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):  # the file system cannot do it
        return False
    raise OSError(code, os.strerror(code), str(one))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
