"""A messaging node over one relay or a pool of relays (channel.md §14 and §15). An asyncio shell."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Self

from strata.channels.messaging import binding
from strata.channels.messaging.emitter import EventEmitter
from strata.channels.messaging.ending import ending
from strata.channels.messaging.heard import OVERLAP_SECONDS, HeardTopic, store_time
from strata.channels.messaging.node import NodeError, check_content_topic
from strata.channels.messaging.packet_relays import DeliveredPacket, PacketRelays
from strata.channels.messaging.reading import HistoryPage, Order
from strata.channels.messaging.stored import StoredMessages
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
    ErrorCode,
    InvalidPacket,
    MissingCapability,
    RequestRefused,
    Retry,
    StrataError,
)
from strata.protocol.packets import Packet
from strata.relays.pool.pool import PacketPool

__all__ = ["RelayNode"]

_log = logging.getLogger("strata.messaging")

_HEALTH_INTERVAL = 0.25
_FAULT_PAUSE = 5.0
_MAX_UNDER_WAY = 1024
_FINAL = frozenset({Retry.NEVER, Retry.AUTHENTICATE})
_WRONG_TIME = frozenset({ErrorCode.TIMESTAMP_IN_FUTURE, ErrorCode.TIMESTAMP_TOO_OLD})
"""Our clock or the relay's is wrong. The message waits, because each attempt has a new timestamp."""
_WRONG_TIME_WAIT_MS = 10_000


