"""When to compare with a peer: its last day often, all that may count once a day, and all after a doubt.

Times are seconds on one monotonic clock. Each wait is up to a quarter longer or shorter than the setting, so
that many relays do not compare in step. The cost that a peer may cause is bounded: comparisons that do not
complete, and bring nothing, are retried half as often each time, down to once a day; and none follows
another one sooner than that one took, or than the interval. What strangers may cause makes none rarer: if a
comparison requests in vain as many packets as it may, because this relay refuses them, the next one may
request half as many in vain.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["Rounds"]

_DAY_SECONDS = 86_400.0
_FIRST_WHOLE_SECONDS = 3600.0
_LEAST_REFUSED = 200


class Rounds:
    """The comparisons with one peer. With `interval` 0, only those that are requested."""

    def __init__(
        self, interval: float, now: float, random: Callable[[], float], *, most_refused: int = _LEAST_REFUSED
    ) -> None:
        """`random` returns numbers from 0 to 1. `most_refused` is the most packets that a comparison may
        request in vain."""
        self._interval = interval
        self._random = random
        self._recent_at = now + interval * random() if interval else math.inf
        self._whole_at = now + _FIRST_WHOLE_SECONDS * random() if interval else math.inf
        self._earliest = -math.inf
        self._failures = 0
        self._most_refused = self.most_refused = most_refused
        """The packets that the next comparison may request in vain."""

    def doubt(self, now: float) -> None:
        """Packets of the peer may have been skipped: a whole comparison is due, unless `interval` is 0."""
        if self._interval:
            self._whole_at = min(self._whole_at, max(now, self._earliest))

    def is_due(self, now: float) -> bool:
        """Whether to compare now."""
        return now >= max(self._earliest, min(self._recent_at, self._whole_at))

    def begin(self, now: float, *, whole: bool = False) -> bool:
        """Begin a comparison; return whether it must be of everything. `whole` says that it will be."""
        whole = whole or now >= self._whole_at
        if self._interval:
            self._recent_at = self._earliest = now + self._interval * self._near_one()
            if whole:
                self._whole_at = now + _DAY_SECONDS * self._near_one()
        return whole

    def ended(
        self,
        now: float,
        took: float,
        *,
        is_whole: bool,
        has_brought: bool = False,
        has_unfetched: bool = False,
    ) -> None:
        """A comparison is over, after `took` seconds. If it did not complete, the next one is of everything,
        and not at once. `has_unfetched`: it has requested as many packets in vain as it might."""
        fewer = max(self.most_refused // 2, min(_LEAST_REFUSED, self._most_refused))
        self.most_refused = self._most_refused if has_brought or not has_unfetched else fewer
        self._failures = 0 if is_whole or has_brought else self._failures + 1
        if not self._interval:
            return
        self._earliest = max(self._earliest, now + took)
        if not is_whole:
            doublings = min(max(0, self._failures - 1), 30)
            wait = min(self._interval * 2**doublings, _DAY_SECONDS) * self._near_one()
            self._whole_at = max(self._earliest, now + wait)
            self._recent_at = max(self._recent_at, self._whole_at)
            if self._failures:
                self._earliest = self._whole_at

    def _near_one(self) -> float:
        return 0.75 + self._random() / 2
