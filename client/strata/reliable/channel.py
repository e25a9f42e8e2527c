"""A reliable channel as a program sees it: every message to every participant, once, in causal order.

An asyncio shell: `engine` decides, `hub` sends, `asking` reads the store, `handing_over` tells the program.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from types import TracebackType
from typing import Self

from strata.encryption import DecryptionFailed, EncryptionFailed, EncryptionHook
from strata.errors import StrataError
from strata.messaging.emitter import EventEmitter
from strata.messaging.node import MessagingNode, check_content_topic
from strata.messaging.values import MessageEnvelope, NodeMessageError, NodeMessageReceived
from strata.persistence.interface import Change, ParticipantKey, Persistence, PersistenceError
from strata.persistence.memory import MemoryPersistence
from strata.persistence.records import SenderName, put, read_records
from strata.persistence.state import ChannelState
from strata.persistence.writer import ChangeWriter, WriterHealth
from strata.rate_limit.limiter import RateLimiter
from strata.rate_limit.proof import ProofFailed, obtain_proof
from strata.rate_limit.values import Priority, Transmission
from strata.reliable.asking import Asking
from strata.reliable.codec import Codec, Decoder, Encoder
from strata.reliable.config import ReliableChannelConfig
from strata.reliable.engine import ChannelEngine, Ephemeral
from strata.reliable.errors import AlreadyOpen, ChannelNotOpen, NotStarted, SegmentDoesNotFit
from strata.reliable.events import (
    CHANNEL_EVENTS,
    ChunkInfo,
    MessageReceived,
    SendingMessageIrrecoverableError,
)
from strata.reliable.handing_over import Events, HandingOver
from strata.reliable.hub import Dispatch, Hub
from strata.reliable.sizes import largest_ephemeral, largest_segment
from strata.reliable.values import (
    AtRisk,
    ChannelHealth,
    ChannelStatistics,
    MissingMessage,
    OutstandingMessage,
    SyncStatus,
)
from strata.sds.ids import check_id
from strata.sds.messages import SdsMessage
from strata.segmentation.messages import message_hash

__all__ = ["ReliableChannel"]

_log = logging.getLogger("strata.reliable")

_SETTLE_TIMEOUT = 5.0
_MAX_PREPARED = 8
_MAX_UNSTORED = 20_000
"""Changes the store has not confirmed; with more the channel reads no further."""


class ReliableChannel:
    """One participant's part in a channel, made by `relay.channel` or `create_reliable_channel`.

        async with relay.channel("room", topic="/chat/1/room/proto") as room:
            await room.send(b"hello")
            async for message in room:
                print(message.sender_id, message.payload)

    It belongs to one event loop. What was sent and not acknowledged, and received and not taken, outlives
    `stop` and `close`, and the process with a durable store.
    """

    def __init__(
        self,
        node: MessagingNode,
        channel_id: str,
        content_topic: str | None,
        sender_id: str | None,
        config: ReliableChannelConfig,
        *,
        encoder: Encoder | None = None,
        decoder: Decoder | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`config` has its sections filled in. Raises `ValueError` and `TypeError` for what cannot work."""
        self._codec = Codec(encoder, decoder)
        self.message_events = EventEmitter(CHANNEL_EVENTS)
        """Handlers by event name (C-026)."""
        self.config = config
        self._node = node
        self._channel_id = check_id("channel_id", channel_id)
        self._content_topic = check_content_topic(self._codec.content_topic or content_topic or "")
        self._sender_id = None if sender_id is None else check_id("sender_id", sender_id)
        self._hook = None if config.encryption is None else EncryptionHook(config.encryption)
        self._store: Persistence = config.persistence or MemoryPersistence()
        self._rng = rng or random.SystemRandom()
        self._opened: _Opened | None = None
        self._closed = False

    # What it is.

    @property
    def channel_id(self) -> str:
        """What all participants call the channel (C-005)."""
        return self._channel_id

    @property
    def content_topic(self) -> str:
        """Where its messages travel."""
        return self._content_topic

    @property
    def sender_id(self) -> str:
        """This participant. Raises `ChannelNotOpen` while one that was left to be made is not known."""
        if self._sender_id is None:
            raise ChannelNotOpen
        return self._sender_id

    @staticmethod
    def get_message_id(payload: bytes) -> str:
        """The logical id that events will carry for this payload (C-018)."""
        return message_hash(payload).hex()

    getMessageId = get_message_id

    # Opening and closing.

    async def open(self) -> Self:
        """Load what is stored and, with `auto_start`, `start`. Cancelling leaves the channel closed.

        Raises `AlreadyOpen`, `SegmentDoesNotFit`, `PersistenceError`, `ValueError` for settings that
        contradict those of the node's other channels, and what `start` raises.
        """
        if self._closed or self._opened is not None:
            raise RuntimeError("a channel is opened once; make a new one")
        sender_id = self._sender_id = self._sender_id or await self._named()
        hub = Hub.enter(self._node)
        lane = f"{self._channel_id}\x1f{sender_id}"
        try:
            if lane in hub.lanes:
                raise AlreadyOpen(self._channel_id, sender_id)
            self._check_sizes(sender_id)
            assert self.config.rate_limit is not None
            limiter = await hub.prepare(self.config.rate_limit, self._store)
            key = ParticipantKey(self._channel_id, sender_id)
            state = ChannelState.read(await self._store.load(key))
            if lane in hub.lanes:
                raise AlreadyOpen(self._channel_id, sender_id)
            self._opened = _Opened(self, hub, limiter, lane, key, state)
        except BaseException:
            await hub.leave()
            raise
        if self.config.auto_start:
            try:
                await self.start()
            except BaseException:
                await self.close()
                raise
        return self

    async def _named(self) -> str:
        """A sender id of this channel's own, the same one after a restart with a durable store (C-006)."""
        if self.config.sender_binding == "did":
            return self._node.transport_identity
        key = ParticipantKey(self._channel_id, "")
        stored = (await self._store.load(key)).records.get(SenderName.KIND, {})
        known = read_records(SenderName, stored).get("current")
        if known is not None:
            return known.sender_id
        made = SenderName(f"{self._rng.getrandbits(128):032x}")
        await self._store.apply(key, [put(made)])
        return made.sender_id

    def _check_sizes(self, sender_id: str) -> None:
        config = self.config
        assert config.sds is not None and config.segmentation is not None
        largest = largest_segment(
            self._largest_payload(), self._channel_id, sender_id, config.sds, hook_overhead=self._overhead
        )
        size = config.segmentation.segment_size_bytes
        if largest is not None and size > largest:
            raise SegmentDoesNotFit(size, largest)

    def _largest_payload(self) -> int | None:
        repairable = self.config.sender_binding == "did"
        return self._node.largest_payload(self._content_topic, repairable=repairable)

    @property
    def _overhead(self) -> int:
        return self._codec.overhead + (0 if self._hook is None else self._hook.overhead)

    async def close(self, *, purge: bool = False) -> None:
        """Stop, and let go of everything in memory (C-019, C-020). What is stored stays for the next opening,
        unless `purge`; events that are told already are told first.

        Takes about five seconds at most, for what is under way. Raises `ChannelNotOpen` if it is not open,
        and `PersistenceError` if the store could not take the last changes.
        """
        opened, self._opened = self._opened, None
        if opened is None:
            raise ChannelNotOpen
        self._closed = True
        await opened.close()
        if purge:
            await self._store.purge(ParticipantKey(self._channel_id, self.sender_id))

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._opened is not None:
            await self.close()

    async def start(self) -> bool:
        """Subscribe, and begin to send, receive, sync and retrieve; True, also if it had begun (C-021).

        Raises `ChannelNotOpen`, and `StrataError` if the topic cannot be subscribed: then it stays stopped.
        """
        await self._open_one().start()
        return True

    async def stop(self) -> None:
        """End all that, once nothing is under way; idempotent. `start` goes on where it stood (C-023)."""
        await self._open_one().stop()

    def is_started(self) -> bool:
        """Whether the channel works."""
        return self._opened is not None and self._opened.started

    # Sending.

    async def send(self, payload: bytes) -> str:
        """Give a message to the channel; returns its request id once it is stored (C-012).

        What becomes of it is told by events. It is sent as often as it takes, also after a restart with a
        durable store. Cancelling stops the wait and not the message.

        Raises, having sent nothing, `EmptyPayload`, `PayloadTooLarge`, `OutgoingFull` or `SendQueueFull` with
        too much on its way already, `PersistenceError` while the store is out of order, `NotStarted`,
        `ChannelNotOpen`. The event `sending-message-irrecoverable-error` tells of the refusal too.
        """
        request_id = self._request_id()
        try:
            opened = self._open_one(started=True)
            opened.check_store()
            opened.engine.send(payload, request_id, opened.now_ms())
        except StrataError as error:
            await self._tell_refusal(payload, request_id, error)
            raise
        opened.flush()
        await opened.writer.written()
        return request_id

    async def send_ephemeral(self, payload: bytes) -> str:
        """Send a message once, to whoever listens now: no history, no acknowledgement, no retry (C-017).

        Returns its request id; `message-sent` tells that the transport has it, `ephemeral-message-dropped`
        that the rate limit did not allow it. Raises `EmptyPayload`, `MessageTooLarge`, `EncryptionFailed`,
        `NotStarted`, `ChannelNotOpen`. Cancelling may send it or not.
        """
        request_id = self._request_id()
        try:
            opened = self._open_one(started=True)
            most = largest_ephemeral(
                *(self._largest_payload(), self._channel_id, self.sender_id), hook_overhead=self._overhead
            )
            ephemeral = opened.engine.send_ephemeral(payload, request_id, opened.now_ms(), most)
            if ephemeral is not None:
                await opened.send_ephemeral(ephemeral)
        except StrataError as error:
            await self._tell_refusal(payload, request_id, error)
            raise
        opened.flush()
        return request_id

    def _request_id(self) -> str:
        return f"{self._rng.getrandbits(128):032x}"

    async def _tell_refusal(self, payload: bytes, request_id: str, error: StrataError) -> None:
        await self.message_events.emit(
            SendingMessageIrrecoverableError(
                request_id=request_id,
                message_id=self.get_message_id(payload),
                chunk_info=ChunkInfo(),
                error=str(error),
                code=type(error).__name__,
            )
        )

    # Receiving.

    def __aiter__(self) -> AsyncIterator[MessageReceived]:
        return self

    async def __anext__(self) -> MessageReceived:
        """The next message of another participant, in causal order, once. Cancelling loses nothing.

        Ends when the channel is closed. Raises `PersistenceError` if its store failed for good, and
        `RuntimeError` if another task is receiving already.
        """
        opened = self._opened
        if opened is None:
            raise StopAsyncIteration
        return await opened.handing.next()

    def events(self, *names: str) -> Events:
        """The events of these names, or all of them, as an asynchronous iterator (C-027).

        Received messages are taken by iterating the channel; while nobody does, by the handlers of the two
        received events, and by an iterator that names one of them. One of all events only looks on.

        Raises `ChannelNotOpen`, and `ValueError` for a name there is not.
        """
        return self._open_one().handing.events(names)

    # Looking.

    def sync_status(self) -> SyncStatus:
        """What is outstanding, what is missing, since when. Raises `ChannelNotOpen`."""
        return self._open_one().sync_status()

    @property
    def health(self) -> ChannelHealth:
        """Whether the channel can do its work."""
        opened = self._opened
        store = opened.writer.health if opened is not None else WriterHealth(0, 0, None)
        return ChannelHealth(self.is_started(), self._node.connection_status, store)

    @property
    def statistics(self) -> ChannelStatistics:
        """What was counted since the channel was opened. Raises `ChannelNotOpen`."""
        return self._open_one().statistics()

    def at_risk(self) -> AtRisk:
        """What a crash at this very moment would keep from the program for good: see `AtRisk`."""
        handing = self._open_one().handing
        return AtRisk(handing.in_hand, handing.untold)

    def log(self) -> list[str]:
        """The ids of all SDS messages in the order that every participant shares (C-141).

        Only for looking: a message may still be put between two others. Raises `ChannelNotOpen`.
        """
        return [entry.message_id for entry in self._open_one().engine.sds.log()]

    def causal_log(self) -> list[tuple[str, str, int, tuple[str, ...]]]:
        """The log with what follows what: message id, sender id, Lamport time, ids of its causal history.

        In the order of `log`, and only for looking too; it decodes every message. Raises `ChannelNotOpen`.
        """
        sds = self._open_one().engine.sds
        found = []
        for entry in sds.log():
            data = sds.encoded(entry.message_id)
            message = None if data is None else SdsMessage.decode(data)
            if message is not None:
                follows = tuple(each.message_id for each in message.causal_history)
                found.append((message.message_id, message.sender_id, message.lamport_timestamp or 0, follows))
        return found

    def _open_one(self, *, started: bool = False) -> _Opened:
        if self._opened is None:
            raise ChannelNotOpen
        if started and not self._opened.started:
            raise NotStarted
        return self._opened


