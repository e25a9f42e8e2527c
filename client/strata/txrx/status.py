"""A value that can be watched (T-016), and the status of a `Tx` (T-017, T-018)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["ACTIVE", "TxStatus", "Watch"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TxStatus:
    """Active, or permanently closed with the reason."""

    closed: bool = False
    reason: str | None = None


ACTIVE = TxStatus()


class Watch(Generic[T]):
    """A value that any number of observers can read, and whose changes they can await."""

    __slots__ = ("_value", "_version", "_waiting")

    def __init__(self, value: T) -> None:
        self._value = value
        self._version = 0
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def value(self) -> T:
        """The current value."""
        return self._value

    async def changed(self) -> T:
        """Wait for the next value. Cancelling it loses nothing."""
        version = self._version
        while self._version == version:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.add(waiter)
            try:
                await waiter
            finally:
                self._waiting.discard(waiter)
        return self._value

    async def wait_for(self, predicate: Callable[[T], bool]) -> T:
        """The current value if it satisfies `predicate`, else the first later value that does.

        Cancelling it loses nothing.
        """
        while not predicate(self._value):
            await self.changed()
        return self._value

    def __aiter__(self) -> AsyncIterator[T]:
        """The current value, then the newest value after each change; values in between may be missed.

        Cancelling the wait for a value loses nothing, and the iteration can continue.
        """
        return _Values(self)

    def _set(self, value: T) -> None:
        if value == self._value:
            return
        self._value = value
        self._version += 1
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)


class _Values(AsyncIterator[T]):
    """The values of a `Watch`. Not a generator, which a cancelled wait would end permanently."""

    __slots__ = ("_seen", "_watch")

    def __init__(self, watch: Watch[T]) -> None:
        self._watch = watch
        self._seen = -1

    async def __anext__(self) -> T:
        while self._seen == self._watch._version:
            await self._watch.changed()
        self._seen = self._watch._version
        return self._watch._value
