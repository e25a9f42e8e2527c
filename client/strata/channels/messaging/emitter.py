"""Handlers by event name, as in the documents (C-026)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from strata.channels.awaiting import answer_of

__all__ = ["EventEmitter", "Handler", "NamedEvent", "callers"]

_log = logging.getLogger("strata.events")

Handler = Callable[[Any], Awaitable[object] | object]
"""Takes one event. The emitter waits for a coroutine function, so a slow handler slows the source."""


class NamedEvent(Protocol):
    """An event with a name."""

    @property
    def name(self) -> str:
        """The exact name used in the documents."""
        ...


class _Call:
    """A call of handlers by a task that waits for them."""

    __slots__ = ("task",)

    def __init__(self, task: asyncio.Task[object] | None) -> None:
        self.task = task
        """The task that waits; None once the handlers have ended."""


_calls: ContextVar[tuple[_Call, ...]] = ContextVar("strata_handlers", default=())
"""The calls that led here. Tasks that a handler starts inherit them, since the handler may wait for them."""


def callers() -> set[asyncio.Task[object]]:
    """The tasks whose handler calls led here, directly or through tasks that a handler started.

    Nothing that a handler calls may wait for these tasks or cancel them, because they wait for the handler.
    """
    return {call.task for call in _calls.get() if call.task is not None}


@contextmanager
def _calling() -> Iterator[None]:
    before = tuple(call for call in _calls.get() if call.task is not None)
    call = _Call(asyncio.current_task())
    _calls.set((*before, call))
    try:
        yield
    finally:
        call.task = None
        _calls.set(before)


class EventEmitter:
    """Calls the handlers of each event, in the order in which they were added.

    An error of a handler is logged; it stops neither the other handlers nor the emitter.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        also: Iterable[str] = (),
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """`also` are events that can be listened to but are not among `names`. `on_change` is called when a
        handler has been added."""
        self._names = tuple(names)
        self._handlers: dict[str, list[Handler]] = {name: [] for name in (*self._names, *also)}
        self._on_change = on_change

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all events, except those that were given as `also`."""
        return self._names

    def on(self, name: str, handler: Handler) -> Handler:
        """Call `handler` for each event of this name from now on. Returns it, for `off`.

        Raises `ValueError` for an unknown name.
        """
        self._of(name).append(handler)
        if self._on_change is not None:
            self._on_change()
        return handler

    def off(self, name: str, handler: Handler) -> None:
        """Stop calling a handler, if it was added. Raises `ValueError` for an unknown name."""
        handlers = self._of(name)
        if handler in handlers:
            handlers.remove(handler)

    def count(self, name: str) -> int:
        """The number of handlers of an event. Raises `ValueError` for an unknown name."""
        return len(self._of(name))

    async def emit(self, event: NamedEvent) -> None:
        """Call the handlers, and wait for asynchronous ones. Cancelling cancels the handler being awaited."""
        await self.call(event)

    def handlers(self, name: str) -> list[Handler]:
        """The handlers of an event, in order."""
        return list(self._of(name))

    async def call(self, event: NamedEvent, *, only: list[Handler] | None = None) -> list[Handler]:
        """Call the handlers as `emit` does, or `only` these of them. Returns those that raised.

        Each handler is removed from `only` as it is called; after a cancellation, the others are still there.
        """
        raised: list[Handler] = []
        if not (handlers := self.handlers(event.name)):
            return raised
        with _calling():
            for handler in handlers:
                if only is not None:
                    if handler not in only:
                        continue
                    only.remove(handler)
                try:
                    await answer_of(handler, event)
                except Exception:
                    _log.exception("a handler of %s raised", event.name)
                    raised.append(handler)
        return raised

    def _of(self, name: str) -> list[Handler]:
        handlers = self._handlers.get(name)
        if handlers is None:
            raise ValueError(f"no event is called {name!r}; there are {', '.join(self._handlers)}")
        return handlers
