"""One participant of one channel: Scalable Data Sync without I/O, clock or random source.

The shell tells it what happens (`wrap`, `dispatched`, `receive`, `handle_timer`). After every call it takes
`events()` and acts on them, stores `changes()`, and arms one timer for `get_timer()`. All times are Unix
milliseconds of the wall clock; timers survive its steps (see `strata.channels.sds.timing`).

Nothing a stranger sends raises out of here: it is counted in `statistics` and dropped. What is dropped
enters neither log nor filter, so it is never acknowledged.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable

from strata.channels.sds.bloom import BloomParameters
from strata.channels.sds.bodies import Body
from strata.channels.sds.config import SdsConfig
from strata.channels.sds.events import (
    Acknowledged,
    DeliveryFailed,
    EphemeralReceived,
    SdsEvent,
    SendRepair,
    SendSync,
)
from strata.channels.sds.fresh import Fresh
from strata.channels.sds.ids import check_id, is_usable_id, message_id
from strata.channels.sds.incoming import IncomingBuffer
from strata.channels.sds.journal import Journal
from strata.channels.sds.ledger import Ledger
from strata.channels.sds.log import Entry
from strata.channels.sds.messages import NO_CHANNEL, HistoryEntry, Kind, SdsMessage
from strata.channels.sds.outgoing import Outgoing, OutgoingBuffer, OutgoingState
from strata.channels.sds.receiving import MAX_HINT_BYTES, Receiver
from strata.channels.sds.repair import RepairBuffers
from strata.channels.sds.restoring import restore
from strata.channels.sds.state import Change, ClockRecord, SdsState
from strata.channels.sds.statistics import Statistics
from strata.channels.sds.sync import SyncSchedule
from strata.channels.sds.timing import LamportClock, SteadyClock
from strata.protocol.errors import StrataError

__all__ = ["OutgoingFull", "Participant"]


class OutgoingFull(StrataError):
    """Too many own messages await acknowledgement: wrap again when some have it."""


class Participant:
    """A sender's part in a channel.

    `channel_id` None is the channel of those without one (C-099). `random` gives values in [0, 1), for the
    times of sync messages. `state` is what earlier `changes()` add up to. With `track_changes` off nothing is
    noted for `changes()`; with it on, take them regularly, or they pile up.

    Raises `ValueError` for ids that are empty or longer than 256 bytes.
    """

    def __init__(
        self,
        channel_id: str | None,
        sender_id: str,
        config: SdsConfig | None = None,
        *,
        now_ms: int,
        random: Callable[[], float],
        state: SdsState | None = None,
        track_changes: bool = True,
    ) -> None:
        self.channel_id = check_id("channel_id", NO_CHANNEL if channel_id is None else channel_id)
        self.sender_id = check_id("sender_id", sender_id)
        self.config = config = config or SdsConfig()
        self.statistics = Statistics()
        self._events: list[SdsEvent] = []
        self._clock = SteadyClock(now_ms)
        self._lamport = LamportClock(now_ms)
        self._own_count = 0
        self._fresh = Fresh()
        self._parameters = BloomParameters(config.bloom_filter_size, config.bloom_filter_error_rate)
        self._outgoing = OutgoingBuffer(config, self._parameters)
        self._incoming = IncomingBuffer(config)
        self._repair = RepairBuffers(self.sender_id, config)
        self._journal = Journal() if track_changes else None
        self._mark = self._journal.mark if self._journal is not None else _ignore
        self._ledger = Ledger(config, self._parameters, self._outgoing, self._mark)
        if state is not None:
            self._restore(state)
        self._receiver = Receiver(
            *(config, self._ledger, self._incoming, self._repair, self._clock, self._lamport),
            sender_id=self.sender_id,
            statistics=self.statistics,
            mark=self._mark,
            emit=self._events.append,
        )
        self._sync = SyncSchedule(config, random, self._clock.now)

    def _restore(self, state: SdsState) -> None:
        now = self._clock.now
        stored = restore(
            *(state, self._parameters, now, self._ledger, self._outgoing, self._incoming, self._repair)
        )
        # Whatever the wall clock does, Lamport time never goes back.
        self._lamport.follow(stored.lamport)
        self._own_count = stored.own_count

    @property
    def lamport(self) -> int:
        """One's own Lamport time."""
        return self._lamport.time

    # What the application sends.

    @property
    def room(self) -> int:
        """How many more messages `wrap` takes before it refuses."""
        return self.config.max_unacknowledged - len(self._outgoing)

    def wrap(self, content: bytes, now_ms: int, now_ns: int) -> SdsMessage:
        """Register a message and give it the form in which it travels.

        It is in the log and tracked from here on (C-109, C-110); say `dispatched` when it has gone out, or
        `failed`. `now_ns` makes its id unique: give each call another. Raises `ValueError` for empty content,
        `OutgoingFull` with `max_unacknowledged` messages unacknowledged.
        """
        if not content:
            raise ValueError("a message needs content")
        if len(self._outgoing) >= self.config.max_unacknowledged:
            raise OutgoingFull(f"{len(self._outgoing)} messages await acknowledgement")
        now = self._clock.advance(now_ms)
        id_ = message_id(self.sender_id, now_ns, content)
        if id_ in self._ledger.known:
            raise ValueError("this content was wrapped at this time before")
        message = self._compose(id_, self._recent(dispatched_only=False), content)
        data = message.encode()
        body = self._ledger.archive.keep(self.sender_id, data, message.bloom_filter)
        self._fresh.put(id_, data)
        self._own_count += 1
        self._outgoing.add(id_, self._own_count, body)
        self._mark("outgoing", id_)
        history = _ids(message)
        self._ledger.add(
            *(id_, self.sender_id, self._lamport.time, body, history),
            clock=self._lamport.time,
            now=now,
            own=self._own_count,
        )
        self._sync.sent(history, now)
        return message

    def wrap_ephemeral(self, content: bytes, now_ns: int) -> SdsMessage:
        """Give an ephemeral message its form; nothing is kept of it (C-138, C-180). Raises `ValueError`."""
        if not content:
            raise ValueError("a message needs content")
        id_ = message_id(self.sender_id, now_ns, content)
        return SdsMessage(self.sender_id, id_, self.channel_id, content=content)

    def dispatched(self, message_id: str, now_ms: int, retrieval_hint: bytes | None = None) -> None:
        """An own message, or its retransmission, has gone out: its timer starts (C-067).

        From the first time on it is in the filter, and sync messages may name it (C-110). `retrieval_hint` is
        what others can fetch it by (C-071).
        """
        now = self._clock.advance(now_ms)
        self._fresh.discard(message_id)
        entry = self._ledger.log.get(message_id)
        if entry is not None and entry.own:
            self._ledger.dispatched(entry)
            self._ledger.learn_hint(entry, retrieval_hint)
        if message_id in self._outgoing:
            self._outgoing.dispatched(message_id, now)
            self._mark("outgoing", message_id)

    def failed(self, message_id: str) -> None:
        """An own message can never go out: it is forgotten, and no later message names it (C-110).

        If it went out before, others may have it, so it stays in the log and is only not sent again.
        """
        self._fresh.discard(message_id)
        outgoing = self._outgoing.discard(message_id)
        if outgoing is not None:
            self._let_go(outgoing)
        entry = self._ledger.log.get(message_id)
        if entry is not None and entry.own and not entry.dispatched:
            self._ledger.withdraw(entry)

    def sync_failed(self, now_ms: int) -> None:
        """A `SendSync` could not be carried out: the next comes later (C-135)."""
        self._sync.failed(self._clock.advance(now_ms))

    def set_online(self, online: bool, now_ms: int) -> None:
        """Say whether the node can reach anybody. While it cannot, no timer runs (C-088)."""
        self._clock.advance(now_ms)
        self._clock.online = online

    # What comes in.

    def receive(self, data: bytes, now_ms: int, retrieval_hint: bytes | None = None) -> SdsMessage | None:
        """Take a message from the network; it is returned as read, None if it is none of this channel.

        Never raises for what it holds.
        """
        now = self._clock.advance(now_ms)
        message = self._decode(data)
        if message is None:
            return None
        self.statistics.received += 1
        hint = retrieval_hint if retrieval_hint and len(retrieval_hint) <= MAX_HINT_BYTES else None
        if message.sender_id == self.sender_id:
            self._own_echo(message, data, now, hint)
        elif message.kind is Kind.EPHEMERAL:
            assert message.content is not None
            self._events.append(EphemeralReceived(message.message_id, message.sender_id, message.content))
        elif message.kind is Kind.SYNC:
            self._receive_sync(message, now)
        elif self._is_new(message, hint):
            self._receive_content(message, data, now, hint)
        return message

    def _decode(self, data: bytes) -> SdsMessage | None:
        if len(data) > self.config.max_message_bytes:
            self.statistics.oversized += 1
            return None
        message = SdsMessage.decode(data, max_entries=self.config.max_received_history)
        if message is None or message.kind is None or not _has_usable_ids(message):
            self.statistics.undecodable += 1
            return None
        if message.channel_id != self.channel_id:
            self.statistics.other_channels += 1
            return None
        return message

    def _own_echo(self, message: SdsMessage, data: bytes, now: int, hint: bytes | None) -> None:
        """An own message comes back: no news (C-111), unless it was lost with an earlier state.

        Then it is logged in its place like any other, for others have it; the application knows it.
        """
        self.statistics.own_echoes += 1
        id_ = message.message_id
        if message.kind is Kind.CONTENT and id_ not in self._ledger.known:
            if id_ not in self._incoming.waiting:
                self._receive_content(message, data, now, hint)

    def _is_new(self, message: SdsMessage, hint: bytes | None) -> bool:
        """Whether a content message was not received before (C-112)."""
        id_ = message.message_id
        if id_ not in self._ledger.known and id_ not in self._incoming.waiting:
            return True
        self.statistics.duplicates += 1
        self._receiver.arrived(id_)
        entry = self._ledger.log.get(id_)
        if entry is not None and entry.hint is None:
            self._ledger.learn_hint(entry, hint)
        return False

    def _receive_sync(self, message: SdsMessage, now: int) -> None:
        """A sync message acknowledges and reveals gaps; nothing of it is kept (C-131, C-134)."""
        self._review(message, now)
        # Half the room is for gaps that messages wait for: syncs are cheap to forge.
        unmet = self._receiver.unmet(message)
        self._receiver.miss(unmet.values(), limit=self.config.max_missing // 2)
        self._sync.received_sync(now)

    def _receive_content(self, message: SdsMessage, data: bytes, now: int, hint: bytes | None) -> None:
        id_ = message.message_id
        own = message.sender_id == self.sender_id
        # What it acknowledges is true even if it is refused. One's own word acknowledges nothing (C-092).
        if not own:
            self._review(message, now)
        if (message.lamport_timestamp or 0) <= self._ledger.known.horizon:
            self.statistics.refused_old += 1
            return
        unmet = self._receiver.unmet(message)
        if unmet and not self._incoming.has_room(len(data), len(unmet)):
            self.statistics.refused_full += 1
            return
        self._receiver.arrived(id_)
        # From here on the filter acknowledges the message, so nothing below may drop it (C-114).
        self._ledger.filter.insert(id_)
        if not own:
            self._sync.received_content(id_, message.sender_id, _ids(message), now)
        body = self._ledger.archive.keep(message.sender_id, data, self._wire_filter(message))
        self._receiver.take(message, body, unmet, hint)

    def _review(self, message: SdsMessage, now: int) -> None:
        """What a received message says about own messages (C-113), and what it asks for (C-153, C-154)."""
        history = _ids(message)
        self._sync.named_by_other(history, message.sender_id)
        if not self._outgoing.is_empty:
            for acknowledged in self._outgoing.review_history(history, message.sender_id):
                self._acknowledged(acknowledged)
        data = self._wire_filter(message)
        if data is not None:
            if not self._outgoing.is_empty:
                self._review_filter(message, data, history)
            if message.kind is Kind.SYNC:
                self._ledger.tips.compare(data, now)
        for entry in message.repair_request:
            self._requested(entry, now)

    def _review_filter(self, message: SdsMessage, data: bytes, history: list[str]) -> None:
        named = [entry for entry in map(self._ledger.log.get, history) if entry is not None and entry.floor]
        runs = [(entry.run, entry.floor) for entry in named]
        lamport = message.lamport_timestamp or 0
        for event in self._outgoing.review_filter(data, message.sender_id, lamport, runs):
            if isinstance(event, Acknowledged):
                self._acknowledged(event)
            else:
                self._events.append(event)
                self._mark("outgoing", event.message_id)

    def _acknowledged(self, event: Acknowledged) -> None:
        outgoing = self._outgoing.discard(event.message_id)
        if outgoing is None:
            return
        self._let_go(outgoing)
        entry = self._ledger.log.get(event.message_id)
        if entry is not None:
            # Word that the message has gone out may come later than the acknowledgement.
            self._ledger.dispatched(entry)
        self._events.append(event)

    def _requested(self, entry: HistoryEntry, now: int) -> None:
        id_ = entry.message_id
        if self._repair.asked_by_other(entry, now):
            self._mark("request", id_)
        held = self._held_for_repair(id_)
        if held is not None and self._repair.answer(id_, entry.sender_id, held[0], now):
            self._mark("response", id_)

    def _held_for_repair(self, message_id: str) -> tuple[str, Body] | None:
        """Sender and bytes of a message that others may be sent, though one's own gaps hold it back here."""
        entry = self._ledger.log.get(message_id)
        if entry is not None:
            return (entry.sender_id, entry.body) if entry.dispatched else None
        waiting = self._incoming.waiting.get(message_id)
        return None if waiting is None else (waiting.sender_id, waiting.body)

    def _wire_filter(self, message: SdsMessage) -> bytes | None:
        """The filter of a message; None if it is not of this channel's size (C-103)."""
        data = message.bloom_filter
        return data if data is not None and len(data) == self._parameters.size_bytes else None

    def _let_go(self, outgoing: Outgoing) -> None:
        if outgoing.owns_body:
            self._ledger.archive.release(outgoing.body)
        self._mark("outgoing", outgoing.message_id)

    # What goes out by itself.

    def get_timer(self) -> float:
        """When to call `handle_timer`, in wall milliseconds; infinite if there is nothing to do."""
        at = min(
            *(self._outgoing.next_at, self._receiver.sweep_at, self._repair.responses.next_at, self._sync.at)
        )
        if self.config.sync_min_interval_ms:
            at = min(at, self._repair.requests.next_at)
        return self._clock.to_wall(at)

    def handle_timer(self, now_ms: int) -> None:
        """Do what is due: retransmissions, failures, syncs, repairs, the sweep of the incoming buffer."""
        now = self._clock.advance(now_ms)
        if not self._clock.online:
            return
        self._sweep_outgoing(now)
        if self._receiver.sweep_at <= now:
            self._receiver.sweep()
        self._send_repairs(now)
        # Others' syncs do not spare one's own when it has to ask for repair (C-160).
        asks = self.config.sync_min_interval_ms and self._repair.requests.next_at <= now
        if self._sync.at <= now or asks:
            self._send_sync(now)

    def _sweep_outgoing(self, now: int) -> None:
        events, forgotten = self._outgoing.take_due(now)
        for event in events:
            self.statistics.retransmissions += not isinstance(event, DeliveryFailed)
            self._mark("outgoing", event.message_id)
            self._events.append(event)
        for outgoing in forgotten:
            self._let_go(outgoing)

    def _send_repairs(self, now: int) -> None:
        for id_ in self._repair.take_responses(now):
            self._mark("response", id_)
            held = self._held_for_repair(id_)
            if held is not None:
                self.statistics.repairs_sent += 1
                self._events.append(SendRepair(id_, held[1].restore()))

    def _send_sync(self, now: int) -> None:
        recent = self._recent(dispatched_only=True)
        lacked = self._ledger.tips.take_lacked([entry.message_id for entry in recent])
        entries = [entry for entry in map(self._ledger.log.get, lacked) if entry is not None] + recent
        asks = self._repair.requests.next_at <= now
        self._sync.sent([entry.message_id for entry in entries], now)
        if entries or asks:  # C-137: else there is nothing to tell
            id_ = message_id(self.sender_id, self._lamport.time, b"sync")
            self.statistics.syncs_sent += 1
            self._events.append(SendSync(self._compose(id_, entries, None).encode()))

    def _recent(self, *, dispatched_only: bool) -> list[Entry]:
        """The log entries that a message sent now follows (C-106)."""
        # At the next Lamport time, so that an own message of this very moment counts.
        limit = max(self._clock.wall, self._lamport.time + 1)
        return self._ledger.log.recent(
            self.config.causal_history_size, limit, dispatched_only=dispatched_only
        )

    def _compose(self, id_: str, named: list[Entry], content: bytes | None) -> SdsMessage:
        """A content or sync message, sent now (C-105, C-107, C-108, C-130, C-148)."""
        requests = self._repair.take_requests(self._clock.now)
        for entry in requests:
            self._mark("request", entry.message_id)
        return SdsMessage(
            self.sender_id,
            id_,
            self.channel_id,
            self._lamport.tick(self._clock.wall),
            tuple([entry.as_history(with_sender=self.config.enable_repair) for entry in named]),
            self._ledger.filter.to_bytes(),
            requests,
            content,
        )

    # What the shell takes.

    def events(self) -> list[SdsEvent]:
        """What happened since the last call, in order."""
        events = self._events.copy()
        self._events.clear()
        return events

    def changes(self) -> list[Change]:
        """What to store since the last call, in one transaction. `ValueError` without `track_changes`."""
        if self._journal is None:
            raise ValueError("made with track_changes=False")
        ledger = self._ledger
        clock = ClockRecord(
            self._lamport.time, self._own_count, ledger.log.last_arrival, ledger.known.horizon
        )
        return self._journal.take(clock, ledger, self._outgoing, self._incoming, self._repair)

    def log(self) -> list[HistoryEntry]:
        """Everything in the log, in the order that all participants share. Costs the length of the log."""
        return [entry.as_history(with_sender=True) for entry in self._ledger.log.ordered()]

    def encoded(self, message_id: str) -> bytes | None:
        """A logged or unacknowledged message as it travels, byte for byte; None if it is not here.

        After a restart: what to send for the own messages that had not been dispatched.
        """
        if (data := self._fresh.get(message_id)) is not None:
            return data
        kept = self._outgoing.get(message_id) or self._ledger.log.get(message_id)
        return None if kept is None else kept.body.restore()

    def retrieval_hint(self, message_id: str) -> bytes | None:
        """What finds a logged message in a store; None if that is not known."""
        entry = self._ledger.log.get(message_id)
        return None if entry is None else entry.hint

    def missing(self) -> list[HistoryEntry]:
        """What others name and is not here, longest missing first."""
        return [missing.entry for missing in self._incoming.missing.values()]

    def missing_since(self) -> dict[str, int]:
        """When each missing message was first found to be so, in wall milliseconds."""
        return {
            message_id: self._clock.was_at(missing.first_missing_at)
            for message_id, missing in self._incoming.missing.items()
        }

    def outgoing(self) -> dict[str, OutgoingState]:
        """Own messages that nobody has acknowledged, and where each stands."""
        return self._outgoing.states()

    def is_outgoing(self, message_id: str) -> bool:
        """Whether this is an own message that nobody has acknowledged."""
        return message_id in self._outgoing

    def undispatched(self) -> list[str]:
        """Own messages that have never gone out, in the order they were wrapped."""
        return self._outgoing.undispatched()


def _ignore(kind: str, key: str) -> None:
    """Nobody stores anything."""


def _ids(message: SdsMessage) -> list[str]:
    return [entry.message_id for entry in message.causal_history]


def _has_usable_ids(message: SdsMessage) -> bool:
    if message.kind is not Kind.SYNC and not message.message_id:
        return False
    texts = [message.sender_id, message.channel_id, *_ids(message)]
    texts += [entry.message_id for entry in message.repair_request]
    return all(map(is_usable_id, texts)) and (not message.message_id or is_usable_id(message.message_id))
