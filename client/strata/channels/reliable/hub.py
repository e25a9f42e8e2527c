"""What the channels of one node share: its identity's rate limit, and the one that sends (C-234).

One task takes transmissions from the rate limiter, in the order and at the pace it allows, and hands them to
the node. A channel that is not ready, its hook being at work or its store not having confirmed what is to go
out, holds back nobody else (C-082). What is on its way at once is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from strata.channels.messaging.node import MessagingNode, NodeError
from strata.channels.messaging.values import (
    ConnectionStatus,
    ConnectionStatusChange,
    MessageEnvelope,
    NodeMessageError,
    NodeMessageReceived,
    NodeMessageSent,
)
from strata.channels.persistence.interface import ParticipantKey, Persistence, PersistenceError
from strata.channels.persistence.records import EpochCount, read_records
from strata.channels.persistence.writer import ChangeWriter
from strata.channels.rate_limit.limiter import RateLimiter
from strata.channels.rate_limit.values import RateLimitConfig, Transmission
from strata.channels.reliable.engine import Ephemeral
from strata.channels.reliable.errors import InvalidConfiguration
from strata.protocol.errors import StrataError

__all__ = ["Dispatch", "Hub", "Lane"]

_log = logging.getLogger("strata.reliable")

_MAX_UNDER_WAY = 64
_MAX_UNDER_WAY_BYTES = 4 << 20
_ANSWER_TIMEOUT = 120.0
_BACKOFF_BASE_MS, _BACKOFF_CAP_MS = 250, 10_000


@dataclass(frozen=True, slots=True)
class Dispatch:
    """What a channel wants sent, and as what."""

    request_id: str
    envelope: MessageEnvelope
    stored_as: bytes | None = None
    """Send again what is stored under this hash instead, as its author signed it (C-294)."""


class Lane(Protocol):
    """What a hub needs of a channel."""

    @property
    def lane(self) -> str: ...

    @property
    def content_topic(self) -> str: ...

    @property
    def channel(self) -> Any:
        """The channel as programs see it."""
        ...

    def is_ready(self) -> bool:
        """Whether what its queue has next can go out at once."""
        ...

    def dispatch(self, transmission: Transmission) -> Dispatch | None:
        """What to send for a transmission; None if it need not go out any more."""
        ...

    def accepted(self, sent: Transmission | Ephemeral, message_hash: bytes) -> None: ...

    def not_accepted(self, sent: Transmission | Ephemeral, error: NodeMessageError) -> None: ...

    @property
    def is_full(self) -> bool: ...

    def pass_over(self) -> None: ...

    async def receive(self, event: NodeMessageReceived) -> object: ...

    def status_changed(self, online: bool) -> None: ...


class _UnderWay:
    __slots__ = ("lane", "sent", "size_bytes", "timer")

    def __init__(
        self, lane: Lane, sent: Transmission | Ephemeral, size_bytes: int, timer: asyncio.TimerHandle
    ) -> None:
        self.lane = lane
        self.sent = sent
        self.size_bytes = size_bytes
        self.timer = timer


class Hub:
    """The channels of one node. There is one as long as there are channels: `Hub.enter`."""

    _hubs: ClassVar[dict[int, Hub]] = {}

    def __init__(self, node: MessagingNode) -> None:
        self.node = node
        self.lanes: dict[str, Lane] = {}
        self.limiter: RateLimiter | None = None
        self.rate_limit: RateLimitConfig | None = None
        self._loop = asyncio.get_running_loop()
        self._preparing = asyncio.Lock()
        self._started_at = node.wall() - self._loop.time()
        self._topics: Counter[str] = Counter()
        self._under_way: dict[str, _UnderWay] = {}
        self._bytes_under_way = 0
        self._failures = 0
        self._woken = asyncio.Event()
        self._settled = asyncio.Event()
        self._guests = 0
        self._sender: asyncio.Task[None] | None = None
        self._counts: ChangeWriter | None = None

    @classmethod
    def enter(cls, node: MessagingNode) -> Hub:
        """The hub of a node, made if there is none, for a channel that is being opened; then `leave` it."""
        hub = cls._hubs.get(id(node))
        if hub is None:
            hub = cls._hubs[id(node)] = cls(node)
        hub._guests += 1
        return hub

    @classmethod
    def existing(cls, node: MessagingNode) -> Hub | None:
        """The hub of a node, if any channel is open on it."""
        return cls._hubs.get(id(node))

    @classmethod
    def abandon(cls, node: MessagingNode) -> None:
        """Forget the hub of a node whose process was killed: for simulators."""
        cls._hubs.pop(id(node), None)

    # Clock and status.

    def now_ms(self) -> int:
        """Wall time at the start plus what has passed since: it never steps."""
        return int((self._started_at + self._loop.time()) * 1000)

    @property
    def online(self) -> bool:
        """Whether the node reaches any relay."""
        return self.node.connection_status is not ConnectionStatus.DISCONNECTED

    # Channels come and go.

    async def prepare(self, config: RateLimitConfig, persistence: Persistence) -> RateLimiter:
        """The rate limiter of this node's identity; what it had sent in this epoch is read from the store.

        Raises `InvalidConfiguration` if another configuration is in force, and `PersistenceError`.
        """
        async with self._preparing:
            if self.limiter is None:
                key = ParticipantKey("", self.node.transport_identity)
                stored = await persistence.load(key)
                counted = read_records(EpochCount, stored.records.get(EpochCount.KIND, {})).get("current")
                self.limiter = RateLimiter(config, counted=counted)
                self.rate_limit = config
                self._counts = ChangeWriter(persistence, key)
                if (limit := self.node.declared_limit()) is not None:
                    self.limiter.learn_limit(*limit)  # C-221
                self._listen(True)
        if config != self.rate_limit:
            raise InvalidConfiguration(
                "the channels of one node share one rate limit, and another one is in force"
            )
        return self.limiter

    def join(self, lane: Lane) -> None:
        """A channel has been opened."""
        self.lanes[lane.lane] = lane
        if self._sender is None:
            self._sender = self._loop.create_task(self._send(), name="strata-channel-sender")

    async def leave(self, lane: Lane | None = None) -> None:
        """A channel is closed, or could not be opened; with the last one everything here ends."""
        self._guests -= 1
        if lane is not None:
            self.lanes.pop(lane.lane, None)
            if self.limiter is not None:
                self.limiter.close_lane(lane.lane)
        if not self._guests:
            await self._end_all()

    async def _end_all(self) -> None:
        self._hubs.pop(id(self.node), None)
        if self.limiter is not None:
            self._listen(False)
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait([self._sender])
        for name in list(self._under_way):
            self._end(name)
        if self._counts is not None:
            try:
                await self._counts.close()
            except PersistenceError as error:
                _log.error("what was sent in this epoch could not be stored: %s", error)

    async def subscribe(self, topic: str, authors: tuple[str, ...]) -> None:
        """Hear a topic as long as any channel is started on it. Raises `StrataError`."""
        self._topics[topic] += 1
        try:
            if self._topics[topic] == 1:
                await self.node.subscribe([topic], authors=authors)
            else:
                _log.warning("two channels share the topic %s: each receives the other's messages", topic)
        except BaseException:
            self._drop_topic(topic)
            raise

    async def unsubscribe(self, topic: str) -> None:
        """A channel does not need the topic any more."""
        if self._drop_topic(topic):
            try:
                await self.node.unsubscribe([topic])
            except NodeError:
                pass  # the node had let go of it

    def _drop_topic(self, topic: str) -> bool:
        self._topics[topic] -= 1
        if self._topics[topic] > 0:
            return False
        del self._topics[topic]
        return True

    def _listen(self, on: bool) -> None:
        messages, health = self.node.message_events, self.node.health_events
        change = (messages.on, health.on) if on else (messages.off, health.off)
        change[0](NodeMessageReceived.name, self._on_received)
        change[0](NodeMessageSent.name, self._on_sent)
        change[0](NodeMessageError.name, self._on_error)
        change[1](ConnectionStatusChange.name, self._on_status)

    # Sending.

    def wake(self) -> None:
        """Something may have become possible."""
        self._woken.set()

    async def send_now(self, lane: Lane, ephemeral: Ephemeral, envelope: MessageEnvelope) -> None:
        """Send an ephemeral message past the queue. Raises what the node does."""
        self._begin(lane, ephemeral, ephemeral.request_id, len(envelope.payload))
        try:
            await self.node.send(envelope, request_id=ephemeral.request_id)
        except BaseException:
            self._end(ephemeral.request_id)
            raise

    async def settled(self, lane: Lane, timeout: float) -> list[Transmission | Ephemeral]:
        """Wait until nothing of a channel is under way; what still is after `timeout` seconds is given up."""
        try:
            async with asyncio.timeout(timeout):
                while any(each.lane is lane for each in self._under_way.values()):
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            pass
        left = [name for name, each in self._under_way.items() if each.lane is lane]
        return [under_way.sent for name in left if (under_way := self._end(name)) is not None]

    async def _send(self) -> None:
        assert self.limiter is not None
        while True:
            self._woken.clear()
            while (transmission := self._next()) is not None:
                await self._dispatch(transmission)
            due = self.limiter.get_timer()
            wait = None if due is None else (due - self.now_ms()) / 1000
            try:
                # What is due and could not go waits for a channel, an answer or the relays, which wake us.
                async with asyncio.timeout(wait if wait is None or wait > 0 else None):
                    await self._woken.wait()
            except TimeoutError:
                pass

    def _next(self) -> Transmission | None:
        full = len(self._under_way) >= _MAX_UNDER_WAY or self._bytes_under_way >= _MAX_UNDER_WAY_BYTES
        if full or not self.online or self.limiter is None:
            return None
        ready = {name for name, lane in self.lanes.items() if lane.is_ready()}
        return self.limiter.take(self.now_ms(), ready=ready) if ready else None

    async def _dispatch(self, transmission: Transmission) -> None:
        lane = self.lanes[transmission.lane]
        dispatch = lane.dispatch(transmission)
        self._store_counts()
        if dispatch is None:
            return
        name = dispatch.request_id
        self._begin(lane, transmission, name, len(dispatch.envelope.payload))
        try:
            if dispatch.stored_as is None:
                await self.node.send(dispatch.envelope, request_id=name)
            else:
                await self.node.send_again(
                    dispatch.stored_as,
                    topic=dispatch.envelope.content_topic,
                    request_id=name,
                    retention_seconds=dispatch.envelope.retention_seconds,
                )
        except StrataError as error:
            final = isinstance(error, NodeError)
            self._fail(name, NodeMessageError(name, None, str(error), type(error).__name__, not final))
        except Exception as error:
            _log.exception("the node raised")
            self._fail(name, NodeMessageError(name, None, str(error), type(error).__name__))

    def _begin(self, lane: Lane, sent: Transmission | Ephemeral, name: str, size_bytes: int) -> None:
        late = NodeMessageError(name, None, "the node has not answered", "timeout")
        timer = self._loop.call_later(_ANSWER_TIMEOUT, self._fail, name, late)
        self._under_way[name] = _UnderWay(lane, sent, size_bytes, timer)
        self._bytes_under_way += size_bytes

    def _end(self, name: str) -> _UnderWay | None:
        under_way = self._under_way.pop(name, None)
        if under_way is not None:
            under_way.timer.cancel()
            self._bytes_under_way -= under_way.size_bytes
            self._settled.set()
            self._woken.set()
        return under_way

    def _store_counts(self) -> None:
        limit = self.rate_limit
        if self._counts is None or self.limiter is None or limit is None:
            return
        if limit.messages_per_epoch is None and limit.segments_per_epoch is None:
            return
        try:
            self._counts.submit(self.limiter.counts_to_store())
        except PersistenceError as error:
            _log.error("what was sent in this epoch could not be stored: %s", error)

    # What the node tells.

    def _on_sent(self, event: NodeMessageSent) -> None:
        under_way = self._end(event.request_id)
        if under_way is not None:
            self._failures = 0
            under_way.lane.accepted(under_way.sent, event.message_hash)

    def _on_error(self, event: NodeMessageError) -> None:
        self._fail(event.request_id, event)

    def _fail(self, name: str, error: NodeMessageError) -> None:
        under_way = self._end(name)
        if under_way is None:
            return
        if error.recoverable and self.limiter is not None:
            wait = error.retry_after_ms
            if wait is None:
                wait = min(_BACKOFF_CAP_MS, _BACKOFF_BASE_MS << min(self._failures, 6))
                self._failures += 1
            self.limiter.pause(self.now_ms(), wait)  # C-232
        under_way.lane.not_accepted(under_way.sent, error)

    async def _on_received(self, event: NodeMessageReceived) -> None:
        lanes = [lane for lane in self.lanes.values() if lane.content_topic == event.message.content_topic]
        for lane in lanes:
            # One that has no room makes the node wait, and no other channel (C-082).
            if len(lanes) > 1 and lane.is_full:
                lane.pass_over()
            else:
                await lane.receive(event)

    def _on_status(self, event: ConnectionStatusChange) -> None:
        online = event.status is not ConnectionStatus.DISCONNECTED
        for lane in list(self.lanes.values()):
            lane.status_changed(online)
        self.wake()
