"""Reads a channel's past from the relays, page by page and backwards; nothing is handed over or kept.

A page is cut when it has enough messages. Its `before` is the place of the cut, exact to the packet, so the
next page skips nothing and repeats nothing, even if a packet has expired since, or if the relays of a pool
return two packets in the other order the next time. A message in several segments belongs to the page with
its last segment; its other segments are read ahead, and skipped by the next page.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import structs

from strata.channels.messaging.node import MessagingNode
from strata.channels.messaging.reading import HistoryPage, read_pages, sent_ms
from strata.channels.messaging.values import NodeMessageReceived
from strata.channels.reliable.clock import date_of_sending
from strata.channels.reliable.events import MessageReceived
from strata.channels.reliable.retrieval import has_hint, hinted
from strata.channels.sds import HistoryEntry, SdsMessage
from strata.channels.sds.messages import Kind
from strata.channels.segmentation.messages import InvalidSegment, Segment, decode_segment, message_hash
from strata.protocol.errors import StrataError

__all__ = ["ChannelPast", "InvalidPlace", "PastMessages"]

_MAX_LIMIT = 1_000
_MAX_PAGES = 40
"""The most store pages read for one page of messages; as many again for the rest of large messages."""
_MAX_BYTES = 64 << 20
_MAX_REMEMBERED = 1_000
_MAX_SEEN = 500
_FEW_BYTES = 8
_LATE_MS = 2_000
"""A packet this much later than its message was sent again, so there may be an older packet."""

Key = tuple[str, bytes, str]
"""Identifies a message: its sender, its hash and its request id."""


class InvalidPlace(StrataError, ValueError):
    """The value of `before` is not a place in a channel's past."""


@dataclass(frozen=True, slots=True)
class PastMessages:
    """A page of a channel's past."""

    messages: tuple[MessageReceived, ...]
    """The messages as they are handed over, own ones included, in the order that all participants share."""
    more: bool
    """Whether the relays have older messages."""
    missing: tuple[str, ...]
    """Messages that these follow (by SDS id) or that are only partly there (by payload hash): no relay has
    them, as far as can be determined."""
    before: str | None
    """The value of `before` for the page before this one; None if there is none."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing in this page or right before it."""
        return not self.missing


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """The place where a page was cut."""

    after: str | None
    until_ms: int
    last: bytes
    """The hash of the last packet that was read."""
    done: tuple[bytes, ...] = ()
    """Messages to skip in later pages: those that were read ahead, and those that were sent again later."""
    seen: tuple[bytes, ...] = ()
    """The last packets read after `after`, in a few bytes each; earlier versions stored only one."""
    read_at: int = 0
    """When the first page was read, in milliseconds; packets sent later have arrived since."""


@dataclass(slots=True)
class _Partial:
    segments: dict[int, Segment]
    order: tuple[int, str]
    """The place of its first segment among those read so far, which is the place of the message."""
    latest: int
    """The Lamport time of its last segment."""
    event: NodeMessageReceived


