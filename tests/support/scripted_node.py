"""A messaging node that the test plays: it answers sends, and the test fills its store."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from strata.channels.messaging.emitter import EventEmitter
from strata.channels.messaging.values import (
    HEALTH_EVENTS,
    MESSAGE_EVENTS,
    ConnectionStatus,
    ConnectionStatusChange,
    MessageEnvelope,
    NodeMessageError,
    NodeMessageReceived,
    NodeMessageSent,
    ReceivedEnvelope,
)
from strata.channels.reliable import CHANNEL_EVENTS, NotSent, ReliableChannel, make_channel
from strata.channels.sds import BloomFilter, BloomParameters, HistoryEntry, SdsConfig, SdsMessage
from strata.channels.segmentation import SegmentationConfig, encode_segment, segment_message
from strata.channels.segmentation.messages import Segment, decode_segment

T = TypeVar("T")

TOPIC = "/test/1/room/proto"
START = 1_760_000_000
START_MS = START * 1000

QUIET: dict[str, Any] = {"sync_min_interval_ms": 0, "process_task_min_elapse_ms": 0}
"""Settings with which a channel sends what the test gives it, when it is due, and nothing else."""


def elapsed() -> float:
    """Seconds since the test began."""
    return asyncio.get_running_loop().time()


async def settle() -> None:
    """Let everything happen that takes practically no time."""
    await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Sent:
    """One message that a channel handed to the node."""

    at: float
    request_id: str
    envelope: MessageEnvelope
    message_hash: bytes

    @property
    def payload(self) -> bytes:
        return self.envelope.payload

    @property
    def sds(self) -> SdsMessage:
        """The message inside, unless a hook hides it."""
        message = SdsMessage.decode(self.payload)
        assert message is not None
        return message

    @property
    def segment(self) -> Segment:
        return segment_in(self.sds)


@dataclass(frozen=True)
class Refusal:
    """A refusal by the transport."""

    code: str = "refused"
    recoverable: bool = False
    retry_after_ms: int | None = None


Answer = Callable[[Sent], "Refusal | float | None"]
"""A refusal, the seconds until acceptance, or None for no answer at all. May raise."""


def at_once(sent: Sent) -> float:
    """The answer of a friendly node: accepted at once."""
    return 0.0


@dataclass
class Query:
    """One query for history."""

    at: float
    topic: str
    since_ms: int
    pages: int = 0
    """The number of pages that were read."""


@dataclass
class ScriptedNode:
    """A channel's transport. Everything requested of it is recorded."""

    transport_identity: str = "did:test:node"
    defaults: object = None
    largest: int | None = None
    limit: tuple[int, int] | None = None
    answer: Answer = at_once
    pages: list[list[NodeMessageReceived]] = field(default_factory=list)
    """The content of the store, newest page first, each page newest first."""
    stored: dict[bytes, NodeMessageReceived] = field(default_factory=dict)
    store_error: Exception | None = None
    subscribe_error: Exception | None = None

    hub: object = field(init=False, repr=False, compare=False)
    """Set by the channels; until then the node lacks the attribute."""

    def __post_init__(self) -> None:
        self.message_events = EventEmitter(MESSAGE_EVENTS)
        self.health_events = EventEmitter(HEALTH_EVENTS)
        self.connection_status = ConnectionStatus.CONNECTED
        self.sent: list[Sent] = []
        self.again: list[tuple[bytes, str]] = []
        self.topics: list[str] = []
        self.subscriptions: list[tuple[str, tuple[str, ...]]] = []
        self.queries: list[Query] = []
        self.fetches: list[tuple[float, tuple[bytes, ...]]] = []
        self.clock_offset = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._count = 0

    # Called by a channel.

    def wall(self) -> float:
        return START + elapsed() + self.clock_offset

    def largest_payload(self, content_topic: str, *, repairable: bool = False) -> int | None:
        return self.largest

    def declared_limit(self) -> tuple[int, int] | None:
        return self.limit

    async def send(self, envelope: MessageEnvelope, *, request_id: str | None = None) -> str:
        name = request_id or f"node:{self._count}"
        self._play(Sent(elapsed(), name, envelope, self.hash_of(envelope.payload)))
        return name

    async def send_again(
        self, message_hash: bytes, *, topic: str, request_id: str, retention_seconds: int | None = None
    ) -> None:
        self.again.append((message_hash, request_id))
        self._emit_later(0.0, NodeMessageSent(request_id, self.hash_of(message_hash)))

    def _play(self, sent: Sent) -> None:
        self.sent.append(sent)
        outcome = self.answer(sent)
        if isinstance(outcome, Refusal):
            text = "the script says no"
            self._emit_later(
                0.0,
                NodeMessageError(
                    sent.request_id, None, text, outcome.code, outcome.recoverable, outcome.retry_after_ms
                ),
            )
        elif outcome is not None:
            self._emit_later(outcome, NodeMessageSent(sent.request_id, sent.message_hash))

    def _emit_later(self, delay: float, event: NodeMessageSent | NodeMessageError) -> None:
        async def emit() -> None:
            if delay:
                await asyncio.sleep(delay)
            await self.message_events.emit(event)

        task = asyncio.get_running_loop().create_task(emit())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def subscribe(self, topics: Sequence[str], *, authors: Iterable[str] = ()) -> None:
        if self.subscribe_error is not None:
            raise self.subscribe_error
        self.topics += topics
        self.subscriptions += [(topic, tuple(authors)) for topic in topics]

    async def unsubscribe(self, topics: Sequence[str]) -> None:
        for topic in topics:
            self.topics.remove(topic)

    async def history(
        self, topic: str, *, since_ms: int
    ) -> AsyncGenerator[Sequence[NodeMessageReceived], None]:
        query = Query(elapsed(), topic, since_ms)
        self.queries.append(query)
        if self.store_error is not None:
            raise self.store_error
        for page in list(self.pages):
            await asyncio.sleep(0.001)
            query.pages += 1
            yield page

    async def fetch(self, topic: str, hashes: Sequence[bytes]) -> AsyncGenerator[NodeMessageReceived, None]:
        self.fetches.append((elapsed(), tuple(hashes)))
        if self.store_error is not None:
            raise self.store_error
        await asyncio.sleep(0.001)
        for each in hashes:
            if each in self.stored:
                yield self.stored[each]

    # Called by the test.

    def hash_of(self, payload: bytes) -> bytes:
        """A different hash each time, as for packets."""
        self._count += 1
        return hashlib.sha256(self._count.to_bytes(8, "big") + payload).digest()

    def packed(
        self, message: SdsMessage | bytes, *, author: str | None = None, topic: str = TOPIC
    ) -> NodeMessageReceived:
        """A message as the transport brings it, which `fetch` finds from now on."""
        payload = message if isinstance(message, bytes) else message.encode()
        event = NodeMessageReceived(
            self.hash_of(payload),
            ReceivedEnvelope(content_topic=topic, payload=payload, author=author),
        )
        self.stored[event.message_hash] = event
        return event

    async def deliver(
        self,
        *messages: SdsMessage | bytes | NodeMessageReceived,
        author: str | None = None,
        topic: str = TOPIC,
    ) -> None:
        """Deliver messages, one after the other, and let the channel handle each."""
        for message in messages:
            known = isinstance(message, NodeMessageReceived)
            event = message if known else self.packed(message, author=author, topic=topic)  # type: ignore[arg-type]
            await self.message_events.emit(event)  # type: ignore[arg-type]
        await settle()

    async def set_status(self, status: ConnectionStatus) -> None:
        self.connection_status = status
        await self.health_events.emit(ConnectionStatusChange(status))

    async def disconnect(self) -> None:
        await self.set_status(ConnectionStatus.DISCONNECTED)

    async def reconnect(self) -> None:
        await self.set_status(ConnectionStatus.CONNECTED)

    def times(self) -> list[float]:
        """The time at which each message was sent, to a tenth of a second."""
        return [round(sent.at, 1) for sent in self.sent]


