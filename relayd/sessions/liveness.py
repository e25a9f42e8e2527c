"""Deadlines of one connection: is the peer still there, and does it still read? Without I/O or clock.

Silence means something only while the relay listens: a connection whose reading is paused is not pinged. A
peer that takes none of the bytes waiting for it is stuck, whatever it sends (R-170); a peer that takes some,
however slowly, is alive.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

__all__ = ["Liveness", "PeerState"]


class PeerState(enum.Enum):
    """The result of one look at the deadlines."""

    FINE = "fine"
    SILENT = "silent"
    """Nothing was heard for a while: send a ping (R-130)."""
    GONE = "gone"
    """Pings went unanswered: the socket is half-open."""
    STUCK = "stuck"
    """The peer took nothing for too long."""


@dataclass(slots=True)
class Liveness:
    """When a peer was last heard, and how much it has taken; all times are monotonic seconds."""

    ping_interval: float
    ping_misses: int
    slow_consumer_timeout: float
    heard_at: float
    _pings: int = 0
    _asked_at: float = -math.inf
    _waiting_bytes: int = 0
    _stuck_since: float | None = None

    def heard(self, now: float) -> None:
        """Bytes came from the peer, or the peer took bytes."""
        self.heard_at = now
        self._pings = 0

    def write_paused(self, now: float, waiting_bytes: int) -> None:
        """The transport's buffer is full."""
        self._stuck_since = now
        self._waiting_bytes = waiting_bytes

    def write_resumed(self, now: float) -> None:
        """The peer has taken what was waiting: a sign of life, even if it was not listened to meanwhile."""
        self._stuck_since = None
        self.heard(now)

    def check(self, now: float, *, waiting_bytes: int, listening: bool) -> PeerState:
        """Look at the deadlines; called about once a second."""
        if self._stuck_since is not None:
            return self._check_stuck(now, waiting_bytes, self._stuck_since)
        if not listening:
            self.heard_at = now
        elif now - self.heard_at > self.ping_interval * (self._pings + 1):
            if now - self._asked_at < self.ping_interval:
                return PeerState.FINE  # the ping was sent late; the peer still has its full time to answer
            if self._pings >= self.ping_misses:
                return PeerState.GONE
            self._pings += 1
            self._asked_at = now
            return PeerState.SILENT
        return PeerState.FINE

    def _check_stuck(self, now: float, waiting_bytes: int, since: float) -> PeerState:
        before, self._waiting_bytes = self._waiting_bytes, waiting_bytes
        if waiting_bytes < before:
            self._stuck_since = now
        elif now - since > self.slow_consumer_timeout:
            return PeerState.STUCK
        return PeerState.FINE
