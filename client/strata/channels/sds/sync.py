"""When to send a sync message: regularly, and in time to acknowledge received messages.

Acknowledgements travel in a participant's own messages. A participant that has nothing to send would
acknowledge only with its next periodic sync, long after the sender has begun to retransmit (A-144). So a
message that was received and not yet acknowledged is a *debt*. While there is a debt, the next sync comes
within half the acknowledgement timeout.

A message names `causal_history_size` others, and has a list or a filter of further received messages. It pays
the debts for the messages that it names or lists. A debt that only its filter covers needs as many messages
as the sender counts filters for an acknowledgement.

A device that names a message of another device of the same person pays no debt: debts are between people.

Each participant draws the delay of its syncs independently, and the shortest delay counts. So the more
participants there are, the longer each waits (`Pace`, decision 0051): syncs are as frequent in a crowd as
between two participants, and a few of them acknowledge for all.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

from strata.channels.sds.config import SdsConfig
from strata.channels.sds.messages import person_of
from strata.channels.sds.receipts import Debts

__all__ = ["Pace", "SyncSchedule"]

_MIN_GAP_MS = 1_000
"""The least time between one of our messages and the sync after it."""
_TELLS, _TELL_AGAIN_MS = 3, 600_000
_RATE = 0.1
"""How much one sync changes the scale."""
_MIN_SCALE, _MAX_SCALE = 0.8, 4_096.0
"""A scale below one has no effect yet: a single early sync may be chance."""
_HEARD_FOR_MS = 600_000
"""How long a sender counts after its last message."""
_MAX_HEARD = 2_048


class SyncSchedule:
    """The next sync, and the debts that hasten it. Times are in steady milliseconds."""

    def __init__(self, config: SdsConfig, random: Callable[[], float], now: int) -> None:
        self._interval = config.sync_min_interval_ms
        self._grace = config.acknowledgement_timeout_ms / 2
        self._random = random
        self._pace = Pace(self._interval, lambda: self._random())
        self.debts = Debts(max(1, config.possible_acks_threshold))
        """Received messages that nobody is known to have acknowledged."""
        self._in_debt_since = now
        self._tell_by = math.inf
        self._told_at = -math.inf
        self._tells = 0
        """How many more messages of ours another program with our sender id must hear; one by `_tell_by`."""
        self._chance = 0.0
        """The random place, within the grace period, of the sync for the present debts."""
        self.at: float = math.inf
        """When the next sync is due; infinite if syncs are switched off (C-034)."""
        self._schedule(now, 1.0)

    def live(self, sender_id: str, now: int, lamport: int, *, needless: bool) -> None:
        """Note a message that another participant has just sent, which shows that it is present.

        A copy shows nothing about the number of participants. `needless` is for a sync without news.
        """
        if self._pace.heard(sender_id, now, lamport):
            self._pace.passed(now, needless=needless)

    def received_content(
        self, message_id: str, sender_id: str, now: int, *, stands_for: Iterable[str] = ()
    ) -> None:
        """Note a received content message: it is a debt, and may stand for messages that it follows."""
        had_debts = bool(self.debts)
        self.debts.pay(stands_for)
        self._owe(message_id, sender_id, now, had_debts)
        self._schedule(now, 0.5)

    def sent_again(self, message_id: str, sender_id: str, now: int) -> None:
        """Note that a sender repeated a message, since it lacks the acknowledgement: it is a debt again."""
        self._owe(message_id, sender_id, now, bool(self.debts))
        if self._interval:
            self.at = min(self.at, self._pay_by(now))

    def _owe(self, message_id: str, sender_id: str, now: int, had_debts: bool) -> None:
        # A debt keeps its age when a later message stands for it, so that a steady stream cannot delay it.
        if not had_debts:
            self._in_debt_since, self._chance = now, self._random()
        self.debts.add(message_id, person_of(sender_id))

    def received_sync(self, now: int) -> None:
        """Delay our sync, since another participant's sync has just done the same."""
        self._schedule(now, 1.0)

    def sender_is_shared(self, now: int) -> None:
        """Send syncs soon, because another program uses our sender id and must hear of this one.

        A few are sent, since one may be lost. Then there is a pause, since each of the two programs would
        always find news in the messages of the other.
        """
        if self._interval and now - self._told_at > _TELL_AGAIN_MS:
            self._told_at, self._tells = now, _TELLS
            self._tell_soon(now)

    def said(self, now: int) -> None:
        """Note that one of our messages goes out."""
        self._tells = max(0, self._tells - 1)
        self._tell_soon(now)

    def _tell_soon(self, now: int) -> None:
        self._tell_by = now + _MIN_GAP_MS * (1 + self._random()) if self._tells else math.inf
        self.at = min(self.at, self._tell_by)

    def speak_for_all(self, now: int) -> None:
        """Hasten a sync that shows who lacks what; one such sync, by any participant, is enough."""
        if self._interval:
            self.at = min(self.at, now + self._pace.within(self._interval, self._random()))

    def named_by_other(self, history: Iterable[str], receipts: Collection[bytes], sender_id: str) -> int:
        """Note that another participant acknowledges these, except its own: once is enough (C-093, C-133).

        Returns how many of them were debts.
        """
        person = person_of(sender_id)
        return self.debts.pay(history, payer=person) + self.debts.pay_listed(receipts, person)

    def sent(
        self, history: Iterable[str], now: int, *, with_filter: bool = True, needless: bool = False
    ) -> None:
        """Note that one of our messages names or lists these. `needless` is for a sync that nobody needed."""
        self.debts.pay(history)
        if with_filter:
            self.debts.filter_sent()
        self._pace.passed(now, needless=needless, own=True)
        self._in_debt_since, self._chance = now, self._random()
        self._schedule(now, 1.0)
        self.at = max(self.at, now + _MIN_GAP_MS)

    def failed(self, now: int) -> None:
        """Note that a sync could not be sent."""
        self._schedule(now, 2.0)

    def _schedule(self, now: int, factor: float) -> None:
        """Schedule after `random() × interval × factor`, scaled (C-135), or within a debt's grace (C-136)."""
        if not self._interval:
            return
        self.at = now + self._pace.delay(factor)
        if self.debts and self.at > self._in_debt_since + self._grace:
            # Not all participants sync at the last moment: the first sync makes the others unnecessary.
            self.at = self._pay_by(now)
        self.at = min(self.at, max(now, self._tell_by))

    def _pay_by(self, now: int) -> float:
        return max(now, self._in_debt_since + self._pace.within(self._grace, self._chance))


