"""Where tests keep their files: in memory, if there is plenty of it.

The run creates hundreds of databases and lakes and throws them away, and on a disk that takes a fifth of its
processor time. A disk proves nothing here: files in memory also survive a `kill -9` of the process that wrote
them, and tests simulate failing disks themselves. `TMPDIR`, if set, is used unchanged.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import psutil

__all__ = ["keep_files_in_memory"]

_MEMORY = Path("/dev/shm")
_FREE = 4 * 2**30
"""Several times what a whole run holds at once."""
_AVAILABLE = 12 * 2**30
"""Besides the files there are JVMs, browsers and databases."""
_LIMIT = Path("/sys/fs/cgroup/memory.max")


def keep_files_in_memory() -> None:
    """Let this process and its children make temporary files in memory, if there is enough."""
    if "TMPDIR" not in os.environ and _free() >= _FREE and _available() >= _AVAILABLE:
        os.environ["TMPDIR"] = str(_MEMORY)
        tempfile.tempdir = None


def _free() -> int:
    try:
        told = os.statvfs(_MEMORY)
    except (OSError, AttributeError):
        return 0
    return told.f_bavail * told.f_frsize


def _available() -> int:
    there = psutil.virtual_memory().available
    try:
        return min(there, int(_LIMIT.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit
        return there
