"""The events of a channel as an asynchronous iterator (C-027)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Self

from strata.channels.messaging.emitter import EventEmitter
from strata.channels.reliable.errors import EventsMissed
from strata.channels.reliable.events import ChannelEvent

__all__ = ["Events"]

_MAX_EVENTS = 10_000


class Events(AsyncIterator[ChannelEvent]):
    """The events of a channel as an asynchronous iterator (C-027), until `close` or the channel's end.

    At most 10 000 events wait. Beyond that the oldest are dropped, and the iterator raises `EventsMissed`
    once, with their number, before it continues. Received messages that the iterator itself takes are not
    among them: it takes a message when it has nothing else to return.
    """

    def __init__(
        self,
        emitter: EventEmitter,
        names: tuple[str, ...],
        *,
        names_all: bool,
        on_ask: Callable[[], None],
    ) -> None:
        """`on_ask` is called when the program waits for an event."""
        self.names = names
        self.names_all = names_all
        """Whether it was opened for all events; it then takes messages only if nothing else does."""
        self.has_taken = False
        """Whether it has taken messages that an iteration of the channel would otherwise have taken."""
        self._emitter = emitter
        self._on_ask = on_ask
        self._waiting: deque[ChannelEvent] = deque()
        self._missed = 0
        self._askers = 0
        self._arrived = asyncio.Event()
        self._closed = False
        self._error: Exception | None = None
        for name in names:
            emitter.count(name)  # check all names before listening to any
        for name in names:
            emitter.on(name, self.take)

    @property
    def closed(self) -> bool:
        """Whether no further event will arrive."""
        return self._closed

    @property
    def is_asking(self) -> bool:
        """Whether the program waits for an event, and there is none."""
        return self._askers > 0 and not self._waiting

    def close(self, error: Exception | None = None) -> None:
        """Stop listening; events that have already arrived can still be read. Idempotent.

        The iterator then ends, or raises `error` first.
        """
        if not self._closed:
            self._closed = True
            self._error = error
            for name in self.names:
                self._emitter.off(name, self.take)
            self._arrived.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChannelEvent:
        """Return the next event. Cancelling loses nothing. Raises `EventsMissed`, or `ChannelFailed` once."""
        while not self._waiting:
            if self._closed:
                error, self._error = self._error, None
                raise error or StopAsyncIteration
            self._arrived.clear()
            self._askers += 1
            self._on_ask()
            try:
                await self._arrived.wait()
            finally:
                self._askers -= 1
        if self._missed:
            missed, self._missed = self._missed, 0
            raise EventsMissed(missed)
        return self._waiting.popleft()

    def take(self, event: ChannelEvent) -> None:
        """Receive an event, as its handler."""
        if len(self._waiting) == _MAX_EVENTS:
            self._waiting.popleft()
            self._missed += 1
        self._waiting.append(event)
        self._arrived.set()