class RelayNode:
    """Carries messages as packets of one identity over a relay or a pool, which the caller must close.

    `max_payload` limits payloads below what fits into a packet; `defaults` are settings for channels that
    have none of their own. `is_genuine` judges a packet inside another one by its author's keys of that time;
    without it the key in the author's DID counts.

    With 1024 messages under way, `send` waits for one of them to end. Received messages are passed on as fast
    as the handlers of `message_received` take them: a slow handler slows the subscription, and the relay's
    store is the buffer. `dropped` counts packets without a message.

    Use as an asynchronous context manager, or call `close`. The node starts by itself with the first call.
    """

    hub: object = None
    """The state that the channels of this node share; see `MessagingNode`."""
    receipts: bool = True
    """Whether channels may list receipts instead of filters; see `MessagingNode`."""

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
        """A `ReliableChannelConfig` for settings that a channel leaves open (C-031)."""
        self._status = ConnectionStatus.DISCONNECTED
        self._store = StoredMessages(relays, self._read)
        self._topics: dict[str, HeardTopic] = {}
        self._health: dict[str, TopicHealth] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Task[None]] = set()
        """Tasks that report a message as stored, while it may still be under way to other relays."""
        self._slots = asyncio.Semaphore(_MAX_UNDER_WAY)
        self._clock_ahead = -math.inf
        """How far the wall clock was ahead of the loop's at the last check."""
        self._monitor: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every task; messages under way may arrive or not. Idempotent; the node can be used again.

        Returns without waiting for anyone. A handler that closes its node ends at its next wait.
        """
        tasks = [*self._under_way, *self._telling, *(heard.end() for heard in self._topics.values())]
        if self._monitor is not None:
            tasks.append(self._monitor)
            self._monitor = None
        self._topics.clear()
        async with ending(tasks):
            self._status = ConnectionStatus.DISCONNECTED

    @property
    def transport_identity(self) -> str:
        """The DID that signs the packets."""
        return self._identity.did

    @property
    def connection_status(self) -> ConnectionStatus:
        """Whether none, some or all of the relays that should be connected are connected."""
        connected, wanted = self._relays.seats
        if not connected:
            return ConnectionStatus.DISCONNECTED
        return ConnectionStatus.PARTIALLY_CONNECTED if connected < wanted else ConnectionStatus.CONNECTED

    @property
    def topics(self) -> tuple[str, ...]:
        """The subscribed topics (C-268)."""
        return tuple(self._topics)

    def largest_payload(self, content_topic: str, *, repairable: bool = False) -> int:
        """The largest payload that fits into a packet at the smallest known limit, in bytes."""
        limit = self._relays.max_packet_bytes or packets.DEFAULT_MAX_PACKET_BYTES
        limit = min(limit, packets.DEFAULT_MAX_PACKET_BYTES)
        fits = binding.largest_payload(self.transport_identity, content_topic, limit, repairable=repairable)
        return fits if self._max_payload is None else min(fits, self._max_payload)

    def declared_limit(self) -> tuple[int, int] | None:
        """None, because a relay reports its limit only when it refuses a packet."""
        return None

    # Sending.

    async def send(self, envelope: MessageEnvelope, *, request_id: str | None = None) -> str:
        """Sign a message and publish it; `message_events` reports its outcome.

        The first message on a topic subscribes to it (C-264). Raises `NodeError` for an invalid topic or a
        size that can never be sent. Cancelling sends nothing or everything.
        """
        topic = check_content_topic(envelope.content_topic)
        request_id = request_id or secrets.token_hex(16)
        if self._max_payload is not None and len(envelope.payload) > self._max_payload:
            raise NodeError(f"{len(envelope.payload)} bytes exceed the node's limit of {self._max_payload}")
        packet = self._build(
            lambda: binding.build_packet(
                self._identity, envelope, now=int(self.wall()), nonce=f"0x{secrets.token_hex(16)}"
            )
        )
        if topic not in self._topics:
            await self.subscribe([topic])
        await self._spawn(self._publish(packet, request_id), f"strata-send {request_id}")
        return request_id

    async def send_again(
        self, message_hash: bytes, *, topic: str, request_id: str, retention_seconds: int | None = None
    ) -> None:
        """Publish a new packet that embeds a stored packet as its author signed it (C-294)."""
        work = self._repair(message_hash, topic, request_id, retention_seconds)
        await self._spawn(work, f"strata-repair {request_id}")

    def _build(self, build: Callable[[], Packet]) -> Packet:
        try:
            packet = build()
        except InvalidPacket as error:
            raise NodeError(str(error)) from error
        limit = self._relays.max_packet_bytes
        if limit is not None and packet.size_bytes > limit:
            raise NodeError(f"the packet would have {packet.size_bytes} bytes, the relay takes {limit}")
        return packet

    async def _spawn(self, work: Coroutine[object, object, None], name: str) -> None:
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
                task = asyncio.create_task(self.message_events.emit(event), name=f"strata-told {request_id}")
                propagated.append(task)
                self._telling.add(task)
                task.add_done_callback(self._telling.discard)

        try:
            await self._relays.publish(packet, timeout=self._timeout, on_stored=stored)
        except Exception as error:
            # The channel that waits for the outcome must learn of any error.
            if not isinstance(error, StrataError | OSError):
                _log.exception("a message could not be published")
            await _all_told(propagated)
            await self.message_events.emit(_failure(request_id, packet.digest, error))
            return
        stored()
        await _all_told(propagated)
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
        """Receive messages on these topics, only from these authors if any are named (C-284, C-288).

        Messages of the last ten minutes are received first, because relays' clocks may be behind ours. A
        topic that is already subscribed stays as it is. A relay that is away is no error: it is read once it
        is back. Raises `NodeError` for an invalid topic, and for one that is subscribed with other authors;
        then none is subscribed.
        """
        self._subscribe(topics, authors, from_head=False)

    async def subscribe_live(self, topics: Sequence[str], *, authors: Iterable[str] = ()) -> None:
        """As `subscribe`, for messages that arrive from now on; `read` returns earlier ones.

        `read` of such a topic waits until the relays have reported their heads. A reading that follows and
        reaches its end therefore leaves no gap between itself and the subscription.
        """
        self._subscribe(topics, authors, from_head=True)

    def _subscribe(self, topics: Sequence[str], authors: Iterable[str], *, from_head: bool) -> None:
        wanted = tuple(authors)
        for topic in topics:
            check_content_topic(topic)
            heard = self._topics.get(topic)
            if heard is not None and set(heard.authors) != set(wanted):
                whom = "others" if heard.authors else "everybody"
                raise NodeError(f"{topic} is subscribed already, to hear {whom}: unsubscribe it first")
        for topic in topics:
            if topic not in self._topics:
                self._topics[topic] = HeardTopic(
                    self._relays,
                    topic,
                    wanted,
                    from_head=from_head,
                    hand_on=self._hand_on,
                    wall=lambda: self.wall(),  # it may be set
                )
        self._watch()

    async def unsubscribe(self, topics: Sequence[str]) -> None:
        """Stop receiving topics. Raises `NodeError` for a topic that is not subscribed (C-265)."""
        for topic in topics:
            if topic not in self._topics:
                raise NodeError(f"{topic} is not subscribed")
        async with ending([self._topics.pop(topic).end() for topic in topics]):
            await self._tell_health()

    async def _hand_on(self, delivery: DeliveredPacket, topic: str) -> None:
        message = await self._read(delivery, topic)
        if message is None:
            return
        if getattr(delivery, "live", None) is False:
            # The relays of a pool differ: a reading may not find what one of them has stored.
            message = replace(message, live=False, stored=not isinstance(self._relays, PacketPool))
        await self.message_events.emit(message)

    async def _read(self, delivery: DeliveredPacket, topic: str) -> NodeMessageReceived | None:
        """The message in a packet; None if there is none on this topic, or its author has not signed it."""
        packet = delivery.packet
        if "original" not in packet.content:
            message = binding.read_packet(packet, topic)
        else:
            original = await self._original(packet)
            message = None if original is None else binding.read_packet(packet, topic, original)
        if message is None:
            self.dropped += 1
            return None
        received_at = getattr(delivery, "received_at", None)
        return message if received_at is None else replace(message, received_at=received_at)

    def store_time(self) -> float | None:
        """The latest time by the relays' clocks; see `MessagingNode`."""
        return store_time(self._relays)

    async def _original(self, packet: Packet) -> Packet | None:
        """The packet itself, or the packet that it embeds if that is genuine by its author's keys."""
        if packet.content.get("original") is None:
            return packet
        if self._is_genuine is None:
            return binding.original_of(packet)
        original = binding.embedded_in(packet)
        try:
            return original if original is not None and await self._is_genuine(original) else None
        except (StrataError, OSError) as error:
            _log.info("the keys of an author cannot be had: %s", error)
            return None  # a participant that lacks the message requests it again

    # Reading stored messages.

    def history(self, topic: str, *, since_ms: int) -> AsyncGenerator[Sequence[NodeMessageReceived], None]:
        """The messages of the relays, newest first, in pages of up to 500. Raises as a subscription does."""
        return self._store.history(topic, since_ms=since_ms, authors=self._authors_of(topic))

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

        When reading newest first, `since_ms` and `until_ms` refer to authors' times. When reading oldest
        first, `since_ms` refers to the time at which relays received a packet, so that packets that were sent
        late, or by a slow clock, are read too.
        """
        heard = self._topics.get(topic)
        if heard is not None:
            await heard.begun.wait()  # the subscription covers what comes after the end of this reading
        pages = self._store.read(
            topic,
            order=order,
            since_ms=since_ms,
            until_ms=until_ms,
            after=after,
            authors=self._authors_of(topic),
        )
        async with aclosing(pages):
            async for page in pages:
                yield page

    @property
    def finds_by_hash(self) -> bool:
        """Whether `fetch` costs less than reading the store; a plain relay is read completely each time."""
        return self._store.finds_by_hash

    def fetch(self, topic: str, hashes: Sequence[bytes]) -> AsyncGenerator[NodeMessageReceived, None]:
        """The messages in these packets, found in a way that each relay supports (C-285)."""
        since = max(0, int(self.wall()) - 30 * 86_400)
        return self._store.fetch(topic, hashes, since=since)

    def _authors_of(self, topic: str) -> tuple[str, ...]:
        heard = self._topics.get(topic)
        return () if heard is None else heard.authors

    # Health.

    def _watch(self) -> None:
        if self._monitor is None:
            self._monitor = asyncio.create_task(self._monitor_health(), name="strata-node-health")

    async def _monitor_health(self) -> None:
        # Relays reconnect by themselves; this task only observes them.
        while self._monitor is asyncio.current_task():
            pause = _HEALTH_INTERVAL
            try:
                await self._look_at_health()
            except Exception:  # a bug of ours must not end this task unnoticed
                _log.exception("the health of the node could not be told")
                pause = _FAULT_PAUSE
            await asyncio.sleep(pause)

    async def _look_at_health(self) -> None:
        self._look_at_clock()
        status = self.connection_status
        if status is not self._status:
            self._status = status
            await self.health_events.emit(ConnectionStatusChange(status))
        await self._tell_health()

    def _look_at_clock(self) -> None:
        """Subscribe again after the clock was set back; else the topics would wait for future packets."""
        ahead = self.wall() - asyncio.get_running_loop().time()
        if ahead < self._clock_ahead - OVERLAP_SECONDS:
            for heard in self._topics.values():
                if heard.by_time:
                    heard.begin_again()
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
        """The current health of a topic's subscription."""
        if topic not in self._topics:
            return TopicHealth.NOT_SUBSCRIBED
        connected, wanted = self._relays.seats
        if not connected or self._topics[topic].failures:
            return TopicHealth.UNHEALTHY
        return TopicHealth.MINIMALLY_HEALTHY if connected < wanted else TopicHealth.SUFFICIENTLY_HEALTHY


async def _all_told(tasks: Collection[asyncio.Task[None]]) -> None:
    """Wait for tasks that call handlers. Cancelling does not cancel them: one may have requested it."""
    if tasks:
        await asyncio.wait(tasks)


def _failure(request_id: str, message_hash: bytes | None, error: Exception) -> NodeMessageError:
    """Return the event for a message that failed with this error of a relay (C-292)."""
    code, recoverable, retry_after_ms = type(error).__name__, True, None
    if isinstance(error, RequestRefused):
        code, recoverable = error.code, error.retry not in _FINAL
        if error.code == ErrorCode.RATE_LIMITED or error.retry is Retry.LATER:
            retry_after_ms = 1000 * (error.retry_after or 1)
        elif error.code in _WRONG_TIME:
            recoverable, retry_after_ms = True, _WRONG_TIME_WAIT_MS
    elif isinstance(error, InvalidPacket | MissingCapability | NodeError):
        recoverable = False
    return NodeMessageError(request_id, message_hash, str(error), code, recoverable, retry_after_ms)
