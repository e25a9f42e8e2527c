"""Logged messages that no other names, and the peers that lack them.

With a history of two entries, the third of three messages sent at once is named by nobody, ever. Whoever
missed it has no gap to notice, and the logs differ for good. But a filter never denies what it holds: if the
filter of a received sync lacks such an id, that peer lacks the message. One's own next sync then names it
besides the most recent ones, and the peer's ordinary detection of gaps does the rest.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable, Iterable

from strata.channels.sds.bloom import BloomParameters
from strata.channels.sds.log import Log

__all__ = ["Tips"]

_MAX_TIPS = 128


class Tips:
    """Ids of logged messages that none names; `grace` is how long a message may be on its way, in ms."""

    def __init__(
        self,
        log: Log,
        parameters: BloomParameters,
        grace: int,
        *,
        limit: int,
        mark: Callable[[str, str], None],
    ) -> None:
        self._log = log
        self._parameters = parameters
        self._grace = grace
        self._limit = limit
        self._tips: dict[str, int] = {}
        """Since when, in steady time; oldest first."""
        self._lacked: dict[str, None] = {}
        self._mark = mark

    def logged(self, message_id: str, history: Iterable[str], now: int) -> None:
        """A message was logged; what it names is no tip any more."""
        for named in history:
            self.discard(named)
        self._tips[message_id] = now
        self._mark("tip", message_id)
        if len(self._tips) > _MAX_TIPS:
            self.discard(next(iter(self._tips)))

    def discard(self, message_id: str) -> None:
        """A message is named by another, or has left the log."""
        if self._tips.pop(message_id, None) is not None:
            self._mark("tip", message_id)

    def get(self, message_id: str) -> int | None:
        """Since when this message is a tip, in steady time; None if it is none."""
        return self._tips.get(message_id)

    def restore(self, message_id: str, since: int) -> None:
        """A tip of an earlier life."""
        self._tips[message_id] = since

    def compare(self, bloom_filter: bytes, now: int) -> None:
        """Note which tips a peer lacks, by its filter."""
        # A peer's filter has at least the last half of what it is sized for; older tips prove nothing.
        oldest = self._log.last_arrival - self._parameters.capacity // 4
        for message_id, since in list(self._tips.items()):
            if now - since < self._grace:
                break
            entry = self._log.get(message_id)
            if entry is None or entry.arrival < oldest:
                self.discard(message_id)
            elif entry.dispatched and not self._parameters.contains(
                bloom_filter, self._parameters.positions(message_id)
            ):
                self._lacked[message_id] = None

    def take_lacked(self, named: Iterable[str]) -> list[str]:
        """Tips to name in a sync besides these: the oldest that some peer was seen to lack."""
        lacked, self._lacked = self._lacked, {}
        for message_id in named:
            lacked.pop(message_id, None)
        return [message_id for message_id in lacked if message_id in self._log][: self._limit]
