"""The time of a node's channels, which runs evenly, follows the wall clock, and reports when that was set.

Timers need a clock that runs evenly; Lamport times, packets and stores need real time. The time of channels
therefore runs with the event loop's clock, and `look` compares it with the wall clock. If the two are a
second or more apart, channels take the wall clock's time and learn by how much they jumped. A laptop that
slept, a clock that was set, and one that drifts for hours all look the same, and are treated the same.

`date_of_sending` deals with the clocks of other participants.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable

from strata.channels.sds.config import FAR_AHEAD_MS

__all__ = ["ChannelClock", "date_of_sending"]

_TOLERANCE_MS = 1_000
"""The smallest difference that causes a jump; clocks of one machine drift by a second in some hours."""
_LEAST_CLOCK_MS = 1_500_000_000_000
"""Lamport times below this are counters of other implementations, not times."""


class ChannelClock:
    """Unix milliseconds from two clocks in seconds: one that may be set, and one that runs evenly."""

    def __init__(self, wall: Callable[[], float], steady: Callable[[], float]) -> None:
        self._wall = wall
        self._steady = steady
        self._began_at = wall() - steady()

    def now_ms(self) -> int:
        """The current time. It jumps or goes back only through `look`."""
        return int((self._began_at + self._steady()) * 1000)

    def look(self) -> int:
        """Take the wall clock's time if it differs. Returns the jump in milliseconds, negative if back."""
        before = self.now_ms()
        began_at = self._wall() - self._steady()
        if abs(began_at - self._began_at) * 1000 < _TOLERANCE_MS:
            return 0
        self._began_at = began_at
        return self.now_ms() - before


def date_of_sending(lamport: int | None, transmitted_at: int | None, now_ms: int) -> int | None:
    """When a message was sent, by its sender's clock; no single value on the wire gives this.

    Returns Unix milliseconds: the earlier of two times that are never too early. None if they are absurd.

    A Lamport time is the sender's clock, unless that was behind others. A transmission, in Unix seconds, may
    come long after the message was sent.
    """
    latest = now_ms + FAR_AHEAD_MS if transmitted_at is None else transmitted_at * 1000 + 999
    if lamport is not None and _LEAST_CLOCK_MS <= lamport <= latest:
        sent_at = lamport
    elif transmitted_at is not None:
        sent_at = transmitted_at * 1000
    else:
        return None
    return sent_at if sent_at <= now_ms + FAR_AHEAD_MS else None
