"""A ceiling over all accounts: what the relay refuses, and to which peers, when its memory runs short.

Every queue has a bound, but ten thousand bounded queues are more than a machine can hold. So the process
checks its resident memory twice a second, and at once when a part of the ceiling has arrived since. From
`Pressure.TIGHT` on it names the largest accounts: those that hold most of the bytes kept for peers. They may
publish nothing more. If that is not enough, nobody may connect, and the connections that hold most are
closed, first one at a time and then many. Connections that hold little are left alone: closing them would
free nothing.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Final

__all__ = ["HOLDS_MUCH", "MemoryCeiling", "Pressure", "dearest"]

HOLDS_MUCH: Final = 256 * 1024
"""An account that holds fewer bytes than this is never among the largest."""

_EASE: Final = 0.03
"""How far memory must fall below a threshold, as a part of the ceiling, before the pressure falls."""


class Pressure(enum.IntEnum):
    """How short memory is."""

    FINE = 0
    TIGHT = 1
    """The largest accounts may publish nothing."""
    SHORT = 2
    """Nobody may connect either, the relay is not ready, and the connection that holds most is closed."""
    FULL = 3
    """Many such connections are closed at a time."""


_FROM: Final = {Pressure.TIGHT: 0.8, Pressure.SHORT: 0.9, Pressure.FULL: 0.95}


class MemoryCeiling:
    """The memory pressure of one process, which may have `limit` bytes resident."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.pressure = Pressure.FINE

    def update(self, resident: int) -> Pressure:
        """This many bytes are resident now. Pressure rises at once, and falls when memory is well below."""
        part = resident / self.limit
        risen = max((each for each, start in _FROM.items() if part >= start), default=Pressure.FINE)
        left = max((each for each, start in _FROM.items() if part >= start - _EASE), default=Pressure.FINE)
        self.pressure = max(risen, min(self.pressure, left))
        return self.pressure


def dearest(held: Iterable[tuple[Hashable, int]]) -> set[Hashable]:
    """The accounts that together hold half of all bytes, the largest first; none that holds little."""
    totals: Counter[Hashable] = Counter()
    for account, size in held:
        totals[account] += size
    left, found = sum(totals.values()) / 2, set[Hashable]()
    for account, size in totals.most_common():
        if left <= 0 or size < HOLDS_MUCH:
            break
        found.add(account)
        left -= size
    return found
