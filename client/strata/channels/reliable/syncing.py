"""When `syncing` and `synced` are told: at once where the standing changes, else once a second at most."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math

from strata.channels.reliable.events import Synced, Syncing

__all__ = ["SyncNews"]

_LEAST_GAP_MS = 1_000


class SyncNews:
    """Compares what is received, missing and lost with what was told last."""

    def __init__(self) -> None:
        self.at = math.inf
        """When a change that was too soon to be told is due."""
        self._told: Syncing | Synced = Synced(received=0, missing=0, lost=0)
        self._told_at = -math.inf

    def look(self, counts: tuple[int, int, int], now_ms: int) -> Syncing | Synced | None:
        """The event to tell now of these counts, if there is one."""
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
