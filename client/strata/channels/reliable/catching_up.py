"""When to ask the store for what was missed while away (channel.md §8; A-133). No I/O, no clock."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from strata.channels.persistence.interface import Change
from strata.channels.persistence.records import QueryMark, put

__all__ = ["CatchingUp"]

_OVERLAP_MS = 600_000
"""Relays file packets under their authors' times, and clocks differ."""
_MARK_EVERY_MS = 60_000


class CatchingUp:
    """The queries on connect of one channel. Times are wall milliseconds.

    A query reads newest first and stops at the first page with a message of this channel that names others:
    whatever is older and missing is then known by name (C-171, C-172).
    """

    def __init__(
        self, *, enabled: bool, threshold_ms: int, window_ms: int, mark: QueryMark | None = None
    ) -> None:
        """`mark` is what a store kept of an earlier run."""
        self._enabled = enabled
        self._threshold = threshold_ms
        self._window = window_ms
        self._succeeded_at = mark.succeeded_at if mark is not None else 0
        self._received_at = mark.received_at if mark is not None else 0
        self._asked = False
        self._missed = False
        self._marked = mark
        self._changes: list[Change] = []

    def is_due(self, now: int) -> bool:
        """Whether a store that has become available is to be asked (C-169, C-170, C-174)."""
        if not self._enabled:
            return False
        return self._missed or not self._asked or now - self._succeeded_at > self._threshold

    @property
    def has_missed(self) -> bool:
        """Whether a message was let pass."""
        return self._missed

    def missed(self) -> None:
        """A message was let pass for want of room: the store is to be asked without delay."""
        self._missed = True

    def begin(self, now: int) -> int:
        """A query begins; returns where its window does (C-173)."""
        self._missed = False  # what is let pass from now on, this query may not bring
        return self.since(now)

    def since(self, now: int) -> int:
        """Where the window of a query at this time begins."""
        known = min(now, max(self._succeeded_at, self._received_at))
        return max(known - _OVERLAP_MS, now - self._window)

    def oldest(self, now: int) -> int:
        """The earliest time worth reading back to for a gap."""
        return now - self._window

    def succeeded(self, now: int) -> None:
        """A query has been read to its end, or to where it may stop."""
        self._asked = True
        self._succeeded_at = now
        self._mark()

    def received(self, now: int) -> None:
        """A message came in."""
        self._received_at = now
        if self._marked is None or now - self._marked.received_at >= _MARK_EVERY_MS:
            self._mark()

    def stopped(self) -> None:
        """The channel stops: what it knows is to be kept."""
        self._asked = False
        if self._received_at:
            self._mark()

    def changes_to_store(self) -> list[Change]:
        """What a store has to do since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _mark(self) -> None:
        mark = QueryMark(self._succeeded_at, self._received_at)
        if mark != self._marked:
            self._marked = mark
            self._changes = [put(mark)]
