"""When to send a sync message: regularly, and in time to acknowledge what came in.

Acknowledgements travel in what one sends. A participant that has nothing to say would acknowledge only with
its next periodic sync, long after the sender has begun to retransmit (A-144). So what was received and not
yet acknowledged is a *debt*: while there is one, the next sync comes within half the acknowledgement timeout.

A message names `causal_history_size` others and carries a filter. It pays for what it names and what
that follows. The rest is in the filter only, and needs as many messages as the sender counts filters for.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from strata.channels.sds.config import SdsConfig

__all__ = ["SyncSchedule"]

_MAX_DEBTS = 256
_MIN_GAP_MS = 1_000
"""Between one's own message and the sync after it, whatever chance says."""


class SyncSchedule:
    """The next sync, and the debts that hasten it. Times are steady milliseconds."""

    def __init__(self, config: SdsConfig, random: Callable[[], float], now: int) -> None:
        self._interval = config.sync_min_interval_ms
        self._grace = config.acknowledgement_timeout_ms / 2
        self._filters_needed = max(1, config.possible_acks_threshold)
        self._random = random
        self._debts: dict[str, tuple[str, int]] = {}
        """Received messages that no later one names: sender, and how many more filters must carry them."""
        self._in_debt_since = now
        self.at: float = math.inf
        """When the next sync is due; never if they are switched off (C-034)."""
        self._schedule(now, 1.0)

    def received_content(self, message_id: str, sender_id: str, history: Iterable[str], now: int) -> None:
        """A content message came: it is a debt, and stands for what it follows."""
        # What a later message stands for is owed since it came: else a steady stream puts it off for ever.
        if not self._debts:
            self._in_debt_since = now
        for named in history:
            self._debts.pop(named, None)
        if len(self._debts) < _MAX_DEBTS:
            self._debts[message_id] = (sender_id, self._filters_needed)
        self._schedule(now, 0.5)

    def received_sync(self, now: int) -> None:
        """Another participant's sync does for now what one's own would."""
        self._schedule(now, 1.0)

    def named_by_other(self, history: Iterable[str], sender_id: str) -> None:
        """This participant acknowledges these, unless they are its own: one is enough (C-093, C-133)."""
        for message_id in history:
            debt = self._debts.get(message_id)
            if debt is not None and debt[0] != sender_id:
                del self._debts[message_id]

    def sent(self, history: Iterable[str], now: int) -> None:
        """A content or sync message of one's own names these, and carries the filter."""
        for message_id in history:
            self._debts.pop(message_id, None)
        self._debts = {
            message_id: (sender_id, left - 1)
            for message_id, (sender_id, left) in self._debts.items()
            if left > 1
        }
        self._in_debt_since = now
        self._schedule(now, 1.0)
        self.at = max(self.at, now + _MIN_GAP_MS)

    def failed(self, now: int) -> None:
        """A sync could not be sent."""
        self._schedule(now, 2.0)

    def _schedule(self, now: int, factor: float) -> None:
        """Delay by `random() × interval × factor` (C-135), within the grace of a debt (C-136)."""
        if not self._interval:
            return
        chance = self._random()
        self.at = now + chance * self._interval * factor
        if self._debts and self.at > self._in_debt_since + self._grace:
            # Not all at the latest moment: whoever is first spares the others.
            self.at = max(now, self._in_debt_since + self._grace * (1 + chance) / 2)