# Reported by a channel.


class Told:
    """All events of a channel, in order."""

    def __init__(self, channel: ReliableChannel, *, received: bool = True) -> None:
        """With `received` messages are taken as they come; otherwise the test must iterate the channel."""
        self.events: list[tuple[float, Any]] = []
        for name in CHANNEL_EVENTS:
            if received or not name.endswith("received"):
                channel.message_events.on(name, self._take)

    def _take(self, event: Any) -> None:
        self.events.append((elapsed(), event))

    def of(self, kind: type[T]) -> list[T]:
        return [event for _, event in self.events if isinstance(event, kind)]

    def at(self, kind: type[Any]) -> list[float]:
        """The times of events of one kind, to a tenth of a second."""
        return [round(at, 1) for at, event in self.events if isinstance(event, kind)]

    @property
    def names(self) -> list[str]:
        return [event.name for _, event in self.events]

    @property
    def payloads(self) -> list[bytes]:
        """The payloads of the received messages."""
        return [event.payload for _, event in self.events if event.name == "message-received"]


class Reversing:
    """An encryption hook: what it makes is not what it got, and as long."""

    def encrypt(self, content: bytes) -> bytes:
        return content[::-1]

    def decrypt(self, payload: bytes) -> bytes:
        return payload[::-1]


