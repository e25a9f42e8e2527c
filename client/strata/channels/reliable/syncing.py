"""When `syncing` and `synced` are reported: at once if one replaces the other, else at most once a second."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math

from strata.channels.reliable.events import Synced, Syncing

__all__ = ["SyncNews"]

_LEAST_GAP_MS = 1_000


class SyncNews:
    """Compares the counts of received, missing and lost messages with those reported last."""

    def __init__(self) -> None:
        self.at = math.inf
        """When a change that came too soon to be reported is due."""
        self._told: Syncing | Synced = Synced(received=0, missing=0, lost=0)
        self._told_at = -math.inf

    def look(self, counts: tuple[int, int, int], now_ms: int) -> Syncing | Synced | None:
        """Return the event to report for these counts now, if there is one."""
        received, missing, lost = counts
        kind = Syncing if missing else Synced
        event = kind(received=received, missing=missing, lost=lost)
        if event == self._told:
            self.at = math.inf
            return None
        due = self._told_at + _LEAST_GAP_MS
        if type(event) is type(self._told) and self._told_at <= now_ms < due:
            self.at = due
            return None
        self.at, self._told, self._told_at = math.inf, event, now_ms
        return event
