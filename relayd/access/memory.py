"""A ceiling over all accounts: what the relay refuses, and whom, when its memory runs short.

Every queue has its bound, but ten thousand bounded queues are more than a machine has. So the process looks
at its resident memory twice a second, and at once where a part of the ceiling has arrived since. From
`Pressure.TIGHT` on it names the dearest accounts: those that hold most of the bytes kept for peers. They may
publish nothing further; when that is not enough, nobody may connect, and the connections that hold most are
closed, one after the other and then many at a time. Whoever holds little is left alone: closing such
connections would free nothing.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Final

__all__ = ["HOLDS_MUCH", "MemoryCeiling", "Pressure", "dearest"]

HOLDS_MUCH: Final = 256 * 1024
"""Bytes below which nobody is dear."""

_EASE: Final = 0.03
"""How far memory must fall below a threshold to be past it."""


class Pressure(enum.IntEnum):
    """How short memory is."""

    FINE = 0
    TIGHT = 1
    """The dearest accounts may publish nothing."""
    SHORT = 2
    """Nobody may connect either, the relay is not ready, and the connection that holds most is closed."""
    FULL = 3
    """Many are."""


_FROM: Final = {Pressure.TIGHT: 0.8, Pressure.SHORT: 0.9, Pressure.FULL: 0.95}


class MemoryCeiling:
    """The pressure of one process, which may have `limit` bytes resident."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.pressure = Pressure.FINE

    def update(self, resident: int) -> Pressure:
        """So much is resident now. Pressure rises at once, and falls when memory is well below."""
        part = resident / self.limit
        risen = max((each for each, start in _FROM.items() if part >= start), default=Pressure.FINE)
        left = max((each for each, start in _FROM.items() if part >= start - _EASE), default=Pressure.FINE)
        self.pressure = max(risen, min(self.pressure, left))
        return self.pressure


def dearest(held: Iterable[tuple[Hashable, int]]) -> set[Hashable]:
    """The accounts that together hold half of all bytes, the dearest first; none that holds little."""
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
