"""Which relay to ask, and when, for packets a subscription may have missed (C-275, C-276, C-278): no I/O.

A subscription reads from a few relays. A packet may be only on another relay, or a relay may withhold it from
the stream and yet return it on request. So every relay of the pool, reader or not, is asked periodically for
everything that it received since it was last asked. The next sweep covers what a failed sweep did not reach.
A relay that gives cursors is asked from the last cursor on, which is exact; one that gives none is asked from
its last success less `overlap`, and repeats are dropped.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from strata.relays.connection.values import RESUME_MARGIN_SECONDS
from strata.relays.pool.values import Position

__all__ = ["Start", "Sweeps", "start_after"]


@dataclass(frozen=True, slots=True)
class Start:
    """Where to start reading at a relay: members of a `Query`."""

    cursor: str | None = None
    cursor_fallback_since: int | None = None
    since: int | None = None
    received_since: int | None = None


def start_after(received_at: int, *, since: int | None, received_since: int | None) -> Start:
    """Start with everything received from a time on, at a relay for which there is no cursor.

    `since` stays that of the query: a packet from another relay may have been written days before.
    """
    return Start(since=since, received_since=max(received_at, received_since or 0, 0))


@dataclass(slots=True)
class _Swept:
    due_at: float
    success_at: int
    """When the last successful sweep, or else the subscription, began, by the wall clock."""
    cursor: str | None = None
    running: bool = False
    hastened: bool = False
    """Whether it was hastened during a sweep, which may already have passed what was to be found."""
    left: list[Position | None] = field(default_factory=list)
    """Where the subscription stopped reading during a sweep, which may have begun after that position."""

    def go_back(self, position: Position | None) -> None:
        """Begin the next sweep no later than this position."""
        received_at = 0 if position is None else position.received_at
        if received_at < self.success_at:
            self.success_at = received_at
            self.cursor = None if position is None else position.cursor


class Sweeps:
    """The schedule of one subscription. `now` is on the monotonic clock; `started_at` and `began_at` are Unix
    seconds."""

    def __init__(self, *, interval: float | None, overlap: int, started_at: int) -> None:
        self._interval = interval
        self._overlap = overlap
        self._started_at = started_at
        self._relays: dict[str, _Swept] = {}
        self._cursors: dict[str, str] = {}

    def begin_at(self, url: str, cursor: str) -> None:
        """Begin this relay's first sweep at a cursor, which is exact."""
        self._cursors[url] = cursor

    def cursor(self, url: str) -> str | None:
        """The cursor up to which this relay was swept, or where its first sweep begins; None if unknown."""
        swept = self._relays.get(url)
        return self._cursors.get(url) if swept is None else swept.cursor

    def due(self, urls: Iterable[str], now: float) -> list[str]:
        """The relays to ask now, among `urls`; each has at most one sweep at a time."""
        if self._interval is None:
            return []
        due = []
        for url in urls:
            swept = self._relays.get(url)
            if swept is None:
                swept = _Swept(now + self._interval, self._started_at, self._cursors.get(url))
                self._relays[url] = swept
            if not swept.running and now >= swept.due_at:
                swept.running = True
                due.append(url)
        return due

    def start(self, url: str, *, since: int | None, received_since: int | None) -> Start:
        """Where this relay's sweep begins: never later than its last success (C-276)."""
        swept = self._relays[url]
        from_time = swept.success_at - self._overlap
        if swept.cursor is None:
            return start_after(from_time, since=since, received_since=received_since)
        # A relay that no longer knows the cursor answers from the time instead.
        return Start(swept.cursor, max(from_time - RESUME_MARGIN_SECONDS, 0), since, received_since)

    def succeeded(self, url: str, position: Position | None, *, began_at: int, now: float) -> None:
        """Note that the sweep succeeded; `position` is that of its last packet, if there was one."""
        self._relays[url].success_at = began_at
        self._ended(url, position, now)

    def failed(self, url: str, position: Position | None, now: float) -> None:
        """Note that the sweep failed: the next one covers the rest, from the last cursor given."""
        self._ended(url, position, now)

    def left_at(self, url: str, position: Position | None) -> None:
        """Note that the subscription stopped reading from this relay at `position`: sweeps begin there."""
        swept = self._relays.setdefault(url, _Swept(0.0, self._started_at))
        if swept.running:
            swept.left.append(position)
        else:
            swept.go_back(position)

    def hasten(self, url: str, now: float) -> None:
        """Sweep this relay at once: it has reconnected, or another relay has lost packets."""
        swept = self._relays.get(url)
        if swept is not None:
            swept.due_at, swept.hastened = now, swept.running

    def _ended(self, url: str, position: Position | None, now: float) -> None:
        swept = self._relays[url]
        if position is not None and position.cursor is not None:
            swept.cursor = position.cursor
        for left in swept.left:
            swept.go_back(left)
        swept.left.clear()
        swept.due_at = now if swept.hastened else now + (self._interval or math.inf)
        swept.running = swept.hastened = False

    def get_timer(self) -> float:
        """When a sweep of one of the relays known so far is due."""
        return min((s.due_at for s in self._relays.values() if not s.running), default=math.inf)
