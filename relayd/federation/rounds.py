"""When a peer is compared with: its last day often, all that may count once a day, and all after a doubt.

Times are seconds on one monotonic clock. Each wait is up to a quarter longer or shorter than the setting, so
that many relays do not compare in step.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["Rounds"]

_DAY_SECONDS = 86_400.0
_FIRST_WHOLE_SECONDS = 3600.0


class Rounds:
    """The comparisons with one peer. `interval` 0: only those that somebody asks for."""

    def __init__(self, interval: float, now: float, random: Callable[[], float]) -> None:
        """`random` gives numbers from 0 to 1."""
        self._interval = interval
        self._random = random
        self._recent_at = now + interval * random() if interval else math.inf
        self._whole_at = now + _FIRST_WHOLE_SECONDS * random() if interval else math.inf

    def doubt(self, now: float) -> None:
        """What the peer has may have been passed by: everything is due."""
        if self._interval:
            self._whole_at = min(self._whole_at, now)

    def is_due(self, now: float) -> bool:
        """Whether to compare now."""
        return now >= min(self._recent_at, self._whole_at)

    def begin(self, now: float, *, whole: bool = False) -> bool:
        """A comparison begins; whether it is to be of everything. `whole` says that it will be."""
        whole = whole or now >= self._whole_at
        if self._interval:
            self._recent_at = now + self._interval * self._near_one()
            if whole:
                self._whole_at = now + _DAY_SECONDS * self._near_one()
        return whole

    def failed(self, now: float) -> None:
        """It did not come to its end: the next one is of everything, and not at once."""
        if self._interval:
            self._whole_at = now + self._interval * self._near_one()

    def _near_one(self) -> float:
        return 0.75 + self._random() / 2
