"""From a received message to its delivery: dependencies, holding, gaps (SDS Receive and Incoming sweep).

`Receiver` delivers each message once, after all messages that it follows. `IncomingBuffer` holds the messages
that wait, and tracks the missing messages that they wait for. `OwnName` reports messages under our sender id
that were not sent here: another program may use the id (C-006).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from strata.channels.sds.bodies import Body
from strata.channels.sds.config import FAR_AHEAD_MS, SdsConfig
from strata.channels.sds.events import (
    Delivered,
    Lost,
    MissingFound,
    Origin,
    SdsEvent,
    SdsStatistics,
    SenderShared,
)
from strata.channels.sds.log import History, LoggedMessage, MessageLog
from strata.channels.sds.messages import HistoryEntry, Kind, SdsMessage, is_usable_id
from strata.channels.sds.repair import RepairBuffers
from strata.channels.sds.timing import LamportClock, SteadyClock

__all__ = ["IncomingBuffer", "Missing", "OwnName", "Receiver", "Reception", "Waiting", "usable_hint"]

_MAX_HINT_BYTES = 256
_WANTED_SHARE = 2
"""Messages that others wait for have this many times the usual room."""
_REMEMBERED_OWN = 256
"""How many own syncs and withdrawn messages are recognised when they come back, and how many reports wait."""


class Reception(msgspec.Struct, frozen=True):
    """How a message was received."""

    hint: bytes | None
    """The hint by which a store finds it."""
    origin: Origin
    stored: bool
    """Whether it was read from a store, and not heard."""


class Waiting:
    """A received message with dependencies that are not in the log."""

    __slots__ = (
        "alone",
        "body",
        "lamport",
        "message_id",
        "received_at",
        "reception",
        "sender_id",
        "unmet",
        "unread",
    )

    def __init__(
        self,
        message_id: str,
        sender_id: str,
        lamport: int,
        body: Body,
        unmet: set[str],
        reception: Reception,
        *,
        received_at: int,
        alone: bool,
    ) -> None:
        self.message_id = message_id
        self.sender_id = sender_id
        self.lamport = lamport
        self.body = body
        self.alone = alone
        """Whether it names no message that was known when it came."""
        self.reception = reception
        self.unread = not reception.stored
        """Whether it was heard, and has not been read from a store since."""
        self.unmet = unmet
        self.received_at = received_at

    @property
    def said_at(self) -> int:
        """The latest time it can have been sent, in milliseconds: by its store's clock, else its sender's."""
        stored_at = self.reception.origin.stored_at
        return self.lamport if stored_at is None else 1000 * stored_at

    def log_order(self) -> tuple[int, str]:
        """The place in the order that all participants share."""
        return self.lamport, self.message_id


class Missing:
    """A message that others name and that has not arrived."""

    __slots__ = ("entry", "first_missing_at", "released", "told", "waited_from")

    def __init__(self, entry: HistoryEntry, first_missing_at: int, waited_from: int) -> None:
        self.released = False
        """Whether no message waits for it any more; it is still wanted."""
        self.told = False
        """Whether the program knows that it is gone: giving it up is then not reported."""
        self.entry = entry
        self.first_missing_at = first_missing_at
        self.waited_from = waited_from
        """When the time until it is given up began: not before this run, since a program that does not run
        cannot look for the message. In the time during which messages were taken (`set_hearing`)."""


class IncomingBuffer:
    """Waiting messages and what they wait for. The settings bound its size: call `has_room` first."""

    def __init__(self, config: SdsConfig) -> None:
        self._config = config
        self.waiting: dict[str, Waiting] = {}
        self.missing: dict[str, Missing] = {}
        """In the order in which they were found missing."""
        self.lost: dict[str, bool] = {}
        """Messages given up; as dependencies they count as met. If True, they are dropped if they arrive."""
        self.holds_heard = False
        """Whether messages that were heard wait until they are read, even with nothing unmet; see
        `Participant.hold_heard`."""
        self._waiters: dict[str, dict[str, None]] = {}
        self._waiting_bytes = 0
        self._deaf_since: int | None = None
        self._deaf_ms = 0
        """For how long, in sum, no message was taken; see `Participant.set_hearing`."""

    def set_hearing(self, hears: bool, now: int) -> None:
        """Note whether messages are taken: while they are not, no time is counted against missing ones."""
        if hears and self._deaf_since is not None:
            self._deaf_ms += now - self._deaf_since
            self._deaf_since = None
        elif not hears and self._deaf_since is None:
            self._deaf_since = now

    def _heard_for(self, now: int) -> int:
        """`now`, less the time during which no message was taken."""
        return (now if self._deaf_since is None else self._deaf_since) - self._deaf_ms

    def has_room(self, size_bytes: int, unmet: int, *, wanted: bool = False) -> bool:
        """Whether a message of this size with `unmet` unmet dependencies can be held.

        A `wanted` message, which others wait for, has twice the room: without it they would wait in vain. It
        does not have more, because a chain of such messages is cheap to forge.
        """
        config, share = self._config, _WANTED_SHARE if wanted else 1
        return (
            len(self.waiting) < share * config.max_waiting
            and self._waiting_bytes + size_bytes <= share * config.max_waiting_bytes
            and len(self.missing) + unmet <= share * config.max_missing
        )

    @property
    def is_crowded(self) -> bool:
        """Whether half of the room is taken."""
        config = self._config
        return (
            2 * len(self.waiting) >= config.max_waiting
            or 2 * self._waiting_bytes >= config.max_waiting_bytes
            or 2 * len(self.missing) >= config.max_missing
        )

    def hold(self, waiting: Waiting) -> None:
        """Keep a message until its dependencies are met."""
        self.waiting[waiting.message_id] = waiting
        self._waiting_bytes += waiting.body.size_bytes
        for message_id in waiting.unmet:
            self._waiters.setdefault(message_id, {})[waiting.message_id] = None

    def miss(self, entries: Iterable[HistoryEntry], now: int, *, limit: int) -> list[HistoryEntry]:
        """Track these as missing while fewer than `limit` are; return the new or changed entries."""
        news: list[HistoryEntry] = []
        for entry in entries:
            known = self.missing.get(entry.message_id)
            if known is None:
                if len(self.missing) < limit and entry.message_id not in self.waiting:
                    self.missing[entry.message_id] = Missing(entry, now, self._heard_for(now))
                    news.append(entry)
            elif known.entry.retrieval_hint is None and entry.retrieval_hint is not None:
                sender_id = known.entry.sender_id or entry.sender_id
                known.entry = HistoryEntry(entry.message_id, entry.retrieval_hint, sender_id)
                news.append(known.entry)
        return news

    def met(self, message_id: str) -> list[Waiting]:
        """Note that a dependency is met; release and return the messages that wait for nothing else."""
        ready: list[Waiting] = []
        for waiter in self._waiters.pop(message_id, ()):
            waiting = self.waiting[waiter]
            waiting.unmet.discard(message_id)
            if self._is_ready(waiting):
                ready.append(self._release(waiter))
        return ready

    def read(self, message_id: str) -> list[Waiting]:
        """Note that this waiting message was read from a store; release and return it if nothing is unmet."""
        waiting = self.waiting[message_id]
        waiting.unread = False
        return [self._release(message_id)] if self._is_ready(waiting) else []

    def _is_ready(self, waiting: Waiting) -> bool:
        return not (waiting.unmet or (waiting.unread and self.holds_heard))

    def recheck(self, is_met: Callable[[str], bool]) -> list[Waiting]:
        """Check every dependency again (C-124); release and return the messages that wait for nothing."""
        ready: list[Waiting] = []
        for message_id in [message_id for message_id in self._waiters if is_met(message_id)]:
            ready += self.met(message_id)
        ready += [
            self._release(each.message_id) for each in list(self.waiting.values()) if self._is_ready(each)
        ]
        return ready

    def is_released(self, message_id: str) -> bool:
        """Whether a message is missing and no message waits for it any more."""
        missing = self.missing.get(message_id)
        return missing is not None and missing.released

    def overdue(self, now: int) -> list[str]:
        """The missing messages for which others have waited `hold_back_ms` or longer."""
        hold_back, heard_for = self._config.hold_back_ms, self._heard_for(now)
        if not hold_back:
            return []
        return [
            message_id
            for message_id, missing in self.missing.items()
            if not missing.released and heard_for - missing.waited_from >= hold_back
        ]

    def front(self, edge: int, *, heard: bool, said_before: float = math.inf) -> dict[str, HistoryEntry]:
        """The missing messages at the beginning of everything that waits: all before them is unknown.

        A message that names a missing message and a known one has a gap before it, and not a front. It counts
        nevertheless if its Lamport time is at most `edge`, where a front was found before, since several
        participants may talk at once. Messages read from a store count if they were sent before
        `said_before`. Messages that were heard count if `heard`, whenever they were sent.
        """
        at_front: set[str] = set()
        found: dict[str, HistoryEntry] = {}
        for waiting in sorted(self.waiting.values(), key=Waiting.log_order):
            stored = waiting.reception.stored
            if waiting.said_at >= said_before and (stored or not heard):
                continue
            if not ((waiting.alone and (stored or heard)) or waiting.lamport <= edge):
                continue
            named = [each for each in waiting.unmet if each not in self.waiting]
            if any(each not in at_front for each in waiting.unmet if each in self.waiting):
                continue
            at_front.add(waiting.message_id)
            found |= {each: self.missing[each].entry for each in named if each in self.missing}
        return found

    def give_up(self, now: int) -> list[tuple[Lost, bool]]:
        """Mark messages that have been missing too long as lost (C-126); return each with its `told`."""
        timeout, heard_for = self._config.lost_message_timeout_ms, self._heard_for(now)
        lost: list[tuple[Lost, bool]] = []
        if timeout:
            for message_id, missing in list(self.missing.items()):
                if heard_for - missing.waited_from < timeout:
                    break
                del self.missing[message_id]
                self.lost[message_id] = False
                lost.append((Lost(missing.entry, missing.first_missing_at), missing.told))
        return lost

    def forget_lost(self) -> list[str]:
        """Forget the oldest lost messages beyond the bound, and return their ids."""
        excess = len(self.lost) - self._config.max_missing
        forgotten = list(self.lost)[:excess] if excess > 0 else []
        for message_id in forgotten:
            del self.lost[message_id]
        return forgotten

    def break_cycle(self, now: int) -> list[Waiting]:
        """Release the first of the messages that have waited too long, and only for each other.

        Only a forger makes such messages, since an honest message names earlier ones.
        """
        timeout = self._config.lost_message_timeout_ms
        if self.holds_heard or not timeout:
            return []
        if not any(now - each.received_at >= timeout for each in self.waiting.values()):
            return []
        hopeful: set[str] = set()
        reached = list(self.missing)
        while reached:
            for waiter in self._waiters.get(reached.pop(), ()):
                if waiter not in hopeful:
                    hopeful.add(waiter)
                    reached.append(waiter)
        stuck = [each for each in self.waiting.values() if each.message_id not in hopeful]
        if not stuck:
            return []
        first = min(stuck, key=Waiting.log_order)
        for message_id in first.unmet:
            self._waiters[message_id].pop(first.message_id)
        first.unmet.clear()
        return [self._release(first.message_id)]

    def _release(self, message_id: str) -> Waiting:
        waiting = self.waiting.pop(message_id)
        self._waiting_bytes -= waiting.body.size_bytes
        return waiting


class Receiver:
    """Holds messages until their dependencies are met, then logs and delivers each one once."""

    def __init__(
        self,
        config: SdsConfig,
        history: History,
        incoming: IncomingBuffer,
        repair: RepairBuffers,
        clock: SteadyClock,
        lamport: LamportClock,
        *,
        sender_id: str,
        statistics: SdsStatistics,
        mark: Callable[[str, str], None],
        emit: Callable[[SdsEvent], None],
    ) -> None:
        self._config = config
        self._history = history
        self._incoming = incoming
        self._repair = repair
        self._clock = clock
        self._lamport = lamport
        self._mark = mark
        self._emit = emit
        self._sender_id = sender_id
        self._statistics = statistics
        # Messages that an earlier run held or missed are checked at once.
        self.sweep_at: float = clock.now if incoming.waiting or incoming.missing else math.inf

    def unmet(self, message: SdsMessage) -> dict[str, HistoryEntry]:
        """The dependencies of a message that are not in the log (C-115).

        Lost messages count as met, and so do those that no message waits for any more.
        """
        return {
            entry.message_id: entry
            for entry in message.causal_history
            if entry.message_id != message.message_id and not self._is_met(entry.message_id)
        }

    def _is_met(self, message_id: str) -> bool:
        """Whether no message need wait for this one."""
        incoming = self._incoming
        return (
            message_id in self._history.known
            or message_id in incoming.lost
            or incoming.is_released(message_id)
        )

    def is_new(self, message_id: str, reception: Reception) -> bool:
        """Whether a content message was not received before (C-112) and is wanted; a duplicate is counted.

        A duplicate that is read from a store releases the message if it was only waiting to be read.
        """
        if message_id not in self._history.known and message_id not in self._incoming.waiting:
            unwanted = self._incoming.lost.get(message_id, False)
            self._statistics.unwanted += unwanted
            return not unwanted
        self._statistics.duplicates += 1
        self.arrived(message_id)
        if reception.stored and message_id in self._incoming.waiting:
            self._deliver_all(self._incoming.read(message_id))
        logged = self._history.log.get(message_id)
        if logged is not None and logged.hint is None:
            self._history.learn_hint(logged, reception.hint)
        return False

    def arrived(self, id_: str) -> None:
        """Stop looking for a message, since it has arrived (C-151, C-166)."""
        if self._repair.received(id_):
            self._mark("request", id_)
            self._mark("response", id_)
        if self._incoming.missing.pop(id_, None) is not None:
            self._mark("missing", id_)
        if id_ in self._incoming.lost:
            del self._incoming.lost[id_]
            self._mark("lost", id_)

    def take(
        self,
        message: SdsMessage,
        body: Body,
        unmet: dict[str, HistoryEntry],
        reception: Reception,
    ) -> None:
        """Deliver a new content message, or hold it (C-116)."""
        id_, lamport = message.message_id, message.lamport_timestamp or 0
        if not unmet and (reception.stored or not self._incoming.holds_heard):
            self._deliver(message, body, reception)
            self.met(id_)
            return
        alone = not any(map(self._history.known.__contains__, message.history_ids))
        self._incoming.hold(
            Waiting(
                id_,
                message.sender_id,
                lamport,
                body,
                set(unmet),
                reception,
                received_at=self._clock.now,
                alone=alone,
            )
        )
        self._mark("waiting", id_)
        # `has_room` has allowed this: a message held for an untracked one would wait for ever.
        self.miss(unmet.values(), limit=_WANTED_SHARE * self._config.max_missing)

    def miss(self, entries: Iterable[HistoryEntry], *, limit: int) -> None:
        """Track these as missing, report them, and schedule requests for them (C-152, C-162)."""
        now = self._clock.now
        news = self._incoming.miss(map(_bounded, entries), now, limit=limit)
        if not news:
            return
        for entry in news:
            self._mark("missing", entry.message_id)
            if self._repair.want(entry, now):
                self._mark("request", entry.message_id)
        self._emit(MissingFound(tuple(news)))
        self.sweep_at = min(self.sweep_at, now + self._config.sweep_in_buf_interval_ms)

    def hold_heard(self, on: bool) -> None:
        """Hold messages that are heard until they are read; if not `on`, deliver those with nothing unmet."""
        self._incoming.holds_heard = on
        if not on:
            self._deliver_all(self._incoming.recheck(self._is_met))

    def met(self, message_id: str) -> None:
        """Note that a dependency is met; deliver messages that waited only for it, and those they release."""
        self._deliver_all(self._incoming.met(message_id))

    def release(self, ids: Iterable[str]) -> None:
        """Let no message wait for these any longer. They stay wanted."""
        for id_ in ids:
            missing = self._incoming.missing.get(id_)
            if missing is not None:
                missing.released = True
                self._mark("missing", id_)
                self.met(id_)

    def told(self, ids: Iterable[str]) -> None:
        """Note that the program knows these to be gone: giving them up is not reported."""
        for id_ in ids:
            missing = self._incoming.missing.get(id_)
            if missing is not None:
                missing.told = True
                self._mark("missing", id_)

    def pass_over(self, id_: str) -> None:
        """Neither want this message nor wait for it: it is from before this participant joined."""
        if id_ in self._history.known or id_ in self._incoming.waiting:
            return
        self.arrived(id_)
        self._incoming.lost[id_] = True
        self._mark("lost", id_)
        self.met(id_)
        self._forget_lost()

    def _forget_lost(self) -> None:
        for id_ in self._incoming.forget_lost():
            self._mark("lost", id_)

    def requested(self, entry: HistoryEntry) -> None:
        """Handle another's request for a message: schedule an answer, drop our request (C-153, C-154)."""
        id_, now = entry.message_id, self._clock.now
        if self._repair.asked_by_other(id_, now):
            self._mark("request", id_)
        held = self.held_for_repair(id_)
        if held is not None and self._repair.answer(id_, entry.sender_id, held.sender_id, now):
            self._mark("response", id_)

    def held_for_repair(self, message_id: str) -> LoggedMessage | Waiting | None:
        """The message to answer a request with: a logged one, or one that waits for its dependencies."""
        logged = self._history.log.get(message_id)
        if logged is None:
            return self._incoming.waiting.get(message_id)
        return logged if logged.dispatched else None

    def sweep(self) -> None:
        """Check all waiting and missing messages once more (C-124, C-126)."""
        now, incoming = self._clock.now, self._incoming
        self._deliver_all(incoming.recheck(self._is_met))
        self.release(incoming.overdue(now))
        for lost, told in incoming.give_up(now):
            id_ = lost.entry.message_id
            self._mark("missing", id_)
            self._mark("lost", id_)
            if self._repair.received(id_):
                self._mark("request", id_)
            if not told:
                self._emit(lost)
            self.met(id_)
        self._forget_lost()
        self._deliver_all(incoming.break_cycle(now))
        self._repair.take_unanswered(now)
        for missing in incoming.missing.values():  # some found no room in the buffer before
            if self._repair.is_full:
                break
            if self._repair.want(missing.entry, now):
                self._mark("request", missing.entry.message_id)
        busy = incoming.waiting or incoming.missing
        self.sweep_at = now + self._config.sweep_in_buf_interval_ms if busy else math.inf

    def _deliver_all(self, ready: list[Waiting]) -> None:
        while ready:
            following: list[Waiting] = []
            for waiting in sorted(ready, key=Waiting.log_order):
                message = SdsMessage.read(waiting.body.restore())
                self._deliver(message, waiting.body, waiting.reception)
                self._mark("waiting", waiting.message_id)
                following += self._incoming.met(waiting.message_id)
            ready = following

    def _deliver(self, message: SdsMessage, body: Body, reception: Reception) -> None:
        """Log a message and deliver its content; our Lamport time follows (C-117)."""
        lamport = message.lamport_timestamp or 0
        # One extreme value must not freeze the order for all (C-119, A-141).
        if lamport <= self._clock.wall + FAR_AHEAD_MS:
            self._lamport.follow(lamport)
        self._history.add(
            message.message_id,
            message.sender_id,
            lamport,
            body,
            message.history_ids,
            clock=self._lamport.credible(self._clock.wall),
            now=self._clock.now,
            hint=reception.hint,
            stored=reception.stored,
        )
        if message.sender_id == self._sender_id:
            return  # one of our messages, lost with an earlier state: the application knows it
        self._statistics.delivered += 1
        content, hint = message.content or b"", reception.hint
        self._emit(Delivered(message.message_id, message.sender_id, content, lamport, hint, reception.origin))


