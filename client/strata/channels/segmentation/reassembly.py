"""Reassembles messages from segments: interleaved, bounded, verified (C-202 … C-211).

One `Reassembler` serves one channel. `receive` takes bytes that SDS delivered. `events_received` returns
whole messages, and partial messages that were given up; `changes_to_store` returns the changes to the store.
Time is Unix time in milliseconds.

    segment ──▶ the instance of (sender, hash) that lacks it ──▶ whole? ──▶ hash right? ──▶ Reassembled
                        │                                                      └──▶ Abandoned: corrupt
                        └── nothing new for the timeout ──▶ Abandoned: timeout

An *instance* is one sending of a payload. Equal payloads have equal hashes, so the hash alone cannot
distinguish the second "ok" of a chat from a repetition of the first (A-152). SDS has already removed true
repetitions. So a segment is added to the oldest instance that lacks its index, and begins a new instance if
there is none. Segments with different `request_id`s never mix: a message made from two requests would have
the wrong id (C-050), and the remaining segments of both would never complete a message.

Parity can complete a message before its last segments come. Such an instance is kept without its bytes until
the timeout, and takes the late segments, which would otherwise begin an instance that is never completed.

SDS has acknowledged every received segment, so a message must not be lost because it was given up after the
timeout or at a limit. The ids of its segments are kept, and when another segment of it comes, the others are
read from the log. If it was given up at a limit, this waits until all of its segments may be there:
otherwise each segment of a sender above its share would cause all the others to be read, stored and given up
again.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec import structs

from strata.channels.persistence.interface import Change
from strata.channels.persistence.records import (
    PartialSegment,
    SegmentsFinished,
    SegmentsGivenUp,
    put,
    remove,
)
from strata.channels.segmentation.instances import Instance, assemble
from strata.channels.segmentation.messages import (
    InvalidSegment,
    Segment,
    SegmentFault,
    decode_segment,
    message_hash,
)
from strata.channels.segmentation.parity import ParityCodec, load_codec
from strata.channels.segmentation.splitting import SegmentationConfig

__all__ = [
    "AbandonReason",
    "Abandoned",
    "DropReason",
    "Reassembled",
    "Reassembler",
    "ReassemblyStatistics",
    "whole_payload",
]

_REMEMBERED_MESSAGE_IDS = 4096
_REMEMBERED_GIVEN_UP = 256
_REMEMBERED_SEGMENTS = 512
"""The most segments remembered under one key: those of two sendings."""

_Key: TypeAlias = tuple[str, bytes, str | None]
"""The sender, hash and request id of a message."""


class DropReason(enum.StrEnum):
    """Why a valid segment was not used; statistics count each reason."""

    REPEATED = "repeated"
    """The SDS message was seen before (C-208)."""
    COUNTS_DIFFER = "counts_differ"
    """Its counts differ from those of earlier segments (C-200)."""
    TOO_LARGE = "too_large"
    LATE = "late"
    """Its message was already completed by parity."""
    PARITY_UNUSED = "parity_unused"
    """The library that parity needs is not installed (C-213)."""


class AbandonReason(enum.StrEnum):
    """Why a partial message was given up."""

    TIMEOUT = "timeout"
    LIMIT = "limit"
    """It made room for newer messages (C-210)."""
    CORRUPT = "corrupt"
    """All data segments came, and the message did not match its hash (C-204)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reassembled:
    """A complete message with a verified hash. It is reported once (C-205)."""

    sender_id: str
    payload: bytes
    message_hash: bytes
    request_id: str | None
    """The request id; a payload that came without a segment has the id of its SDS message."""
    message_ids: tuple[str, ...]
    """The SDS messages that carried its segments, in the order of arrival."""
    data_segment_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """A partial message was given up (C-079)."""

    sender_id: str
    message_hash: bytes
    request_id: str | None
    reason: AbandonReason
    missing: tuple[int, ...]
    """The indices of the data segments that had not come."""
    data_segment_count: int
    message_ids: tuple[str, ...]
    first_received_at: int


@dataclass(slots=True)
class ReassemblyStatistics:
    """Counters since construction, and the partial messages held now."""

    reassembled: int = 0
    recovered_by_parity: int = 0
    invalid: Counter[SegmentFault] = field(default_factory=Counter)
    dropped: Counter[DropReason] = field(default_factory=Counter)
    abandoned: Counter[AbandonReason] = field(default_factory=Counter)
    partial_messages: int = 0
    partial_bytes: int = 0


