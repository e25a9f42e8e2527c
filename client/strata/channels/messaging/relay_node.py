"""A messaging node over relays: one, or a pool of them (channel.md §14 and §15). An asyncio shell."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal, Protocol, Self

from strata.channels.messaging import binding
from strata.channels.messaging.emitter import EventEmitter
from strata.channels.messaging.node import NodeError, check_content_topic
from strata.channels.messaging.reading import HistoryPage, Order, Place, read_position, write_position
from strata.channels.messaging.values import (
    HEALTH_EVENTS,
    MESSAGE_EVENTS,
    ConnectionStatus,
    ConnectionStatusChange,
    ContentTopicHealthChange,
    MessageEnvelope,
    NodeMessageError,
    NodeMessagePropagated,
    NodeMessageReceived,
    NodeMessageSent,
    TopicHealth,
)
from strata.protocol import ids, packets
from strata.protocol.errors import (
    Closed,
    ConnectionFailed,
    ErrorCode,
    InvalidPacket,
    MissingCapability,
    RequestRefused,
    Retry,
    StrataError,
)
from strata.protocol.packets import Packet
from strata.relays.pool.pool import PacketPool
from strata.relays.pool.values import Position

__all__ = ["DeliveredPacket", "PacketRelays", "PacketStream", "RelayNode"]

_log = logging.getLogger("strata.messaging")

_OVERLAP_SECONDS = 600
"""How far back a new subscription looks at relays' clocks: they may be behind ours."""
_PAGE_MESSAGES = 500
_PAGE_BYTES = 4 << 20
_RESUME_MARGIN_SECONDS = 600
"""How far before its last packet a relay is read that knows its cursor no more."""
_HEALTH_INTERVAL = 0.25
_RETRY_BASE, _RETRY_CAP = 1.0, 60.0
_STANDS_AFTER = 5.0
"""A subscription that a relay has not refused within this time is taken for standing."""
_MAX_UNDER_WAY = 1024
_BY_HASH = frozenset({"packet_ids", "http_packets"})
_FINAL = frozenset({Retry.NEVER, Retry.AUTHENTICATE})
_WRONG_TIME = frozenset({ErrorCode.TIMESTAMP_IN_FUTURE, ErrorCode.TIMESTAMP_TOO_OLD})
"""Our clock is wrong, or the relay's: the message waits, for each attempt has a time of its own."""
_WRONG_TIME_WAIT_MS = 10_000


class DeliveredPacket(Protocol):
    """A verified packet, delivered by a relay."""

    @property
    def packet(self) -> Packet: ...


class PacketStream(Protocol):
    """A subscription: an asynchronous iterator of deliveries that can be closed."""

    def __aiter__(self) -> AsyncIterator[DeliveredPacket]: ...

    async def aclose(self) -> None: ...


class PacketRelays(Protocol):
    """The part of a relay or pool that a node uses; `strata.Relay` and `strata.Pool` have it."""

    @property
    def is_connected(self) -> bool: ...

    @property
    def seats(self) -> tuple[int, int]:
        """How many relays are connected, and how many should be."""
        ...

    @property
    def max_packet_bytes(self) -> int | None:
        """The smallest limit that a connected relay has told."""
        ...

    async def publish(
        self, packet: Packet, *, timeout: float | None = None, on_stored: Callable[[], None] | None = None
    ) -> object: ...

    def subscribe(
        self,
        *,
        authors: tuple[str, ...] = (),
        types: str = "",
        since: int | None = None,
        until: int | None = None,
        received_since: int | None = None,
        live: bool = True,
        order: Literal["asc", "desc"] = "asc",
    ) -> PacketStream: ...

    def find(
        self, packet_ids: Sequence[str], *, types: str, since: int
    ) -> AsyncGenerator[DeliveredPacket, None]: ...


