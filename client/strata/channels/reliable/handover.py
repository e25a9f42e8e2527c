"""Delivers events and received messages to the program once they are durable, never before (C-255).

Events wait here until the store has confirmed the step that they report. Received messages wait in the inbox.
A task that iterates the channel takes them. While there is none, the handlers of the two received events take
them; and if there are no handlers either, iterators of events that ask for one.

With `hand_over="at_most_once"` a message leaves the store before the program gets it, and a crash in between
loses it. With `"at_least_once"` it leaves the store when it is acknowledged, and after a crash before that it
is handed over again. A handler acknowledges by returning; if it raises, it is called again with the message
after a pause. A program that iterates acknowledges by asking for the next message. With `auto_ack` off, only
`ack` of the channel or of the message acknowledges.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from strata.channels.awaiting import Alarm
from strata.channels.messaging.emitter import EventEmitter, Handler
from strata.channels.messaging.values import MessageEnvelope
from strata.channels.persistence.writer import ChangeWriter
from strata.channels.reliable.errors import ChannelFailed, ChannelNotOpen
from strata.channels.reliable.event_iterator import Events
from strata.channels.reliable.events import (
    CHANNEL_EVENTS,
    ChannelEvent,
    MessageReceived,
    ReliableEnvelope,
    ReliableMessageReceived,
)
from strata.channels.reliable.inbox import MessageInbox, Received
from strata.channels.reliable.program_acks import hand_over

__all__ = ["Events", "Handover"]

_RECEIVED = (MessageReceived.name, ReliableMessageReceived.name)
_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 1.0, 60.0
"""The pause before a handler that raised is called again with the message; it doubles each time."""


class _Again(NamedTuple):
    """A message whose handlers raised and will be called with it again; ordered by time."""

    at: float
    pause: float
    """The pause before the handlers are called again, in seconds; the next pause is longer."""
    position: int
    received: Received


class Handover:
    """Hands a channel's events and messages to its program."""

    def __init__(
        self,
        channel_id: str,
        inbox: MessageInbox,
        writer: ChangeWriter,
        emitter: EventEmitter,
        *,
        at_most_once: bool,
        auto_ack: bool,
        on_taken: Callable[[], None],
    ) -> None:
        """`on_taken` is called when a message has left the inbox, so that this change is stored."""
        self._channel_id = channel_id
        self._inbox = inbox
        self._writer = writer
        self._emitter = emitter
        self._at_most_once = at_most_once
        self._auto_ack = auto_ack
        self._on_taken = on_taken
        self._gate: deque[tuple[int, ChannelEvent | int]] = deque()
        self._telling: tuple[ChannelEvent, list[Handler]] | None = None
        """The event that is being reported, and the handlers still to be called with it, also if a slow one
        was cancelled because the channel closes."""
        self._available = max((each.position for each in inbox), default=0)
        self._iterating = False
        self._iterated = False
        """Whether messages are taken by iterating; handlers are then called with each as it is taken."""
        self._in_hand: Received | None = None
        self._processed: Received | None = None
        """The message that is acknowledged when the program asks for the next one."""
        self._unacknowledged: dict[int, Received] = {}
        """Messages that the program has not acknowledged, by the `id()` of the objects that it got."""
        self._again: list[_Again] = []
        """A heap."""
        self._arrived = asyncio.Event()
        self._woken = Alarm()
        self._closing = False
        self._ended = False
        self._failure: ChannelFailed | None = None
        self._iterators: list[Events] = []

    @property
    def in_hand(self) -> MessageReceived | None:
        """The message that has left the inbox and is not with the program yet."""
        return None if self._in_hand is None else self._in_hand.message

    @property
    def untold(self) -> tuple[ChannelEvent, ...]:
        """The events that wait for the store."""
        return tuple(told for _, told in self._gate if not isinstance(told, int))

    def tell(self, events: list[ChannelEvent], ticket: int, newest: int) -> None:
        """Report these events, and hand over messages up to position `newest`, once `ticket` is durable."""
        self._gate.extend((ticket, event) for event in events)
        if newest > self._available:
            self._gate.append((ticket, newest))
        if self._gate:
            self._woken.set()

    def wake(self) -> None:
        """The store has confirmed more, or the program has begun to listen."""
        self._woken.set()

    def fail(self, error: ChannelFailed) -> None:
        """The channel has closed itself; all waiting calls raise this error. Calls `end`."""
        self._failure = error
        self.end(error)

    def end(self, error: Exception | None = None) -> None:
        """The channel is closed: iterators stop, or raise `error`."""
        self._ended = True
        self._arrived.set()
        self._woken.set()
        for events in self._iterators:
            events.close(error)

    def events(self, names: tuple[str, ...]) -> Events:
        """An iterator of the named events, or by default of all. Raises `ValueError` for unknown names."""
        events = Events(self._emitter, names or CHANNEL_EVENTS, names_all=not names, on_ask=self.wake)
        self._iterators = [each for each in self._iterators if not each.closed]
        self._iterators.append(events)
        self._woken.set()
        return events

    async def run(self) -> None:
        """Report events and hand over messages as long as the channel is open."""
        while not self._ended:
            self._woken.clear()
            await self.drain()
            pause = await self._hand_on()
            if pause != 0:
                await self._woken.wait(pause)

    async def drain(self) -> None:
        """Report every event that is durable by now."""
        while self._telling or (self._gate and self._gate[0][0] <= self._writer.confirmed):
            if self._telling is None:
                _, told = self._gate.popleft()
                if isinstance(told, int):
                    self._available = max(self._available, told)
                    self._arrived.set()
                    continue
                self._telling = told, self._emitter.handlers(told.name)
            event, left = self._telling
            await self._emitter.call(event, only=left)
            self._telling = None

    # Received messages, for the task that iterates.

    def begin(self) -> None:
        """The program begins to iterate; messages that an earlier loop did not finish are due again."""
        if not self._iterating:
            self._processed = None
            self._again.clear()
            self._inbox.take_back()

    async def next(self) -> MessageReceived:
        """Return the next message, for the task that iterates. Cancelling loses nothing.

        Raises `StopAsyncIteration` once the channel is closed, `ChannelFailed`, `PersistenceError` if its
        store failed permanently, and `RuntimeError` for a second task, or if an open iterator of all events
        has taken messages.
        """
        if self._iterating:
            raise RuntimeError("another task is already receiving from this channel")
        if any(each.has_taken and not each.closed for each in self._iterators):
            raise RuntimeError(
                "an iterator of all events takes the received messages: close it, or iterate the channel "
                "before it, or name its events"
            )
        self._iterating = self._iterated = True
        try:
            return await self._next()
        finally:
            self._iterating = False

    async def _next(self) -> MessageReceived:
        await self._acknowledge_processed()
        while True:
            while self._in_hand is None:
                if self._failure is not None:
                    raise self._failure.again()
                if self._ended or self._closing:
                    raise StopAsyncIteration
                received = self._left_behind() or self._first()
                if received is None:
                    self._arrived.clear()
                    await self._arrived.wait()
                elif self._at_most_once:
                    self._in_hand = received
                    self._take(received)
                else:
                    await self._announce(received)
                    self._hand(received)
                    return received.message
            # The message has left the inbox; it stays in hand until the store has removed it.
            received = self._in_hand
            await self._writer.written()
            if self._in_hand is received:  # else it was put back, or handlers took it
                break
        await self._announce(received)
        self._in_hand = None
        return received.message

    # Received messages, for handlers and iterators of events.

    async def _hand_on(self) -> float | None:
        """Hand a message over if no task iterates. Returns the seconds until the next look, if any."""
        if self._iterated or self._ended or self._closing:
            return None
        if self._has_handlers():
            return await self._hand_to_handlers()
        asking = self._asking()
        if not asking:
            return None
        await self._acknowledge_processed()
        received = self._in_hand or self._left_behind() or self._first()
        if received is None:
            return None
        for events in asking:
            events.has_taken = events.names_all
        if self._at_most_once:
            await self._hand_once(received)
        else:
            await self._announce(received)
            self._hand(received)
        return 0

    async def _hand_to_handlers(self) -> float | None:
        received, pause = self._in_hand or self._first(), 0.0
        now = asyncio.get_running_loop().time()
        while self._again and self._again[0].received.acknowledged:  # by the program in the meantime
            heappop(self._again)
        if self._again and self._again[0].at <= now:
            _, pause, _, received = heappop(self._again)
        if received is None:
            return self._again[0].at - now if self._again else None
        if self._at_most_once:
            await self._hand_once(received)
            return 0
        await self._announce(received)
        self._hand(received)
        if not received.untold:
            await self._acknowledge_processed()
        elif not received.acknowledged:
            # Handlers that raise are called again with the message, and hold up no other message (C-026).
            self._processed = None
            pause = min(max(_PAUSE_SECONDS, 2 * pause), _MAX_PAUSE_SECONDS)
            at = asyncio.get_running_loop().time() + pause
            heappush(self._again, _Again(at, pause, received.position, received))
        return 0

    async def _hand_once(self, received: Received) -> None:
        if self._in_hand is None:
            self._in_hand = received
            self._take(received)
        await self._writer.written()
        # Meanwhile it may have been put back. If all listeners have been removed, the next one gets it.
        if self._in_hand is received and any(map(self._emitter.count, _RECEIVED)):
            self._in_hand = None
            await self._announce(received)

    def put_back(self) -> None:
        """The channel closes; a message in hand that was announced to no handler stays for the next opening.

        Unacknowledged messages stay too, because nothing more can be stored.
        """
        self._closing = True
        if self._in_hand is not None and not self._in_hand.announced:
            self._inbox.put_back(self._in_hand)
            self._in_hand = None

    def _has_handlers(self) -> bool:
        iterators = [each for each in self._iterators if not each.closed]
        return any(
            self._emitter.count(name) > sum(name in each.names for each in iterators) for name in _RECEIVED
        )

    def _asking(self) -> list[Events]:
        """The iterators that may take a message and wait for one."""
        able = [each for each in self._iterators if not each.closed and any(map(each.names.count, _RECEIVED))]
        named = [each for each in able if not each.names_all]
        return [each for each in named or able if each.is_asking]

    def _left_behind(self) -> Received | None:
        """The first message on which handlers raised, now that handlers no longer take messages."""
        self._again = [each for each in self._again if not each.received.acknowledged]
        if not self._again:
            return None
        first = min(self._again, key=lambda each: each.position)
        self._again.remove(first)
        heapify(self._again)
        return first.received

    def _first(self) -> Received | None:
        received = self._inbox.first()
        if received is None or received.position > self._available:
            return None
        hand_over(received.message, self)
        return received

    # Acknowledging.

    async def ack(self, messages: Iterable[object]) -> None:
        """The program is done with these messages. Returns once the store has removed them.

        Raises `ChannelNotOpen` from the moment when the channel begins to close, `ChannelFailed`, and
        `PersistenceError` if the store failed permanently.
        """
        if self._failure is not None:
            raise self._failure.again()
        if self._closing or self._ended:
            raise ChannelNotOpen
        for message in messages:
            received = self._unacknowledged.get(id(message))
            if received is not None:
                self._acknowledge(received)
        await self._writer.written()

    async def _acknowledge_processed(self) -> None:
        processed, self._processed = self._processed, None
        if processed is not None:
            self._acknowledge(processed)
            await self._writer.written()  # after a crash before this, the message is handed over again

    def _acknowledge(self, received: Received) -> None:
        received.acknowledged = True
        if self._processed is received:
            self._processed = None
        for event in (received.message, received.envelope):
            self._unacknowledged.pop(id(event), None)
        self._take(received)

    def _hand(self, received: Received) -> None:
        """The program has a message that it will acknowledge, unless its handlers already did."""
        if received.acknowledged:
            return
        self._unacknowledged[id(received.message)] = received
        self._inbox.hand(received)
        if self._auto_ack:
            self._processed = received

    def _take(self, received: Received) -> None:
        self._inbox.take(received)
        self._on_taken()

    # Handlers.

    async def _announce(self, received: Received) -> None:
        """Call each handler once with the message.

        The next call of this method calls the handlers whose turn had not come when it was cancelled while
        waiting for a slow handler, and again those that raised. If these have all been removed, and no
        handler has returned from the message, it goes to the handlers that listen now.
        """
        if received.announced and not received.heard and self._have_gone(received.untold):
            received.announced = False
        if not received.announced:
            received.untold = {name: self._emitter.handlers(name) for name in _RECEIVED}
        if not any(received.untold.values()):
            return
        received.announced = True
        events: list[MessageReceived | ReliableMessageReceived] = [received.message]
        if self._emitter.count(ReliableMessageReceived.name):
            events.append(self._envelope(received))
        refused: dict[str, list[Handler]] = {}
        for event in events:
            if not self._at_most_once:
                self._unacknowledged[id(event)] = received
            only = received.untold.get(event.name, [])
            due = list(only)
            raised = await self._emitter.call(event, only=only)
            looking_on = [each.take for each in self._iterators]
            received.heard |= any(each not in (*only, *raised, *looking_on) for each in due)
            if raised and not self._at_most_once and not self._iterated:
                refused[event.name] = raised
        received.untold = refused

    def _have_gone(self, untold: dict[str, list[Handler]]) -> bool:
        """Whether there are handlers in `untold`, and none of them listens any more."""
        left = [handler in self._emitter.handlers(name) for name, some in untold.items() for handler in some]
        return bool(left) and not any(left)

    def _envelope(self, received: Received) -> ReliableMessageReceived:
        if received.envelope is None:
            message = received.message
            inner = MessageEnvelope(
                content_topic=message.content_topic, payload=message.payload, ephemeral=message.ephemeral
            )
            envelope = ReliableEnvelope(message_envelope=inner, channel_id=self._channel_id)
            received.envelope = ReliableMessageReceived(
                request_id=message.request_id, envelope=envelope, message=message
            )
            hand_over(received.envelope, self)
        return received.envelope
