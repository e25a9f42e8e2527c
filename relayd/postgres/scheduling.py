"""A hint for the kernel's scheduler about the server process that everybody waits for.

All publishers wait for the one process that commits. It has little to do at a time, whereas a process that
reads a page takes milliseconds of a processor. On Linux (6.12 and newer) a process can declare that its turns
are short: it then gets a processor sooner when it wakes, but not more of it (`sched_setattr(2)`,
`sched_runtime`).
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from typing import Final

__all__ = ["SHORT_TURN_SECONDS", "ask_for_short_turns"]

SHORT_TURN_SECONDS: Final = 0.0002
"""The processor time of most appends between two waits for the disk."""

_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQII")
"""`struct sched_attr`: its size, policy, flags, nice value, priority, runtime, deadline, period, and the
bounds of the utilization."""
_CALLS: Final = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""The numbers of `sched_setattr` and `sched_getattr`: C libraries had no functions for them until 2025."""
_ORDINARY: Final = 0
_POLICY, _RUNTIME = 1, 5
"""The positions of these members in the structure."""


def ask_for_short_turns(pid: int) -> bool:
    """Request short turns for a process of this machine.

    Returns whether the system accepted that; an older kernel accepts it and does nothing. Never raises:
    without it everything works, only more slowly on a busy machine. A policy that an operator has chosen
    stays.
    """
    told = _attributes(pid)
    if told is None or told[_POLICY] != _ORDINARY:
        return False
    told[_RUNTIME] = round(SHORT_TURN_SECONDS * 1e9)
    return _call(0, pid, _ATTRIBUTES.pack(*told), 0) == 0


def _attributes(pid: int) -> list[int] | None:
    told = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if _call(1, pid, told, _ATTRIBUTES.size, 0) != 0:
        return None
    return list(_ATTRIBUTES.unpack(told.raw))


def _call(which: int, *arguments: object) -> int:
    numbers = _CALLS.get(platform.machine())
    if sys.platform != "linux" or numbers is None:
        return -1
    answer: int = ctypes.CDLL(None).syscall(numbers[which], *arguments)
    return answer
