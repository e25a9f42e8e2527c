"""Temporary folders that killed processes have left, and the locks by which one knows that."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["is_held", "remove_left"]


def is_held(lock: Path) -> bool:
    """Whether a process holds this lock file: the system gives locks back, whatever ends a process.

    Raises `OSError` where there is none.
    """
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove_left(prefix: str, is_left: Callable[[Path], bool]) -> None:
    """Remove this user's temporary folders of that prefix whose processes are gone.

    A folder stays where `is_left` raises `OSError`: whose it is cannot be told.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # or somebody else's, or being removed by somebody else
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and is_left(folder):
                shutil.rmtree(folder)
