"""The memory that this process uses, and the memory that it may use."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

__all__ = ["default_limit", "give_back", "resident_bytes"]

_PART: Final = 0.6
"""The default limit as a part of memory; the rest is for PostgreSQL, the page cache and other programs."""
_CGROUPS: Final = Path("/sys/fs/cgroup")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """The resident memory of this process; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def default_limit(workers: int) -> int:
    """The memory for each of this many processes: a part of the machine's memory or the control group's."""
    physical = os.sysconf("SC_PHYS_PAGES") * _PAGE
    return int(min([physical, *_cgroup_limits()]) * _PART / workers)


def give_back() -> None:
    """Let the C library return freed memory that would otherwise stay resident for later use."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):  # another C library
        return


def _cgroup_limits() -> list[int]:
    found = []
    for name in ("memory.max", "memory/memory.limit_in_bytes", *_own_group()):
        try:
            found.append(int((_CGROUPS / name).read_text()))
        except (OSError, ValueError):  # there is no such file, or it says "max"
            continue
    return found


def _own_group() -> list[str]:
    """The limit files of this process's control group, and of the groups around it (cgroup v2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = [Path(line[3:]) for line in lines if line.startswith("0::/")]
    inside = [each.relative_to("/") for path in paths for each in (path, *path.parents[:-1])]
    return [str(each / "memory.max") for each in inside]
