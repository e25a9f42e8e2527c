"""Shared parts of all channels of one node: the rate limit of its identity, and the sending task (C-234).

Only the hub takes transmissions from the rate limiter, in the order and at the pace that the limiter allows.
It hands each to the node and returns the outcome to the channel. A channel is not ready while its hook is
running or its store has not confirmed the next transmission; it holds back no other channel (C-082). The
number of messages under way is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from strata.channels.awaiting import Alarm, end_of
from strata.channels.messaging.node import MessagingNode, NodeError
from strata.channels.messaging.outcomes import Outcome
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
from strata.channels.persistence.writer import ChangeWriter, last_words
from strata.channels.rate_limit.limiter import RateLimiter
from strata.channels.rate_limit.values import EphemeralDropReason, RateLimitConfig, Transmission
from strata.channels.reliable.clock import ChannelClock
from strata.channels.reliable.ephemerals import Ephemeral
from strata.channels.reliable.errors import ChannelFailed, InvalidConfiguration
from strata.channels.reliable.membership import HubMember
from strata.channels.reliable.outbox import Outbox
from strata.channels.reliable.under_way import Consignment, UnderWay
from strata.protocol.errors import StrataError

__all__ = ["Hub"]

_log = logging.getLogger("strata.reliable")

_BACKOFF_BASE_MS, _BACKOFF_CAP_MS = 250, 10_000
_AWAY_SECONDS = 1.0
"""How often a sender that reaches no relay checks for one without being woken."""
_LOOK_SECONDS = 5.0
"""How often the wall clock is checked: no timer fires when a laptop wakes up."""

_open: WeakValueDictionary[tuple[int, int, str], HubMember] = WeakValueDictionary()
"""The open channels of all nodes, by the `id()` of the event loop and of the store, and by the lane: two
channels of one participant on one store would overwrite each other's state."""


