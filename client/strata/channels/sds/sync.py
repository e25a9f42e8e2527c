"""When to send a sync message: regularly, and in time to acknowledge received messages.

Acknowledgements travel in a participant's own messages. A participant that has nothing to send would
acknowledge only with its next periodic sync, long after the sender has begun to retransmit (A-144). So a
message that was received and not yet acknowledged is a *debt*. While there is a debt, the next sync comes
within half the acknowledgement timeout.

A message names `causal_history_size` others and lists or filters what it received beside them. It pays for
the messages that it names and lists. Debts that are in its filter alone need as many messages as the sender
counts filters for.

An own device that names a message pays nobody's debt to another person, so debts are between people.

The more participants there are, the longer each waits (`strata.channels.sds.pace`). So syncs come as often in
a crowd as between two, and a few of them acknowledge for all.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from strata.channels.sds.config import SdsConfig
from strata.channels.sds.messages import person_of
from strata.channels.sds.pace import Pace
from strata.channels.sds.receipts import Debts

__all__ = ["SyncSchedule"]

_MIN_GAP_MS = 1_000
"""The least time between an own message and the sync after it."""
_TELLS, _TELL_AGAIN_MS = 3, 600_000


class SyncSchedule:
    """The next sync, and the debts that hasten it. Times are steady milliseconds."""

    def __init__(self, config: SdsConfig, random: Callable[[], float], now: int) -> None:
        self._interval = config.sync_min_interval_ms
        self._grace = config.acknowledgement_timeout_ms / 2
        self._random = random
        self._pace = Pace(self._interval, lambda: self._random())
        self.debts = Debts(max(1, config.possible_acks_threshold))
        """Received messages that nobody has acknowledged as far as one knows."""
        self._in_debt_since = now
        self._tell_by = math.inf
        self._told_at = -math.inf
        self._tells = 0
        """When another program under the own sender id has to hear of this one, and how often yet."""
        self._chance = 0.0
        """Where in the time of grace the sync for the present debts comes."""
        self.at: float = math.inf
        """When the next sync is due; never if they are switched off (C-034)."""
        self._schedule(now, 1.0)

    def live(self, sender_id: str, now: int, lamport: int, *, needless: bool) -> None:
        """What another participant has just sent, and not long ago: one of those that are here.

        A copy tells nothing about how many there are. `needless` is a sync that told nothing new.
        """
        if self._pace.heard(sender_id, now, lamport):
            self._pace.passed(now, needless=needless)

    def received_content(
        self, message_id: str, sender_id: str, now: int, *, stands_for: Iterable[str] = ()
    ) -> None:
        """A content message came: it is a debt, and may stand for messages that it follows."""
        had_debts = bool(self.debts)
        self.debts.pay(stands_for)
        self._owe(message_id, sender_id, now, had_debts)
        self._schedule(now, 0.5)

    def sent_again(self, message_id: str, sender_id: str, now: int) -> None:
        """The sender of a received message has not heard of that: it is a debt once more."""
        self._owe(message_id, sender_id, now, bool(self.debts))
        if self._interval:
            self.at = min(self.at, self._pay_by(now))

    def _owe(self, message_id: str, sender_id: str, now: int, had_debts: bool) -> None:
        # A debt keeps its age when a later message stands for it: else a steady stream delays it for ever.
        if not had_debts:
            self._in_debt_since, self._chance = now, self._random()
        self.debts.add(message_id, person_of(sender_id))

    def received_sync(self, now: int) -> None:
        """Another participant's sync does for now what an own sync would do."""
        self._schedule(now, 1.0)

    def sender_is_shared(self, now: int) -> None:
        """Another program sends under the own sender id: it is to hear of this one soon.

        A few times, for one may be lost, and then not for long: what each of the two sends is news to the
        other.
        """
        if self._interval and now - self._told_at > _TELL_AGAIN_MS:
            self._told_at, self._tells = now, _TELLS
            self._tell_soon(now)

    def said(self, now: int) -> None:
        """An own message goes out."""
        self._tells = max(0, self._tells - 1)
        self._tell_soon(now)

    def _tell_soon(self, now: int) -> None:
        self._tell_by = now + _MIN_GAP_MS * (1 + self._random()) if self._tells else math.inf
        self.at = min(self.at, self._tell_by)

    def speak_for_all(self, now: int) -> None:
        """A sync of this participant would tell who lacks what: one of all who know it is to say so."""
        if self._interval:
            self.at = min(self.at, now + self._pace.within(self._interval, self._random()))

    def named_by_other(self, history: Iterable[str], receipts: Collection[bytes], sender_id: str) -> int:
        """Another participant acknowledges these, unless it sent them: one is enough (C-093, C-133).

        Returns how many of them were debts.
        """
        person = person_of(sender_id)
        return self.debts.pay(history, payer=person) + self.debts.pay_listed(receipts, person)

    def sent(
        self, history: Iterable[str], now: int, *, with_filter: bool = True, needless: bool = False
    ) -> None:
        """An own message names or lists these, and may carry the filter. A sync may have been needless."""
        self.debts.pay(history)
        if with_filter:
            self.debts.filter_sent()
        self._pace.passed(now, needless=needless, own=True)
        self._in_debt_since, self._chance = now, self._random()
        self._schedule(now, 1.0)
        self.at = max(self.at, now + _MIN_GAP_MS)

    def failed(self, now: int) -> None:
        """A sync could not be sent."""
        self._schedule(now, 2.0)

    def _schedule(self, now: int, factor: float) -> None:
        """Delay by `random() × interval × factor`, at the pace (C-135), in the grace of a debt (C-136)."""
        if not self._interval:
            return
        self.at = now + self._pace.delay(factor)
        if self.debts and self.at > self._in_debt_since + self._grace:
            # Not all participants at the latest moment: the first one spares the others.
            self.at = self._pay_by(now)
        self.at = min(self.at, max(now, self._tell_by))

    def _pay_by(self, now: int) -> float:
        return max(now, self._in_debt_since + self._pace.within(self._grace, self._chance))
