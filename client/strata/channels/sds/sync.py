"""When to send a sync message: regularly, and in time to acknowledge received messages.

Acknowledgements travel in a participant's own messages. A participant that has nothing to send would
acknowledge only with its next periodic sync, long after the sender has begun to retransmit (A-144). So a
message that was received and not yet acknowledged is a *debt*. While there is a debt, the next sync comes
within half the acknowledgement timeout.

A message names `causal_history_size` others and carries a filter. It pays for the messages that it names and
for those that they follow. The other debts are in the filter alone, and need as many messages as the sender
counts filters for.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from strata.channels.sds.config import SdsConfig

__all__ = ["SyncSchedule"]

_MAX_DEBTS = 256
_MIN_GAP_MS = 1_000
"""The least time between an own message and the sync after it."""


class SyncSchedule:
    """The next sync, and the debts that hasten it. Times are steady milliseconds."""

    def __init__(self, config: SdsConfig, random: Callable[[], float], now: int) -> None:
        self._interval = config.sync_min_interval_ms
        self._grace = config.acknowledgement_timeout_ms / 2
        self._filters_needed = max(1, config.possible_acks_threshold)
        self._random = random
        self._debts: dict[str, tuple[str, int]] = {}
        """Received messages that no later one names: sender, and how many more filters must carry each."""
        self._in_debt_since = now
        self.at: float = math.inf
        """When the next sync is due; never if they are switched off (C-034)."""
        self._schedule(now, 1.0)

    def received_content(self, message_id: str, sender_id: str, history: Iterable[str], now: int) -> None:
        """A content message came: it is a debt, and stands for the messages that it follows."""
        # A debt keeps its age when a later message stands for it: else a steady stream delays it for ever.
        if not self._debts:
            self._in_debt_since = now
        for named in history:
            self._debts.pop(named, None)
        if len(self._debts) < _MAX_DEBTS:
            self._debts[message_id] = (sender_id, self._filters_needed)
        self._schedule(now, 0.5)

    def received_sync(self, now: int) -> None:
        """Another participant's sync does for now what an own sync would do."""
        self._schedule(now, 1.0)

    def named_by_other(self, history: Iterable[str], sender_id: str) -> None:
        """Another participant acknowledges these, unless it sent them: one is enough (C-093, C-133)."""
        for message_id in history:
            debt = self._debts.get(message_id)
            if debt is not None and debt[0] != sender_id:
                del self._debts[message_id]

    def sent(self, history: Iterable[str], now: int) -> None:
        """An own content or sync message names these, and carries the filter."""
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
            # Not all participants at the latest moment: the first one spares the others.
            self.at = max(now, self._in_debt_since + self._grace * (1 + chance) / 2)