class RelayNode:
    """Carries messages as packets of one identity over a relay or a pool, which stay the caller's to close.

    `max_payload` limits payloads below what fits into a packet; `defaults` are settings of channels that have
    none of their own. `is_genuine` judges a packet inside another one by its author's keys of that time;
    without it the key in the author's DID counts.

    With 1024 messages under way, `send` waits for one of them to end. What is received is handed on as fast
    as the handlers of `message_received` take it: a slow one slows the subscription, and the relay's store is
    the buffer. `dropped` counts packets without a message.

    Use as an asynchronous context manager, or call `close`. It starts by itself with the first call.
    """

    hub: object = None
    """What the channels of this node share; see `MessagingNode`."""
    receipts: bool = True
    """Channels may list receipts in place of filters; see `MessagingNode`."""

    def __init__(
        self,
        relays: PacketRelays,
        *,
        identity: ids.Signer,
        publish_timeout: float | None = None,
        defaults: object = None,
        max_payload: int | None = None,
        wall: Callable[[], float] = time.time,
        is_genuine: Callable[[Packet], Awaitable[bool]] | None = None,
    ) -> None:
        self.message_events = EventEmitter(MESSAGE_EVENTS)
        self.health_events = EventEmitter(HEALTH_EVENTS)
        self.dropped = 0
        self._relays = relays
        self._is_genuine = is_genuine
        self._identity = identity
        self._timeout = publish_timeout
        self._max_payload = max_payload
        self.wall = wall
        self.defaults = defaults
        """A `ReliableChannelConfig` for channels that say nothing else (C-031)."""
        self._status = ConnectionStatus.DISCONNECTED
        self._topics: dict[str, asyncio.Task[None]] = {}
        self._authors: dict[str, tuple[str, ...]] = {}
        self._failing: Counter[str] = Counter()
        self._health: dict[str, TopicHealth] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_MAX_UNDER_WAY)
        self._clock_ahead = -math.inf
        """The wall clock above the loop's, when it was last looked at."""
        self._monitor: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every task; messages under way may arrive or not. Idempotent; the node can be used again.

        Takes no time: nobody is waited for.
        """
        tasks = [*self._topics.values(), *self._under_way]
        if self._monitor is not None:
            tasks.append(self._monitor)
            self._monitor = None
        self._topics.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._status = ConnectionStatus.DISCONNECTED

    @property
    def transport_identity(self) -> str:
        """The DID that signs the packets."""
        return self._identity.did

    @property
    def connection_status(self) -> ConnectionStatus:
        """How many of the relays that should be connected are."""
        connected, wanted = self._relays.seats
        if not connected:
            return ConnectionStatus.DISCONNECTED
        return ConnectionStatus.PARTIALLY_CONNECTED if connected < wanted else ConnectionStatus.CONNECTED

    @property
    def topics(self) -> tuple[str, ...]:
        """What is subscribed (C-268)."""
        return tuple(self._topics)

    def largest_payload(self, content_topic: str, *, repairable: bool = False) -> int:
        """Bytes of payload that fit into a packet, at the smallest limit that is known."""
        limit = self._relays.max_packet_bytes or packets.DEFAULT_MAX_PACKET_BYTES
        limit = min(limit, packets.DEFAULT_MAX_PACKET_BYTES)
        fits = binding.largest_payload(self.transport_identity, content_topic, limit, repairable=repairable)
        return fits if self._max_payload is None else min(fits, self._max_payload)

    def declared_limit(self) -> tuple[int, int] | None:
        """None: a relay tells its limit when it refuses a packet, and not before."""
        return None

    # Sending.

    async def send(self, envelope: MessageEnvelope, *, request_id: str | None = None) -> str:
        """Sign a message and publish it; what becomes of it is told by `message_events`.

        A first message on a topic subscribes it (C-264). Raises `NodeError` for a topic or size that can
        never be. Cancelling sends nothing, or everything.
        """
        topic = check_content_topic(envelope.content_topic)
        request_id = request_id or secrets.token_hex(16)
        if self._max_payload is not None and len(envelope.payload) > self._max_payload:
            raise NodeError(f"{len(envelope.payload)} bytes exceed the node's limit of {self._max_payload}")
        packet = self._build(lambda: self._packet(envelope))
        if topic not in self._topics:
            await self.subscribe([topic])
        await self._start(packet, request_id)
        return request_id

    async def send_again(
        self, message_hash: bytes, *, topic: str, request_id: str, retention_seconds: int | None = None
    ) -> None:
        """Publish a new packet that embeds a stored packet as its author signed it (C-294)."""
        work = self._repair(message_hash, topic, request_id, retention_seconds)
        await self._spawn(work, f"strata-repair {request_id}")

    def _packet(self, envelope: MessageEnvelope) -> Packet:
        return binding.build_packet(
            self._identity,
            envelope,
            now=int(self.wall()),
            nonce=f"0x{secrets.token_hex(16)}",
            retention_seconds=envelope.retention_seconds,
        )

    def _build(self, build: Callable[[], Packet]) -> Packet:
        try:
            packet = build()
        except InvalidPacket as error:
            raise NodeError(str(error)) from error
        limit = self._relays.max_packet_bytes
        if limit is not None and packet.size_bytes > limit:
            raise NodeError(f"the packet would have {packet.size_bytes} bytes, the relay takes {limit}")
        return packet

    async def _start(self, packet: Packet, request_id: str) -> None:
        await self._spawn(self._publish(packet, request_id), f"strata-send {request_id}")

    async def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._watch()
        try:
            await self._slots.acquire()
        except BaseException:
            work.close()
            raise
        task = asyncio.create_task(work, name=name)
        self._under_way.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._slots.release()

    async def _publish(self, packet: Packet, request_id: str) -> None:
        propagated: list[asyncio.Task[None]] = []

        def stored() -> None:
            if not propagated:
                event = NodeMessagePropagated(request_id, packet.digest)
                propagated.append(asyncio.create_task(self.message_events.emit(event)))

        try:
            await self._relays.publish(packet, timeout=self._timeout, on_stored=stored)
        except Exception as error:
            # Whatever it is, the channel that waits for the outcome has to hear of it.
            if not isinstance(error, StrataError | OSError):
                _log.exception("a message could not be published")
            for task in propagated:
                await task
            await self.message_events.emit(_failure(request_id, packet.digest, error))
            return
        stored()
        for task in propagated:
            await task
        await self.message_events.emit(NodeMessageSent(request_id, packet.digest))

    async def _repair(
        self, message_hash: bytes, topic: str, request_id: str, retention_seconds: int | None
    ) -> None:
        try:
            found: Packet | None = None
            wanted = [f"0x{message_hash.hex()}"]
            async with aclosing(self._relays.find(wanted, types=topic, since=0)) as deliveries:
                async for delivery in deliveries:
                    found = await self._original(delivery.packet)
            if found is None:
                raise NodeError("the original packet cannot be had")
            original = found
            packet = self._build(
                lambda: binding.build_repair(
                    self._identity,
                    original,
                    now=int(self.wall()),
                    nonce=f"0x{secrets.token_hex(16)}",
                    retention_seconds=retention_seconds,
                )
            )
        except Exception as error:
            if not isinstance(error, StrataError | OSError):
                _log.exception("a message could not be published again")
            await self.message_events.emit(_failure(request_id, None, error))
            return
        await self._publish(packet, request_id)

    # Receiving.

    async def subscribe(self, topics: Sequence[str], *, authors: Iterable[str] = ()) -> None:
        """Receive what comes in on these topics, of these authors alone if any are named (C-284, C-288).

        One that is subscribed already stays as it is. A relay that is away is no error: it is read from once
        it is there. Raises `NodeError` for an invalid topic; then none was subscribed.
        """
        for topic in topics:
            check_content_topic(topic)
        for topic in topics:
            if topic not in self._topics:
                self._authors[topic] = tuple(authors)
                self._topics[topic] = asyncio.create_task(self._receive(topic), name=f"strata-topic {topic}")
        self._watch()

    async def unsubscribe(self, topics: Sequence[str]) -> None:
        """Stop receiving topics. Raises `NodeError` for a topic that is not subscribed (C-265)."""
        for topic in topics:
            if topic not in self._topics:
                raise NodeError(f"{topic} is not subscribed")
        tasks = [self._topics.pop(topic) for topic in topics]
        for task in tasks:
            task.cancel()
        # A handler may unsubscribe: the task that runs it must not wait for itself.
        others = [task for task in tasks if task is not asyncio.current_task()]
        if others:
            await asyncio.wait(others)
        for topic in topics:
            self._failing.pop(topic, None)
        await self._tell_health()

    async def _receive(self, topic: str) -> None:
        """Read a topic for as long as it is subscribed."""
        since = int(min(self.wall(), self.store_time() or math.inf)) - _OVERLAP_SECONDS
        alone = not isinstance(self._relays, PacketPool)
        while True:
            try:
                subscription = self._relays.subscribe(
                    types=topic,
                    authors=self._authors[topic],
                    # The first says it exactly, to relays that have it; the second loses nothing at others,
                    # for no relay takes a packet older than that.
                    received_since=max(0, since),
                    since=max(0, since - packets.DEFAULT_MAX_PACKET_AGE_SECONDS),
                )
                stands = asyncio.get_running_loop().call_later(_STANDS_AFTER, self._failing.pop, topic, None)
                try:
                    async with aclosing(subscription):
                        async for delivery in subscription:
                            self._failing.pop(topic, None)
                            # A pool's relays differ: what one has stored, a reading may not come upon.
                            live = getattr(delivery, "live", None)
                            await self._hand_on(delivery, topic, stored=live is False and alone)
                finally:
                    stands.cancel()
                return  # closed by the relay object
            except Exception as error:
                if isinstance(error, Closed):
                    return
                if not isinstance(error, StrataError | OSError):
                    _log.exception(
                        "reading %s failed", topic
                    )  # a fault of ours must not end the reading unseen
                self._failing[topic] += 1
                _log.warning("%s cannot be read: %s", topic, error)
                bound = min(_RETRY_CAP, _RETRY_BASE * 2 ** min(self._failing[topic], 10))
            await asyncio.sleep(random.uniform(_RETRY_BASE, bound))

    async def _hand_on(self, delivery: DeliveredPacket, topic: str, *, stored: bool) -> None:
        message = await self._read(delivery, topic)
        if message is None:
            self.dropped += 1
        else:
            if stored:
                message = replace(message, stored=True)
            await self.message_events.emit(message)

    async def _read(self, delivery: DeliveredPacket, topic: str) -> NodeMessageReceived | None:
        """The message in a packet; None if it has none of this topic, or one its author has not signed."""
        packet = delivery.packet
        if "original" not in packet.content:
            message = binding.read_packet(packet, topic)
        else:
            original = await self._original(packet)
            message = None if original is None else binding.read_packet(packet, topic, original)
        received_at = getattr(delivery, "received_at", None)
        return (
            message if message is None or received_at is None else replace(message, received_at=received_at)
        )

    def store_time(self) -> float | None:
        """The time by the relays' clocks, at the latest; see `MessagingNode`."""
        return getattr(self._relays, "latest_time", None)  # relays of other authors may lack it

    async def _original(self, packet: Packet) -> Packet | None:
        """The packet itself, or the one it embeds if that is genuine by the keys of its author."""
        if packet.content.get("original") is None:
            return packet
        if self._is_genuine is None:
            return binding.original_of(packet)
        original = binding.embedded_in(packet)
        try:
            return original if original is not None and await self._is_genuine(original) else None
        except (StrataError, OSError) as error:
            _log.info("the keys of an author cannot be had: %s", error)
            return None  # who lacks the message asks for it again

    async def history(
        self, topic: str, *, since_ms: int
    ) -> AsyncGenerator[Sequence[NodeMessageReceived], None]:
        """The messages of the relays, newest first, in pages of up to 500. Raises as a subscription."""
        query = self._relays.subscribe(
            types=topic,
            authors=self._authors.get(topic, ()),
            since=max(0, since_ms // 1000),
            order="desc",
            live=False,
        )
        page: list[NodeMessageReceived] = []
        async with aclosing(query) as found:
            async for delivery in found:
                message = await self._read(delivery, topic)
                if message is None:
                    self.dropped += 1
                    continue
                page.append(message)
                if len(page) == _PAGE_MESSAGES:
                    yield page
                    page = []
        if page:
            yield page

    async def read(
        self,
        topic: str,
        *,
        order: Order,
        since_ms: int,
        until_ms: int | None = None,
        after: str | None = None,
    ) -> AsyncGenerator[HistoryPage, None]:
        """The messages of the relays in either order, from a position on; see `PagedHistory`.

        Newest first, `since_ms` and `until_ms` are about authors' times. Oldest first, `since_ms` is about
        the time at which relays received a packet: what was sent late, or by a slow clock, is read too.
        """
        places = read_position(after)
        query: dict[str, Any] = {"since": max(0, since_ms // 1000)}
        if order == "asc":
            query["received_since"] = query["since"]
            query["since"] = max(0, query["since"] - packets.DEFAULT_MAX_PACKET_AGE_SECONDS)
        if until_ms is not None:
            query["until"] = until_ms // 1000
        found = self._relays.subscribe(
            types=topic,
            authors=self._authors.get(topic, ()),
            order=order,
            live=False,
            **query,
            **self._resumed(places),
        )
        page: list[NodeMessageReceived] = []
        size = 0
        async with aclosing(found):
            async for delivery in found:
                message = await self._read(delivery, topic)
                places |= self._place(delivery)
                if message is None:
                    self.dropped += 1
                    continue
                page.append(message)
                size += len(message.message.payload)
                if len(page) == _PAGE_MESSAGES or size >= _PAGE_BYTES:
                    places |= self._places(found)
                    yield HistoryPage(page, write_position(places))
                    page, size = [], 0
            places |= self._places(found)
        yield HistoryPage(page, write_position(places))

    def _resumed(self, places: dict[str, Place]) -> dict[str, Any]:
        """The options of a subscription that goes on from these places."""
        if isinstance(self._relays, PacketPool):
            known = {url: Position(place.cursor, place.received_at) for url, place in places.items()}
            return {"positions": known} if known else {}
        place = places.get(getattr(self._relays, "url", ""))
        if place is None:
            return {}
        since = max(0, place.received_at - _RESUME_MARGIN_SECONDS)
        return {"cursor": place.cursor, "cursor_fallback_since": since}

    def _place(self, delivery: DeliveredPacket) -> dict[str, Place]:
        """Where a delivery leaves its relay, if there is one relay."""
        cursor = getattr(delivery, "cursor", None)
        if cursor is None or isinstance(self._relays, PacketPool):
            return {}
        return {getattr(self._relays, "url", ""): Place(cursor, getattr(delivery, "received_at", 0))}

    def _places(self, found: PacketStream) -> dict[str, Place]:
        """Where the relays of a pool stand after the packet last taken."""
        positions: dict[str, Position] = getattr(found, "positions", {})
        return {url: Place(each.cursor, each.received_at) for url, each in positions.items()}

    @property
    def finds_by_hash(self) -> bool:
        """Whether `fetch` costs less than reading the store: a plain relay is read through each time."""
        announced = getattr(self._relays, "announced", None)
        return announced is None or not _BY_HASH.isdisjoint(announced.extensions)

    async def fetch(self, topic: str, hashes: Sequence[bytes]) -> AsyncGenerator[NodeMessageReceived, None]:
        """The messages in these packets, found in the way that each relay supports (C-285)."""
        wanted = [f"0x{each.hex()}" for each in hashes if len(each) == 32]
        since = max(0, int(self.wall()) - 30 * 86_400)
        async with aclosing(self._relays.find(wanted, types=topic, since=since)) as found:
            async for delivery in found:
                message = await self._read(delivery, topic)
                if message is not None:
                    yield message

    # Health.

    def _watch(self) -> None:
        if self._monitor is None:
            self._monitor = asyncio.create_task(self._monitor_health(), name="strata-node-health")

    async def _monitor_health(self) -> None:
        # Relays reconnect by themselves; this task only observes them.
        while True:
            self._look_at_clock()
            status = self.connection_status
            if status is not self._status:
                self._status = status
                await self.health_events.emit(ConnectionStatusChange(status))
            await self._tell_health()
            await asyncio.sleep(_HEALTH_INTERVAL)

    def _look_at_clock(self) -> None:
        """Read the topics anew once the clock was set back: else they wait for packets of the future."""
        ahead = self.wall() - asyncio.get_running_loop().time()
        if ahead < self._clock_ahead - _OVERLAP_SECONDS:
            for topic, task in self._topics.items():
                task.cancel()
                self._topics[topic] = asyncio.create_task(self._receive(topic), name=f"strata-topic {topic}")
        self._clock_ahead = ahead

    async def _tell_health(self) -> None:
        for topic in {*self._topics, *self._health}:
            health = self.topic_health(topic)
            if self._health.get(topic, TopicHealth.NOT_SUBSCRIBED) is not health:
                self._health[topic] = health
                await self.health_events.emit(ContentTopicHealthChange(topic, health))
            if health is TopicHealth.NOT_SUBSCRIBED:
                self._health.pop(topic, None)

    def topic_health(self, topic: str) -> TopicHealth:
        """How well a topic is heard at this moment."""
        if topic not in self._topics:
            return TopicHealth.NOT_SUBSCRIBED
        connected, wanted = self._relays.seats
        if not connected or self._failing[topic]:
            return TopicHealth.UNHEALTHY
        return TopicHealth.MINIMALLY_HEALTHY if connected < wanted else TopicHealth.SUFFICIENTLY_HEALTHY


def _failure(request_id: str, message_hash: bytes | None, error: Exception) -> NodeMessageError:
    """What an error of a relay means for the message (C-292)."""
    code, recoverable, retry_after_ms = type(error).__name__, True, None
    if isinstance(error, RequestRefused):
        code, recoverable = error.code, error.retry not in _FINAL
        if error.code == ErrorCode.RATE_LIMITED or error.retry is Retry.LATER:
            retry_after_ms = 1000 * (error.retry_after or 1)
        elif error.code in _WRONG_TIME:
            recoverable, retry_after_ms = True, _WRONG_TIME_WAIT_MS
    elif isinstance(error, InvalidPacket | MissingCapability | NodeError):
        recoverable = False
    elif isinstance(error, ConnectionFailed | Closed):
        # The relay cannot be had any more, which a channel over several may outlive: its node is offline.
        recoverable = True
    return NodeMessageError(request_id, message_hash, str(error), code, recoverable, retry_after_ms)
