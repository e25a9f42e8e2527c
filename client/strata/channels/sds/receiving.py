"""From a received message to its delivery: dependencies, holding, gaps (SDS Receive and Incoming sweep)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from strata.channels.sds.bodies import Body
from strata.channels.sds.config import FAR_AHEAD_MS, SdsConfig
from strata.channels.sds.events import Delivered, MissingFound, SdsEvent
from strata.channels.sds.ids import is_usable_id
from strata.channels.sds.incoming import IncomingBuffer, Waiting
from strata.channels.sds.ledger import Ledger
from strata.channels.sds.messages import HistoryEntry, SdsMessage
from strata.channels.sds.repair import RepairBuffers
from strata.channels.sds.statistics import Statistics
from strata.channels.sds.timing import LamportClock, SteadyClock

__all__ = ["MAX_HINT_BYTES", "Receiver"]

MAX_HINT_BYTES = 256


class Receiver:
    """Holds messages until what they follow is there, then logs and delivers them, each once."""

    def __init__(
        self,
        config: SdsConfig,
        ledger: Ledger,
        incoming: IncomingBuffer,
        repair: RepairBuffers,
        clock: SteadyClock,
        lamport: LamportClock,
        *,
        sender_id: str,
        statistics: Statistics,
        mark: Callable[[str, str], None],
        emit: Callable[[SdsEvent], None],
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._incoming = incoming
        self._repair = repair
        self._clock = clock
        self._lamport = lamport
        self._mark = mark
        self._emit = emit
        self._sender_id = sender_id
        self._statistics = statistics
        # What was held or missed in an earlier life is looked at first of all.
        self.sweep_at: float = clock.now if incoming.waiting or incoming.missing else math.inf

    def unmet(self, message: SdsMessage) -> dict[str, HistoryEntry]:
        """The dependencies of a message that are not in the log (C-115); those given up count as met."""
        known, lost = self._ledger.known, self._incoming.lost
        return {
            entry.message_id: entry
            for entry in message.causal_history
            if entry.message_id not in known
            and entry.message_id not in lost
            and entry.message_id != message.message_id
        }

    def arrived(self, id_: str) -> None:
        """A message is here: nobody need look for it (C-151, C-166)."""
        if self._repair.received(id_):
            self._mark("request", id_)
            self._mark("response", id_)
        if self._incoming.missing.pop(id_, None) is not None:
            self._mark("missing", id_)
        if id_ in self._incoming.lost:
            del self._incoming.lost[id_]
            self._mark("lost", id_)

    def take(
        self, message: SdsMessage, body: Body, unmet: dict[str, HistoryEntry], hint: bytes | None
    ) -> None:
        """Deliver a new content message, or hold it (C-116)."""
        id_, lamport = message.message_id, message.lamport_timestamp or 0
        if not unmet:
            self._deliver(message, body, hint)
            self.met(id_)
            return
        received_at = self._clock.now
        self._incoming.hold(
            Waiting(id_, message.sender_id, lamport, body, set(unmet), hint=hint, received_at=received_at)
        )
        self._mark("waiting", id_)
        self.miss(unmet.values(), limit=self._config.max_missing)

    def miss(self, entries: Iterable[HistoryEntry], *, limit: int) -> None:
        """Track these as missing, tell of them, and ask for them in time (C-152, C-162)."""
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

    def met(self, message_id: str) -> None:
        """A dependency is met: deliver what waited for it alone, and what that sets free in turn."""
        self._deliver_all(self._incoming.met(message_id))

    def sweep(self) -> None:
        """Look at everything that is held or missed once more (C-124, C-126)."""
        now, incoming = self._clock.now, self._incoming
        self._deliver_all(incoming.recheck(self._ledger.known.__contains__))
        for lost in incoming.give_up(now):
            id_ = lost.entry.message_id
            self._mark("missing", id_)
            self._mark("lost", id_)
            if self._repair.received(id_):
                self._mark("request", id_)
            self._emit(lost)
            self.met(id_)
        for id_ in incoming.forget_lost():
            self._mark("lost", id_)
        self._deliver_all(incoming.break_cycle(now))
        for entry in self._repair.take_unanswered(now):
            if entry.message_id in incoming.missing and self._repair.want(entry, now):
                self._mark("request", entry.message_id)
        busy = incoming.waiting or incoming.missing
        self.sweep_at = now + self._config.sweep_in_buf_interval_ms if busy else math.inf

    def _deliver_all(self, ready: list[Waiting]) -> None:
        while ready:
            following: list[Waiting] = []
            for waiting in sorted(ready, key=_log_order):
                data = waiting.body.restore()
                message = SdsMessage.decode(data, max_entries=self._config.max_received_history)
                assert message is not None
                self._deliver(message, waiting.body, waiting.hint)
                self._mark("waiting", waiting.message_id)
                following += self._incoming.met(waiting.message_id)
            ready = following

    def _deliver(self, message: SdsMessage, body: Body, hint: bytes | None) -> None:
        """Log a message and hand over its content; one's own Lamport time follows (C-117)."""
        lamport = message.lamport_timestamp or 0
        assert message.content is not None
        # One extreme value must not freeze the order for all (C-119, A-141).
        if lamport <= self._clock.wall + FAR_AHEAD_MS:
            self._lamport.follow(lamport)
        self._ledger.add(
            *(message.message_id, message.sender_id, lamport, body),
            [entry.message_id for entry in message.causal_history],
            clock=self._lamport.time,
            now=self._clock.now,
            hint=hint,
        )
        if message.sender_id == self._sender_id:
            return  # lost with an earlier state, and no news to the application
        self._statistics.delivered += 1
        self._emit(Delivered(message.message_id, message.sender_id, message.content, lamport, hint))


def _bounded(entry: HistoryEntry) -> HistoryEntry:
    """A stranger's entry without what is too long to keep."""
    hint, sender_id = entry.retrieval_hint, entry.sender_id
    return HistoryEntry(
        entry.message_id,
        hint if hint and len(hint) <= MAX_HINT_BYTES else None,
        sender_id if sender_id and is_usable_id(sender_id) else None,
    )


def _log_order(waiting: Waiting) -> tuple[int, str]:
    return waiting.lamport, waiting.message_id
