"""Events and received messages on their way to the program: after they are durable, never before (C-255).

Events wait here until the store has confirmed the step that they tell of. Received messages wait in the
inbox. A task that iterates the channel takes them; while there is none, the handlers of the two received
events do.

With `hand_over="once"` a message leaves the store before the program gets it. The program gets it at most
once: a crash in between loses it. With `"again"` a message leaves the store when the program asks for the
next one. The program gets it at least once: a crash before that hands it over again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Self

from strata.channels.messaging.emitter import EventEmitter
from strata.channels.messaging.values import MessageEnvelope
from strata.channels.persistence.writer import ChangeWriter
from strata.channels.reliable.alarm import Alarm
from strata.channels.reliable.errors import EventsMissed
from strata.channels.reliable.events import (
    CHANNEL_EVENTS,
    ChannelEvent,
    MessageReceived,
    ReliableEnvelope,
    ReliableMessageReceived,
)
from strata.channels.reliable.inbox import MessageInbox, Received

__all__ = ["Events", "Handover"]

_RECEIVED = (MessageReceived.name, ReliableMessageReceived.name)
_MAX_EVENTS = 10_000


class Events(AsyncIterator[ChannelEvent]):
    """The events of a channel as an asynchronous iterator (C-027), until `close` or the channel's end.

    At most 10 000 wait; then the oldest are dropped, and the iterator raises `EventsMissed` once, saying how
    many, before it goes on.
    """

    def __init__(self, emitter: EventEmitter, names: tuple[str, ...], *, takes: bool) -> None:
        self.looks_on = not takes
        """Whether the iterator hears of received messages without taking them."""
        self._emitter = emitter
        self._names = names
        self._waiting: deque[ChannelEvent] = deque()
        self._missed = 0
        self._arrived = asyncio.Event()
        self._closed = False
        for name in names:
            emitter.count(name)  # all are checked before any is listened to
        for name in names:
            emitter.on(name, self._take)

    @property
    def closed(self) -> bool:
        """Whether no further event will arrive."""
        return self._closed

    def close(self) -> None:
        """Stop listening; the events that have arrived can still be read. Idempotent."""
        if not self._closed:
            self._closed = True
            for name in self._names:
                self._emitter.off(name, self._take)
            self._arrived.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChannelEvent:
        """The next event. Cancelling loses nothing. Raises `EventsMissed`."""
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        if self._missed:
            missed, self._missed = self._missed, 0
            raise EventsMissed(missed)
        return self._waiting.popleft()

    def _take(self, event: ChannelEvent) -> None:
        if len(self._waiting) == _MAX_EVENTS:
            self._waiting.popleft()
            self._missed += 1
        self._waiting.append(event)
        self._arrived.set()


class Handover:
    """Hands a channel's events and messages to its program."""

    def __init__(
        self,
        channel_id: str,
        inbox: MessageInbox,
        writer: ChangeWriter,
        emitter: EventEmitter,
        *,
        once: bool,
        on_taken: Callable[[], None],
    ) -> None:
        """`on_taken` is called when a message has left the inbox, to store that it has."""
        self._channel_id = channel_id
        self._inbox = inbox
        self._writer = writer
        self._emitter = emitter
        self._once = once
        self._on_taken = on_taken
        self._gate: deque[tuple[int, ChannelEvent | int]] = deque()
        first = inbox.first()
        self._available = 0 if first is None else max(each.position for each in inbox)
        self._iterating = False
        self._iterated = False
        """Whether messages are taken by iterating: then handlers hear of each as it is taken."""
        self._in_hand: Received | None = None
        self._processed: Received | None = None
        self._arrived = asyncio.Event()
        self._woken = Alarm()
        self._ended = False
        self._iterators: list[Events] = []

    @property
    def in_hand(self) -> MessageReceived | None:
        """The message that has left the inbox and is not with the program yet."""
        return None if self._in_hand is None else self._in_hand.message

    @property
    def untold(self) -> tuple[ChannelEvent, ...]:
        """Events that wait for the store."""
        return tuple(told for _, told in self._gate if not isinstance(told, int))

    def tell(self, events: list[ChannelEvent], ticket: int, newest: int) -> None:
        """Tell these events, and hand over messages up to position `newest`, once `ticket` is durable."""
        self._gate.extend((ticket, event) for event in events)
        if newest > self._available:
            self._gate.append((ticket, newest))
        if self._gate:
            self._woken.set()

    def wake(self) -> None:
        """The store has confirmed more, or a handler was added."""
        self._woken.set()

    def end(self) -> None:
        """The channel is closed: iterators stop."""
        self._ended = True
        self._arrived.set()
        self._woken.set()
        for events in self._iterators:
            events.close()

    def events(self, names: tuple[str, ...]) -> Events:
        """An iterator of events, of all of them if none are named. Raises `ValueError` for unknown names."""
        events = Events(self._emitter, names or CHANNEL_EVENTS, takes=bool(names))
        self._iterators = [each for each in self._iterators if not each.closed]
        self._iterators.append(events)
        self._woken.set()
        return events

    async def run(self) -> None:
        """Tell events and hand over messages for as long as the channel is open."""
        while not self._ended:
            self._woken.clear()
            await self.drain()
            if await self._hand_to_handlers():
                continue
            await self._woken.wait()

    async def drain(self) -> None:
        """Tell every event that is durable by now."""
        while self._gate and self._gate[0][0] <= self._writer.confirmed:
            _, told = self._gate.popleft()
            if isinstance(told, int):
                self._available = max(self._available, told)
                self._arrived.set()
            else:
                await self._emitter.emit(told)

    # Received messages.

    async def next(self) -> MessageReceived:
        """The next message, for the task that iterates. Cancelling loses nothing.

        Raises `StopAsyncIteration` once the channel is closed, `PersistenceError` if its store failed for
        good, and `RuntimeError` for a second task.
        """
        if self._iterating:
            raise RuntimeError("another task is already receiving from this channel")
        self._iterating = self._iterated = True
        try:
            return await self._next()
        finally:
            self._iterating = False

    async def _next(self) -> MessageReceived:
        if self._processed is not None:
            processed, self._processed = self._processed, None
            self._take(processed)
            await self._writer.written()  # a crash before this hands the message over again
        while self._in_hand is None:
            if self._ended:
                raise StopAsyncIteration
            received = self._first()
            if received is None:
                self._arrived.clear()
                await self._arrived.wait()
            elif self._once:
                self._in_hand = received
                self._take(received)
            else:
                await self._announce(received)
                self._processed = received
                return received.message
        # The message has left the inbox: it stays in hand until the store has forgotten it.
        received = self._in_hand
        await self._writer.written()
        await self._announce(received)
        self._in_hand = None
        return received.message

    async def _hand_to_handlers(self) -> bool:
        """Hand a message over to handlers, if nobody iterates; True if there was one."""
        if self._iterated or self._ended or not self._has_takers():
            return False
        received = self._first()
        if received is None:
            return False
        if self._once:
            self._in_hand = received
            self._take(received)
            await self._writer.written()
            self._in_hand = None
            await self._announce(received)
        else:
            await self._announce(received)
            self._take(received)
        return True

    def put_back(self) -> None:
        """The channel closes: a message in hand that nobody has heard of stays for the next opening."""
        if self._in_hand is not None and not self._in_hand.announced:
            self._inbox.put_back(self._in_hand)
            self._in_hand = None

    def _has_takers(self) -> bool:
        looking_on = sum(each.looks_on and not each.closed for each in self._iterators)
        return any(self._emitter.count(name) > looking_on for name in _RECEIVED)

    def _first(self) -> Received | None:
        received = self._inbox.first()
        return received if received is not None and received.position <= self._available else None

    def _take(self, received: Received) -> None:
        self._inbox.take(received)
        self._on_taken()

    async def _announce(self, received: Received) -> None:
        """Tell the handlers once, even if the wait for a slow handler is cancelled."""
        if received.announced or not any(map(self._emitter.count, _RECEIVED)):
            return
        received.announced = True
        message = received.message
        await self._emitter.emit(message)
        if self._emitter.count(ReliableMessageReceived.name):
            inner = MessageEnvelope(
                content_topic=message.content_topic, payload=message.payload, ephemeral=message.ephemeral
            )
            envelope = ReliableEnvelope(message_envelope=inner, channel_id=self._channel_id)
            await self._emitter.emit(
                ReliableMessageReceived(request_id=message.request_id, envelope=envelope, message=message)
            )
