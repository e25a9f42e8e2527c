"""A reliable channel as a program sees it: every message to every participant, once, in causal order.

`session` is the channel while it is open, and `engine` makes the decisions. `hub` sends for all channels of a
node, `store_queries` reads the store, and `handover` delivers events and messages to the program.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from types import TracebackType
from typing import Self

from strata.channels.closing import close_after
from strata.channels.encryption import EncryptionHook
from strata.channels.messaging.emitter import EventEmitter
from strata.channels.messaging.node import MessagingNode, check_content_topic
from strata.channels.parameters import named_too
from strata.channels.persistence.interface import ParticipantKey, Persistence
from strata.channels.persistence.memory import MemoryPersistence
from strata.channels.persistence.state import ChannelState
from strata.channels.persistence.writer import WriterHealth, last_words
from strata.channels.rate_limit.values import DEFAULT_RATE_LIMIT_CONFIG
from strata.channels.reliable.codec import Decoder, Encoder
from strata.channels.reliable.config import ReliableChannelConfig
from strata.channels.reliable.errors import AlreadyOpen, ChannelNotOpen, NotStarted
from strata.channels.reliable.events import (
    CHANNEL_EVENTS,
    CHANNEL_STATUS_EVENTS,
    ChunkInfo,
    MessageReceived,
    ReliableMessageReceived,
    SendingMessageIrrecoverableError,
)
from strata.channels.reliable.handover import Events
from strata.channels.reliable.history import PastMessages
from strata.channels.reliable.hub import Hub
from strata.channels.reliable.looking import causal_log
from strata.channels.reliable.naming import name_sender
from strata.channels.reliable.payloads import CodecPair
from strata.channels.reliable.request_names import check_request_id
from strata.channels.reliable.session import ChannelSession
from strata.channels.reliable.sizes import fitted_segments, largest_ephemeral, largest_segment
from strata.channels.reliable.values import (
    AtRisk,
    ChannelHealth,
    ChannelStatistics,
    SyncStatus,
)
from strata.channels.sds import SdsConfig
from strata.channels.sds.messages import check_id
from strata.channels.segmentation.messages import message_hash
from strata.channels.segmentation.splitting import SegmentationConfig
from strata.protocol.errors import StrataError

__all__ = ["ReliableChannel"]

_log = logging.getLogger("strata.reliable")


_named_as_documented = named_too(message_payload="payload")


class ReliableChannel:
    """One participant's part in a channel, made by `relay.channel` or `create_reliable_channel`.

        async with relay.channel("room", topic="/chat/1/room/proto") as room:
            await room.send(b"hello")
            async for message in room:
                print(message.sender_id, message.payload)

    Leaving the block waits until the messages are out, and raises `NotSent` for those that are lost with the
    default store. Sent messages that are not acknowledged, and received messages that the program has not
    taken, survive `stop` and `close`, and with a durable store also the process. A channel belongs to one
    event loop.

    A channel closes itself when one of its tasks fails. Every call and every iterator then raises
    `ChannelFailed`, and so does `close`.
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
        """`config` has its sections filled in. Raises `ValueError` and `TypeError` for unusable arguments."""
        self._session: ChannelSession | None = None
        self._closed = False
        self._closed_with_node = False
        self._codec = CodecPair(encoder, decoder)
        self.message_events = EventEmitter(CHANNEL_EVENTS, also=CHANNEL_STATUS_EVENTS, on_change=self._heard)
        """Handlers by event name (C-026), including the names in `CHANNEL_STATUS_EVENTS`."""
        self.config = config
        self._node = node
        self._channel_id = check_id("channel_id", channel_id)
        self._content_topic = check_content_topic(self._codec.content_topic or content_topic or "")
        self._sender_id = None if sender_id is None else check_id("sender_id", sender_id)
        if config.device is not None and (config.sender_binding != "did" or sender_id is not None):
            raise ValueError('device needs sender_binding="did", and no sender_id')
        self._hook = None if config.encryption is None else EncryptionHook(config.encryption)
        self._store: Persistence = config.persistence or MemoryPersistence()
        self._rng = rng or random.SystemRandom()

    def _heard(self) -> None:
        """A handler was added; it may take messages that wait in the inbox."""
        if self._session is not None:
            self._session.handover.wake()

    # Properties.

    @property
    def channel_id(self) -> str:
        """The name that all participants use for the channel (C-005)."""
        return self._channel_id

    @property
    def channelId(self) -> str:
        """`channel_id`, as the documents spell it."""
        return self._channel_id

    @property
    def messageEvents(self) -> EventEmitter:
        """`message_events`, as the documents spell it."""
        return self.message_events

    @property
    def content_topic(self) -> str:
        """The topic on which the messages travel."""
        return self._content_topic

    @property
    def sender_id(self) -> str:
        """This participant's id. Raises `ChannelNotOpen` until a channel that makes its own id is open."""
        if self._sender_id is None:
            raise ChannelNotOpen
        return self._sender_id

    @staticmethod
    @_named_as_documented
    def get_message_id(payload: bytes) -> str:
        """Return the logical id that events carry for this payload (C-018)."""
        return message_hash(payload).hex()

    getMessageId = get_message_id
    """The name in the documents, as for the camel-case aliases below."""

    # Opening and closing.

    async def open(self) -> Self:
        """Load the stored state and, with `auto_start`, `start`. Cancelling leaves the channel closed.

        Raises `AlreadyOpen`, `SegmentDoesNotFit`, `PersistenceError`, `InvalidConfiguration` for settings
        that contradict those of the node's other channels, the errors of `start`, and `RuntimeError` if the
        channel is open or was closed: make a new one.
        """
        if self._closed or self._session is not None:
            raise RuntimeError("a channel is opened once; make a new one")
        sender_id = self._sender_id = self._sender_id or await self._named()
        key = ParticipantKey(self._channel_id, sender_id)
        hub = Hub.enter(self._node)
        try:
            if hub.is_open(key, self._store):
                raise AlreadyOpen(self._channel_id, sender_id)
            self._fit_sizes(sender_id)
            rate_limit = self.config.rate_limit or DEFAULT_RATE_LIMIT_CONFIG
            outbox = await hub.open_outbox(key, rate_limit, self._store)
            await last_words(self._store, key)
            state = ChannelState.read(await self._store.load(key))
            if hub.is_open(key, self._store):  # another opening was faster
                raise AlreadyOpen(self._channel_id, sender_id)
            self._session = ChannelSession(
                self,
                hub,
                outbox,
                key,
                state,
                content_topic=self._content_topic,
                config=self.config,
                emitter=self.message_events,
                store=self._store,
                hook=self._hook,
                codec=self._codec,
                rng=self._rng,
                close_with_node=self._close_with_node,
            )
        except BaseException:
            await hub.leave()
            raise
        if self.config.auto_start:
            try:
                await self.start()
            except BaseException as error:
                session, self._session, self._closed = self._session, None, True
                if session is not None:
                    await close_after(error, session.close(0))
                raise
        return self

    async def _named(self) -> str:
        """Return a sender id made for this channel, which a durable store keeps across restarts (C-006)."""
        return await name_sender(
            self._store,
            self._channel_id,
            self._node.transport_identity,
            self._rng,
            bound=self.config.sender_binding == "did",
            device=self.config.device,
        )

    def _fit_sizes(self, sender_id: str) -> None:
        """Fit a default segment size to the transport; refuse a chosen size that does not fit (C-035)."""
        sds = self.config.sds or SdsConfig()
        largest = largest_segment(
            self._largest_payload(), self._channel_id, sender_id, sds, hook_overhead=self._overhead
        )
        fitted = fitted_segments(self.config.segmentation or SegmentationConfig(), largest)
        self.config = replace(self.config, segmentation=fitted)

    def _largest_payload(self) -> int | None:
        repairable = self.config.sender_binding == "did"
        return self._node.largest_payload(self._content_topic, repairable=repairable)

    @property
    def _overhead(self) -> int:
        return self._codec.overhead + (0 if self._hook is None else self._hook.overhead)

    async def drain(self, timeout: float | None = None) -> None:
        """Wait until every message that `send` has accepted is out, that is, the transport has all of it.

        `timeout` is in seconds; None waits without limit. Raises `NotSent` for messages that are not out by
        then, or that cannot go out because the channel is stopped, and for refused messages that were
        reported to no handler. Raises `PersistenceError` if the store failed permanently, `ChannelNotOpen`,
        `ChannelFailed`. Cancelling stops only the wait.
        """
        await self._open_session().drain(timeout)

    async def close(self, *, purge: bool = False, timeout: float | None = None) -> None:
        """Stop, and release everything in memory (C-019, C-020). Stored state stays for the next opening,
        unless `purge` is true. Events whose step is stored are reported first.

        First waits, as `drain` does, for messages to go out, for `timeout` seconds; None means
        `drain_timeout_ms`. Then waits up to about five seconds for the answer to those that are under way.
        Messages that are not out stay in the store that the program provided. Raises `NotSent` for messages
        that are lost instead, because there is no such store or because of `purge`, and for refused messages
        that were reported to no handler.

        Raises `ChannelNotOpen`, `ChannelFailed` for a channel that had closed itself, and `PersistenceError`
        if the store could not take the last changes. The channel is closed in these cases too. Cancelling
        ends the wait for messages but not the closing.
        """
        session, self._session = self._session, None
        if session is None:
            if self._closed_with_node:
                self._closed_with_node = False
                if purge:
                    await self._purge()
                return
            raise ChannelNotOpen
        self._closed = True
        try:
            left = await session.close(self._drain_seconds(timeout))
        finally:
            if purge:
                await self._purge()
        if left is None:
            return
        if left.refused or purge or self.config.persistence is None:
            raise left
        _log.info("%s: %d messages wait in the store", self._channel_id, len(left.requests))

    async def _purge(self) -> None:
        # A caller that is cancelled here cannot ask again, so the purge continues on its own.
        await asyncio.shield(self._purge_behind_the_rest())

    async def _purge_behind_the_rest(self) -> None:
        key = ParticipantKey(self._channel_id, self.sender_id)
        await last_words(self._store, key)
        await self._store.purge(key)

    async def _close_with_node(self) -> None:
        """Close because the connection below is closing. A `close` that follows can only purge."""
        if self._session is not None:
            self._closed_with_node = True
            await self.close()

    def _drain_seconds(self, timeout: float | None) -> float:
        return self.config.drain_timeout_ms / 1000 if timeout is None else timeout

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await close_after(exc, self.close())

    async def start(self) -> bool:
        """Subscribe, and begin to send, receive, sync and retrieve. Returns True, even if started (C-021).

        Raises `ChannelNotOpen`, and `StrataError` if the topic cannot be subscribed; the channel then stays
        stopped.
        """
        await self._open_session().start()
        return True

    async def stop(self, *, timeout: float | None = None) -> None:
        """Undo `start` once nothing is under way; idempotent. A later `start` continues from there (C-023).

        First waits for messages to go out, as `close` does. Those that are not out by then wait for `start`,
        and `sync_status` shows them. Cancelling ends the wait for messages but not the stopping.
        """
        await self._open_session().stop(self._drain_seconds(timeout))

    def is_started(self) -> bool:
        """Whether the channel works; False from the moment when it begins to stop."""
        session = self._session
        return session is not None and session.accepting and session.failure is None

    # Sending.

    @_named_as_documented
    async def send(self, payload: bytes, *, request_id: str | None = None) -> str:
        """Give a message to the channel; returns its request id once it is stored (C-012).

        Events report what becomes of the message. With a durable store it is also sent again after a restart.
        Cancelling stops the wait but not the message.

        A program may choose the `request_id`, of up to 128 bytes. A second call with the same id and payload
        sends nothing more and returns once the first message is stored. The program may therefore repeat a
        call that it did not see finish, even after a restart if the store is durable. The channel remembers
        the last 10 000 ids, and those of all unacknowledged messages, but not those of refused messages.

        Raises, having sent nothing, `EmptyPayload`, `PayloadTooLarge`, `OutgoingFull` or `SendQueueFull` if
        too much is on its way already, `RequestIdInUse` if another payload has the id, `PersistenceError`
        while the store is failing, `NotStarted`, `ChannelNotOpen`, and `ValueError` for an id of another
        length. The event `sending-message-irrecoverable-error` reports the refusal too. Raises
        `ChannelFailed` if the channel closes itself meanwhile; the message may then be sent or not.
        """
        chosen = request_id is not None
        request_id = self._request_id() if request_id is None else check_request_id(request_id)
        try:
            session = self._open_session(started=True)
            session.check_store()
            session.engine.sending.send(payload, request_id, session.now_ms(), chosen=chosen)
        except StrataError as error:
            await self._tell_refusal(payload, request_id, error)
            raise
        session.flush()
        await session.writer.written()
        session.check()
        return request_id

    @_named_as_documented
    async def send_ephemeral(self, payload: bytes) -> str:
        """Send a message once, to current listeners: no history, no acknowledgement, no retry (C-017).

        Returns its request id. `message-sent` reports that the transport has it, `ephemeral-message-dropped`
        that the rate limit did not allow it. Raises `EmptyPayload`, `MessageTooLarge`, `EncryptionFailed`,
        `NotStarted`, `ChannelNotOpen`. If the call is cancelled, the message may be sent or not.
        """
        request_id = self._request_id()
        try:
            session = self._open_session(started=True)
            limit = self._largest_payload()
            most = largest_ephemeral(limit, self._channel_id, self.sender_id, hook_overhead=self._overhead)
            ephemeral = session.engine.ephemerals.send(payload, request_id, session.now_ms(), most)
            if ephemeral is not None:
                await session.send_ephemeral(ephemeral)
        except StrataError as error:
            await self._tell_refusal(payload, request_id, error)
            raise
        session.check()
        session.flush()
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

    sendEphemeral = send_ephemeral
    isStarted = is_started

    # Receiving.

    def __aiter__(self) -> AsyncIterator[MessageReceived]:
        """Begin to iterate. With `at_least_once`, unacknowledged messages are handed over again first."""
        if self._session is not None:
            self._session.handover.begin()
        return self

    async def __anext__(self) -> MessageReceived:
        """Return the next message of another participant, in causal order, once. Cancelling loses nothing.

        With `at_least_once`, asking for a message acknowledges the previous one, unless `auto_ack` is off.
        The iteration ends when the channel is closed. Raises `PersistenceError` if its store failed
        permanently, `ChannelFailed`, and `RuntimeError` if another task is already receiving, or an iterator
        of all events has taken messages.
        """
        session = self._session
        if session is None:
            raise StopAsyncIteration
        return await session.handover.next()

    async def ack(self, *messages: MessageReceived | ReliableMessageReceived) -> None:
        """Acknowledge messages that were handed over with `hand_over="at_least_once"`: they never come again.

        Returns once the store has removed them. Messages that are already acknowledged are ignored; with
        `at_most_once` all of them are. Raises `TypeError` for anything but received messages,
        `PersistenceError` if the store failed permanently, `ChannelNotOpen`, `ChannelFailed`. Cancelling
        stops only the wait.
        """
        for message in messages:
            if not isinstance(message, MessageReceived | ReliableMessageReceived):
                raise TypeError(f"not a received message: {message!r}")
        await self._open_session().handover.ack(messages)

    def events(self, *names: str) -> Events:
        """An asynchronous iterator of the events of these names, or by default of all events about messages
        (C-027).

        Received messages are taken by iterating the channel. While nobody iterates it, the handlers of the
        two received events take them, and if there are none, an iterator that includes one of these events.
        An iterator takes a message when it is asked for an event and has no other. An iterator of all events
        only observes the messages while something else takes them. Once it has taken any, the channel cannot
        be iterated until the iterator is closed, because each would miss what the other gets.

        Raises `ChannelNotOpen`, `ChannelFailed`, and `ValueError` for an unknown name.
        """
        return self._open_session().handover.events(names)

    async def history(self, *, before: str | int | None = None, limit: int = 50) -> PastMessages:
        """Return a page of past messages, own messages included, without handing anything over.

        The relays are read backwards, even if no other participant is online. A page has at most `limit`
        messages: the newest ones, those right before the page whose `before` is given, or those before a time
        in Unix seconds. Relays are read as far back as `query_window_ms`. Cancelling changes nothing.

        Raises `InvalidPlace`, `ValueError` for a limit that is not between 1 and 1 000, `StrataError` if no
        relay answers, `ChannelNotOpen`.
        """
        return await self._open_session().past(before, limit)

    # Inspection.

    def sync_status(self) -> SyncStatus:
        """The outstanding and the missing messages, and since when. Raises `ChannelNotOpen`."""
        return self._open_session().sync_status()

    @property
    def health(self) -> ChannelHealth:
        """Whether the channel can do its work."""
        session = self._session
        store = session.writer.health if session is not None else WriterHealth(0, 0, None)
        conflict = None if session is None else session.engine.conflicts.current(session.now_ms())
        full = session is not None and session.engine.inbox.is_full
        error = None if session is None else session.failure
        return ChannelHealth(
            self.is_started(),
            self._node.connection_status,
            store,
            sender_conflict=conflict,
            inbox_full=full,
            undecryptable=0 if session is None else session.undecryptable,
            error=error,
        )

    @property
    def statistics(self) -> ChannelStatistics:
        """The counts since the channel was opened. Raises `ChannelNotOpen`."""
        return self._open_session().statistics()

    def at_risk(self) -> AtRisk:
        """The message and events that a crash at this moment would lose: see `AtRisk`."""
        handover = self._open_session().handover
        return AtRisk(handover.in_hand, handover.untold)

    def log(self) -> list[str]:
        """The ids of all SDS messages in the order that every participant shares (C-141).

        For inspection only: a message may still be inserted between two others. Raises `ChannelNotOpen`.
        """
        return [entry.message_id for entry in self._open_session().engine.sds.log()]

    def causal_log(self) -> list[tuple[str, str, int, tuple[str, ...]]]:
        """The log with causal histories: message id, sender id, Lamport time, ids of the messages it follows.

        In the order of `log`, and for inspection only too; it decodes every message. Raises `ChannelNotOpen`.
        """
        return causal_log(self._open_session().engine.sds)

    def _open_session(self, *, started: bool = False) -> ChannelSession:
        if self._session is None:
            raise ChannelNotOpen
        self._session.check()
        if started and not self._session.accepting:
            raise NotStarted
        return self._session
