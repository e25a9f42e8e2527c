"""Temporary folders that killed processes have left, and the locks that reveal them."""

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
    """Whether a process holds this lock file: the system releases locks, however a process ends.

    Raises `OSError` if the file does not exist.
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
    """Remove this user's temporary folders with this prefix whose processes have ended.

    A folder for which `is_left` raises `OSError` stays: nothing shows whose it is.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # also if it is somebody else's, or being removed by somebody else
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and is_left(folder):
                shutil.rmtree(folder)
