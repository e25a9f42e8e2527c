"""A participant's record of its channel's past, within bounds: the log, the known ids, the filter.

`Unreferenced` finds messages that a peer lacks without noticing. With a history of two entries, the third of
three messages sent at once is never named by another message. A participant that missed it sees no gap, and
the logs differ permanently. But a filter has no false negatives: if the filter of a received sync lacks such
an id, the peer lacks the message. Our next sync then names the message with the most recent ones, and the
peer's ordinary detection of gaps does the rest.

For that the peer must send a sync, which each participant of a crowd seldom does. `Unheard` makes a
participant send one when others list receipts of messages that it does not have.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import takewhile

from strata.channels.sds.bloom import BloomParameters, RollingFilter
from strata.channels.sds.bodies import Archive, Body
from strata.channels.sds.config import SdsConfig
from strata.channels.sds.log import KnownIds, LoggedMessage, MessageLog
from strata.channels.sds.outgoing import OutgoingBuffer
from strata.channels.sds.receipts import receipt

__all__ = ["History", "Unheard", "Unreferenced"]

_MAX_UNREFERENCED = 1_024
_MAX_UNHEARD = 1_024
_NOTICED = 4_096
"""The least number of receipts of logged messages to compare with those of others; the most is twice this."""
_TRIES = 4
"""How many syncs a participant sends because of one receipt: it may be of a message that it does not want."""


class History:
    """The log and everything derived from it.

    `mark` is called with the kind and key of each record that changes. An unacknowledged message of ours
    keeps its bytes after it has left the log; the history needs the outgoing buffer for this.
    """

    def __init__(
        self,
        config: SdsConfig,
        parameters: BloomParameters,
        outgoing: OutgoingBuffer,
        mark: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._outgoing = outgoing
        self._mark = mark
        self.log = MessageLog()
        self.known = KnownIds(config.max_known_ids)
        self.archive = Archive()
        self.filter = RollingFilter(parameters)
        self.unreferenced = Unreferenced(
            self.log,
            parameters,
            2 * config.acknowledgement_timeout_ms,
            limit=config.max_repair_requests,
            mark=mark,
        )
        self.unheard = Unheard(2 * config.acknowledgement_timeout_ms)
        self._read_to: int | None = None
        """The Lamport time up to which a store was read; None while there is nothing to read."""

    def set_reading(self, on: bool) -> None:
        """Note whether a store may have messages that are still to be read: see `KnownIds.trim`."""
        if not on:
            self._read_to = None
        elif self._read_to is None:
            self._read_to = self.known.horizon  # how far it was read before is not known

    def add(
        self,
        message_id: str,
        sender_id: str,
        lamport: int,
        body: Body,
        history: Sequence[str],
        *,
        clock: int,
        now: int,
        hint: bytes | None = None,
        own: int = 0,
        stored: bool = False,
    ) -> None:
        """Log a message. `own` is its number among our own messages, `clock` our Lamport time as far
        as it is credible. `stored`: it was read from a store."""
        floor, run = self._follows(history, own)
        logged = LoggedMessage(
            message_id,
            sender_id,
            lamport,
            body,
            arrival=self.log.last_arrival + 1,
            hint=hint,
            own=own,
            floor=floor,
            run=run,
            dispatched=not own,
        )
        self.log.add(logged)
        self.known.add(message_id, lamport, logged.arrival)
        self.unreferenced.logged(message_id, history, now)
        self.unheard.logged(message_id)
        self._mark("log", message_id)
        while len(self.log) > self._config.max_history or (
            self.archive.size_bytes > self._config.max_history_bytes and len(self.log) > 1
        ):
            self._evict(self._leaves_next())
        reading: float = math.inf if self._read_to is None else self._read_to
        if stored:
            reading = lamport
            if self._read_to is not None and lamport <= clock:
                self._read_to = lamport
        for forgotten in self.known.trim(clock, reading=reading, kept=self.log):
            self._mark("known", forgotten)

    def _follows(self, history: Iterable[str], own: int) -> tuple[int, int]:
        """`LoggedMessage.floor` and `LoggedMessage.run` of a message with this history."""
        named = [logged for logged in map(self.log.get, history) if logged is not None]
        floor, run = max(((logged.floor, logged.run) for logged in named), default=(0, 0))
        if own:
            # The run continues if this message follows our message just before it.
            return own, run if run and floor == own - 1 else own
        return floor, run

    def dispatched(self, logged: LoggedMessage) -> None:
        """Note that one of our messages has gone out: others may have it, so it enters the filter (C-110)."""
        if not logged.dispatched:
            logged.dispatched = True
            self.filter.insert(logged.message_id)
            self._mark("log", logged.message_id)

    def learn_hint(self, logged: LoggedMessage, hint: bytes | None) -> None:
        """Keep the hint by which a store finds a message."""
        if hint is not None and hint != logged.hint:
            logged.hint = hint
            self._mark("log", logged.message_id)

    def withdraw(self, logged: LoggedMessage) -> None:
        """Remove one of our messages that never went out (C-110)."""
        self.log.remove(logged.message_id)
        self.known.discard(logged.message_id)
        self.unreferenced.discard(logged.message_id)
        self.archive.release(logged.body)
        self._mark("log", logged.message_id)

    def amend(
        self, logged: LoggedMessage, data: bytes, bloom_filter: bytes | None, history: Sequence[str]
    ) -> None:
        """Replace the bytes of one of our messages that has not gone out; `history` is its new history."""
        before = logged.body
        logged.body = self.archive.keep(logged.sender_id, data, bloom_filter)
        self.archive.release(before)
        floor, _ = self._follows(history, 0)
        if floor < logged.run:  # the messages that it was known to follow are no longer in its history
            logged.run = logged.own
        for named in history:
            self.unreferenced.discard(named)
        self._mark("log", logged.message_id)

    def _leaves_next(self) -> LoggedMessage:
        """The message that leaves the full log next.

        While a store is read, our last message stays: it is newer than what is read, and our next one must
        name it.
        """
        first = self.log.first_logged()
        if self._read_to is not None and first.own and first.own == self.log.last_own:
            self.log.put_off(first)
        return self.log.first_logged()

    def _evict(self, logged: LoggedMessage) -> None:
        """Drop a message from the full log, and remember its id."""
        self.log.remove(logged.message_id)
        self.unreferenced.discard(logged.message_id)
        outgoing = self._outgoing.get(logged.message_id)
        if outgoing is not None:
            outgoing.owns_body = True
            self._mark("outgoing", logged.message_id)
        else:
            self.archive.release(logged.body)
        self._mark("log", logged.message_id)
        self._mark("known", logged.message_id)


class Unreferenced:
    """Ids of logged messages that no other message names.

    `grace` is how many milliseconds a message may take to arrive before a peer counts as lacking it. At most
    `limit` messages are named in one sync.
    """

    def __init__(
        self,
        log: MessageLog,
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
        self._since: dict[str, int] = {}
        """The steady time since which each id is unreferenced; oldest first."""
        self._lacked: dict[str, None] = {}
        """Ids that some peer was found to lack."""
        self._mark = mark

    def logged(self, message_id: str, history: Iterable[str], now: int) -> None:
        """Note that a message was logged: nothing names it yet, and it names `history`."""
        for named in history:
            self.discard(named)
        self._since[message_id] = now
        self._mark("tip", message_id)
        if len(self._since) > _MAX_UNREFERENCED:
            self.discard(next(iter(self._since)))

    def discard(self, message_id: str) -> None:
        """Drop a message that another message names, or that has left the log."""
        if self._since.pop(message_id, None) is not None:
            self._mark("tip", message_id)

    def since(self, message_id: str) -> int | None:
        """The steady time since which this message is unreferenced; None if it is not."""
        return self._since.get(message_id)

    def restore(self, message_id: str, since: int) -> None:
        """Restore an unreferenced message of an earlier run."""
        self._since[message_id] = since

    def dispatched(self) -> list[str]:
        """The unreferenced messages that others may have, oldest first."""
        found = [self._log.get(message_id) for message_id in self._since]
        return [logged.message_id for logged in found if logged is not None and logged.dispatched]

    def compare(self, bloom_filter: bytes, now: int) -> None:
        """Note which unreferenced messages a peer lacks, by its filter."""
        contains, positions = self._parameters.contains, self._parameters.positions
        for message_id in self._settled(now):
            if not contains(bloom_filter, positions(message_id)):
                self._note_lacked(message_id)

    def compare_receipts(self, receipts: Collection[bytes], now: int) -> None:
        """Note the same by a sync without a filter: it lists all messages unreferenced for its sender."""
        for message_id in self._settled(now):
            if receipt(message_id) not in receipts:
                self._note_lacked(message_id)

    def _settled(self, now: int) -> Iterator[str]:
        """The messages that should have reached everybody by now; those that prove nothing are dropped."""
        # A peer's filter has at least the last half of its capacity: older messages prove nothing.
        oldest = self._log.last_arrival - self._parameters.capacity // 4
        for message_id in list(self._since):
            logged = self._log.get(message_id)
            if logged is not None and logged.arrival >= oldest:
                break
            self.discard(message_id)
        return (
            message_id
            for message_id, _ in takewhile(lambda each: now - each[1] >= self._grace, self._since.items())
        )

    def _note_lacked(self, message_id: str) -> None:
        logged = self._log.get(message_id)
        # The bound is for a participant that sends no syncs, which never takes these.
        if logged is not None and logged.dispatched and len(self._lacked) < _MAX_UNREFERENCED:
            self._lacked[message_id] = None

    @property
    def some_lacked(self) -> bool:
        """Whether some peer lacks a message, to name in a sync."""
        return bool(self._lacked)

    def named_by_other(self, named: Iterable[str]) -> None:
        """Forget messages that another participant's sync names: peers that lack them know it now."""
        for message_id in named:
            self._lacked.pop(message_id, None)

    def take_lacked(self, named: Iterable[str]) -> list[str]:
        """Remove and return the oldest messages that some peer lacks, to name in a sync with `named`."""
        lacked, self._lacked = self._lacked, {}
        for message_id in named:
            lacked.pop(message_id, None)
        return [message_id for message_id in lacked if message_id in self._log][: self._limit]


