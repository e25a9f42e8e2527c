"""How much memory this process has, and how much it may have."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Final

__all__ = ["default_limit", "give_back", "resident_bytes"]

_PART: Final = 0.6
"""The rest is for PostgreSQL, the page cache and whatever else runs here."""
_CGROUPS: Final = Path("/sys/fs/cgroup")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Resident memory of this process; 0 on a system that does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0


def default_limit(workers: int) -> int:
    """What each of so many processes may have: a part of what the machine has, or its control group."""
    physical = os.sysconf("SC_PHYS_PAGES") * _PAGE
    return int(min([physical, *_cgroup_limits()]) * _PART / workers)


def give_back() -> None:
    """Let the C library return what it keeps for later; without it, what was freed stays resident."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):  # another C library
        return


def _cgroup_limits() -> list[int]:
    found = []
    for name in ("memory.max", "memory/memory.limit_in_bytes", *_own_group()):
        try:
            found.append(int((_CGROUPS / name).read_text()))
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
    return found


def _own_group() -> list[str]:
    """The limit files of the control group of this process and of those around it (cgroup v2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = [Path(line[3:]) for line in lines if line.startswith("0::/")]
    inside = [each.relative_to("/") for path in paths for each in (path, *path.parents[:-1])]
    return [str(each / "memory.max") for each in inside]
