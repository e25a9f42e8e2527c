"""One participant of one channel: Scalable Data Sync without I/O, clock or random source.

The shell reports what happens (`wrap`, `dispatched`, `receive`, `handle_timer`). After every call the shell
takes `events()` and acts on them, stores `changes()`, and arms one timer for `get_timer()`. All times are
Unix milliseconds of the wall clock; timers survive its steps (see `strata.channels.sds.timing`).

No bytes of a stranger make these methods raise: a bad message is counted in `statistics` and dropped. A
dropped message enters neither log nor filter, so it is never acknowledged.
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
from strata.channels.sds.history import History
from strata.channels.sds.incoming import IncomingBuffer, Receiver, Reception, usable_hint
from strata.channels.sds.journal import Journal, restore
from strata.channels.sds.log import LoggedMessage
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
from strata.channels.sds.own_name import OwnName
from strata.channels.sds.receipts import (
    LATEST,
    MAX_IN_CONTENT,
    MAX_IN_SYNC,
    read_receipts,
    write_receipts,
)
from strata.channels.sds.repair import RepairBuffers
from strata.channels.sds.state import Change, ClockRecord, SdsState
from strata.channels.sds.sync import SyncSchedule
from strata.channels.sds.timing import LamportClock, SteadyClock
from strata.protocol.errors import StrataError

__all__ = ["OutgoingFull", "Participant"]

_PLAIN_FOR_MS = 3_600_000
"""Whoever lists nothing gets filters for so long after its last message: far longer than syncs are apart."""
_LIVE_MS = 30_000
"""What was said longer ago comes from a store: it does not tell who is here now."""
_FILTER_EVERY_MS = 120_000
"""While all list, one sync in so long carries a filter, whoever sends it."""
_COMPARED = 4_096
"""Messages of an earlier run whose receipts are known: what others list was said lately."""
_MAX_REFUSED_OLD = 1_000
_SMALL_BYTES = 16_384
"""Content up to this size leaves room for receipts beside it (`strata.channels.reliable.sizes`)."""


class OutgoingFull(StrataError):
    """Too many own messages await acknowledgement: wrap again when some are acknowledged."""


class Participant(Looking):
    """A sender's part in a channel.

    `channel_id` None is the channel of messages without one (C-099). `random` gives values in [0, 1), for the
    times of sync messages. `state` is the sum of earlier `changes()`. With `track_changes` off nothing is
    noted for `changes()`. With it on, take them regularly, or they pile up. `author` is how the transport
    names this participant's person, where it does (`Origin.author`). With `receipts` the participant
    lists what it received, and leaves out its filter while all that it hears do the same
    (`strata.channels.sds.receipts`); without, its messages are those of the document, byte for byte.

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
        """Until when, by Lamport time, somebody was heard who lists nothing."""
        self._filter_passed_at = self._clock.now
        """When somebody last sent a filter."""
        self._refused_old: dict[str, None] = {}
        """Messages of which it was told that they are too old; the last ones."""
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
        # Lamport time never goes back, whatever the wall clock does.
        self._lamport.follow(stored.lamport)
        for known in reversed([*self._history.known.latest(_COMPARED)]):
            self._history.unheard.logged(known)
        self._own_count = stored.own_count

    @property
    def lamport(self) -> int:
        """The own Lamport time."""
        return self._lamport.time

    # Sending.

    @property
    def room(self) -> int:
        """How many more messages `wrap` takes before it refuses."""
        return self.config.max_unacknowledged - len(self._outgoing)

    def wrap(self, content: bytes, now_ms: int, now_ns: int) -> SdsMessage:
        """Register a message, and return it in the form in which it travels.

        From here on it is logged and tracked (C-109, C-110); call `dispatched` when it has gone out, or
        `failed`. `now_ns` makes its id unique: give each call another value. Raises `ValueError` for empty
        content, and `OutgoingFull` with `max_unacknowledged` messages unacknowledged.
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
            clock=self._lamport.time,
            now=now,
            own=self._own_count,
        )
        self._sync.sent(self._paid(named, listed), now, with_filter=self._filters)
        return message

    def wrap_ephemeral(self, content: bytes, now_ns: int) -> SdsMessage:
        """Return an ephemeral message, and do not keep it (C-138, C-180). `ValueError` without content."""
        if not content:
            raise ValueError("a message needs content")
        id_ = message_id(self.sender_id, now_ns, content)
        return SdsMessage(self.sender_id, id_, self.channel_id, content=content)

    def dispatched(self, message_id: str, now_ms: int, retrieval_hint: bytes | None = None) -> None:
        """An own message, or its retransmission, has gone out: its timer starts (C-067).

        From the first time on it is in the filter, and sync messages may name it (C-110). Other participants
        can fetch it by `retrieval_hint` (C-071).
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
        """An own message can never go out: it is forgotten, and no later message names it (C-110).

        If it went out before, others may have it. Then it stays in the log, and is only not sent again.
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
        """Name no message that never went out, in an own message that has not gone out either (C-110).

        Returns whether its bytes have changed. Its id and its Lamport time stay, so that messages that follow
        it need no change. It names what came before it, as far as that is still there.
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
        """Send a sync message without waiting for its time: `events()` has a `SendSync` then.

        False, and no event, if there is nothing to say yet (C-137). The next sync by itself comes later.
        """
        before = self.statistics.syncs_sent
        self._send_sync(self._clock.advance(now_ms))
        return self.statistics.syncs_sent > before

    def sync_failed(self, now_ms: int) -> None:
        """A `SendSync` was not possible: the next sync comes later (C-135)."""
        self._sync.failed(self._clock.advance(now_ms))

    def set_online(self, online: bool, now_ms: int) -> None:
        """Say whether the node can reach others. While it cannot, no timer runs (C-088)."""
        self._clock.advance(now_ms)
        self._clock.online = online

    def clock_stepped(self, by_ms: int) -> None:
        """Say that the times of later calls have jumped by so much, back if below 0: timers wait as before.

        A jump forward that nobody tells of looks like a pause of the process, and makes due what it passes.
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
        """Take a message from the network, and return it; None if it is no message of this channel.

        `origin` is what the transport knows of its sender. `stored`: it was read from a store, and not
        heard. Never raises, whatever the bytes are.
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
            # One that was passed over is not here: a list that names it would acknowledge it.
            self._sent_again(message, now, reception.hint)
        return message

    def _sent_again(self, message: SdsMessage, now: int, hint: bytes | None) -> None:
        """A message came again, perhaps because its sender has not heard of the acknowledgement."""
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
        """An own message comes back: it is ignored (C-111), unless it was lost with an earlier state.

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
        """A sync message acknowledges and reveals gaps; it is not kept (C-131, C-134)."""
        useful = self._review(message, now, origin)
        # Half the room is kept for gaps that messages wait for: syncs are cheap to forge.
        unmet = self._receiver.unmet(message)
        self._receiver.miss(unmet.values(), limit=self.config.max_missing // 2)
        self._note_live(message, now, needless=not (useful or unmet))
        self._sync.received_sync(now)
        unreferenced = self._history.unreferenced
        unreferenced.named_by_other(message.history_ids)
        if unreferenced.some_lacked or self._lacks_unseen(message, now):
            self._sync.speak_for_all(now)

    def _lacks_unseen(self, sync: SdsMessage, now: int) -> bool:
        """Whether others list messages that are not here, and that nobody names."""
        unheard, incoming = self._history.unheard, self._incoming
        if self._lists and sync.receipts is not None and self._is_live(sync):
            unheard.listed(read_receipts(sync.receipts), now)
        return unheard.is_due(now, chain(incoming.missing, incoming.waiting, incoming.lost))

    def _receive_content(self, message: SdsMessage, data: bytes, now: int, reception: Reception) -> None:
        id_ = message.message_id
        own = message.sender_id == self.sender_id
        # A refused message acknowledges too. An own message acknowledges nothing (C-092).
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
            # A filter acknowledges with a message those that it follows (C-123), a list only itself.
            stands_for = () if self._lists else message.history_ids
            self._sync.received_content(id_, message.sender_id, now, stands_for=stands_for)
        body = self._history.archive.keep(message.sender_id, data, self._wire_filter(message))
        self._receiver.take(message, body, unmet, reception)

    def _tell_refused_old(self, message: SdsMessage, reception: Reception) -> None:
        """A message is refused for its age, as one from a long partition is: the program must hear of it."""
        id_ = message.message_id
        if id_ not in self._refused_old:
            self._refused_old[id_] = None
            if len(self._refused_old) > _MAX_REFUSED_OLD:
                del self._refused_old[next(iter(self._refused_old))]
            self._events.append(RefusedOld(id_, message.sender_id, reception.hint, reception.stored))

    def _note_live(self, message: SdsMessage, now: int, *, needless: bool) -> None:
        """Count the sender as present, unless this was said long ago and comes from a store."""
        if self._is_live(message):
            self._sync.live(message.sender_id, now, message.lamport_timestamp or 0, needless=needless)

    def _is_live(self, message: SdsMessage) -> bool:
        return abs(self._clock.wall - (message.lamport_timestamp or 0)) <= _LIVE_MS

    def _review(self, message: SdsMessage, now: int, origin: Origin) -> bool:
        """Take the acknowledgements (C-113) and repair requests (C-153, C-154) of a received message.

        Returns whether it told anything.
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
        # Whoever signed it is known better than whoever it names.
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
        """The filter of a message; None if it is not of this channel's size (C-103)."""
        data = message.bloom_filter
        return data if data is not None and len(data) == self._parameters.size_bytes else None

    def _let_go(self, outgoing: Outgoing) -> None:
        if outgoing.owns_body:
            self._history.archive.release(outgoing.body)
        self._mark("outgoing", outgoing.message_id)

    # While a store is read.

    def hold_heard(self, on: bool, now_ms: int) -> None:
        """Say whether a store is being read: until it is, messages that are heard wait for their turn in it.

        A history of two entries does not name all that its sender said before. Where two talk at once, a
        message may name the other's last two alone. Whoever has these, and hears the message before a store
        has told what else was said, would deliver it before an earlier one of the same sender.
        """
        self._clock.advance(now_ms)
        self._receiver.hold_heard(on)

    # What is not there to be had.

    def front(
        self, edge: int = 0, *, heard: bool = True, said_before: float = math.inf
    ) -> list[HistoryEntry]:
        """The missing messages behind which everything begins that waits; see `IncomingBuffer.front`."""
        return list(self._incoming.front(edge, heard=heard, said_before=said_before).values())

    def release(self, ids: Iterable[str], now_ms: int) -> None:
        """Deliver what waits for these missing messages alone. They stay wanted."""
        self._clock.advance(now_ms)
        self._receiver.release(ids)

    def told(self, ids: Iterable[str]) -> None:
        """It has been told that these missing messages are gone: there is no `Lost` for them later."""
        self._receiver.told(ids)

    def pass_over(self, ids: Iterable[str], now_ms: int) -> None:
        """Neither want these messages nor wait for them; they are dropped should they arrive."""
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
        """Do all that is due: retransmissions, failures, syncs, repairs, the sweep of the incoming buffer."""
        now = self._clock.advance(now_ms)
        if not self._clock.online:
            return
        self._sweep_outgoing(now)
        if self._receiver.sweep_at <= now:
            self._receiver.sweep()
        self._send_repairs(now)
        # Syncs of others do not spare an own sync that has to request repair (C-160).
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
        """Whether receipts are enough: everybody who was heard lately lists them."""
        return self._receipts and self._clock.wall - self._plain_heard_at > _PLAIN_FOR_MS

    @property
    def _filters(self) -> bool:
        """Whether each message must carry the filter."""
        return not self._lists

    def _news(self) -> tuple[list[str], bool]:
        """What a sync lists, and whether it needs the filter: all that is owed, and all that is unreferenced.

        By the latter others see what is lacking here, as they do by a filter (decision 0014).
        """
        if not self._receipts:
            return [], True
        debts = self._sync.debts
        news = dict.fromkeys([*debts, *self._history.unreferenced.dispatched()])
        # Now and then somebody says everything: an acknowledgement may be lost when nobody asks any more.
        stale = self._clock.now - self._filter_passed_at > _FILTER_EVERY_MS
        with_filter = self._filters or stale or debts.overflown or len(news) > MAX_IN_SYNC
        # What was acknowledged already costs little to say again, and the acknowledgement may be lost.
        return [*news | dict.fromkeys(self._history.known.latest(LATEST))][:MAX_IN_SYNC], with_filter

    def _news_beside(self, content_bytes: int) -> list[str]:
        """What a message with content lists, oldest debts first."""
        if content_bytes > _SMALL_BYTES:
            return []
        latest = self._history.known.latest(MAX_IN_CONTENT)
        return list(islice(dict.fromkeys(chain(self._sync.debts, latest)), MAX_IN_CONTENT))

    def _paid(self, named: list[str], listed: list[str]) -> list[str]:
        """The messages that an own message acknowledges to everybody."""
        return named + listed if self._lists else named

    def _recent(self, *, dispatched_only: bool) -> list[LoggedMessage]:
        """The logged messages that a message sent now follows (C-106)."""
        # At the next Lamport time, so that an own message of this very moment counts.
        limit = max(self._clock.wall, self._lamport.time + 1)
        return self._history.log.recent(
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
        """A content or sync message to send now (C-105, C-107, C-108, C-130, C-148)."""
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

    # What the shell takes and asks.

    def events(self) -> list[SdsEvent]:
        """The events since the last call, in order."""
        events = self._events.copy()
        self._events.clear()
        return events

    def shared(self) -> list[SenderShared]:
        """The latest messages under the own sender id that were not sent here, since the last call."""
        return self._own_name.take()

    def changes(self) -> list[Change]:
        """Changes to store in one transaction, since the last call. `ValueError` without `track_changes`."""
        if self._journal is None:
            raise ValueError("made with track_changes=False")
        history = self._history
        clock = ClockRecord(
            self._lamport.time, self._own_count, history.log.last_arrival, history.known.horizon
        )
        return self._journal.take(clock)


def _ignore(kind: str, key: str) -> None:
    """Note nothing, because no state is stored."""