@dataclass(slots=True)
class _Page:
    """A page being built."""

    limit: int
    segmentation: Literal["always", "auto", "off", "raw"]
    now_ms: int
    done: set[bytes]
    found: list[tuple[tuple[int, str], MessageReceived]] = field(default_factory=list)
    partial: dict[Key, _Partial] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)
    named: dict[str, HistoryEntry] = field(default_factory=dict)
    again: list[bytes] = field(default_factory=list)
    """Messages of which older packets may follow."""
    size: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.found) + len(self.partial) >= self.limit or self.size >= _MAX_BYTES

    def take(self, event: NodeMessageReceived, message: SdsMessage, *, ahead: bool = False) -> None:
        """Add a message of the channel in its place; `ahead`: only if it belongs to a partial message."""
        if message.message_id in self.ids or message.content is None:
            return
        segment = self._segment(message.content)
        if segment is not None:
            key = (message.sender_id, segment.entire_message_hash, segment.request_id or "")
        elif self.segmentation == "always":
            return
        else:  # the payload itself: its event also has the id of the SDS message
            key = (message.sender_id, message_hash(message.content), message.message_id)
        if _short(key) in self.done or (ahead and key not in self.partial):
            return
        self.ids.add(message.message_id)
        self.named |= {entry.message_id: entry for entry in message.causal_history}
        place = (message.lamport_timestamp or 0, message.message_id)
        if sent_ms(event) > place[0] + _LATE_MS:
            self.again.append(_short(key))
        if segment is None or (segment.data_segment_count == 1 and not segment.is_parity):
            payload = message.content if segment is None else segment.payload
            self._add(key, place, place[0], event, payload)
            return
        partial = self.partial.setdefault(key, _Partial({}, place, place[0], event))
        if not segment.is_parity:
            partial.segments[segment.index] = segment
            partial.order = min(partial.order, place)
            partial.latest = max(partial.latest, place[0])
        if len(partial.segments) == segment.data_segment_count:
            parts = [partial.segments[index].payload for index in sorted(partial.segments)]
            del self.partial[key]
            self.again.append(_short(key))
            self._add(key, partial.order, partial.latest, partial.event, b"".join(parts))

    def _segment(self, content: bytes) -> Segment | None:
        """The segment in this content, if the channel looks for segments; None for bytes that are none."""
        try:
            segment = None if self.segmentation == "off" else decode_segment(content)
        except InvalidSegment:
            return None
        if segment is not None and self.segmentation == "auto" and segment.data_segment_count == 1:
            is_whole = not segment.parity_segment_count
            if is_whole and message_hash(segment.payload) != segment.entire_message_hash:
                return None  # it only looks like a segment
        return segment

    def _add(
        self, key: Key, order: tuple[int, str], latest: int, event: NodeMessageReceived, payload: bytes
    ) -> None:
        sender_id, digest, request_id = key
        if message_hash(payload) != digest:
            return
        self.size += len(payload)
        sent = event.message.timestamp
        received = MessageReceived(
            request_id=request_id or digest.hex(),
            message_id=digest.hex(),
            sender_id=sender_id,
            payload=payload,
            content_topic=event.message.content_topic,
            timestamp=latest if sent is None else 1000 * sent,
            hash=event.message_hash,
            meta=event.message.meta,
            author=event.message.author,
            sent_at=date_of_sending(order[0], sent, self.now_ms),
            lamport_timestamp=order[0],
            sds_id=order[1],
        )
        self.done.add(_short(key))
        self.found.append((order, received))