@dataclass(slots=True)
class _Topic:
    """A topic that channels are started on, or are about to be."""

    authors: frozenset[str]
    """The authors that all of them listen to; an empty set means all authors."""
    channels: int = 0
    subscribed: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while one channel subscribes, so that the next ones know whether it succeeded."""


class Hub:
    """The channels of one node. The node holds the hub as long as it has channels: `Hub.enter`."""

    def __init__(self, node: MessagingNode) -> None:
        self.node = node
        self.members: dict[str, HubMember] = {}
        """The open channels, by the lane of their outbox."""
        self._limiter: RateLimiter | None = None
        self._loop = asyncio.get_running_loop()
        self._preparing = asyncio.Lock()
        self._clock = ChannelClock(node.wall, self._loop.time)
        self._clock_watch: asyncio.TimerHandle | None = None
        self._topics: dict[str, _Topic] = {}
        self._under_way = UnderWay(node, on_outcome=self._conclude, on_ended=self.wake)
        self._failures = 0
        self._woken = Alarm()
        self._guests = 0
        self._sender: asyncio.Task[None] | None = None
        self._counts: ChangeWriter | None = None
        self._ended = asyncio.Event()
        self._earlier: Hub | None = None
        """The hub that the node had before, which may still be storing what was sent in this epoch."""
        self.failure: BaseException | None = None
        """The error that ended the sender, and thereby this hub's work."""

    @classmethod
    def enter(cls, node: MessagingNode) -> Hub:
        """Return a node's hub for a channel that is being opened, making one if needed; `leave` it later."""
        hub = cls.existing(node)
        if hub is None:
            hub = cls(node)
            hub._earlier = cls._of(node)
            node.hub = hub
        hub._guests += 1
        return hub

    @classmethod
    def existing(cls, node: MessagingNode) -> Hub | None:
        """The hub of a node, if any channel is open on it."""
        hub = cls._of(node)
        return hub if hub is not None and hub._guests and hub.failure is None else None

    @classmethod
    def _of(cls, node: MessagingNode) -> Hub | None:
        """The hub of a node, which may be about to end."""
        hub = getattr(node, "hub", None)  # nodes of other authors may be older than the attribute
        # A node that wraps another may pass on the attribute of the inner one.
        return hub if isinstance(hub, Hub) and hub.node is node else None

    # Clock and status.

    def now_ms(self) -> int:
        """The time of the channels; it jumps only when `clock_stepped` reports it."""
        return self._clock.now_ms()

    def _look_at_clock(self) -> None:
        """Follow the wall clock, now and at regular intervals."""
        if self._clock_watch is not None:
            self._clock_watch.cancel()
        self._clock_watch = self._loop.call_later(_LOOK_SECONDS, self._look_at_clock)
        by_ms = self._clock.look()
        if by_ms:
            _log.info("the clock was set by %+.1f s, or the machine slept", by_ms / 1000)
            for member in list(self.members.values()):
                try:
                    member.clock_stepped(by_ms)
                except Exception as error:
                    member.fail("following the clock", error)
            self.wake()

    @property
    def online(self) -> bool:
        """Whether the node reaches any relay."""
        return self.node.connection_status is not ConnectionStatus.DISCONNECTED

    # Opening and closing channels.

    def is_open(self, key: ParticipantKey, store: Persistence) -> bool:
        """Whether a participant has its channel open on this node, or with this store on any node."""
        lane = _lane(key)
        return lane in self.members or (id(self._loop), id(store), lane) in _open

    async def open_outbox(
        self, key: ParticipantKey, config: RateLimitConfig, persistence: Persistence
    ) -> Outbox:
        """Return an outbox for a channel, in the rate limiter of this node's identity.

        The first outbox makes the limiter, with the count of this epoch that the store has.
        Raises `InvalidConfiguration` if another configuration is in force, and `PersistenceError`.
        """
        async with self._preparing:
            limiter = self._limiter
            if limiter is None:
                limiter = await self._make_limiter(config, persistence)
        if config != limiter.config:
            raise InvalidConfiguration(
                "the channels of one node share one rate limit, and another one is in force"
            )
        return Outbox(limiter, _lane(key))

    async def _make_limiter(self, config: RateLimitConfig, persistence: Persistence) -> RateLimiter:
        if self._earlier is not None:
            await self._earlier._ended.wait()
            self._earlier = None
        key = ParticipantKey("", self.node.transport_identity)
        await last_words(persistence, key)
        stored = await persistence.load(key)
        counted = read_records(EpochCount, stored.records.get(EpochCount.KIND, {})).get("current")
        limiter = self._limiter = RateLimiter(config, counted=counted)
        self._counts = ChangeWriter(persistence, key, on_fault=self._fail)
        if (limit := self.node.declared_limit()) is not None:
            limiter.learn_limit(*limit)  # C-221
        self.node.message_events.on(NodeMessageReceived.name, self._on_received)
        self.node.health_events.on(ConnectionStatusChange.name, self._on_status)
        self._sender = self._loop.create_task(self._send(limiter), name="strata-channel-sender")
        self._look_at_clock()
        self._sender.add_done_callback(self._sender_ended)
        return limiter

    def _sender_ended(self, task: asyncio.Task[None]) -> None:
        if self._guests:  # else the hub ended it
            self._fail(end_of(task))

    def _fail(self, error: BaseException | None) -> None:
        """Close all channels, because nothing more can be sent for any of them."""
        self.failure = error or RuntimeError("it has ended")
        if self.node.hub is self:
            self.node.hub = None
        for member in list(self.members.values()):
            member.fail("the sender of the node", self.failure)

    def join(self, member: HubMember) -> None:
        """Add a channel that has been opened. Raises `ChannelFailed` if nothing can be sent any more."""
        if self.failure is not None:
            raise ChannelFailed("the sender of the node", self.failure)
        self.members[member.outbox.lane] = member
        _open[self._place(member)] = member

    def _place(self, member: HubMember) -> tuple[int, int, str]:
        return id(self._loop), id(member.store), member.outbox.lane

    async def leave(self, member: HubMember | None = None) -> None:
        """Remove a channel that is closed or could not be opened; the last one ends the hub."""
        self._guests -= 1
        if member is not None:
            self.members.pop(member.outbox.lane, None)
            _open.pop(self._place(member), None)
            if self._limiter is not None:
                self._limiter.close_lane(member.outbox.lane)
        if not self._guests:
            await self._end_all()

    async def _end_all(self) -> None:
        self.node.message_events.off(NodeMessageReceived.name, self._on_received)
        self.node.health_events.off(ConnectionStatusChange.name, self._on_status)
        self._under_way.stop_listening()
        if self._clock_watch is not None:
            self._clock_watch.cancel()
        try:
            if self._sender is not None:
                self._sender.cancel()
                await asyncio.wait([self._sender])
        finally:
            self._under_way.give_up()
            try:
                if self._counts is not None:
                    await self._counts.close()
            except PersistenceError as error:
                _log.error("what was sent in this epoch could not be stored: %s", error)
            finally:
                self._ended.set()
                if self.node.hub is self:
                    earlier = self._earlier
                    self.node.hub = None if earlier is None or earlier._ended.is_set() else earlier

    async def subscribe(self, topic: str, authors: tuple[str, ...], *, reads: bool) -> None:
        """Listen on a topic as long as any channel is started on it; `reads`: stored messages are read.

        Raises `StrataError`, and `InvalidConfiguration` if channels on it listen to other authors: a node has
        one subscription for each topic, and one channel would miss messages or get those of strangers.
        """
        live = getattr(self.node, "subscribe_live", None)  # nodes of other authors may lack the method
        heard = self._topics.setdefault(topic, _Topic(frozenset(authors)))
        if heard.authors != frozenset(authors):
            raise InvalidConfiguration(
                f"the channels of one node share what it hears on {topic}, and one has other members"
            )
        heard.channels += 1
        try:
            async with heard.turn:
                if not heard.subscribed:
                    await (live if reads and live else self.node.subscribe)([topic], authors=authors)
                    heard.subscribed = True
                else:
                    _log.warning("two channels share the topic %s: each receives the other's messages", topic)
        except BaseException:
            self._drop_topic(topic)
            raise

    async def unsubscribe(self, topic: str) -> None:
        """A channel no longer needs the topic."""
        if self._drop_topic(topic):
            try:
                await self.node.unsubscribe([topic])
            except NodeError:
                pass  # the node had already dropped it

    def _drop_topic(self, topic: str) -> bool:
        heard = self._topics[topic]
        heard.channels -= 1
        if heard.channels:
            return False
        del self._topics[topic]
        return True

    # Sending.

    def wake(self) -> None:
        """Make the sender check again, because a transmission may have become possible."""
        self._woken.set()

    def admit_ephemeral(self) -> EphemeralDropReason | None:
        """Charge an ephemeral message outside all channels, or return why it must be dropped (C-181)."""
        if self._limiter is None:
            return None
        reason = self._limiter.admit_ephemeral(self.now_ms())
        self._store_counts()
        return reason

    async def send_now(self, member: HubMember, ephemeral: Ephemeral, envelope: MessageEnvelope) -> None:
        """Send an ephemeral message past the queue. Raises as the node does."""
        self._store_counts()  # the channel has charged it
        name = self._under_way.free_name(ephemeral.request_id)
        sending = self.node.send(envelope, request_id=name)
        consignment = Consignment(member, ephemeral, len(envelope.payload))
        try:
            await self._under_way.hand_to_node(consignment, name, sending)
        except BaseException:
            self._under_way.end(consignment)
            raise

    async def settled(self, member: HubMember, timeout: float) -> list[Transmission | Ephemeral]:
        """Wait until a channel has nothing under way. Returns messages given up after `timeout` seconds."""
        return await self._under_way.settled(member, timeout)

    async def _send(self, limiter: RateLimiter) -> None:
        while True:
            self._woken.clear()
            while (transmission := self._next(limiter)) is not None:
                await self._dispatch(transmission)
            # A due transmission that could not go waits for a channel, an answer or a relay to wake us; the
            # others wait for their time.
            now = self.now_ms()
            due, later = limiter.get_timer(), limiter.get_timer(after=now)
            wait = None if later is None else (later - now) / 1000
            if due is not None and due <= now and not self.online:
                # Nothing reports a relay that was away for a moment between two checks.
                wait = _AWAY_SECONDS
            await self._woken.wait(wait)

    def _next(self, limiter: RateLimiter) -> Transmission | None:
        if self._under_way.is_full or not self.online:
            return None
        ready = {lane for lane, member in list(self.members.items()) if _is_ready(member)}
        return limiter.take(self.now_ms(), ready=ready) if ready else None

    async def _dispatch(self, transmission: Transmission) -> None:
        member = self.members[transmission.lane]
        dispatch = None
        try:
            dispatch = member.dispatch(transmission)
        except Exception as error:  # an error in one channel must not affect the others
            member.fail("sending", error)
        self._store_counts()
        if dispatch is None:
            return
        name, envelope = self._under_way.free_name(dispatch.request_id), dispatch.envelope
        if dispatch.original is None:
            sending: Awaitable[object] = self.node.send(envelope, request_id=name)
        else:
            sending = self.node.send_again(
                dispatch.original,
                topic=envelope.content_topic,
                request_id=name,
                retention_seconds=envelope.retention_seconds,
            )
        consignment = Consignment(member, transmission, len(envelope.payload))
        try:
            await self._under_way.hand_to_node(consignment, name, sending)
        except Exception as error:
            if not isinstance(error, StrataError):
                _log.exception("the node raised")
            final = isinstance(error, NodeError)
            failed = NodeMessageError(name, None, str(error), type(error).__name__, not final)
            self._conclude(consignment, failed)
            await asyncio.sleep(0)  # a node that refuses one message after another holds up no other task

    def _conclude(self, consignment: Consignment, outcome: Outcome) -> None:
        """Report to a channel what became of its message, unless the message was given up."""
        if not self._under_way.end(consignment):
            return
        if isinstance(outcome, NodeMessageSent):
            self._failures = 0
            try:
                consignment.member.accepted(consignment.sent, outcome.message_hash)
            except Exception as error:
                consignment.member.fail("noting what was sent", error)
            return
        if outcome.recoverable and self._limiter is not None:
            wait = outcome.retry_after_ms
            if wait is None:
                wait = min(_BACKOFF_CAP_MS, _BACKOFF_BASE_MS << min(self._failures, 6))
                self._failures += 1
            self._limiter.pause(self.now_ms(), wait)  # C-232
        try:
            consignment.member.not_accepted(consignment.sent, outcome)
        except Exception as error:
            consignment.member.fail("noting what was not sent", error)

    def _store_counts(self) -> None:
        limiter = self._limiter
        if self._counts is None or limiter is None:
            return
        if limiter.config.messages_per_epoch is None and limiter.config.segments_per_epoch is None:
            return
        try:
            self._counts.submit(limiter.counts_to_store())
        except PersistenceError as error:
            _log.error("what was sent in this epoch could not be stored: %s", error)

    # Events of the node.

    async def _on_received(self, event: NodeMessageReceived) -> None:
        topic = event.message.content_topic
        members = [member for member in self.members.values() if member.content_topic == topic]
        for member in members:
            # A channel without room makes the node wait, but no other channel (C-082).
            try:
                if len(members) > 1 and member.is_full:
                    member.pass_over()
                else:
                    await member.receive(event)
            except Exception as error:
                member.fail("receiving", error)

    def _on_status(self, event: ConnectionStatusChange) -> None:
        self._look_at_clock()  # a connection that is lost or restored often means that the machine slept
        online = event.status is not ConnectionStatus.DISCONNECTED
        for member in list(self.members.values()):
            try:
                member.status_changed(online)
            except Exception as error:
                member.fail("noting the connection", error)
        self.wake()


def _is_ready(member: HubMember) -> bool:
    """Whether a channel is ready; False if it raises."""
    try:
        return member.is_ready()
    except Exception as error:
        member.fail("preparing what is sent next", error)
        return False


def _lane(key: ParticipantKey) -> str:
    return str(tuple(key))
