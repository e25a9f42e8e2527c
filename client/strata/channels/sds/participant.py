"""One participant of one channel: Scalable Data Sync without I/O, clock or random source.

The shell reports what happens (`wrap`, `dispatched`, `receive`, `handle_timer`). After every call the shell
takes `events()` and acts on them, stores `changes()`, and arms one timer for `get_timer()`. All times are
Unix milliseconds of the wall clock; timers survive its steps (see `strata.channels.sds.timing`).

Received bytes never make these methods raise: a bad message is counted in `statistics` and dropped. A
dropped message enters neither the log nor the filter, so it is never acknowledged.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import chain, islice

from msgspec.structs import replace

from strata.channels.sds.bloom import BloomParameters
from strata.channels.sds.config import SdsConfig
from strata.channels.sds.events import (
    NO_ORIGIN,
    Acknowledged,
    DeliveryFailed,
    EphemeralReceived,
    Origin,
    RefusedOld,
    SdsEvent,
    SdsStatistics,
    SenderShared,
    SendRepair,
    SendSync,
)
from strata.channels.sds.incoming import IncomingBuffer, OwnName, Receiver, Reception, usable_hint
from strata.channels.sds.log import History, LoggedMessage
from strata.channels.sds.looking import Looking
from strata.channels.sds.messages import (
    NO_CHANNEL,
    HistoryEntry,
    Kind,
    SdsMessage,
    check_id,
    message_id,
    person_of,
)
from strata.channels.sds.outgoing import Outgoing, OutgoingBuffer, WireCache
from strata.channels.sds.receipts import (
    LATEST,
    MAX_IN_CONTENT,
    MAX_IN_SYNC,
    read_receipts,
    write_receipts,
)
from strata.channels.sds.repair import RepairBuffers
from strata.channels.sds.state import Change, ClockRecord, Journal, SdsState, restore
from strata.channels.sds.sync import SyncSchedule
from strata.channels.sds.timing import LamportClock, SteadyClock
from strata.protocol.errors import StrataError

__all__ = ["OutgoingFull", "Participant"]

_PLAIN_FOR_MS = 3_600_000
"""How long a participant that lists nothing gets filters after its last message; far longer than a sync
interval."""
_LIVE_MS = 30_000
"""A message sent longer ago comes from a store, so it does not show who is present now."""
_FILTER_EVERY_MS = 120_000
"""While all participants list receipts, one sync in this time, from any of them, carries a filter."""
_COMPARED = 4_096
"""Messages of an earlier run whose receipts are remembered: others list only recent messages."""
_MAX_REFUSED_OLD = 1_000
_SMALL_BYTES = 16_384
"""Content up to this size leaves room for receipts in its message (`strata.channels.reliable.sizes`)."""


class OutgoingFull(StrataError):
    """Too many own messages await acknowledgement. Wrap again when some have been acknowledged."""


class Participant(Looking):
    """A sender's part in a channel.

    `channel_id` None is the channel of messages without one (C-099). `random` returns values in [0, 1), for
    the times of sync messages. `state` is the sum of earlier `changes()`. With `track_changes` off no changes
    are recorded. With it on, call `changes()` regularly, or they accumulate. `author` is the transport's name
    for the person behind this participant, if it has one (`Origin.author`). With `receipts` the participant
    lists the messages it received, and omits its filter while everyone it hears does the same
    (`strata.channels.sds.receipts`). Without, its messages are those of the document, byte for byte.

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
        author: str | None = None,
        receipts: bool = False,
    ) -> None:
        self.channel_id = check_id("channel_id", NO_CHANNEL if channel_id is None else channel_id)
        self.sender_id = check_id("sender_id", sender_id)
        self.config = config = config or SdsConfig()
        self.statistics = SdsStatistics()
        self._events: list[SdsEvent] = []
        self._clock = SteadyClock(now_ms)
        self._lamport = LamportClock(now_ms)
        self._own_count = 0
        self._author = author
        self._receipts = receipts
        self._plain_heard_at = -math.inf
        """The latest Lamport time of a received message without a list of receipts."""
        self._filter_passed_at = self._clock.now
        """When any participant last sent a filter."""
        self._refused_old: dict[str, None] = {}
        """The latest messages that were reported as too old."""
        self._wire_cache = WireCache()
        self._parameters = BloomParameters(config.bloom_filter_size, config.bloom_filter_error_rate)
        self._outgoing = OutgoingBuffer(config, self._parameters)
        self._incoming = IncomingBuffer(config)
        self._repair = RepairBuffers(self.sender_id, config)
        self._journal = Journal() if track_changes else None
        self._mark = self._journal.mark if self._journal is not None else _ignore
        self._history = History(config, self._parameters, self._outgoing, self._mark)
        if self._journal is not None:
            self._journal.watch(self._history, self._outgoing, self._incoming, self._repair)
        if state is not None:
            self._restore(state)
        self._own_name = OwnName(self._history.log, self._own_count)
        self._receiver = Receiver(
            config,
            self._history,
            self._incoming,
            self._repair,
            self._clock,
            self._lamport,
            sender_id=self.sender_id,
            statistics=self.statistics,
            mark=self._mark,
            emit=self._events.append,
        )
        self._sync = SyncSchedule(config, random, self._clock.now)

    def _restore(self, state: SdsState) -> None:
        parts = (self._history, self._outgoing, self._incoming, self._repair)
        stored = restore(state, self._parameters, self._clock.now, *parts)
        # Lamport time never goes back, even if the wall clock does.
        self._lamport.follow(stored.lamport)
        for known in reversed([*self._history.known.latest(_COMPARED)]):
            self._history.unheard.logged(known)
        self._own_count = stored.own_count

    @property
    def lamport(self) -> int:
        """The Lamport time of this participant."""
        return self._lamport.time

    # Sending.

    @property
    def room(self) -> int:
        """The number of messages that `wrap` would still accept."""
        return self.config.max_unacknowledged - len(self._outgoing)

    def wrap(self, content: bytes, now_ms: int, now_ns: int) -> SdsMessage:
        """Register a message, and return it as it travels.

        From now on it is logged and tracked (C-109, C-110). Call `dispatched` when it has gone out, or
        `failed`. `now_ns` makes its id unique: give each call a different value. Raises `ValueError` for
        empty content, or for content that was already wrapped with this `now_ns`, and `OutgoingFull` if
        `max_unacknowledged` messages are unacknowledged.
        """
        if not content:
            raise ValueError("a message needs content")
        if len(self._outgoing) >= self.config.max_unacknowledged:
            raise OutgoingFull(f"{len(self._outgoing)} messages await acknowledgement")
        now = self._clock.advance(now_ms)
        id_ = message_id(self.sender_id, now_ns, content)
        if id_ in self._history.known:
            raise ValueError("this content was wrapped at this time before")
        # A large message may fill its packet to the last byte.
        listed = self._news_beside(len(content)) if self._receipts else []
        message = self._compose(
            id_, self._recent(dispatched_only=False), listed, content, with_filter=self._filters
        )
        data = message.encode()
        body = self._history.archive.keep(self.sender_id, data, message.bloom_filter)
        self._wire_cache.put(id_, data)
        self._own_count += 1
        self._outgoing.add(id_, self._own_count, body)
        self._mark("outgoing", id_)
        named = message.history_ids
        self._history.add(
            id_,
            self.sender_id,
            self._lamport.time,
            body,
            named,
            clock=self._lamport.credible(self._clock.wall),
            now=now,
            own=self._own_count,
        )
        self._sync.sent(self._paid(named, listed), now, with_filter=self._filters)
        return message

    def wrap_ephemeral(self, content: bytes, now_ns: int) -> SdsMessage:
        """Return an ephemeral message, which is not kept (C-138, C-180). `ValueError` without content."""
        if not content:
            raise ValueError("a message needs content")
        id_ = message_id(self.sender_id, now_ns, content)
        return SdsMessage(self.sender_id, id_, self.channel_id, content=content)

    def dispatched(self, message_id: str, now_ms: int, retrieval_hint: bytes | None = None) -> None:
        """Report that one of our messages, or its retransmission, has gone out: its timer starts (C-067).

        After the first dispatch the message is in the filter, and sync messages may name it (C-110). Other
        participants can fetch it by `retrieval_hint` (C-071).
        """
        now = self._clock.advance(now_ms)
        self._wire_cache.discard(message_id)
        entry = self._history.log.get(message_id)
        if entry is not None and entry.own:
            self._history.dispatched(entry)
            self._history.learn_hint(entry, retrieval_hint)
        if message_id in self._outgoing:
            self._outgoing.dispatched(message_id, now)
            self._mark("outgoing", message_id)

    def failed(self, message_id: str) -> None:
        """Report that one of our messages can never go out: forget it, and let no later one name it (C-110).

        If it went out before, others may have it. Then it stays in the log, but is not sent again.
        """
        self._wire_cache.discard(message_id)
        outgoing = self._outgoing.discard(message_id)
        if outgoing is not None:
            self._let_go(outgoing)
        entry = self._history.log.get(message_id)
        if entry is not None and entry.own and not entry.dispatched:
            self._history.withdraw(entry)
            self._own_name.withdrawn(message_id)

    def amend(self, message_id: str) -> bool:
        """Remove withdrawn messages from the history of one of our messages that is not dispatched (C-110).

        Returns whether its bytes have changed. Its id and its Lamport time stay, so messages that follow it
        need no change. Its new history names the latest messages before it that are still in the log.
        """
        outgoing, entry = self._outgoing.get(message_id), self._history.log.get(message_id)
        if outgoing is None or entry is None or entry.dispatched:
            return False
        message = self.message(message_id)
        if message is None or all(named in self._history.known for named in message.history_ids):
            return False
        before = self._history.log.recent(
            self.config.causal_history_size, entry.lamport - 1, dispatched_only=False
        )
        named = tuple([each.as_history() for each in before])
        amended = replace(message, causal_history=named)
        data = amended.encode()
        self._wire_cache.discard(message_id)
        self._wire_cache.put(message_id, data)
        self._history.amend(entry, data, self._wire_filter(message), amended.history_ids)
        outgoing.body = entry.body
        self._mark("outgoing", message_id)
        return True

    def sync_now(self, now_ms: int) -> bool:
        """Send a sync message now: `events()` then has a `SendSync`.

        Returns False, without an event, if there is nothing to say yet (C-137). The next periodic sync is
        rescheduled.
        """
        before = self.statistics.syncs_sent
        self._send_sync(self._clock.advance(now_ms))
        return self.statistics.syncs_sent > before

    def sync_failed(self, now_ms: int) -> None:
        """Report that a `SendSync` was not possible: the next sync comes later (C-135)."""
        self._sync.failed(self._clock.advance(now_ms))

    def set_online(self, online: bool, now_ms: int) -> None:
        """Report whether the node can reach others. While it cannot, no timer runs (C-088)."""
        self._clock.advance(now_ms)
        self._clock.online = online

    def clock_stepped(self, by_ms: int) -> None:
        """Report that the wall clock jumped by `by_ms`, back if negative: timers keep their waits.

        An unreported jump forward looks like a pause of the process: the timers that it passes become due.
        """
        self._clock.step(by_ms)

    # Receiving.

    def receive(
        self,
        data: bytes,
        now_ms: int,
        retrieval_hint: bytes | None = None,
        origin: Origin = NO_ORIGIN,
        *,
        stored: bool = False,
    ) -> SdsMessage | None:
        """Take a message from the network, and return it; None if it is not a message of this channel.

        `origin` is what the transport knows of its sender. `stored` says that the message was read from a
        store, and not heard live. Never raises, whatever the bytes are.
        """
        now = self._clock.advance(now_ms)
        message = self._decode(data)
        if message is None:
            return None
        self.statistics.received += 1
        reception = Reception(usable_hint(retrieval_hint), origin, stored)
        if message.sender_id == self.sender_id:
            self._own_echo(message, data, now, reception)
        elif message.kind is Kind.EPHEMERAL:
            content = message.content or b""
            self._events.append(EphemeralReceived(message.message_id, message.sender_id, content, origin))
        elif message.kind is Kind.SYNC:
            self._receive_sync(message, now, origin)
        elif self._receiver.is_new(message.message_id, reception):
            self._receive_content(message, data, now, reception)
        elif self._lists and self.is_here(message.message_id):
            # A message that was passed over is not here: listing it would acknowledge it.
            self._sent_again(message, now, reception.hint)
        return message

    def _sent_again(self, message: SdsMessage, now: int, hint: bytes | None) -> None:
        """Handle a repeated message, perhaps sent because its sender has not heard the acknowledgement."""
        config = self.config
        held = self._history.log.get(message.message_id)
        tries = config.acknowledgement_timeout_ms * (config.max_retransmissions + 1)
        age = self._clock.wall - (message.lamport_timestamp or 0)
        copy = held is not None and hint is not None and hint == held.hint
        if not copy and age <= tries * config.possible_ack_retry_factor:
            self._sync.sent_again(message.message_id, message.sender_id, now)

    def _decode(self, data: bytes) -> SdsMessage | None:
        if len(data) > self.config.max_message_bytes:
            self.statistics.oversized += 1
            return None
        message = SdsMessage.decode_usable(data, max_entries=self.config.max_received_history)
        if message is None:
            self.statistics.undecodable += 1
            return None
        if message.channel_id != self.channel_id:
            self.statistics.other_channels += 1
            return None
        return message

    def _own_echo(self, message: SdsMessage, data: bytes, now: int, reception: Reception) -> None:
        """Handle one of our messages that comes back: ignore it (C-111), unless an earlier state lost it.

        A lost message is logged in its place like any other, since other participants have it.
        """
        self.statistics.own_echoes += 1
        id_ = message.message_id
        is_content = message.kind is Kind.CONTENT
        if is_content and (id_ in self._history.known or id_ in self._incoming.waiting):
            return
        if self._own_name.heard(message, reception.origin):
            self._sync.sender_is_shared(now)
        if is_content:
            self._receive_content(message, data, now, reception)

    def _receive_sync(self, message: SdsMessage, now: int, origin: Origin) -> None:
        """Take acknowledgements and gaps from a sync message, which is not kept (C-131, C-134)."""
        useful = self._review(message, now, origin)
        # Half the room is reserved for gaps that messages wait for: syncs are cheap to forge.
        unmet = self._receiver.unmet(message)
        self._receiver.miss(unmet.values(), limit=self.config.max_missing // 2)
        self._note_live(message, now, needless=not (useful or unmet))
        self._sync.received_sync(now)
        unreferenced = self._history.unreferenced
        unreferenced.named_by_other(message.history_ids)
        if unreferenced.some_lacked or self._lacks_unseen(message, now):
            self._sync.speak_for_all(now)

    def _lacks_unseen(self, sync: SdsMessage, now: int) -> bool:
        """Whether others list messages that are not here and that no message names."""
        unheard, incoming = self._history.unheard, self._incoming
        if self._lists and sync.receipts is not None and self._is_live(sync):
            unheard.listed(read_receipts(sync.receipts), now)
        return unheard.is_due(now, chain(incoming.missing, incoming.waiting, incoming.lost))

    def _receive_content(self, message: SdsMessage, data: bytes, now: int, reception: Reception) -> None:
        id_ = message.message_id
        own = message.sender_id == self.sender_id
        # A refused message acknowledges too. One of our own acknowledges nothing (C-092).
        if not own:
            self._review(message, now, reception.origin)
        if (message.lamport_timestamp or 0) <= self._history.known.horizon:
            self.statistics.refused_old += 1
            if not own:
                self._tell_refused_old(message, reception)
            return
        unmet = self._receiver.unmet(message)
        wanted = id_ in self._incoming.missing
        waits = bool(unmet) or (self._incoming.holds_heard and not reception.stored)
        if waits and not self._incoming.has_room(len(data), len(unmet), wanted=wanted):
            self.statistics.refused_full += 1
            return
        self._receiver.arrived(id_)
        # From here on the filter acknowledges the message, so nothing below may drop it (C-114).
        self._history.filter.insert(id_)
        if not own:
            self._note_live(message, now, needless=False)
            # A filter with a message acknowledges those that it follows too (C-123); a list does not.
            stands_for = () if self._lists else message.history_ids
            self._sync.received_content(id_, message.sender_id, now, stands_for=stands_for)
        body = self._history.archive.keep(message.sender_id, data, self._wire_filter(message))
        self._receiver.take(message, body, unmet, reception)

    def _tell_refused_old(self, message: SdsMessage, reception: Reception) -> None:
        """Report a message refused for its age, such as one from a long partition: the program must know."""
        id_ = message.message_id
        if id_ not in self._refused_old:
            self._refused_old[id_] = None
            if len(self._refused_old) > _MAX_REFUSED_OLD:
                del self._refused_old[next(iter(self._refused_old))]
            self._events.append(RefusedOld(id_, message.sender_id, reception.hint, reception.stored))

    def _note_live(self, message: SdsMessage, now: int, *, needless: bool) -> None:
        """Count the sender as present, unless the message was sent long ago and so comes from a store."""
        if self._is_live(message):
            self._sync.live(message.sender_id, now, message.lamport_timestamp or 0, needless=needless)

    def _is_live(self, message: SdsMessage) -> bool:
        return abs(self._clock.wall - (message.lamport_timestamp or 0)) <= _LIVE_MS

    def _review(self, message: SdsMessage, now: int, origin: Origin) -> bool:
        """Take the acknowledgements (C-113) and repair requests (C-153, C-154) of a received message.

        Returns whether the message had any news.
        """
        if message.receipts is None:
            self._plain_heard_at = max(
                self._plain_heard_at, min(message.lamport_timestamp or 0, self._clock.wall)
            )
        history, receipts = message.history_ids, read_receipts(message.receipts)
        useful = bool(message.repair_request)
        useful |= 0 < self._sync.named_by_other(
            history, receipts if self._lists else frozenset(), message.sender_id
        )
        counts = not self._outgoing.is_empty and self._may_acknowledge(message, origin)
        if counts:
            acknowledged = self._outgoing.review_history(history, message.sender_id)
            acknowledged += self._outgoing.review_receipts(receipts, message.sender_id)
            for each in acknowledged:
                self._acknowledged(each)
            useful |= bool(acknowledged)
        data = self._wire_filter(message)
        if data is not None:
            self._filter_passed_at = now
            if counts and not self._outgoing.is_empty:
                self._review_filter(message, data, history)
            if message.kind is Kind.SYNC:
                self._history.unreferenced.compare(data, now)
        elif message.kind is Kind.SYNC and message.receipts is not None:
            self._history.unreferenced.compare_receipts(receipts, now)
        for entry in message.repair_request:
            self._receiver.requested(entry)
        return useful

    def _may_acknowledge(self, message: SdsMessage, origin: Origin) -> bool:
        """Whether this sender's acknowledgement counts; see `SdsConfig.acknowledged_by_people`."""
        if not self.config.acknowledged_by_people:
            return True
        # A verified signer is more certain than the sender that the message names.
        if origin.author is not None and self._author is not None:
            return origin.author != self._author
        return person_of(message.sender_id) not in (person_of(self.sender_id), self._author)

    def _review_filter(self, message: SdsMessage, data: bytes, history: list[str]) -> None:
        if self._parameters.is_overfull(data):
            self.statistics.overfull_filters += 1
            return
        named = [entry for entry in map(self._history.log.get, history) if entry is not None and entry.floor]
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
        entry = self._history.log.get(event.message_id)
        if entry is not None:
            # The report that the message has gone out may come later than its acknowledgement.
            self._history.dispatched(entry)
        self._events.append(event)

    def _wire_filter(self, message: SdsMessage) -> bytes | None:
        """The filter of a message; None if it does not have this channel's size (C-103)."""
        data = message.bloom_filter
        return data if data is not None and len(data) == self._parameters.size_bytes else None

    def _let_go(self, outgoing: Outgoing) -> None:
        if outgoing.owns_body:
            self._history.archive.release(outgoing.body)
        self._mark("outgoing", outgoing.message_id)

    # While a store is read.

    def hold_heard(self, on: bool, now_ms: int) -> None:
        """Report whether a store is being read. Meanwhile, messages that are heard wait until they are read.

        A history of two entries does not name everything that its sender sent before. If two participants
        talk at once, a message may name only the other's last two messages. A participant that has these, and
        hears the message before it has read the rest from the store, would deliver the message before an
        earlier one of the same sender.
        """
        self._clock.advance(now_ms)
        self._receiver.hold_heard(on)

    def set_reading(self, on: bool) -> None:
        """Report whether a store may have earlier messages that are still to be read.

        Meanwhile, no id of a later message than those that were read is forgotten, if possible: without it,
        all that is still to be read would be refused as too old.
        """
        self._history.set_reading(on)

    def set_hearing(self, hears: bool, now_ms: int) -> None:
        """Report whether received messages are passed on to this participant at all.

        While they are not, for lack of room, no missing message is given up: it may be one that waits.
        """
        self._incoming.set_hearing(hears, self._clock.advance(now_ms))

    # Messages that cannot be obtained.

    def front(
        self, edge: int = 0, *, heard: bool = True, said_before: float = math.inf
    ) -> list[HistoryEntry]:
        """The missing messages at the beginning of everything that waits; see `IncomingBuffer.front`."""
        return list(self._incoming.front(edge, heard=heard, said_before=said_before).values())

    def release(self, ids: Iterable[str], now_ms: int) -> None:
        """Deliver the messages that wait for these missing messages alone. The missing ones stay wanted."""
        self._clock.advance(now_ms)
        self._receiver.release(ids)

    def told(self, ids: Iterable[str]) -> None:
        """Note that the program knows these missing messages to be gone: no `Lost` follows for them."""
        self._receiver.told(ids)

    def pass_over(self, ids: Iterable[str], now_ms: int) -> None:
        """Neither want these messages nor wait for them; they are dropped if they arrive."""
        self._clock.advance(now_ms)
        for id_ in ids:
            self._receiver.pass_over(id_)

    # Timers.

    def get_timer(self) -> float:
        """When to call `handle_timer`, in wall milliseconds; infinite if nothing is due."""
        at = min(
            self._outgoing.next_at,
            self._receiver.sweep_at,
            self._repair.responses.next_at,
            self._sync.at,
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
        # Syncs of others do not replace one of ours that must request repair (C-160).
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
            held = self._receiver.held_for_repair(id_)
            if held is not None:
                self.statistics.repairs_sent += 1
                self._events.append(SendRepair(id_, held.body.restore()))

    def _send_sync(self, now: int) -> None:
        recent = self._recent(dispatched_only=True)
        lacked = self._history.unreferenced.take_lacked([entry.message_id for entry in recent])
        entries = [entry for entry in map(self._history.log.get, lacked) if entry is not None] + recent
        asks = self._repair.requests.next_at <= now
        listed, with_filter = self._news()
        needless = not self._sync.debts and not lacked and not asks
        named = [entry.message_id for entry in entries]
        self._sync.sent(self._paid(named, listed), now, with_filter=with_filter, needless=needless)
        self._history.unheard.said(now)
        if entries or asks:  # else the sync would be empty (C-137)
            id_ = message_id(self.sender_id, self._lamport.time, b"sync")
            self.statistics.syncs_sent += 1
            if with_filter:
                self._filter_passed_at = now
            message = self._compose(id_, entries, listed, None, with_filter=with_filter)
            self._own_name.sync_sent(message.lamport_timestamp or 0)
            self._events.append(SendSync(message.encode()))
        else:
            self._sync.said(now)

    # Receipts and filters.

    @property
    def _lists(self) -> bool:
        """Whether receipts are enough, because everybody heard recently lists them."""
        return self._receipts and self._clock.wall - self._plain_heard_at > _PLAIN_FOR_MS

    @property
    def _filters(self) -> bool:
        """Whether each message must carry the filter."""
        return not self._lists

    def _news(self) -> tuple[list[str], bool]:
        """The messages that a sync lists, and whether the sync needs the filter too.

        A sync lists all debts and all unreferenced messages. The latter show others what is lacking here, as
        a filter does (decision 0014).
        """
        if not self._receipts:
            return [], True
        debts = self._sync.debts
        news = dict.fromkeys([*debts, *self._history.unreferenced.dispatched()])
        # Now and then one sync says everything: an acknowledgement may be lost that nobody asks for again.
        stale = self._clock.now - self._filter_passed_at > _FILTER_EVERY_MS
        with_filter = self._filters or stale or debts.overflown or len(news) > MAX_IN_SYNC
        # An acknowledgement costs little to repeat, and the first one may be lost.
        return [*news | dict.fromkeys(self._history.known.latest(LATEST))][:MAX_IN_SYNC], with_filter

    def _news_beside(self, content_bytes: int) -> list[str]:
        """The messages that a content message lists, oldest debts first."""
        if content_bytes > _SMALL_BYTES:
            return []
        latest = self._history.known.latest(MAX_IN_CONTENT)
        return list(islice(dict.fromkeys(chain(self._sync.debts, latest)), MAX_IN_CONTENT))

    def _paid(self, named: list[str], listed: list[str]) -> list[str]:
        """The messages that one of our messages acknowledges to everybody."""
        return named + listed if self._lists else named

    def _recent(self, *, dispatched_only: bool) -> list[LoggedMessage]:
        """The logged messages that a message sent now follows (C-106)."""
        # Up to the next Lamport time, so that our message of this very moment counts.
        limit = max(self._clock.wall, self._lamport.credible(self._clock.wall) + 1)
        return self._history.log.followed(
            self.config.causal_history_size, limit, dispatched_only=dispatched_only
        )

    def _compose(
        self,
        id_: str,
        named: list[LoggedMessage],
        listed: list[str],
        content: bytes | None,
        *,
        with_filter: bool,
    ) -> SdsMessage:
        """Make a content or sync message to send now (C-105, C-107, C-108, C-130, C-148)."""
        self._sync.said(self._clock.now)
        requests = self._repair.take_requests(self._clock.now)
        for entry in requests:
            self._mark("request", entry.message_id)
        return SdsMessage(
            self.sender_id,
            id_,
            self.channel_id,
            self._lamport.tick(self._clock.wall),
            tuple([entry.as_history() for entry in named]),
            self._history.filter.to_bytes() if with_filter else None,
            requests,
            content,
            write_receipts(listed) if self._receipts else None,
        )

    # Output for the shell.

    def events(self) -> list[SdsEvent]:
        """The events since the last call, in order."""
        events = self._events.copy()
        self._events.clear()
        return events

    def shared(self) -> list[SenderShared]:
        """The latest messages under our sender id that were not sent here, since the last call."""
        return self._own_name.take()

    def changes(self) -> list[Change]:
        """The changes since the last call, to store in one transaction.

        Raises `ValueError` without `track_changes`.
        """
        if self._journal is None:
            raise ValueError("made with track_changes=False")
        history = self._history
        clock = ClockRecord(
            self._lamport.time, self._own_count, history.log.last_arrival, history.known.horizon
        )
        return self._journal.take(clock)


def _ignore(kind: str, key: str) -> None:
    """Note nothing, because no state is stored."""