class Pace:
    """The estimated size of a channel, and the delays of one participant. Times are steady milliseconds.

    Two things show how many participants there are: the senders that were heard recently, and the syncs
    themselves. A participant among a thousand silent ones has heard nobody, but syncs that come too often
    show that there are many.

    `scale` is the factor of the delay. It rises with each sync that came early and that nobody needed, and
    falls with each that came late. Silence makes it fall too: after each interval without a sync every
    participant halves its estimate, so a room that has emptied is not silent for long.
    """

    def __init__(self, interval: int, random: Callable[[], float]) -> None:
        self._interval = interval
        self._random = random
        self._heard: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """When each other sender was last heard, and its latest Lamport time; longest ago first."""
        self._scale = _MIN_SCALE
        self._quiet_since: int | None = None

    def heard(self, sender_id: str, now: int, lamport: int) -> bool:
        """Note another participant's message; False for a copy, or if a later message came before."""
        _, before = self._heard.get(sender_id, (0, -1))
        self._heard[sender_id] = (now, max(before, lamport))
        self._heard.move_to_end(sender_id)
        while len(self._heard) > _MAX_HEARD or now - next(iter(self._heard.values()))[0] > _HEARD_FOR_MS:
            self._heard.popitem(last=False)
        return lamport > before

    def passed(self, now: int, *, needless: bool, own: bool = False) -> None:
        """Note a message on the channel: a sync that nobody needed, if `needless`, or another message."""
        if needless and self._interval and self._quiet_since is not None:
            self._adapt(now - self._quiet_since, own=own)
        self._quiet_since = now

    def _adapt(self, gap: int, *, own: bool) -> None:
        wanted = self._interval / 2
        step = 1 - min(gap, self._interval) / wanted
        # A participant that syncs more than its share waits longer, and the others less: otherwise a newcomer
        # that knows nobody would sync for all, for ever.
        step += 1.0 if own else -1 / self.scale()
        scale = self._scale * math.exp(_RATE * step)
        if gap > self._interval:
            scale *= 0.5 ** (gap / self._interval - 1)
        self._scale = min(max(scale, _MIN_SCALE), _MAX_SCALE)

    def scale(self) -> float:
        """The factor by which delays are longer than those of two participants alone."""
        return max(1.0, self._scale, len(self._heard) / 2)

    def delay(self, factor: float) -> float:
        """The delay of the next sync; `random() × interval × factor` in a small room (C-135)."""
        scale, silence = self.scale(), 0.0
        while True:
            delay = self._random() * self._interval * factor * scale
            if delay <= self._interval * factor or scale <= 1:
                return silence + delay
            silence += self._interval * factor
            scale = max(scale / 2, 1.0)

    def within(self, grace: float, chance: float) -> float:
        """A delay up to `grace`, for a sync that one of many should send: the more, the later most of them.

        Then the first few make those of the others unnecessary. `chance` is a random number in [0, 1).
        """
        steepness = math.log(2 * self.scale() - 1)
        if steepness:
            chance = math.log(chance * math.expm1(steepness) + 1) / steepness
        return grace * (1 + chance) / 2