class ChannelPast:
    """Reads the past of one channel; see `ReliableChannel.history`."""

    def __init__(
        self,
        node: MessagingNode,
        channel_id: str,
        content_topic: str,
        *,
        segmentation: Literal["always", "auto", "off", "raw"],
        open_payload: Callable[[NodeMessageReceived], Awaitable[bytes | None]],
        decode: Callable[[bytes], SdsMessage | None],
        is_genuine: Callable[[bytes, str | None], bool],
        is_known: Callable[[str], bool],
        oldest_ms: Callable[[], int],
        now_ms: Callable[[], int],
        members: Collection[str] = (),
    ) -> None:
        """`segmentation` is that of the channel. `open_payload` decrypts, and `decode` reads the result.
        `is_known` says whether a message is in this participant's log. `members` are the authors to read, if
        any are named: a node whose channel is not started reads all authors."""
        self._node = node
        self._channel_id = channel_id
        self._topic = content_topic
        self._segmentation = segmentation
        self._open = open_payload
        self._decode = decode
        self._is_genuine = is_genuine
        self._is_known = is_known
        self._oldest_ms = oldest_ms
        self._now_ms = now_ms
        self._members = frozenset(members)

    async def read(self, before: str | int | None, limit: int) -> PastMessages:
        """Read one page. Raises `InvalidPlace`, `ValueError` for the limit, `StrataError` if none answers."""
        if not 1 <= limit <= _MAX_LIMIT:
            raise ValueError(f"limit must be between 1 and {_MAX_LIMIT}")
        start = self._place(before)
        page = _Page(limit, self._segmentation, self._now_ms(), set(start.done))
        cut, more = await self._fill(page, start)
        missing = await self._missing(page, more)
        page.found.sort(key=lambda each: each[0])
        messages = tuple(message for _, message in page.found)
        return PastMessages(messages, more, missing, cut if more else None)

    def _place(self, before: str | int | None) -> _Place:
        if before is None:
            now = self._now_ms()
            return _Place(None, now + 86_400_000, b"", read_at=now)
        if isinstance(before, int):
            until = 1000 * before - 1000
            return _Place(None, until, b"", read_at=until)
        try:
            return msgspec.msgpack.decode(bytes.fromhex(before), type=_Place)
        except (ValueError, msgspec.MsgspecError):
            raise InvalidPlace("not a place in this channel's past: give `before` of a page") from None

    async def _fill(self, page: _Page, start: _Place) -> tuple[str, bool]:
        """Read until the page is full, and then further for the rest of large messages.

        Returns the cut, and whether there is more after it.
        """
        after, last = start.after, start.last
        seen = list(start.seen) or ([last[:_FEW_BYTES]] if last else [])
        known, is_before_cut = set(seen), bool(seen)
        has_all = 0 < len(start.seen) < _MAX_SEEN
        place: _Place | None = None
        pages_read = 0
        async with aclosing(self._pages(start)) as pages:
            async for stored in pages:
                pages_read += 1
                if start.after is not None and known.isdisjoint(_few(each) for each in stored.messages):
                    is_before_cut = False  # the packets before the cut have expired
                for event in stored.messages:
                    if _few(event) in known:
                        is_before_cut = False
                        continue
                    if is_before_cut and not (has_all and sent_ms(event) <= start.read_at):
                        continue  # it arrived since, or was read but is not among the known packets
                    if place is None and (page.is_full or pages_read > _MAX_PAGES):
                        place = structs.replace(start, after=after, last=last, seen=tuple(seen[-_MAX_SEEN:]))
                    message = await self._read(event)
                    if message is not None:
                        page.take(event, message, ahead=place is not None)
                    if place is None:
                        last = event.message_hash
                        seen.append(_few(event))
                if place is not None and (not page.partial or pages_read > 2 * _MAX_PAGES):
                    break
                if place is None and stored.position is not None:
                    after, last, seen = stored.position, b"", []
        if is_before_cut and pages_read and not has_all:
            # The packets before the cut are gone; packets that arrived since are better than nothing.
            return await self._fill(page, structs.replace(start, last=b"", seen=()))
        cut = place or structs.replace(start, after=after, last=last, seen=tuple(seen[-_MAX_SEEN:]))
        done = tuple(dict.fromkeys([*start.done, *page.again, *map(_short, page.partial)]))[-_MAX_REMEMBERED:]
        return msgspec.msgpack.encode(structs.replace(cut, done=done)).hex(), place is not None

    def _pages(self, start: _Place) -> AsyncGenerator[HistoryPage, None]:
        return read_pages(
            self._node,
            self._topic,
            order="desc",
            since_ms=self._oldest_ms(),
            until_ms=start.until_ms,
            after=start.after,
        )

    async def _read(self, event: NodeMessageReceived) -> SdsMessage | None:
        author = event.message.author
        if self._members and author is not None and author not in self._members:
            return None
        data = await self._open(event)
        message = None if data is None else self._decode(data)
        if data is None or message is None or message.kind is not Kind.CONTENT or not message.has_usable_ids:
            return None
        if message.channel_id != self._channel_id or not self._is_genuine(data, author):
            return None
        return message

    async def _missing(self, page: _Page, more: bool) -> tuple[str, ...]:
        """The messages that those of a page follow, and that are neither here nor at a relay."""
        named = [
            entry
            for message_id, entry in page.named.items()
            if message_id not in page.ids and not self._is_known(message_id)
        ]
        asked = hinted(named)
        async with aclosing(self._node.fetch(self._topic, tuple(asked.values()))) as found:
            there = {event.message_hash async for event in found}
        lost = [message_id for message_id, message_hash in asked.items() if message_hash not in there]
        if not more:
            lost += [entry.message_id for entry in named if not has_hint(entry)]
        return (*lost, *(digest.hex() for _, digest, _ in page.partial))


def _few(event: NodeMessageReceived) -> bytes:
    """A packet's identity in a few bytes."""
    return event.message_hash[:_FEW_BYTES]


def _short(key: Key) -> bytes:
    """A message's identity in a few bytes."""
    sender_id, digest, request_id = key
    return message_hash(f"{sender_id}\n{request_id}\n".encode() + digest)[:12]