@asynccontextmanager
async def opened(
    node: ScriptedNode,
    *,
    sender_id: str = "alice",
    channel_id: str = "room",
    topic: str = TOPIC,
    take: bool = True,
    leaves_unsent: bool = False,
    **options: Any,
) -> AsyncIterator[tuple[ReliableChannel, Told]]:
    """An open channel that sends nothing unprompted, and its events.

    A test that `leaves_unsent` ends with messages that cannot go out, which closing must report.
    """
    channel = make_channel(
        node, channel_id, topic, sender_id, rng=random.Random(1), options={**QUIET, **options}
    )
    told = Told(channel, received=take)
    await channel.open()
    try:
        await settle()
        yield channel, told
    finally:
        if leaves_unsent:
            with pytest.raises(NotSent):
                await channel.close()
        elif channel._session is not None:
            await channel.close()


# Messages of other participants.

_PARAMETERS = BloomParameters(SdsConfig().bloom_filter_size, SdsConfig().bloom_filter_error_rate)


def named(*messages: SdsMessage | Sent | HistoryEntry) -> tuple[HistoryEntry, ...]:
    """A history of these messages."""
    found = []
    for each in messages:
        if isinstance(each, HistoryEntry):
            found.append(each)
        elif isinstance(each, Sent):
            found.append(HistoryEntry(each.sds.message_id, each.message_hash, each.sds.sender_id))
        else:
            found.append(HistoryEntry(each.message_id, None, each.sender_id))
    return tuple(found)


def filter_of(*messages: SdsMessage | Sent) -> bytes:
    """A filter that holds these messages."""
    bloom = BloomFilter(_PARAMETERS)
    for each in messages:
        bloom.insert((each.sds if isinstance(each, Sent) else each).message_id)
    return bloom.to_bytes()


def segments(payload: bytes, *, size: int = 1 << 20, request_id: str | None = None) -> list[bytes]:
    """The contents of the SDS messages that carry a payload."""
    cut = segment_message(payload, SegmentationConfig(segment_size_bytes=size), request_id=request_id)
    return [encode_segment(segment) for segment in cut]


def segment_in(message: SdsMessage) -> Segment:
    assert message.content is not None
    return decode_segment(message.content)


def said(
    n: int,
    payload: bytes = b"",
    *,
    sender: str = "bob",
    follows: Sequence[SdsMessage | Sent | HistoryEntry] = (),
    has: Sequence[SdsMessage | Sent] | None = None,
    content: bytes | None = None,
    lamport: int | None = None,
    channel: str = "room",
    asks: Sequence[HistoryEntry] = (),
) -> SdsMessage:
    """Content message `n` of a participant: `follows` is its history, and `has` is in its filter."""
    whole = content if content is not None else segments(payload or f"{sender} {n}".encode())[0]
    return SdsMessage(
        sender,
        f"{sender}-{n}",
        channel,
        START_MS + n if lamport is None else lamport,
        named(*follows),
        None if has is None else filter_of(*has),
        tuple(asks),
        whole,
    )


def chunks(
    n: int, payload: bytes, size: int, *, sender: str = "bob", chained: bool = False
) -> list[SdsMessage]:
    """A message in several chunks, each following the previous one if `chained`."""
    made: list[SdsMessage] = []
    for index, content in enumerate(segments(payload, size=size)):
        follows = made[-1:] if chained else ()
        made.append(said(n + index, sender=sender, content=content, follows=follows))
    return made


def sync(
    n: int,
    *,
    sender: str = "bob",
    follows: Sequence[SdsMessage | Sent | HistoryEntry] = (),
    has: Sequence[SdsMessage | Sent] | None = None,
) -> SdsMessage:
    """A sync message: what its sender has received lately."""
    return SdsMessage(
        sender,
        f"{sender}-sync-{n}",
        "room",
        START_MS + n,
        named(*follows),
        None if has is None else filter_of(*has),
    )


def ephemeral(n: int, payload: bytes, *, sender: str = "bob") -> SdsMessage:
    return SdsMessage(sender, f"{sender}-e{n}", "room", content=segments(payload)[0])


def node_off_by(seconds: float) -> ScriptedNode:
    """A node whose clock is ahead by this much."""
    node = ScriptedNode()
    node.clock_offset = seconds
    return node
