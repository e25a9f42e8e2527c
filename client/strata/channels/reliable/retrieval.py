"""When to query the store for messages known to be missing, and how (channel.md §8; A-133).

`strata.channels.reliable.catching_up` handles messages missed while away.

`Retrieval` queries for a gap soon after it is found, by the hints in the messages that name it (C-164). An
answer may name further missing messages. As long as answers bring messages, the next query follows at once,
so a chain of gaps is closed in one go (C-168). Otherwise the next query waits for `retrieve_frequency_ms`
(C-163), and longer after each query that brought nothing.

A query by hints costs a round trip and brings at most two generations. If a gap is still open after some of
these, or has no hints, the topic is read: from where it was last read, or if that is unknown newest first,
until nothing is missing. A part that was read completely is not read again.
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
"""Messages overtake each other, so most of those that seem to be missing arrive within this time."""
_MAX_HASHES = 128
_MAX_ROUNDS = 4
"""The number of consecutive queries by hint before the topic is read."""
_MAX_BACKOFF = 32


@dataclass(frozen=True, slots=True)
class ByHash:
    """Request these packets."""

    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ByWindow:
    """Read the unread part of the topic, until nothing is missing."""


RetrievalPlan = ByHash | ByWindow


class Retrieval:
    """The query schedule of one channel. Times are in wall-clock milliseconds."""

    def __init__(self, frequency_ms: int) -> None:
        self._frequency = frequency_ms
        self._rounds = 0
        self._fruitless = 0
        self._asked_at = -math.inf
        self._under_way = False
        self._window_next = False
        self.at = math.inf
        """When to call `take`; never if retrieval is off."""

    def found_missing(self, now: int) -> None:
        """A gap was found, perhaps a new one."""
        if self._frequency and not self._under_way:
            soon = now + min(_SOON_MS, self._frequency)
            self.at = min(self.at, max(soon, self._asked_at + self._wait))

    def waited_for(self, now: int) -> None:
        """A first message waits for messages that were already missing, so query again soon."""
        if self._frequency and not self._under_way:
            self.at = min(self.at, now + min(_SOON_MS, self._frequency))

    def take(self, now: int, missing: Sequence[HistoryEntry]) -> RetrievalPlan | None:
        """Return what to request now; None if nothing is missing. Call `finished` or `failed` afterwards."""
        self.at = math.inf
        if not missing or not self._frequency:
            self._rounds = self._fruitless = 0
            return None
        self._under_way = True
        self._asked_at = now
        hashes = tuple(dict.fromkeys(hinted(missing).values()))
        # Hints first; if they lead nowhere, or to more and more messages, the topic is read.
        if hashes and not self._window_next and self._rounds < _MAX_ROUNDS:
            self._rounds += 1
            return ByHash(hashes)
        self._rounds = 0
        self._window_next = False
        return ByWindow()

    def finished(self, now: int, *, brought: int, still_missing: bool) -> None:
        """An answer is complete and has brought this number of new messages."""
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
        """The store could not be queried."""
        self._under_way = False
        self.at = now + self._wait

    def clock_stepped(self, by_ms: int) -> None:
        """The clock has jumped. After a jump back waits keep their length; a jump ahead makes them due."""
        if by_ms < 0:
            self.at += by_ms
            self._asked_at += by_ms

    @property
    def _wait(self) -> int:
        return int(self._frequency * min(2 ** max(0, self._fruitless - 1), _MAX_BACKOFF))


def hinted(missing: Iterable[HistoryEntry]) -> dict[str, bytes]:
    """The hashes by which a store finds these messages, by message id; at most as many as one query takes."""
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
