"""When to ask the store, and for which messages (channel.md §8; A-133).

`CatchingUp` asks for messages that were missed while away, `Retrieval` for messages known to be missing.

`Retrieval` asks for a gap soon after it is found, by the hints in the messages that name it (C-164).
An answer may name further missing messages. As long as answers bring messages, the next query follows at
once, so a chain of gaps is closed in one go (C-168). Otherwise the next query waits for
`retrieve_frequency_ms` (C-163), and longer after each query that brought nothing.

A query by hints costs a round trip and brings two generations at most. For a gap that is still open after
some of them, or that has no hints, `Retrieval` reads the whole topic, newest first, until nothing is missing.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strata.channels.persistence.interface import Change
from strata.channels.persistence.records import QueryMark, put
from strata.channels.sds import HistoryEntry

__all__ = ["ByHash", "ByWindow", "CatchingUp", "Retrieval", "RetrievalPlan"]

_HINT_BYTES = 32
_SOON_MS = 200
"""Messages overtake each other: most of what seems to be missing is here after this long."""
_MAX_HASHES = 128
_MAX_ROUNDS = 4
"""Queries by hint in a row before the topic is read through."""
_MAX_BACKOFF = 32
_OVERLAP_MS = 600_000
"""Relays file packets under their authors' times, and clocks differ."""
_MARK_EVERY_MS = 60_000
_ASLEEP_MS = 10_000
"""A jump ahead by more than this may have been sleep."""


@dataclass(frozen=True, slots=True)
class ByHash:
    """Ask for these packets."""

    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ByWindow:
    """Read the topic back to this time, newest first, until nothing is missing."""

    since_ms: int


RetrievalPlan = ByHash | ByWindow


class Retrieval:
    """The schedule of one channel. Times are wall milliseconds."""

    def __init__(self, frequency_ms: int) -> None:
        self._frequency = frequency_ms
        self._rounds = 0
        self._fruitless = 0
        self._asked_at = -math.inf
        self._under_way = False
        self._window_next = False
        self.at = math.inf
        """When `take` has something; never if retrieval is off."""

    def found_missing(self, now: int) -> None:
        """There is a gap, perhaps a new one."""
        if self._frequency and not self._under_way:
            soon = now + min(_SOON_MS, self._frequency)
            self.at = min(self.at, max(soon, self._asked_at + self._wait))

    def take(self, now: int, missing: Sequence[HistoryEntry], window_since_ms: int) -> RetrievalPlan | None:
        """What to ask for now; None if nothing is missing. Then say `finished`."""
        self.at = math.inf
        if not missing or not self._frequency:
            self._rounds = self._fruitless = 0
            return None
        self._under_way = True
        self._asked_at = now
        hashes = _hashes(missing)
        # Hints first; once they led nowhere, or lead on and on, the topic is read through.
        if hashes and not self._window_next and self._rounds < _MAX_ROUNDS:
            self._rounds += 1
            return ByHash(hashes)
        self._rounds = 0
        self._window_next = False
        return ByWindow(window_since_ms)

    def finished(self, now: int, *, brought: int, still_missing: bool) -> None:
        """An answer is complete: so many new messages came of it."""
        self._under_way = False
        if not still_missing:
            self._rounds = self._fruitless = 0
            self.at = math.inf
            return
        if brought:
            self._fruitless = 0
            self.at = now
            return
        self._fruitless += 1
        self._window_next = self._fruitless % 2 == 1
        self.at = now + self._wait

    def failed(self, now: int) -> None:
        """The store could not be asked."""
        self._under_way = False
        self.at = now + self._wait

    def clock_stepped(self, by_ms: int) -> None:
        """The time has jumped: back, the waits keep their length; ahead, whatever is due is asked for."""
        if by_ms < 0:
            self.at += by_ms
            self._asked_at += by_ms

    @property
    def _wait(self) -> int:
        return int(self._frequency * min(2 ** max(0, self._fruitless - 1), _MAX_BACKOFF))


class CatchingUp:
    """The queries on connect of one channel. Times are wall milliseconds.

    A query reads newest first and stops at the first page with a message of this channel that names others:
    whatever is older and missing is then known by name (C-171, C-172).
    """

    def __init__(
        self, *, enabled: bool, threshold_ms: int, window_ms: int, mark: QueryMark | None = None
    ) -> None:
        """`mark` is the record of an earlier run."""
        self._enabled = enabled
        self._threshold = threshold_ms
        self._window = window_ms
        self._succeeded_at = mark.succeeded_at if mark is not None else 0
        self._received_at = mark.received_at if mark is not None else 0
        self._asked = False
        self._missed = False
        self._was_offline = False
        self._marked = mark
        self._changes: list[Change] = []

    def is_due(self, now: int) -> bool:
        """Whether a store that has become available is to be asked (C-169, C-170, C-174)."""
        if not self._enabled:
            return False
        age = now - self._succeeded_at
        due = self._missed or self._was_offline or not self._asked
        return due or age > self._threshold or age < -_OVERLAP_MS

    @property
    def has_missed(self) -> bool:
        """Whether a message was let pass for want of room."""
        return self._missed

    def clock_stepped(self, by_ms: int) -> None:
        """The time has jumped: ahead, the machine may have slept, so the store is to be asked."""
        if by_ms > _ASLEEP_MS or by_ms < -_OVERLAP_MS:
            self._missed = True

    def offline(self) -> None:
        """No store can be reached: once one can, it is to be asked, however soon (C-170)."""
        self._was_offline = True

    def missed(self) -> None:
        """A message was let pass for want of room: the store is to be asked without delay."""
        self._missed = True

    def begin(self, now: int) -> int:
        """A query begins; returns where its window does (C-173)."""
        self._missed = self._was_offline = False  # this query may not bring messages that pass from now on
        return self.since(now)

    def since(self, now: int) -> int:
        """Where the window of a query at this time begins."""
        known = max(self._succeeded_at, self._received_at)
        if known - now > _OVERLAP_MS:
            known = 0  # a mark of a clock that was wrong: nobody knows what was asked for
        known = min(now, known)
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
        if self._marked is None or abs(now - self._marked.received_at) >= _MARK_EVERY_MS:
            self._mark()

    def stopped(self) -> None:
        """The channel stops: store the mark."""
        self._asked = False
        if self._received_at:
            self._mark()

    def changes_to_store(self) -> list[Change]:
        """The changes to store since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _mark(self) -> None:
        mark = QueryMark(self._succeeded_at, self._received_at)
        if mark != self._marked:
            self._marked = mark
            self._changes = [put(mark)]


def _hashes(missing: Iterable[HistoryEntry]) -> tuple[bytes, ...]:
    found: dict[bytes, None] = {}
    for entry in missing:
        hint = entry.retrieval_hint
        if hint is not None and len(hint) == _HINT_BYTES:
            found[hint] = None
            if len(found) == _MAX_HASHES:
                break
    return tuple(found)