class OwnName:
    """Messages sent under our sender id that nothing else keeps, and reports of those received under it."""

    def __init__(self, log: MessageLog, own_count: int) -> None:
        """`own_count` is the number of own messages before this run."""
        self._log = log
        self._own_before = own_count
        self._syncs: deque[int] = deque(maxlen=_REMEMBERED_OWN)
        self._withdrawn: deque[str] = deque(maxlen=_REMEMBERED_OWN)
        self._reports: deque[SenderShared] = deque(maxlen=_REMEMBERED_OWN)

    def sync_sent(self, lamport: int) -> None:
        """Note that we send a sync; its Lamport time identifies it."""
        self._syncs.append(lamport)

    def withdrawn(self, message_id: str) -> None:
        """Note that one of our messages was forgotten, though it may have gone out."""
        self._withdrawn.append(message_id)

    def heard(self, message: SdsMessage, origin: Origin) -> bool:
        """Report a message under our id that is not in the log, unless it was sent here; True if reported."""
        lamport = message.lamport_timestamp or 0
        if message.kind is Kind.EPHEMERAL:
            return False  # none is kept to compare with
        if message.message_id in self._withdrawn or lamport in self._syncs:
            return False
        named = map(self._log.get, message.history_ids)
        follows_own = any(entry is not None and entry.own > self._own_before for entry in named)
        self._reports.append(SenderShared(message.message_id, lamport, follows_own, origin))
        return True

    def take(self) -> list[SenderShared]:
        """Remove and return the latest reports."""
        reports = list(self._reports)
        self._reports.clear()
        return reports


def _bounded(entry: HistoryEntry) -> HistoryEntry:
    """A received entry, without its hint or sender id if that is too long to keep."""
    sender_id = entry.sender_id
    return HistoryEntry(
        entry.message_id,
        usable_hint(entry.retrieval_hint),
        sender_id if sender_id and is_usable_id(sender_id) else None,
    )


def usable_hint(hint: bytes | None) -> bytes | None:
    """The hint; None if it is empty or too long to keep."""
    return hint if hint and len(hint) <= _MAX_HINT_BYTES else None
