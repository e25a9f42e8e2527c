"""Atomic and durable operations on the files of a lake, on a disk that is mounted on this machine.

A batch is written into `_staging`, flushed to the disk, and renamed. So no reader ever sees half a batch, no
matter which process is killed and when. Files that readers may see are renamed out of sight before they are
deleted. Names that begin with `_` are invisible to Spark and to most other readers of Parquet.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from strata_pipeline.errors import LakeBusy, LakeError

__all__ = [
    "WRITER_OPTIONS",
    "awaited",
    "count",
    "exchange",
    "free_name",
    "is_abandoned",
    "is_occupied",
    "locked",
    "make_durable",
    "make_folder",
    "move",
    "occupied",
    "place",
    "remove",
    "remove_drafts",
    "remove_if_empty",
    "replace",
    "settle",
    "shared",
    "sync",
    "unread",
    "without_notes",
    "write_new",
]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_LOOK_SECONDS = 0.002
"""Short, to catch a moment in which none of several busy readers holds the lock: it has no queue."""
_DRAFT = re.compile(r"_(.+)\.\d+")
_NEW_SECONDS = 3600


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock of a lake; the system releases it when the process ends. Raises `LakeBusy`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LakeBusy(f"another process writes into {path.parent}; wait for it, or stop it") from None
        yield


@contextlib.contextmanager
def awaited(path: Path) -> Iterator[None]:
    """Hold a lock of a lake, after waiting until it is free."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def shared(path: Path) -> Iterator[None]:
    """Hold a lock together with others, after waiting until nobody holds it exclusively.

    If the file does not exist and cannot be made, or the file system has no locks, this holds nothing.
    """
    descriptor = -1
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


@contextlib.contextmanager
def unread(path: Path, patience: float) -> Iterator[None]:
    """Hold the lock of `shared` exclusively. Raises `LakeBusy` if others still hold it after `patience`
    seconds."""
    deadline = time.monotonic() + patience
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LakeBusy(f"jobs are reading {path.parent}; run this again later") from None
                time.sleep(min(left, _LOOK_SECONDS))
        yield


@contextlib.contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Make `is_occupied` true of a folder or file until the end of the block or of this process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def is_occupied(folder: Path) -> bool:
    """Whether a process occupies a folder or file; true also if that cannot be determined."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_abandoned(draft: Path) -> bool:
    """Whether a file or folder that was `occupied` when it was made is no longer in use."""
    try:
        # A process occupies its draft only after making it.
        is_new = time.time() - draft.stat().st_mtime < _NEW_SECONDS
    except FileNotFoundError:  # another process has removed it
        return False
    return not is_new and not is_occupied(draft)


def replace(path: Path, content: bytes) -> None:
    """Replace a file as a whole, or create it; after a power cut it may be the old one, or empty.

    A process that is killed leaves a draft, which `remove_drafts` removes.
    """
    draft = path.with_name(f"_{path.name}.{os.getpid()}")
    try:
        draft.touch()
        with occupied(draft):
            draft.write_bytes(content)
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def remove_drafts(folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Remove the drafts that processes killed in `replace` have left, of names that `is_ours` accepts."""
    for draft in folder.glob("_*.*"):
        match = _DRAFT.fullmatch(draft.name)
        if match and is_ours(match[1]) and not draft.is_symlink() and draft.is_file() and is_abandoned(draft):
            draft.unlink(missing_ok=True)


def write_new(path: Path, content: bytes) -> None:
    """Write a new file as a whole or not at all. Raises `LakeError` if the name is taken."""
    make_folder(path.parent)
    draft = path.with_name(f"_{path.name}.{os.getpid()}")
    try:
        _write(draft, content)
        os.link(draft, path)  # like a rename, but never replaces a file
    except FileExistsError:
        raise LakeError(f"{path} is there already") from None
    finally:
        draft.unlink(missing_ok=True)
    sync(path.parent)


def make_durable(folder: Path) -> None:
    """Flush a folder and every file below it to the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            sync(Path(root, name))
        sync(Path(root))


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, durably, where they do not exist yet."""
    for one in (*reversed(folder.parents), folder):
        if not one.exists():
            one.mkdir(exist_ok=True)
            sync(one.parent)


def place(source: Path, target: Path) -> None:
    """Rename a folder to where readers see it. Raises `LakeError` if the name is taken."""
    if target.exists():
        raise LakeError(f"{target} is there already")
    make_folder(target.parent)
    os.rename(source, target)
    sync(target.parent)


def settle(source: Path, target: Path) -> None:
    """Rename a file to where it belongs, replacing any other."""
    make_folder(target.parent)
    os.replace(source, target)
    sync(target.parent)


def move(source: Path, folder: Path, name: str) -> Path:
    """Rename into a folder, under a name or, if that is taken, the name and a number; return the new path."""
    make_folder(folder)
    target = free_name(folder, name)
    os.rename(source, target)
    sync(folder)
    sync(source.parent)
    return target


def free_name(folder: Path, name: str) -> Path:
    """The path in a folder under a name or, if that is taken, the name and a number."""
    target, number = folder / name, 1
    while target.exists():
        target, number = folder / f"{name}.{number}", number + 1
    return target


def exchange(one: Path, other: Path) -> None:
    """Exchange two folders in one step if the system can do that, else in three.

    If this is interrupted between the three, `one` is missing or new, and the old one is `{other}.old`.
    """
    if not _exchange_at_once(one, other):
        aside = other.with_name(f"{other.name}.old")
        os.rename(one, aside)
        sync(other.parent)  # before the name is reused: after a power cut it must be in one of the two
        os.rename(other, one)
        os.rename(aside, other)
    sync(one.parent)
    sync(other.parent)


WRITER_OPTIONS: Final = {
    "parquet.summary.metadata.level": "NONE",
    "parquet.bloom.filter.enabled": "false",
}
"""Options with which Spark writes the files of a lake, whatever its cluster sets: no `_metadata` beside them,
and no filters in them, by which readers could miss rows that checks of a lake find."""


def without_notes(folder: Path) -> None:
    """Remove the marker files of Spark and Hadoop."""
    for note in [*folder.rglob("_SUCCESS"), *folder.rglob("*.crc")]:
        note.unlink()


def count(folder: Path, pattern: str) -> int:
    """The number of files below a folder whose names match a pattern."""
    return sum(1 for _ in folder.rglob(pattern))


def remove(folder: Path) -> None:
    """Remove a folder with its contents, if it exists."""
    if folder.exists():
        shutil.rmtree(folder)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder if it exists and is empty."""
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


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


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
