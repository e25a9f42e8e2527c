"""The reliable channel without I/O or clock: every step of channel.md §4 and §5 except those that may wait.

    send ──▶ segments ──▶ SDS ──▶ [encrypt] ──▶ rate limiter ──▶ [dispatch]
    receive ◀── inbox ◀── segments ◀── SDS ◀── [decrypt]

`session` does the steps in brackets, because a hook and a transport may take their time. The session informs
the engine of what happens. After each step it takes `events()`, stores `changes()` in one transaction, and
arms one timer for `get_timer()`. Times are Unix milliseconds that run evenly; `clock_stepped` reports jumps.

`sending` handles outgoing messages, `ephemerals` those that are sent and received once, and the engine itself
incoming messages.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import islice

from strata.channels import sds
from strata.channels.persistence.interface import Change
from strata.channels.persistence.state import ChannelState, sds_changes
from strata.channels.reliable.catching_up import CatchingUp, Joining
from strata.channels.reliable.clock import date_of_sending
from strata.channels.reliable.config import ReliableChannelConfig
from strata.channels.reliable.conflicts import Conflicts
from strata.channels.reliable.ephemerals import Ephemerals
from strata.channels.reliable.events import (
    ChannelEvent,
    HistoryGap,
    IrretrievableMessage,
    MessageReceived,
)
from strata.channels.reliable.inbox import MessageInbox
from strata.channels.reliable.outbox import Outbox
from strata.channels.reliable.requests import Requests
from strata.channels.reliable.retrieval import Retrieval, RetrievalPlan
from strata.channels.reliable.sending import Sending
from strata.channels.reliable.syncing import SyncNews
from strata.channels.sds import (
    HistoryEntry,
    Origin,
    Participant,
    SdsMessage,
    person_of,
)
from strata.channels.segmentation.messages import message_hash
from strata.channels.segmentation.reassembly import Reassembled, Reassembler
from strata.channels.segmentation.splitting import SegmentationConfig
from strata.protocol.canonical import MAX_SAFE_INTEGER

__all__ = ["ChannelEngine"]

_EARLIEST_MS = 1_577_836_800_000
"""The beginning of 2020: a clock that shows less has not been set since its device booted."""
_MAX_NAMED = 1_000
"""The most messages that a gap event names."""
_MAX_TURNED_AWAY = 20_000
"""The most messages without room that are remembered until they are read again."""
_SETTLED_MS = 600_000
"""How long a message may take to reach the stores, if messages are never given up."""
_AGAIN_MS = 60_000
"""The shortest wait before the messages that are missing at the beginning are checked again."""
_EDGE_MS = 60_000
"""Participants that sent at the end of a gap had received one another's messages within this time."""


