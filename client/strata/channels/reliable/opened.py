"""A channel while it is open: its engine, its store, its tasks. An asyncio shell; nothing is decided here."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from dataclasses import replace
from typing import Protocol

from strata.channels.encryption import DecryptionFailed, EncryptionHook
from strata.channels.messaging.emitter import EventEmitter
from strata.channels.messaging.values import MessageEnvelope, NodeMessageError, NodeMessageReceived
from strata.channels.persistence.interface import Change, ParticipantKey, Persistence, PersistenceError
from strata.channels.persistence.state import ChannelState
from strata.channels.persistence.writer import ChangeWriter, WriterHealth
from strata.channels.rate_limit.limiter import RateLimiter
from strata.channels.rate_limit.proof import obtain_proof
from strata.channels.rate_limit.values import Priority, Transmission
from strata.channels.reliable.asking import Asking
from strata.channels.reliable.codec import Codec
from strata.channels.reliable.config import ReliableChannelConfig
from strata.channels.reliable.engine import ChannelEngine, Ephemeral
from strata.channels.reliable.handing_over import HandingOver
from strata.channels.reliable.hub import Dispatch, Hub
from strata.channels.reliable.preparing import Preparing
from strata.channels.reliable.values import ChannelStatistics, MissingMessage, OutstandingMessage, SyncStatus
from strata.channels.sds import SdsMessage

__all__ = ["OpenChannel"]

_log = logging.getLogger("strata.reliable")

_SETTLE_TIMEOUT = 5.0
_SYNC_SECONDS = 3_600
_MAX_TICKETS = 1_024
_NEVER = 2**63
_MAX_UNSTORED = 20_000
"""Changes the store has not confirmed; with more the channel reads no further."""


class Channel(Protocol):
    """What an open channel needs of the one that programs see."""

    message_events: EventEmitter
    config: ReliableChannelConfig

    @property
    def channel_id(self) -> str: ...

    @property
    def content_topic(self) -> str: ...


class OpenChannel:
    """One participant's part in a channel from opening to closing: what `hub.Lane` asks for."""

    def __init__(
        self,
        channel: Channel,
        hub: Hub,
        limiter: RateLimiter,
        lane: str,
        key: ParticipantKey,
        state: ChannelState,
        *,
        store: Persistence,
        hook: EncryptionHook | None,
        codec: Codec,
        rng: random.Random,
    ) -> None:
        config = channel.config
        self.channel_id = channel.channel_id
        self.content_topic = channel.content_topic
        self.lane = lane
        self.started = False
        self.channel = channel
        self._config = config
        self._hook = hook
        self._codec = codec
        self._hub = hub
        self._limiter = limiter
        self.now_ms = hub.now_ms
        self.writer = ChangeWriter(store, key, on_written=self._on_written, on_health=self._on_store_health)
        self.engine = ChannelEngine(
            key.channel_id,
            key.sender_id,
            channel.content_topic,
            config,
            limiter=limiter,
            lane=lane,
            now_ms=hub.now_ms(),
            random=rng.random,
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
        self.asking = Asking(self, hub.node, self.engine, hub.now_ms)
        self._unsubmitted: list[Change] = []
        self._unsubmitted_ids: list[str] = []
        self._tickets: dict[str, int] = {}
        """What must be durable before these messages go out."""
        self._undecryptable = self._undecodable = 0
        self._room = asyncio.Event()
        self._woken = asyncio.Event()
        self._armed_for = math.inf
        self._receiving = asyncio.Lock()
        self._lifecycle = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._preparing = Preparing(
            self,
            self.engine,
            limiter,
            hook=hook,
            proof_provider=config.proof_provider,
            codec=codec,
            on_ready=hub.wake,
        )
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
            await self._end_tasks([*self._tasks, *self._preparing.tasks()])
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
        self.handing.put_back()
        self.flush()
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
            self._armed_for = self.engine.get_timer()
            wait = (self._armed_for - self.now_ms()) / 1000
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
                self._unsubmitted_ids += self.engine.wrapped()
                self._tickets |= dict.fromkeys(self._unsubmitted_ids, _NEVER)
                return
            self._unsubmitted = []
            self._tickets |= dict.fromkeys([*self._unsubmitted_ids, *self.engine.wrapped()], ticket)
            self._unsubmitted_ids = []
        else:
            ticket = self.writer.submit(())
        self.handing.tell(self.engine.events(), ticket, self.engine.inbox.newest)
        # Each is woken only for what it has to do earlier than it knows: a message makes several steps.
        if self._limiter.heads(self.lane):
            self._hub.wake()
        if self.engine.retrieval.at < self.asking.armed_for:
            self.asking.wake()
        if self.engine.get_timer() < self._armed_for:
            self._woken.set()

    def check_store(self) -> None:
        """Raise the store's `PersistenceError` while it is out of order: nothing more is promised then."""
        health = self.writer.health
        if health.error is not None:
            raise health.error
        if self._unsubmitted or health.pending > _MAX_UNSTORED:
            raise PersistenceError("the store is far behind")

    def _on_written(self) -> None:
        if len(self._tickets) > _MAX_TICKETS:
            confirmed = self.writer.confirmed
            self._tickets = {name: at for name, at in self._tickets.items() if at > confirmed}
        self.handing.wake()
        self._hub.wake()
        self._on_room()

    def _on_store_health(self, health: WriterHealth) -> None:
        if health.failures == 0:
            self.flush()

    def _on_room(self) -> None:
        self._room.set()

    # Sending, as the hub asks for it.

    def is_stored(self, transmission: Transmission) -> bool:
        """Whether what a transmission tells of is durable: before that it must not go out."""
        return self._tickets.get(transmission.message_id, 0) <= self.writer.confirmed

    def is_ready(self) -> bool:
        """Whether what may be next can go out at once."""
        return self.started and self._preparing.is_ready()

    def dispatch(self, transmission: Transmission) -> Dispatch | None:
        """What the hub is to send now."""
        prepared = self._preparing.take(transmission)
        repair, stored_as = self.engine.repairs(transmission), None
        if repair is not None and self._config.sender_binding == "did":
            stored_as = repair[1]
            prepared = None if stored_as is None else prepared  # nobody would believe it without the original
        if prepared is None:
            self.engine.not_dispatched(transmission, self.now_ms())
            self.flush()
            return None
        self.engine.sending(transmission)
        self.flush()
        envelope = self._envelope(prepared.payload, meta=prepared.proof)
        if self.engine.is_sync(transmission):
            # One every half minute, for as long as anybody is there: stores need not keep them all.
            kept = min(_SYNC_SECONDS, envelope.retention_seconds or _SYNC_SECONDS)
            envelope = replace(envelope, retention_seconds=kept)
        return Dispatch(self._transport_request(transmission), envelope, stored_as)

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
        """Send past the queue. Raises `EncryptionFailed`, `EncodingFailed`, `ProofFailed`, as the node."""
        payload = await self._preparing.encode(ephemeral.data)
        proof = await obtain_proof(self._config.proof_provider, payload)
        await self._hub.send_now(self, ephemeral, self._envelope(payload, ephemeral=True, meta=proof))

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

    @property
    def is_full(self) -> bool:
        """Whether `receive` would wait for room."""
        return self.started and self._is_full()

    def pass_over(self) -> None:
        """A message came and there is no room, and others wait for the same topic: the relays have it."""
        self.engine.catching_up.missed()
        self.asking.wake()

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
