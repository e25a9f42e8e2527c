"""When to ask the store for messages known to be missing, and how (channel.md §8; A-133).

`strata.channels.reliable.catching_up` reads what was missed while away.

`Retrieval` asks for a gap soon after it is found, by the hints in the messages that name it (C-164).
An answer may name further missing messages. As long as answers bring messages, the next query follows at
once, so a chain of gaps is closed in one go (C-168). Otherwise the next query waits for
`retrieve_frequency_ms` (C-163), and longer after each query that brought nothing.

A query by hints costs a round trip and brings two generations at most. For a gap that is still open after
some of them, or that has no hints, the topic is read: on from where it was last read, and where that is not
known newest first, until nothing is missing. What was read to its end is not read again.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strata.channels.sds import HistoryEntry

__all__ = ["ByHash", "ByWindow", "Retrieval", "RetrievalPlan", "has_hint", "hinted"]

_HINT_BYTES = 32
_SOON_MS = 200
"""Messages overtake each other: most of what seems to be missing is here after this long."""
_MAX_HASHES = 128
_MAX_ROUNDS = 4
"""Queries by hint in a row before the topic is read through."""
_MAX_BACKOFF = 32


@dataclass(frozen=True, slots=True)
class ByHash:
    """Ask for these packets."""

    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ByWindow:
    """Read what is unread of the topic, until nothing is missing."""


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

    def waited_for(self, now: int) -> None:
        """A first message waits for what was missing already: it is worth another look at once."""
        if self._frequency and not self._under_way:
            self.at = min(self.at, now + min(_SOON_MS, self._frequency))

    def take(self, now: int, missing: Sequence[HistoryEntry]) -> RetrievalPlan | None:
        """What to ask for now; None if nothing is missing. Then say `finished`."""
        self.at = math.inf
        if not missing or not self._frequency:
            self._rounds = self._fruitless = 0
            return None
        self._under_way = True
        self._asked_at = now
        hashes = tuple(dict.fromkeys(hinted(missing).values()))
        # Hints first; once they led nowhere, or lead on and on, the topic is read through.
        if hashes and not self._window_next and self._rounds < _MAX_ROUNDS:
            self._rounds += 1
            return ByHash(hashes)
        self._rounds = 0
        self._window_next = False
        return ByWindow()

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


def hinted(missing: Iterable[HistoryEntry]) -> dict[str, bytes]:
    """The hashes by which a store finds these messages, by message id; at most so many as one query takes."""
    found: dict[str, bytes] = {}
    for entry in missing:
        hint = entry.retrieval_hint
        if hint is not None and has_hint(entry):
            found[entry.message_id] = hint
            if len(found) == _MAX_HASHES:
                break
    return found


def has_hint(entry: HistoryEntry) -> bool:
    """Whether a store can find this message by its hash."""
    return entry.retrieval_hint is not None and len(entry.retrieval_hint) == _HINT_BYTES