class _Opened:
    """A channel while it is open: what `strata.reliable.hub.Lane` asks for."""

    def __init__(
        self,
        channel: ReliableChannel,
        hub: Hub,
        limiter: RateLimiter,
        lane: str,
        key: ParticipantKey,
        state: ChannelState,
    ) -> None:
        config = channel.config
        self.channel_id = channel.channel_id
        self.content_topic = channel.content_topic
        self.lane = lane
        self.started = False
        self.channel = channel
        self._config = config
        self._node = channel._node
        self._hook = channel._hook
        self._codec = channel._codec
        self._hub = hub
        self._limiter = limiter
        self.now_ms = hub.now_ms
        self.writer = ChangeWriter(
            channel._store, key, on_written=self._on_written, on_health=self._on_store_health
        )
        self.engine = ChannelEngine(
            key.channel_id,
            key.sender_id,
            channel.content_topic,
            config,
            limiter=limiter,
            lane=lane,
            now_ms=hub.now_ms(),
            random=channel._rng.random,
            state=state,
        )
        self.handing = HandingOver(
            self,
            self.engine.inbox,
            self.writer,
            channel.message_events,
            once=config.hand_over == "once",
            on_room=self._on_room,
        )
        self.asking = Asking(self, self._node, self.engine, hub.now_ms)
        self._unsubmitted: list[Change] = []
        self._tickets: dict[str, int] = {}
        """What must be durable before these messages go out."""
        self._prepared: dict[str, bytes] = {}
        self._preparing: str | None = None
        self._proofs: dict[str, bytes] = {}
        self._undecryptable = self._undecodable = 0
        self._room = asyncio.Event()
        self._woken = asyncio.Event()
        self._receiving = asyncio.Lock()
        self._lifecycle = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._preparations: set[asyncio.Task[None]] = set()
        self._teller = asyncio.create_task(self.handing.run(), name=f"strata-events {self.channel_id}")
        self.engine.set_online(False, hub.now_ms())
        hub.join(self)
        self.flush()

    # Starting and stopping.

    async def start(self) -> None:
        async with self._lifecycle:
            if self.started:
                return
            self.started = True
            try:
                await self._hub.subscribe(self.content_topic, self._config.members)
            except BaseException:
                self.started = False
                raise
            self._tasks = [
                asyncio.create_task(self._keep_time(), name=f"strata-timers {self.channel_id}"),
                asyncio.create_task(self.asking.run(), name=f"strata-asking {self.channel_id}"),
            ]
            self.status_changed(self._hub.online)
            self._hub.wake()

    async def stop(self) -> None:
        async with self._lifecycle:
            if not self.started:
                return
            self.started = False
            self._room.set()
            await self._end_tasks([*self._tasks, *self._preparations])
            self._tasks = []
            await self._hub.unsubscribe(self.content_topic)
            for sent in await self._hub.settled(self, _SETTLE_TIMEOUT):
                if isinstance(sent, Transmission):
                    self.engine.not_dispatched(sent, self.now_ms())
            self.engine.set_online(False, self.now_ms())
            self.engine.catching_up.stopped()
            self.flush()

    async def close(self) -> None:
        await self.stop()
        try:
            await self.writer.close()
        finally:
            if self._teller is not asyncio.current_task():
                self._teller.cancel()
                await asyncio.wait([self._teller])
                await self.handing.drain()
            self.handing.end()
            await self._hub.leave(self)

    async def _end_tasks(self, tasks: list[asyncio.Task[None]]) -> None:
        others = [task for task in tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)

    def status_changed(self, online: bool) -> None:
        """The node reaches somebody, or nobody (C-088)."""
        if self.started:
            self.engine.set_online(online, self.now_ms())
            self.asking.connected(online)
            self._woken.set()

    # The engine's timer.

    async def _keep_time(self) -> None:
        while True:
            self._woken.clear()
            if self.engine.get_timer() <= self.now_ms():
                self.engine.handle_timer(self.now_ms())
                self.flush()
            wait = (self.engine.get_timer() - self.now_ms()) / 1000
            try:
                async with asyncio.timeout(max(wait, 0.001) if wait < 1e9 else None):
                    await self._woken.wait()
            except TimeoutError:
                pass

    # What changed goes to the store, and then to whom it concerns.

    def flush(self) -> None:
        """Store what the engine changed in one step, and tell of it once that is durable."""
        self._unsubmitted += self.engine.changes()
        if self._unsubmitted:
            try:
                ticket = self.writer.submit(self._unsubmitted)
            except PersistenceError as error:
                # Nothing is told that is not stored; it is tried again with the next step.
                _log.debug("%s: state waits to be stored: %s", self.channel_id, error)
                return
            self._unsubmitted = []
            self._tickets |= dict.fromkeys(self.engine.wrapped(), ticket)
        else:
            ticket = self.writer.submit(())
        self.handing.tell(self.engine.events(), ticket, self.engine.inbox.newest)
        self._hub.wake()
        self.asking.wake()
        self._woken.set()

    def check_store(self) -> None:
        """Raise the store's `PersistenceError` while it is out of order: nothing more is promised then."""
        health = self.writer.health
        if health.error is not None:
            raise health.error
        if self._unsubmitted or health.pending > _MAX_UNSTORED:
            raise PersistenceError("the store is far behind")

    def _on_written(self) -> None:
        self.handing.wake()
        self._hub.wake()
        self._on_room()

    def _on_store_health(self, health: WriterHealth) -> None:
        if health.failures == 0:
            self.flush()

    def _on_room(self) -> None:
        self._room.set()

    # Sending, as the hub asks for it.

    def is_ready(self) -> bool:
        """Whether each of what may be next is stored and encrypted; if not, that is begun."""
        if not self.started:
            return False
        while True:
            heads = self._limiter.heads(self.lane)
            waiting = [each for each in heads if not self._is_prepared(each)]
            if self._limiter.heads(self.lane) == heads:
                return bool(heads) and not waiting

    def _is_prepared(self, head: Transmission) -> bool:
        message_id = head.message_id
        if head.priority is Priority.CONTENT and self._tickets.get(message_id, 0) > self.writer.confirmed:
            return False
        if message_id in self._prepared:
            return True
        data = self.engine.data(head)
        if data is None:
            self.flush()
            return False
        if self._hook is None and self._config.proof_provider is None:
            self._keep_prepared(message_id, data)
            return True
        if self._preparing is None:
            self._preparing = message_id
            task = asyncio.create_task(self._prepare(head, data), name=f"strata-hook {self.channel_id}")
            self._preparations.add(task)
            task.add_done_callback(self._preparations.discard)
        return False

    def _keep_prepared(self, message_id: str, wire: bytes) -> None:
        if len(self._prepared) >= _MAX_PREPARED:  # what was withdrawn since stays behind
            self._prepared.clear()
        self._prepared[message_id] = wire

    async def _prepare(self, head: Transmission, data: bytes) -> None:
        """Run the hooks, which may take their time, for what is next (C-240, C-244)."""
        try:
            wire = data if self._hook is None else await self._hook.encrypt(data)
            proof = await obtain_proof(self._config.proof_provider, wire)
        except (EncryptionFailed, ProofFailed) as error:
            self.engine.refused(head, self.now_ms(), str(error), type(error).__name__)
            self.flush()
        else:
            self._keep_prepared(head.message_id, wire)
            if proof is not None:
                self._proofs = {head.message_id: proof}
        finally:
            self._preparing = None
            self._hub.wake()

    def dispatch(self, transmission: Transmission) -> Dispatch | None:
        """What the hub is to send now."""
        message_id = transmission.message_id
        wire = self._prepared.pop(message_id, None)
        repair = self.engine.repairs(transmission)
        stored_as = None
        if repair is not None and self._config.sender_binding == "did":
            stored_as = repair[1]
            if stored_as is None:
                wire = None  # without the original nobody would believe it
        try:
            payload = None if wire is None else self._codec.encode(wire)
        except Exception as error:
            payload = None
            self.engine.refused(
                transmission, self.now_ms(), f"the encoder failed: {error!r}", "encoding_failed"
            )
        else:
            if payload is None:
                self.engine.not_dispatched(transmission, self.now_ms())
        if payload is None:
            self.flush()
            return None
        self.engine.sending(transmission)
        self.flush()
        return Dispatch(
            self._transport_request(transmission),
            self._envelope(payload, meta=self._proofs.pop(message_id, None)),
            stored_as,
        )

    def _transport_request(self, transmission: Transmission) -> str:
        """`R:1` … `R:N` for the chunks of request `R` (C-070)."""
        found = self.engine.requests.find(transmission.message_id)
        if found is None or transmission.priority is Priority.BACKGROUND:
            return f"{self.lane}\x1f{transmission.message_id}"
        return f"{found[0].request_id}:{found[1] + 1}"

    def _envelope(
        self, payload: bytes, *, ephemeral: bool = False, meta: bytes | None = None
    ) -> MessageEnvelope:
        return MessageEnvelope(
            content_topic=self.content_topic,
            payload=payload,
            ephemeral=ephemeral,
            meta=meta,
            retention_seconds=self._config.retention_seconds,
        )

    async def send_ephemeral(self, ephemeral: Ephemeral) -> None:
        wire = ephemeral.data if self._hook is None else await self._hook.encrypt(ephemeral.data)
        envelope = self._envelope(self._codec.encode(wire), ephemeral=True)
        await self._hub.send_now(self, ephemeral, envelope)

    def accepted(self, sent: Transmission | Ephemeral, message_hash: bytes) -> None:
        """The transport has it."""
        if isinstance(sent, Ephemeral):
            self.engine.ephemeral_sent(sent)
        else:
            self._tickets.pop(sent.message_id, None)
            self.engine.dispatched(sent, self.now_ms(), message_hash)
        self.flush()

    def not_accepted(self, sent: Transmission | Ephemeral, error: NodeMessageError) -> None:
        """The transport has not (C-292)."""
        if isinstance(sent, Ephemeral):
            self.engine.ephemeral_failed(sent, error.error, error.code)
        elif error.recoverable:
            self.engine.not_dispatched(sent, self.now_ms())
        else:
            self._tickets.pop(sent.message_id, None)
            self.engine.refused(sent, self.now_ms(), error.error, error.code)
        self.flush()

    # Receiving.

    async def receive(self, event: NodeMessageReceived) -> SdsMessage | None:
        """Take a message of the transport, once there is room for what comes of it (C-072)."""
        async with self._receiving:
            while self.started and self._is_full():
                self._room.clear()
                await self._room.wait()
            if not self.started:
                return None
            payload = self._codec.decode(event.message.payload)
            if payload is None:
                self._undecodable += 1
                return None
            try:
                data = payload if self._hook is None else await self._hook.decrypt(payload)
            except DecryptionFailed:
                self._undecryptable += 1
                return None
            message = self.engine.receive(
                data, self.now_ms(), hint=event.message_hash, author=event.message.author
            )
            self.flush()
            return message

    def _is_full(self) -> bool:
        health = self.writer.health
        broken = health.error is not None and not health.error.retry
        behind = bool(self._unsubmitted) or health.pending > _MAX_UNSTORED
        return self.engine.inbox.is_full or behind or broken

    # Looking.

    def sync_status(self) -> SyncStatus:
        """What `ReliableChannel.sync_status` tells."""
        engine, now = self.engine, self.now_ms()
        since = engine.sds.missing_since()
        return SyncStatus(
            outstanding=tuple(
                OutstandingMessage(
                    request.request_id,
                    request.message_id,
                    len(request.chunks),
                    sum(chunk.sent for chunk in request.chunks),
                    len(request.acknowledged),
                    request.undelivered,
                )
                for request in engine.requests
            ),
            missing=tuple(
                MissingMessage(each.message_id, each.sender_id, each.retrieval_hint, since[each.message_id])
                for each in engine.sds.missing()
            ),
            queued=sum(self._limiter.queued(self.lane, priority) for priority in Priority),
            partial_messages=engine.reassembler.statistics.partial_messages,
            inbox=len(engine.inbox) + (self.handing.in_hand is not None),
            rate_limit_utilization=self._limiter.utilisation(now),
        )

    def statistics(self) -> ChannelStatistics:
        """What `ReliableChannel.statistics` tells."""
        engine = self.engine
        return ChannelStatistics(
            sds=replace(engine.sds.statistics),
            reassembly=replace(engine.reassembler.statistics),
            undecryptable=self._undecryptable,
            undecodable=self._undecodable,
            senders_forged=engine.counts.senders_forged,
            ephemerals_invalid=engine.counts.ephemerals_invalid,
            ephemerals_repeated=engine.counts.ephemerals_repeated,
            ephemerals_not_taken=engine.inbox.ephemerals_dropped,
            retrievals=self.asking.retrievals,
            retrievals_failed=self.asking.retrievals_failed,
        )
