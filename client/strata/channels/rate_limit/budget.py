"""The transmissions that one transport identity has made and may make (C-222 … C-225, C-232 … C-235).

Two meters return to zero at each epoch; epochs are aligned to Unix time. A relay can add a pause, and a
window that limits the transmissions within some time. There is no clock: call `advance(now)`, with Unix time
in milliseconds, before reading anything.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections import deque

from strata.channels.persistence.records import EpochCount
from strata.channels.rate_limit.values import RateLimitConfig

__all__ = ["TransportBudget"]

_MAX_WINDOW_ENTRIES = 10_000
_ROUNDING = 1e-9


class _Meter:
    """The use of one limit in this epoch."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int | None, used: int = 0) -> None:
        self.limit = limit
        self.used = used

    @property
    def has_room(self) -> bool:
        return self.limit is None or self.used < self.limit

    @property
    def share(self) -> float:
        return 0.0 if self.limit is None else self.used / self.limit


class _Window:
    """At most `limit` events in any `window_ms`. It is exact, since it keeps the times of the last events."""

    __slots__ = ("_at", "_most", "_window_ms")

    def __init__(self, limit: int, window_ms: int) -> None:
        # A huge limit is scaled down with its window, to bound the number of times that are kept.
        self._most = min(limit, _MAX_WINDOW_ENTRIES)
        self._window_ms = -(-window_ms * self._most // limit)
        self._at: deque[int] = deque(maxlen=self._most)

    @property
    def opens_at(self) -> int:
        return self._at[0] + self._window_ms if len(self._at) == self._most else 0

    @property
    def interval_ms(self) -> float:
        return self._window_ms / self._most

    def note(self, now: int) -> None:
        self._at.append(now)

    def shift(self, by: int) -> None:
        self._at = deque((at - by for at in self._at), maxlen=self._most)


class TransportBudget:
    """Two meters, a pause and a window."""

    def __init__(self, config: RateLimitConfig, counted: EpochCount | None = None) -> None:
        """`counted` is the stored count of an earlier run (C-235)."""
        self._config = config
        self._messages = _Meter(config.messages_per_epoch, counted.messages if counted else 0)
        self._segments = _Meter(config.segments_per_epoch, counted.segments if counted else 0)
        self.epoch = counted.epoch if counted else -1
        """The number of the current epoch; -1 before the first `advance`."""
        self._counted_in = self.epoch
        """The epoch for which the meters count; after the clock was set back, it is a later one."""
        self._now = 0
        self._paused_until = 0
        self._window: _Window | None = None

    @property
    def count(self) -> EpochCount:
        """The count of the current epoch, or of the one from which the clock was set back."""
        return EpochCount(self._counted_in, self._messages.used, self._segments.used)

    @property
    def messages_open(self) -> bool:
        """Whether one more message may be sent in this epoch."""
        return not self._config.enabled or self._messages.has_room

    @property
    def segments_open(self) -> bool:
        """Whether one more transmission may be made in this epoch."""
        return not self._config.enabled or self._segments.has_room

    @property
    def approached(self) -> bool:
        """Whether the threshold is reached: ephemerals are dropped, retransmissions wait (C-091, C-182)."""
        return self._config.enabled and self._share >= self._config.approach_threshold - _ROUNDING

    @property
    def utilisation(self) -> int:
        """The used part of the fuller meter, in percent (C-233)."""
        return min(100, int(100 * self._share + _ROUNDING)) if self._config.enabled else 0

    @property
    def open_at(self) -> int:
        """The time from which neither the pause nor the window holds a transmission back."""
        return max(self._paused_until, 0 if self._window is None else self._window.opens_at)

    @property
    def next_epoch_at(self) -> int:
        """When the meters next return to zero."""
        return (self.epoch + 1) * self._config.epoch_size_ms

    def advance(self, now: int) -> None:
        """Set the current time."""
        if now < self._now:
            # The clock was set back. Waits keep their length.
            self._paused_until -= self._now - now
            if self._window is not None:
                self._window.shift(self._now - now)
        self._now = now
        epoch = now // self._config.epoch_size_ms
        # When the clock is set back, epochs repeat. Neither the epoch it is set to nor the epoch it was in
        # gets a new budget, since more than the limit could then be sent in it.
        if epoch > self.epoch and epoch != self._counted_in:
            self._messages.used = self._segments.used = 0
            self._counted_in = epoch
        self.epoch = epoch

    def charge(self, *, message: bool) -> None:
        """Count a transmission; with `message`, count it against the message budget too."""
        self._messages.used += message
        self._segments.used += 1
        if self._window is not None:
            self._window.note(self._now)

    def pause(self, retry_after_ms: int) -> None:
        """Hold back all transmissions for this time (C-232)."""
        wait = min(max(retry_after_ms, 0), self._config.max_pause_ms)
        self._paused_until = max(self._paused_until, self._now + wait)

    def learn_limit(self, limit: int, window_ms: int) -> None:
        """Keep to a relay's limit from now on, if it is the strictest limit known (C-225)."""
        if limit < 1 or window_ms < 1:
            return  # the relay declared numbers that are not a rate
        window = _Window(limit, window_ms)
        if self._window is None or window.interval_ms > self._window.interval_ms:
            self._window = window

    @property
    def _share(self) -> float:
        return max(self._messages.share, self._segments.share)
