"""One participant's part in a channel while it is open: its engine, its store, its tasks. An asyncio shell.

The engine makes the decisions. The session passes its changes to the store, its transmissions to the hub and
its events to `handover`, and runs the engine's timer. `receiving` holds back the node while there is no room.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
from collections.abc import Callable, Coroutine

from strata.channels.awaiting import Alarm, end_of
from strata.channels.encryption import EncryptionHook
from strata.channels.messaging.emitter import EventEmitter, callers
from strata.channels.messaging.values import MessageEnvelope, NodeMessageError, NodeMessageReceived
from strata.channels.persistence.interface import ParticipantKey, Persistence, PersistenceError
from strata.channels.persistence.state import ChannelState
from strata.channels.persistence.writer import ChangeWriter, Steps, WriterHealth
from strata.channels.rate_limit.values import Transmission
from strata.channels.reliable.config import ReliableChannelConfig
from strata.channels.reliable.departures import Departures
from strata.channels.reliable.engine import ChannelEngine
from strata.channels.reliable.ephemerals import Ephemeral
from strata.channels.reliable.errors import ChannelFailed, ChannelNotOpen, NotSent, NotStarted
from strata.channels.reliable.events import (
    ReliableMessageSendError,
    SendingMessageIrrecoverableError,
)
from strata.channels.reliable.handover import Handover
from strata.channels.reliable.history import ChannelPast, PastMessages
from strata.channels.reliable.hub import Hub
from strata.channels.reliable.looking import statistics, sync_status
from strata.channels.reliable.membership import Dispatch
from strata.channels.reliable.outbox import Outbox
from strata.channels.reliable.payloads import CodecPair, Payloads
from strata.channels.reliable.receiving import Receiving
from strata.channels.reliable.store_queries import StoreQueries
from strata.channels.reliable.values import ChannelStatistics, SyncStatus
from strata.channels.sds import SdsMessage

__all__ = ["ChannelSession"]

_log = logging.getLogger("strata.reliable")

_SETTLE_TIMEOUT = 5.0
_LATE_MS, _MAX_PAUSE_MS = 250, 2_000
_MAX_BEHIND_MS = 60_000
"""The longest time that timers wait for a process that is behind."""
_REFUSALS = (ReliableMessageSendError.name, SendingMessageIrrecoverableError.name)


class ChannelSession:
    """A channel from opening to closing, as the hub's member and for the channel that programs see."""

    def __init__(
        self,
        channel: object,
        hub: Hub,
        outbox: Outbox,
        key: ParticipantKey,
        state: ChannelState,
        *,
        content_topic: str,
        config: ReliableChannelConfig,
        emitter: EventEmitter,
        store: Persistence,
        hook: EncryptionHook | None,
        codec: CodecPair,
        rng: random.Random,
        close_with_node: Callable[[], Coroutine[object, object, None]],
    ) -> None:
        """`channel` is the object that programs use; `close_with_node` closes it when the connection below
        closes. `config` has its sections filled in.
        """
        self.channel_id = key.channel_id
        self.content_topic = content_topic
        self.outbox = outbox
        self.store = store
        self.started = False
        self.accepting = False
        """Whether messages may be sent; a channel that is stopping sends what it has and accepts no more."""
        self.failure: ChannelFailed | None = None
        """The error that closed the channel, if one of its tasks ended with an error."""
        self.channel = channel
        self.close_with_node = close_with_node
        self._emitter = emitter
        self._failing: asyncio.Task[None] | None = None
        self._closed = False
        self._config = config
        self._hub = hub
        self.now_ms = hub.now_ms
        self.writer = ChangeWriter(
            store,
            key,
            on_written=self._on_written,
            on_health=self._on_store_health,
            on_fault=lambda error: self.fail("the writer", error),
        )
        self._steps = Steps(self.writer)
        self.engine = ChannelEngine(
            key.channel_id,
            key.sender_id,
            content_topic,
            config,
            outbox=outbox,
            now_ms=hub.now_ms(),
            random=rng.random,
            state=state,
            author=hub.node.transport_identity,
            receipts=getattr(hub.node, "receipts", False),  # nodes of other authors may lack the attribute
        )
        self.handover = Handover(
            key.channel_id,
            self.engine.inbox,
            self.writer,
            emitter,
            at_most_once=config.hand_over == "at_most_once",
            auto_ack=config.auto_ack,
            on_taken=self._on_taken,
        )
        self._departures = Departures(self.engine.requests)
        self._payloads = Payloads(
            self.engine,
            hook=hook,
            codec=codec,
            proof_provider=config.proof_provider,
            now_ms=hub.now_ms,
            is_stored=self._is_stored,
            flush=self.flush,
            on_ready=hub.wake,
            on_fault=lambda error: self.fail("the hook", error),
        )
        self._receiving = Receiving(
            key.channel_id,
            self.engine,
            self._payloads,
            self.handover,
            works=lambda: self._works,
            has_failed=lambda: self.failure is not None,
            is_behind=lambda: self._steps.is_behind,
            flush=self.flush,
            read_again=self._read_again,
            now_ms=hub.now_ms,
        )
        self._queries = StoreQueries(
            hub.node,
            self.engine,
            receive=self._receiving.take_stored,
            pass_over=self._receiving.pass_over,
            flush=self.flush,
            now_ms=hub.now_ms,
        )
        self._woken = Alarm()
        self._armed_for = math.inf
        self._lifecycle = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._called: dict[asyncio.Task[None], str] = {}
        """The name of each task in errors."""
        self.engine.set_online(False, hub.now_ms())
        hub.join(self)
        self._teller = self._begin("events", self.handover.run(), "the task that tells events")
        self.flush()

    # Starting and stopping.

    async def start(self) -> None:
        async with self._lifecycle:
            self._check_not_closed()
            if self.started:
                return
            self.started = True
            if self._hub.online:
                self._queries.will_read()
            try:
                await self._hub.subscribe(
                    self.content_topic, self._config.members, reads=self._config.query_on_connect
                )
            except BaseException:
                self.started = False
                raise
            self.check()
            if self._closed:  # by a call that was cancelled and did not wait for its turn
                self.started = False
                await self._hub.unsubscribe(self.content_topic)
                raise ChannelNotOpen
            self.accepting = True
            self._tasks = [
                self._begin("timers", self._keep_time(), "the task of the timers"),
                self._begin("store-queries", self._queries.run(), "the task that asks the store"),
            ]
            self.status_changed(self._hub.online)
            self._hub.wake()

    def _check_not_closed(self) -> None:
        if self._closed:
            raise ChannelNotOpen

    async def drain(self, timeout: float | None) -> None:
        """Wait until all messages are out: see `ReliableChannel.drain`."""
        await self._departures.drain(timeout if self.started else 0)

    async def stop(self, timeout: float) -> tuple[str, ...]:
        """Wait up to `timeout` seconds for messages to go out, then stop. Returns those that are not out."""
        async with self._lifecycle:
            if self.started:
                self.accepting = False
                clock = asyncio.get_running_loop().time
                began_at = clock()
                try:
                    await self._departures.settle(timeout)
                finally:
                    await self._halt(max(0.0, _SETTLE_TIMEOUT - (clock() - began_at)))
            return self.engine.requests.unsent

    async def _halt(self, settle_timeout: float) -> None:
        # A caller that is cancelled here stops waiting, but still ends everything.
        self.started = False
        self._receiving.make_room()
        self._departures.end()
        left: list[Transmission | Ephemeral] = []
        try:
            await self._end_tasks([*self._tasks, *self._payloads.tasks()])
        finally:
            self._tasks = []
            try:
                await self._hub.unsubscribe(self.content_topic)
            finally:
                try:
                    left = await self._hub.settled(self, settle_timeout)
                finally:
                    self._halted(left)

    def _halted(self, left: list[Transmission | Ephemeral]) -> None:
        if self.failure is None:
            for sent in left:
                if isinstance(sent, Transmission):
                    self.engine.sending.not_dispatched(sent, self.now_ms())
            self.engine.set_online(False, self.now_ms())
            self.engine.catching_up.stopped()
            self.flush()

    async def close(self, timeout: float) -> NotSent | None:
        """Stop and release everything. Returns the messages that are not out, if there are any.

        Raises the `ChannelFailed` of a channel that has closed itself.
        """
        try:
            if self.failure is None:
                await self.stop(timeout)
        finally:
            if self._failing is None and self.failure is not None:
                await self._give_up()
            elif self._failing is None:
                self.handover.put_back()
                self.flush()
                await self._let_go()
            else:
                await asyncio.shield(self._failing)
        self.check()
        unsent, refused = self.engine.requests.unsent, self._departures.take_refused()
        return NotSent(unsent, refused) if unsent or refused else None

    async def _let_go(self) -> None:
        self._closed = True
        self._departures.end()
        try:
            await self.writer.close()
        finally:
            try:
                await self._end_teller()
            finally:  # even if a handler of the last events was cancelled, or the channel would stay open
                self.handover.end(self.failure)
                await self._hub.leave(self)

    async def _end_teller(self) -> None:
        if self._teller not in callers():  # else it ends by itself, once its handler has ended
            self._teller.remove_done_callback(self._task_ended)
            self._teller.cancel()
            await asyncio.wait([self._teller])
            if self.failure is None:
                await self.handover.drain()

    # Tasks, and the failure of a channel when one of them fails.

    def _begin(self, name: str, work: Coroutine[object, object, None], called: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"strata-{name} {self.channel_id}")
        self._called[task] = called
        task.add_done_callback(self._task_ended)
        return task

    async def _end_tasks(self, tasks: list[asyncio.Task[None]]) -> None:
        others = [task for task in tasks if task is not asyncio.current_task()]
        for task in others:
            task.remove_done_callback(self._task_ended)
            self._called.pop(task, None)
            task.cancel()
        if others:
            await asyncio.wait(others)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A task has ended on its own, which must not go unnoticed."""
        called = self._called.pop(task, task.get_name())
        error = end_of(task)
        if error is not None:
            self.fail(called, error)

    def fail(self, task: str, error: BaseException) -> None:
        """Close the channel because one of its tasks ended with this error. All waiting calls raise it.

        Nothing more is stored: after an unfinished step the state in memory may be inconsistent, while the
        store has the last finished step.
        """
        if self.failure is not None or self._closed:
            _log.debug("%s: %s failed too: %r", self.channel_id, task, error)
            return
        failure = self.failure = ChannelFailed(task, error)
        self.accepting = False
        self._departures.end(failure)
        self.handover.fail(failure)
        self.writer.release(failure)
        self._receiving.make_room()
        if isinstance(error, asyncio.CancelledError):  # as when the loop ends, where no task may start
            _log.debug("%s: %s", self.channel_id, failure)
            return
        _log.error("%s: %s", self.channel_id, failure, exc_info=error)
        self._failing = asyncio.create_task(self._give_up(), name=f"strata-failed {self.channel_id}")

    async def _give_up(self) -> None:
        async with self._lifecycle:
            try:
                if self.started:
                    await self._halt(0)
            except Exception:
                _log.exception("%s: the channel could not be stopped in good order", self.channel_id)
            try:
                await self._let_go()
            except Exception as error:
                _log.error("%s: the last changes could not be stored: %r", self.channel_id, error)

    def check(self) -> None:
        """Raise the error that closed the channel, if there is one."""
        if self.failure is not None:
            raise self.failure.again()

    def status_changed(self, online: bool) -> None:
        """The node reaches a relay again, or no longer reaches any (C-088)."""
        if self._works:
            self.engine.set_online(online, self.now_ms())
            self._queries.connected(online)
            self._woken.set()

    def clock_stepped(self, by_ms: int) -> None:
        """The clock has jumped; a machine that slept queries the store for what it missed."""
        self.engine.clock_stepped(by_ms, self.now_ms())
        self._queries.wake()
        self.flush()
        self._woken.set()

    # The engine's timer.

    async def _keep_time(self) -> None:
        while True:
            self._woken.clear()
            await self._keep_up()
            if self.engine.get_timer() <= self.now_ms():
                self.engine.handle_timer(self.now_ms())
                self.flush()
            self._armed_for = self.engine.get_timer()
            wait = (self._armed_for - self.now_ms()) / 1000
            await self._woken.wait(max(wait, 0.001) if wait < 1e9 else None)

    async def _keep_up(self) -> None:
        """Wait while this process is behind: what has arrived meanwhile may make due work unnecessary.

        Otherwise many participants in one process would send more, the slower the process is.
        """
        waited, late = 0, self.now_ms() - self._armed_for
        while late > _LATE_MS and waited < _MAX_BEHIND_MS:
            pause, began_at = min(int(late), _MAX_PAUSE_MS), self.now_ms()
            await asyncio.sleep(pause / 1000)
            took = self.now_ms() - began_at
            waited, late = waited + took, took - pause

    # Changes go to the store; their events are reported and their messages sent once they are durable.

    def flush(self) -> None:
        """Store the changes of one step of the engine, and report its events once they are durable."""
        if self.failure is not None:
            return
        try:
            ticket = self._steps.store(self.engine.changes(), self.engine.sending.wrapped())
        except PersistenceError as error:
            # The next step tries again; events are reported once they are stored.
            _log.debug("%s: state waits to be stored: %s", self.channel_id, error)
            return
        events = self.engine.events()
        self._departures.note(events, heard=any(map(self._emitter.count, _REFUSALS)))
        self.handover.tell(events, ticket, self.engine.inbox.newest)
        # A message takes several steps, so a task is woken only for work that is due before its own timer.
        if self.outbox.waits:
            self._hub.wake()
        if min(self.engine.retrieval.at, self.engine.catching_up.retry_at) < self._queries.armed_for:
            self._queries.wake()
        if self.engine.get_timer() < self._armed_for:
            self._woken.set()

    def check_store(self) -> None:
        """Raise the `PersistenceError` of a failing store: no message is accepted then."""
        self._steps.check()

    def _on_written(self) -> None:
        self._steps.written()
        self.handover.wake()
        if self.outbox.waits:
            self._hub.wake()
        self._receiving.make_room()

    def _on_store_health(self, health: WriterHealth) -> None:
        if health.failures == 0:
            self.flush()
        elif self.writer.has_failed:
            self._departures.end(health.error)

    def _on_taken(self) -> None:
        self._receiving.program_took()
        self.flush()
        self._receiving.make_room()

    # Sending, as requested by the hub.

    def _is_stored(self, transmission: Transmission) -> bool:
        """Whether the step that made a transmission is durable; before that it must not go out."""
        return self._steps.is_stored(transmission.message_id)

    def is_ready(self) -> bool:
        """Whether the next transmission of each queue can go out immediately."""
        return self._works and self._payloads.is_ready()

    def dispatch(self, transmission: Transmission) -> Dispatch | None:
        """Return what the hub should send now, as planned by the engine; None if nothing."""
        payload = self._payloads.take(transmission)
        plan = None if payload is None else self.engine.sending.plan(transmission)
        if payload is None or plan is None:
            self.engine.sending.not_dispatched(transmission, self.now_ms())
            self.flush()
            return None
        self.engine.sending.taken(transmission)
        self.flush()
        envelope = MessageEnvelope(
            content_topic=self.content_topic,
            payload=payload.data,
            meta=payload.proof,
            retention_seconds=plan.retention_seconds,
            again=plan.again,
        )
        return Dispatch(plan.request_id or secrets.token_hex(16), envelope, plan.original)

    async def send_ephemeral(self, ephemeral: Ephemeral) -> None:
        """Send past the queue.

        Raises `EncryptionFailed`, `EncodingFailed`, `ProofFailed` and the node's errors. Raises `NotStarted`
        or `ChannelNotOpen` if the channel was stopped while a hook was running, because a node starts to
        listen on a topic that it sends on, and nothing would end that.
        """
        payload = await self._payloads.make(ephemeral.data)
        if not self._works:
            self.check()
            self._check_not_closed()
            raise NotStarted
        envelope = MessageEnvelope(
            content_topic=self.content_topic,
            payload=payload.data,
            ephemeral=True,
            meta=payload.proof,
            retention_seconds=self._config.retention_seconds,
        )
        await self._hub.send_now(self, ephemeral, envelope)

    def accepted(self, sent: Transmission | Ephemeral, message_hash: bytes) -> None:
        """The transport has accepted it."""
        if self.failure is not None:
            return
        if isinstance(sent, Ephemeral):
            self.engine.ephemerals.sent(sent)
        else:
            self._steps.forget(sent.message_id)
            self.engine.sending.dispatched(sent, self.now_ms(), message_hash)
        self.flush()

    def not_accepted(self, sent: Transmission | Ephemeral, error: NodeMessageError) -> None:
        """The transport refused it, or did not answer (C-292)."""
        if self.failure is not None:
            return
        if isinstance(sent, Ephemeral):
            self.engine.ephemerals.failed(sent, error.error, error.code)
        elif error.recoverable:
            self.engine.sending.not_dispatched(sent, self.now_ms())
        else:
            self._steps.forget(sent.message_id)
            self.engine.sending.refused(sent, self.now_ms(), error.error, error.code)
            self._payloads.renew()
        self.flush()

    # Receiving.

    @property
    def is_full(self) -> bool:
        """Whether `receive` would wait for room."""
        return self._works and self._receiving.is_full

    def pass_over(self) -> None:
        """Skip a message for lack of room: other channels wait for the topic, and the relays have it."""
        self._receiving.tell_full()
        self.engine.catching_up.missed()
        self._queries.wake()

    async def receive(self, event: NodeMessageReceived) -> SdsMessage | None:
        """Take a message from the transport once there is room for it (C-072)."""
        if event.stored and self._queries.leave_to_reading():
            return None
        await self._queries.joined()
        if self._queries.is_from_before(event):
            return None
        return await self._receiving.take(event, stored=False)

    @property
    def _works(self) -> bool:
        return self.started and self.failure is None

    # Inspection.

    async def past(self, before: str | int | None, limit: int) -> PastMessages:
        """The value of `ReliableChannel.history`."""
        engine = self.engine
        past = ChannelPast(
            self._hub.node,
            self.channel_id,
            self.content_topic,
            segmentation=engine.segmentation.segmentation,
            open_payload=lambda event: self._payloads.read(event.message.payload),
            decode=engine.decode,
            is_genuine=engine.is_genuine,
            is_known=engine.sds.knows,
            oldest_ms=lambda: self.now_ms() - self._config.query_window_ms,
            now_ms=self.now_ms,
            members=self._config.members,
        )
        return await past.read(before, limit)

    def _read_again(self) -> None:
        self._queries.wake()

    @property
    def undecryptable(self) -> int:
        """How many messages in a row could not be decrypted."""
        return self._receiving.sealed.count

    def sync_status(self) -> SyncStatus:
        """The value of `ReliableChannel.sync_status`."""
        is_blind = self._receiving.sealed.is_blind
        return sync_status(self.engine, self._queries, self.handover, self.now_ms(), is_blind=is_blind)

    def statistics(self) -> ChannelStatistics:
        """The value of `ReliableChannel.statistics`."""
        return statistics(self.engine, self._queries, self._payloads)