class ChannelEngine:
    """One participant's part in one channel, from payload to SDS message and back.

    `config` has its sections filled in (`configure`). `state` is the sum of earlier `changes()`. `author` is
    the identity that the transport sees. `receipts` is as for `Participant`.
    """

    def __init__(
        self,
        channel_id: str,
        sender_id: str,
        content_topic: str,
        config: ReliableChannelConfig,
        *,
        outbox: Outbox,
        now_ms: int,
        random: Callable[[], float],
        state: ChannelState | None = None,
        author: str | None = None,
        receipts: bool = False,
    ) -> None:
        state = state or ChannelState()
        sds_config = config.sds or sds.SdsConfig()
        self.config = config
        self.segmentation = config.segmentation or SegmentationConfig()
        self.content_topic = content_topic
        self.outbox = outbox
        self.senders_forged = 0
        """The number of messages whose packet was not signed by the sender that they name (C-287)."""
        self.sds = Participant(
            channel_id,
            sender_id,
            sds_config,
            now_ms=now_ms,
            random=random,
            state=state.sds,
            author=author,
            receipts=receipts,
        )
        self.conflicts = Conflicts(sender_id, author, now_ms)
        self._sync_news = SyncNews()
        self.reassembler = Reassembler(
            self.segmentation,
            segments=state.segments.values(),
            finished=state.segments_finished.values(),
            given_up=state.segments_given_up.values(),
            fetch=self._content,
            now=now_ms,
        )
        self.requests = Requests(
            config.sent_event_on,
            stored=state.sent_chunks.values(),
            place=self.sds.place,
            bound=config.sender_binding == "did",
        )
        self.retrieval = Retrieval(config.retrieve_frequency_ms)
        self.catching_up = CatchingUp(
            enabled=config.query_on_connect,
            threshold_ms=config.force_query_threshold_ms,
            window_ms=config.query_window_ms,
            mark=state.query_marks.get("current"),
            joining=Joining(config.join, 1000 * (config.since or 0)),
            now=now_ms,
        )
        self.inbox = MessageInbox(
            content_topic,
            max_messages=config.max_inbox_messages,
            max_bytes=config.max_inbox_bytes,
            stored=state.inbox.values(),
        )
        self.sending = Sending(
            config,
            self.segmentation,
            self.sds,
            outbox,
            self.requests,
            now_ms=now_ms,
            random=random,
            state=state,
        )
        self.ephemerals = Ephemerals(config, self.segmentation, outbox, self.sending.wrap_ephemeral)
        self._is_online = self._hears = True
        self._events: list[ChannelEvent] = []
        self._last_round = -math.inf
        self._latest_hint: bytes | None = None
        self._latest_origin = Origin()
        self._gap: HistoryGap | None = None
        self._gone: list[str] = []
        """The messages of that gap."""
        self._turned_away: dict[str, int] = {}
        """Messages that had no room, with their Lamport times; they may expire before they are read again."""
        self._max_entries = sds_config.max_received_history
        self._settles_ms = sds_config.lost_message_timeout_ms or _SETTLED_MS
        if config.retention_seconds is not None:
            self._settles_ms = min(self._settles_ms, 1000 * config.retention_seconds)
        if self.sds.missing():
            self.retrieval.found_missing(now_ms)

    def _content(self, message_id: str) -> bytes | None:
        """The content of a logged message."""
        message = self.sds.message(message_id)
        return None if message is None else message.content

    # Receiving.

    def receive(
        self,
        data: bytes,
        now_ms: int,
        *,
        hint: bytes | None = None,
        author: str | None = None,
        sent_at: int | None = None,
        meta: bytes | None = None,
        stored: bool = False,
        stored_at: int | None = None,
    ) -> SdsMessage | None:
        """Take decrypted bytes. Returns the message if it belongs to this channel; never raises for bad ones.

        `author` signed them and claims that they were sent at `sent_at`, in Unix seconds. `stored`: they were
        read from a store, not heard on the subscription. A store got them at `stored_at` by its own clock, in
        Unix seconds.
        """
        if not self.is_genuine(data, author):
            self.senders_forged += 1
            return None
        self._latest_hint = hint
        refused, waited = self.sds.statistics.refused_full, self.sds.is_waiting
        origin = Origin(author, _no_nonsense(sent_at), meta, _no_nonsense(stored_at))
        message = self.sds.receive(data, now_ms, hint, origin, stored=stored)
        if self.sds.statistics.refused_full != refused:
            self.catching_up.missed(stored=stored)
            if message is not None and len(self._turned_away) < _MAX_TURNED_AWAY:
                self._turned_away[message.message_id] = message.lamport_timestamp or 0
        elif message is not None and not stored:
            self.catching_up.received(now_ms)
        if self.sds.is_waiting and not waited:
            self.retrieval.waited_for(now_ms)
        self._settle(now_ms)
        return message

    def decode(self, data: bytes) -> SdsMessage | None:
        """Decode decrypted bytes; None if they are no message or name more messages than accepted."""
        return SdsMessage.decode(data, max_entries=self._max_entries)

    def pass_over(self, data: bytes, now_ms: int) -> None:
        """Skip decrypted bytes from before this participant joined, and the messages that they name.

        Never raises for bad bytes.
        """
        message = self.decode(data)
        if message is not None and message.channel_id == self.sds.channel_id and message.has_usable_ids:
            ids = [*message.history_ids, message.message_id] if message.content else message.history_ids
            self.sds.pass_over(ids, now_ms)
            self._settle(now_ms)

    def hold_heard(self, on: bool, now_ms: int) -> None:
        """Set whether the store is being read; see `Participant.hold_heard`."""
        self.sds.hold_heard(on, now_ms)
        self._settle(now_ms)

    def front(self, *, heard: bool, said_before: float = math.inf) -> list[HistoryEntry]:
        """The missing messages right before the first waiting ones; see `IncomingBuffer.front`."""
        edge = 0 if self._gap is None else self._gap.to_time + _EDGE_MS
        return self.sds.front(edge, heard=heard, said_before=said_before)

    def settled_ms(self, stores_now_ms: int) -> int:
        """The time before which messages are settled: the messages that they follow are no longer being sent.

        Messages from before this time that no store has may have expired; later ones may be on their way. The
        current time is that of the stores, whose clocks also date the messages.
        """
        return stores_now_ms - self._settles_ms

    def knows_what_was_before(self) -> bool:
        """Whether a known message was sent shortly before the first waiting message, or shortly after it.

        If so, the messages that the waiting message names have not expired, whatever the clock shows.
        """
        first = self.sds.first_waiting()
        if first is None:
            return True
        known = self.sds.last_before(first.lamport + self._settles_ms)
        return known is not None and known.lamport > first.lamport - self._settles_ms

    def settles_in(self, stores_now_ms: int) -> int:
        """The milliseconds until the first waiting message is settled (`settled_ms`); at least a minute."""
        first = self.sds.first_waiting()
        said_at = stores_now_ms if first is None else first.said_at
        return max(_AGAIN_MS, said_at - self.settled_ms(stores_now_ms) + 1)

    def go_on_without(self, ids: Iterable[str], now_ms: int) -> None:
        """Stop waiting for these missing messages before the first waiting ones, which no store has.

        They belong to a gap, or are from before this participant joined.
        """
        gone = list(ids)
        if self.catching_up.is_young(now_ms) and self.config.join == "now":
            self.sds.pass_over(gone, now_ms)
        elif gone:
            self._add_to_gap(gone)
            self.sds.release(gone, now_ms)
        self._settle(now_ms)

    def _add_to_gap(self, gone: list[str]) -> None:
        if self._gap is None:
            first = self.sds.first_waiting()
            if first is None:
                return
            self._gap = self._gap_behind(first.lamport, first.lamport, first.message_id)
        self._gone += gone

    def _gap_behind(self, lamport: int, to_time: int, to_id: str) -> HistoryGap:
        """A gap after the last message sent before this time; its messages are named when it is reported."""
        before = self.sds.last_before(lamport)
        return HistoryGap(
            channel_id=self.sds.channel_id,
            from_time=None if before is None else before.lamport,
            to_time=to_time,
            from_id=None if before is None else before.message_id,
            to_id=to_id,
            message_ids=(),
            at_least=0,
        )

    def _tell_whole(self, gap: HistoryGap, gone: Collection[str]) -> None:
        """Report a gap and the messages in it, which are given up without further events from now on."""
        named = tuple(islice(gone, _MAX_NAMED))
        self._events.append(replace(gap, message_ids=named, at_least=len(gone)))
        self.sds.told(gone)

    def tell_gap(self) -> None:
        """Report, in one event, the whole gap that a reading found; called when the reading has ended.

        If a crash prevents this, each message of the gap is reported when it is given up.
        """
        if self._gap is not None:
            self._tell_whole(self._gap, self._gone)
            self._gap, self._gone = None, []
        if self._turned_away and self.catching_up.has_whole:
            self._tell_turned_away()

    def _tell_turned_away(self) -> None:
        """Report messages that had no room and that a reading of everything did not find: they expired."""
        here = self.sds.is_here
        gone = {id_: lamport for id_, lamport in self._turned_away.items() if not here(id_)}
        self._turned_away = {}
        if gone:
            last = max(gone, key=gone.__getitem__)
            self._tell_whole(self._gap_behind(min(gone.values()), gone[last], last), gone)

    def is_genuine(self, data: bytes, author: str | None) -> bool:
        """Whether a sender that is a DID, or a device of one, has signed, if senders are bound (C-287)."""
        if self.config.sender_binding == "off":
            return True
        message = self.decode(data)
        if message is None or not message.sender_id.startswith("did:"):
            return True
        return person_of(message.sender_id) == author

    def set_online(self, online: bool, now_ms: int) -> None:
        """Set whether the transport is connected; while it is not, no timer runs (C-088)."""
        self._is_online = online
        self.sds.set_online(online, now_ms)
        self.reassembler.set_online(online and self._hears, now_ms)

    def set_hearing(self, hears: bool, now_ms: int) -> None:
        """Set whether received messages are taken; while none is, nothing that is missing is given up."""
        self._hears = hears
        self.sds.set_hearing(hears, now_ms)
        self.reassembler.set_online(hears and self._is_online, now_ms)

    # Time.

    def clock_stepped(self, by_ms: int, now_ms: int) -> None:
        """The clock was set, or the machine slept, and it is now `now_ms`; timers wait as long as before."""
        self.sds.clock_stepped(by_ms)
        self.reassembler.clock_stepped(by_ms)
        self.retrieval.clock_stepped(by_ms)
        self.catching_up.clock_stepped(by_ms)
        self._last_round += by_ms
        if now_ms - by_ms < _EARLIEST_MS <= now_ms:
            # They would be ordered before all messages they answer; no relay accepted them with such a time.
            self.sending.wrap_anew(now_ms, before=_EARLIEST_MS)

    def get_timer(self) -> float:
        """When to call `handle_timer`, in wall milliseconds."""
        reassembly = self.reassembler.get_timer()
        at = min(self.sds.get_timer(), math.inf if reassembly is None else reassembly, self._sync_news.at)
        # At most one round in this time, whatever is due (C-080); missing messages are requested separately.
        return max(at, self._last_round + self.config.process_task_min_elapse_ms)

    def handle_timer(self, now_ms: int) -> None:
        """Do all due retransmissions, syncs, repairs, sweeps and timeouts."""
        if now_ms < self._last_round:  # the clock was set back
            self._last_round = now_ms
        if self.get_timer() > now_ms:
            return
        self._last_round = now_ms
        self.sds.handle_timer(now_ms)
        self.reassembler.handle_timer(now_ms)
        self._settle(now_ms)

    def plan_retrieval(self, now_ms: int) -> RetrievalPlan | None:
        """Return what to request from the store now; see `Retrieval`."""
        return self.retrieval.take(now_ms, self.sds.missing())

    # Output for the shell.

    def events(self) -> list[ChannelEvent]:
        """The events since the last call, in order. Received messages are in the inbox instead."""
        events = self._events
        self._events = []
        return events + self.ephemerals.events() + self.requests.events()

    def changes(self) -> list[Change]:
        """The changes since the last call, to be stored in one transaction."""
        return [
            *sds_changes(self.sds.changes()),
            *self.reassembler.changes_to_store(),
            *self.requests.changes_to_store(),
            *self.sending.changes_to_store(),
            *self.catching_up.changes_to_store(),
            *self.inbox.changes_to_store(),
            *self.outbox.changes_to_store(),
        ]

    # Inside.

    def _settle(self, now_ms: int) -> None:
        """Handle the events of SDS until there are no more."""
        for event in self.sds.events():
            match event:
                case sds.Delivered():
                    self._latest_hint = event.retrieval_hint or self._latest_hint
                    self._latest_origin = event.origin
                    self.reassembler.receive(event.sender_id, event.message_id, event.content, now_ms)
                    self._take_whole(now_ms)
                case sds.EphemeralReceived():
                    self._receive_ephemeral(event, now_ms)
                case sds.PossiblyAcknowledged():
                    self.requests.possibly_acknowledged(event.message_id, event.count)
                case sds.Acknowledged():
                    self.outbox.withdraw(event.message_id)
                    self.requests.acknowledged(event.message_id, event.sender_id)
                case sds.DeliveryFailed():
                    self.outbox.withdraw(event.message_id)
                    self.requests.exhausted(event.message_id)
                case sds.MissingFound():
                    self.retrieval.found_missing(now_ms)
                case sds.Lost():
                    self._give_up(event.entry, event.first_missing_at)
                case sds.RefusedOld():
                    self._tell_refused(event, now_ms)
                case sds.Retransmit():
                    self.outbox.queue_again(event.message_id)
                case sds.SendSync():
                    self.sending.note_wrapped(self.outbox.queue_sync(event.data))
                case sds.SendRepair():
                    self.sending.note_wrapped(self.outbox.queue_repair(event.message_id, event.data))
        self._take_whole(now_ms)
        self._tell_conflicts(now_ms)
        if (news := self._sync_news.look(self.sds.counts(), now_ms)) is not None:
            self._events.append(news)

    def _tell_conflicts(self, now_ms: int) -> None:
        """Report another program that uses this sender id."""
        for shared in self.sds.shared():
            if (conflict := self.conflicts.heard(shared, now_ms)) is not None:
                self._events.append(conflict)

    def _take_whole(self, now_ms: int) -> None:
        for event in self.reassembler.events_received():
            if isinstance(event, Reassembled):
                self._hand_over(
                    event.sender_id,
                    event.payload,
                    event.message_hash,
                    event.request_id,
                    now_ms,
                    origin=self._latest_origin,
                    order=self.sds.place(event.message_ids),
                )
            else:
                entry = HistoryEntry(event.message_hash.hex(), None, event.sender_id)
                self._give_up(entry, event.first_received_at)

    def _tell_refused(self, event: sds.RefusedOld, now_ms: int) -> None:
        # A reading from a position brings only new messages; a reading by time repeats delivered ones.
        if not event.stored or self.catching_up.position is not None:
            self._give_up(HistoryEntry(event.message_id, event.retrieval_hint, event.sender_id), now_ms)

    def _give_up(self, entry: HistoryEntry, first_missing_at: int) -> None:
        self._events.append(
            IrretrievableMessage(
                message_id=entry.message_id,
                retrieval_hint=entry.retrieval_hint,
                sender_id=entry.sender_id,
                channel_id=self.sds.channel_id,
                first_missing_at=first_missing_at,
            )
        )

    def _receive_ephemeral(self, event: sds.EphemeralReceived, now_ms: int) -> None:
        if (found := self.ephemerals.receive(event)) is not None:
            payload, request_id = found
            digest = message_hash(payload)
            self._hand_over(
                event.sender_id, payload, digest, request_id, now_ms, origin=event.origin, ephemeral=True
            )

    def _hand_over(
        self,
        sender_id: str,
        payload: bytes,
        digest: bytes,
        request_id: str | None,
        now_ms: int,
        *,
        origin: Origin,
        order: tuple[int, str] | None = None,
        ephemeral: bool = False,
    ) -> None:
        if not self.config.receive:
            return
        lamport, sds_id = order or (None, None)
        message = MessageReceived(
            request_id=request_id or digest.hex(),
            message_id=digest.hex(),
            sender_id=sender_id,
            payload=payload,
            content_topic=self.content_topic,
            timestamp=now_ms,
            ephemeral=ephemeral,
            hash=self._latest_hint,
            author=origin.author,
            sent_at=date_of_sending(lamport, origin.sent_at, now_ms),
            lamport_timestamp=lamport,
            sds_id=sds_id,
            meta=origin.meta,
        )
        self.inbox.put(message, digest)


def _no_nonsense(seconds: int | None) -> int | None:
    """The time given by another party, or None if it is absurd: not every integer can be stored."""
    return seconds if seconds is not None and abs(seconds) <= MAX_SAFE_INTEGER else None