class Unheard:
    """Receipts that others list, of messages that this participant does not have.

    `grace` is how many milliseconds a message may take to arrive. None of this is stored.
    """

    def __init__(self, grace: int) -> None:
        self._grace = grace
        self._noticed: dict[bytes, None] = {}
        self._noticed_before: dict[bytes, None] = {}
        """Receipts of logged messages, in two parts: the older part is dropped when the newer one is full."""
        self._since: dict[bytes, tuple[int, int]] = {}
        """The time since which each receipt is unknown, and how many syncs were sent because of it."""

    def logged(self, message_id: str) -> None:
        """Note that a message was logged: its receipt is known."""
        noticed = receipt(message_id)
        if len(self._noticed) >= _NOTICED:
            self._noticed_before, self._noticed = self._noticed, {}
        self._noticed[noticed] = None
        self._since.pop(noticed, None)

    def listed(self, receipts: frozenset[bytes], now: int) -> None:
        """Note the receipts in another's sync, which lists all messages unreferenced for its sender."""
        unknown = receipts.difference(self._noticed).difference(self._noticed_before)
        # A sender that does not list one lacks it too, and its sync has just shown this to everybody.
        self._since = {each: kept for each, kept in self._since.items() if each in unknown}
        for each in unknown:
            if len(self._since) < _MAX_UNHEARD:
                self._since.setdefault(each, (now, 0))

    def is_due(self, now: int, sought: Iterable[str]) -> bool:
        """Whether to send a sync because a message is lacking that is none of `sought`."""
        if not self._due(now):
            return False
        for message_id in sought:
            self._since.pop(receipt(message_id), None)
        return bool(self._due(now))

    def said(self, now: int) -> None:
        """Note that we sent a sync: participants that have the messages see that we lack them."""
        for each in self._due(now):
            self._since[each] = (now, self._since[each][1] + 1)

    def _due(self, now: int) -> list[bytes]:
        grace = self._grace
        return [each for each, (at, said) in self._since.items() if now - at >= grace and said < _TRIES]