class _Sender:
    """The instances of one sender, least recently touched first."""

    __slots__ = ("held_bytes", "instances")

    def __init__(self) -> None:
        self.instances: OrderedDict[int, Instance] = OrderedDict()
        self.held_bytes = 0


class Reassembler:
    """The partial messages of one channel."""

    def __init__(
        self,
        options: SegmentationConfig | None = None,
        *,
        segments: Iterable[PartialSegment] = (),
        finished: Iterable[SegmentsFinished] = (),
        given_up: Iterable[SegmentsGivenUp] = (),
        fetch: Callable[[str], bytes | None] | None = None,
        now: int | None = None,
        codec: ParityCodec | None = None,
    ) -> None:
        """`segments`, `finished` and `given_up` are the stored records of an earlier run, in order.

        `fetch` returns the content of an SDS message that was delivered earlier, if it is still known.

        With `now`, the timeouts of restored messages begin at `now`: no segment could come while the program
        did not run, and the clock may have been set in the meantime.
        """
        self._options = options or SegmentationConfig()
        self._codec = codec or load_codec()
        self._instances: OrderedDict[int, Instance] = OrderedDict()  # least recently touched first
        self._by_message: dict[tuple[str, bytes], list[Instance]] = {}
        self._senders: dict[str, _Sender] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._next_instance = 1
        self._fetch = fetch
        self._given_up: OrderedDict[_Key, SegmentsGivenUp] = OrderedDict()
        self._crowded_out: set[_Key] = set()
        """The keys of those that were given up at a limit in this run."""
        self._offline_since: int | None = None
        self._events: list[Reassembled | Abandoned] = []
        self._changes: list[Change] = []
        self.statistics = ReassemblyStatistics()
        for record in given_up:
            self._given_up[record.sender_id, record.message_hash, record.request_id] = record
            self._next_instance = max(self._next_instance, record.number + 1)
        self._restore(segments, finished)
        if now is not None:
            for instance in self._instances.values():
                instance.touched_at = now

    def receive(self, sender_id: str, message_id: str, content: bytes, now: int) -> None:
        """Take the content of one delivered SDS message. Never raises, whatever the bytes are (C-302)."""
        if message_id in self._seen:
            self.statistics.dropped[DropReason.REPEATED] += 1
            return
        self._remember(message_id)
        if self._options.segmentation == "off":
            self._receive_raw(sender_id, message_id, content)
            return
        try:
            segment = decode_segment(content)
        except InvalidSegment as error:
            if self._options.segmentation == "auto":
                self._receive_raw(sender_id, message_id, content)
            else:
                self.statistics.invalid[error.fault] += 1
            return
        if len(segment.payload) > self._options.max_segment_bytes:
            self.statistics.dropped[DropReason.TOO_LARGE] += 1
        elif segment.is_parity and self._codec is None:
            self.statistics.dropped[DropReason.PARITY_UNUSED] += 1
        elif segment.data_segment_count == 1 and not segment.parity_segment_count:
            self._receive_whole(sender_id, message_id, segment, content, now)
        else:
            self._receive_part(sender_id, message_id, segment, content, now)

    def events_received(self) -> list[Reassembled | Abandoned]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def changes_to_store(self) -> list[Change]:
        """Return the changes to the store since the last call (C-211)."""
        changes, self._changes = self._changes, []
        return changes

    def get_timer(self) -> int | None:
        """When to call `handle_timer`; None if nothing is due."""
        oldest = next(iter(self._instances.values()), None)
        if oldest is None or self._offline_since is not None:
            return None
        return oldest.touched_at + self._options.reassembly_timeout_ms

    def handle_timer(self, now: int) -> None:
        """Give up the instances that received no new segment within the timeout (C-209)."""
        while (due := self.get_timer()) is not None and due <= now:
            instance = next(iter(self._instances.values()))
            if instance.finished:
                self._forget(instance)
            else:
                self._abandon(instance, AbandonReason.TIMEOUT)

    def set_online(self, online: bool, now: int) -> None:
        """Note whether segments can come: while they cannot, no timeout runs (decision 0017)."""
        if online and self._offline_since is not None:
            away = max(0, now - self._offline_since)
            for instance in self._instances.values():
                instance.touched_at = min(instance.touched_at + away, now)
            self._offline_since = None
        elif not online and self._offline_since is None:
            self._offline_since = now

    def clock_stepped(self, by_ms: int) -> None:
        """Note that the clock jumped by `by_ms`: partial messages are kept as long as before."""
        for instance in self._instances.values():
            instance.touched_at += by_ms
        if self._offline_since is not None:
            self._offline_since += by_ms

    def _receive_raw(self, sender_id: str, message_id: str, content: bytes) -> None:
        """Take a payload without a segment: other implementations of channels send payloads this way."""
        if len(content) > self._options.max_segment_bytes:
            self.statistics.dropped[DropReason.TOO_LARGE] += 1
            return
        self.statistics.reassembled += 1
        self._events.append(
            Reassembled(
                sender_id=sender_id,
                payload=content,
                message_hash=message_hash(content),
                request_id=message_id,
                message_ids=(message_id,),
                data_segment_count=1,
            )
        )

    def _receive_whole(
        self, sender_id: str, message_id: str, segment: Segment, content: bytes, now: int
    ) -> None:
        """Take a message of one segment, as nearly all are; it is never stored."""
        instance = Instance(0, sender_id, segment, now)
        instance.add(message_id, segment, now)
        if message_hash(segment.payload) == segment.entire_message_hash:
            self._report_whole(instance, segment.payload)
        elif self._options.segmentation == "auto":
            self._receive_raw(sender_id, message_id, content)  # it only looks like a segment
        else:
            self._report_abandoned(instance, AbandonReason.CORRUPT)

    def _receive_part(
        self, sender_id: str, message_id: str, segment: Segment, content: bytes, now: int
    ) -> None:
        instance = self._instance_for(sender_id, message_id, segment, now)
        if instance is None:
            return
        if instance.finished:
            self.statistics.dropped[DropReason.LATE] += 1
            instance.add(message_id, segment, now)
            self._await_rest(instance)
            return
        self._fill(instance, message_id, segment, content, now)
        self._instances.move_to_end(instance.number)
        sender = self._senders[sender_id]
        sender.instances.move_to_end(instance.number)
        if instance.complete:
            self._try(instance, now)
        self._make_room(sender)

    def _instance_for(self, sender_id: str, message_id: str, segment: Segment, now: int) -> Instance | None:
        """The instance of a segment (C-207). None if its counts contradict the other segments (C-200), or if
        its message was given up at a limit and is not complete."""
        # All segments without a request id have the id None.
        candidates = [
            instance
            for instance in self._by_message.get((sender_id, segment.entire_message_hash), ())
            if instance.request_id == segment.request_id
        ]
        for instance in candidates:
            if instance.agrees(segment) and instance.lacks(segment.index):
                return instance
        if any(not instance.agrees(segment) and not instance.finished for instance in candidates):
            self.statistics.dropped[DropReason.COUNTS_DIFFER] += 1
            return None
        if self._stays_in_log(
            message_id, (sender_id, segment.entire_message_hash, segment.request_id), segment
        ):
            return None
        instance = self._begin(sender_id, segment, now)
        self._revive(instance, segment.index, now)
        return instance

    def _stays_in_log(self, message_id: str, key: _Key, segment: Segment) -> bool:
        """Whether a segment's message was given up at a limit and is not complete: then note its id."""
        record = self._given_up.get(key) if key in self._crowded_out else None
        if record is None or len(record.message_ids) + 1 >= segment.data_segment_count:
            return False
        record = structs.replace(record, message_ids=(*record.message_ids, message_id))
        self._given_up[key] = record
        self._changes.append(put(record))
        return True

    def _revive(self, instance: Instance, come: int, now: int) -> None:
        """Add the segments of this message that were given up earlier, if they are still known.

        `come` is the index of the segment that has just come. Segments of another sending of the message stay
        remembered, since the rest of that sending may come too.
        """
        key = (instance.sender_id, instance.message_hash, instance.request_id)
        self._crowded_out.discard(key)
        record = self._given_up.pop(key, None)
        if record is None or self._fetch is None:
            return
        others: list[str] = []
        for message_id in record.message_ids:
            content = self._fetch(message_id)
            if content is None:
                continue
            try:
                segment = decode_segment(content)
            except InvalidSegment:
                continue
            if instance.agrees(segment) and segment.index != come and instance.lacks(segment.index):
                self._fill(instance, message_id, segment, content, now)
            else:
                others.append(message_id)
        if others:
            self._given_up[key] = structs.replace(record, message_ids=tuple(others))
            self._changes.append(put(self._given_up[key]))
        else:
            self._changes.append(remove(SegmentsGivenUp, record.key))

    def _fill(self, instance: Instance, message_id: str, segment: Segment, content: bytes, now: int) -> None:
        instance.add(message_id, segment, now)
        self._account(self._senders[instance.sender_id], len(segment.payload))
        record = PartialSegment(message_id, instance.sender_id, instance.number, now, content)
        self._changes.append(put(record))

    def _begin(self, sender_id: str, segment: Segment, now: int, number: int | None = None) -> Instance:
        if number is None:
            number = self._next_instance
        self._next_instance = max(self._next_instance, number + 1)
        instance = Instance(number, sender_id, segment, now)
        self._hold(instance)
        return instance

    def _hold(self, instance: Instance) -> None:
        self._instances[instance.number] = instance
        self._by_message.setdefault((instance.sender_id, instance.message_hash), []).append(instance)
        self._senders.setdefault(instance.sender_id, _Sender()).instances[instance.number] = instance
        self.statistics.partial_messages += 1

    def _try(self, instance: Instance, now: int) -> None:
        """Reassemble a message that has as many distinct segments as data segments (C-203)."""
        payload = assemble(instance, self._codec)
        if payload is not None:
            if instance.recovered:
                self.statistics.recovered_by_parity += 1
            self._report_whole(instance, payload)
            self._finish(instance, now)
        elif not instance.missing:
            self._abandon(instance, AbandonReason.CORRUPT)  # C-204
        # Else parity failed, as foreign parity may. The data segments can still come.

    def _finish(self, instance: Instance, now: int) -> None:
        awaited = instance.awaited
        self._drop_segments(instance)
        instance.finish(awaited, now)
        self._instances.move_to_end(instance.number)
        self._await_rest(instance)

    def _await_rest(self, instance: Instance) -> None:
        """Keep a finished instance as long as segments of it may come."""
        awaited = instance.awaited
        if not awaited:
            self._forget(instance)
            return
        self._changes.append(
            put(
                SegmentsFinished(
                    instance.number,
                    instance.sender_id,
                    instance.message_hash,
                    instance.data_count,
                    instance.parity_count,
                    awaited,
                    instance.touched_at,
                    instance.request_id,
                )
            )
        )

    def _forget(self, instance: Instance) -> None:
        self._drop_segments(instance)
        if instance.finished:
            self._changes.append(remove(SegmentsFinished, str(instance.number)))
        del self._instances[instance.number]
        same = self._by_message[instance.sender_id, instance.message_hash]
        same.remove(instance)
        if not same:
            del self._by_message[instance.sender_id, instance.message_hash]
        sender = self._senders[instance.sender_id]
        del sender.instances[instance.number]
        if not sender.instances:
            del self._senders[instance.sender_id]
        self.statistics.partial_messages -= 1

    def _drop_segments(self, instance: Instance) -> None:
        if not instance.finished:
            self._account(self._senders[instance.sender_id], -instance.held_bytes)
            self._changes += [remove(PartialSegment, message_id) for message_id in instance.message_ids]

    def _account(self, sender: _Sender, size_bytes: int) -> None:
        sender.held_bytes += size_bytes
        self.statistics.partial_bytes += size_bytes

    def _make_room(self, sender: _Sender) -> None:
        """Enforce the limits (C-210). A sender above the limit per sender loses its least recently changed
        message. Above the total limit, the sender that holds most loses one: a flood costs the flooder."""
        options = self._options
        while (
            len(sender.instances) > options.max_partial_messages_per_sender
            or sender.held_bytes > options.max_partial_bytes_per_sender
        ):
            self._abandon(next(iter(sender.instances.values())), AbandonReason.LIMIT)
        while len(self._instances) > options.max_partial_messages:
            self._evict_from(max(self._senders.values(), key=lambda other: len(other.instances)))
        while self.statistics.partial_bytes > options.max_partial_bytes:
            self._evict_from(max(self._senders.values(), key=lambda other: other.held_bytes))

    def _evict_from(self, sender: _Sender) -> None:
        self._abandon(next(iter(sender.instances.values())), AbandonReason.LIMIT)

    def _abandon(self, instance: Instance, reason: AbandonReason) -> None:
        if not instance.finished:
            self._report_abandoned(instance, reason)
            # There will never be room for a message that alone exceeds the limit.
            fits = instance.held_bytes <= self._options.max_partial_bytes_per_sender
            if reason is not AbandonReason.CORRUPT and fits and self._fetch is not None:
                self._remember_given_up(instance, reason)
        self._forget(instance)

    def _remember_given_up(self, instance: Instance, reason: AbandonReason) -> None:
        key = (instance.sender_id, instance.message_hash, instance.request_id)
        replaced = self._given_up.pop(key, None)
        others = () if replaced is None else replaced.message_ids
        record = SegmentsGivenUp(
            instance.number,
            instance.sender_id,
            instance.message_hash,
            (*others, *instance.message_ids)[-_REMEMBERED_SEGMENTS:],
            instance.request_id,
        )
        self._given_up[key] = record
        self._changes.append(put(record))
        if reason is AbandonReason.LIMIT:
            self._crowded_out.add(key)
        if replaced is None and len(self._given_up) > _REMEMBERED_GIVEN_UP:
            oldest, replaced = self._given_up.popitem(last=False)
            self._crowded_out.discard(oldest)
        if replaced is not None:
            self._changes.append(remove(SegmentsGivenUp, replaced.key))

    def _report_whole(self, instance: Instance, payload: bytes) -> None:
        self.statistics.reassembled += 1
        self._events.append(
            Reassembled(
                sender_id=instance.sender_id,
                payload=payload,
                message_hash=instance.message_hash,
                request_id=instance.request_id,
                message_ids=tuple(instance.message_ids),
                data_segment_count=instance.data_count,
            )
        )

    def _report_abandoned(self, instance: Instance, reason: AbandonReason) -> None:
        self.statistics.abandoned[reason] += 1
        self._events.append(
            Abandoned(
                sender_id=instance.sender_id,
                message_hash=instance.message_hash,
                request_id=instance.request_id,
                reason=reason,
                missing=instance.missing,
                data_segment_count=instance.data_count,
                message_ids=tuple(instance.message_ids),
                first_received_at=instance.first_received_at,
            )
        )

    def _restore(self, segments: Iterable[PartialSegment], finished: Iterable[SegmentsFinished]) -> None:
        """Restore the state of an earlier run. An unreadable segment is removed from the store."""
        for ended in finished:
            segment = Segment(
                entire_message_hash=ended.message_hash,
                data_segment_count=ended.data_segment_count,
                parity_segment_count=ended.parity_segment_count,
                payload=b"",
                request_id=ended.request_id,
            )
            instance = self._begin(ended.sender_id, segment, ended.finished_at, ended.instance)
            instance.finish(ended.lacking, ended.finished_at)
        # In order of arrival, so that the instances are in the order in which they were last touched.
        for kept in sorted(segments, key=lambda record: record.received_at):
            try:
                segment = decode_segment(kept.segment)
            except InvalidSegment:
                self._changes.append(remove(PartialSegment, kept.message_id))
                continue
            self._restore_segment(kept, segment)
        for instance in sorted(self._instances.values(), key=lambda instance: instance.touched_at):
            self._instances.move_to_end(instance.number)

    def _restore_segment(self, kept: PartialSegment, segment: Segment) -> None:
        instance = self._instances.get(kept.instance)
        if instance is None:
            instance = self._begin(kept.sender_id, segment, kept.received_at, kept.instance)
        if instance.finished:
            self._changes.append(remove(PartialSegment, kept.message_id))
            return
        instance.add(kept.message_id, segment, kept.received_at)
        self._account(self._senders[kept.sender_id], len(segment.payload))
        self._remember(kept.message_id)

    def _remember(self, message_id: str) -> None:
        self._seen[message_id] = None
        if len(self._seen) > _REMEMBERED_MESSAGE_IDS:
            self._seen.popitem(last=False)


def whole_payload(
    content: bytes, message_id: str, options: SegmentationConfig
) -> tuple[bytes, str | None] | None:
    """The payload and request id in the content of a single message; None if it holds no whole payload."""
    raw = None if options.segmentation == "always" else (content, message_id)
    if options.segmentation == "off":
        return raw
    try:
        segment = decode_segment(content)
    except InvalidSegment:
        return raw
    if segment.is_parity or segment.data_segment_count != 1:
        return None
    if message_hash(segment.payload) != segment.entire_message_hash:
        return raw
    return segment.payload, segment.request_id
