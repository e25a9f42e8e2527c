"""The queue between a server's connections, or a local sender, and `recv` (T-020, T-021, T-050 … T-058)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from strata.txrx.errors import ChannelClosed

__all__ = ["Inbox"]

M = TypeVar("M")


class Inbox(Generic[M]):
    """First in, first out; whoever fills it asks for `room` first, and waits for it in turn.

    A message is taken in the same step in which `get` returns it, so cancelling `get` loses none.
    """

    __slots__ = ("_capacity", "_closed", "_items", "_low", "_receivers", "_senders")

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._low = 0 if capacity is None else capacity // 2
        """With so many messages or fewer, half of it is free."""
        self._items: deque[M] = deque()
        self._receivers: deque[asyncio.Future[None]] = deque()
        self._senders: dict[object, Callable[[], None]] = {}
        self._closed: ChannelClosed | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def closed(self) -> ChannelClosed | None:
        """Why nothing more will come."""
        return self._closed

    @property
    def room(self) -> int:
        """How many messages fit now."""
        if self._capacity is None:
            return 2**31
        return max(0, self._capacity - len(self._items))

    def put(self, messages: Iterable[M]) -> None:
        """Add messages there is room for."""
        self._items.extend(messages)
        if self._receivers:
            self._wake()

    def put_one(self, message: M) -> None:
        """Add one that there is room for."""
        self._items.append(message)
        if self._receivers:
            self._wake()

    def when_room(self, key: object, call: Callable[[], None]) -> None:
        """Have `call` called once half the queue is free, in the order of asking; one call for each key."""
        self._senders.setdefault(key, call)

    def forget(self, key: object) -> None:
        """That key needs no room any more."""
        self._senders.pop(key, None)

    def close(self, reason: ChannelClosed) -> None:
        """Nothing more will come; what is here can still be taken."""
        if self._closed is None:
            self._closed = reason
            self._senders.clear()
            while self._receivers:
                self._wake()

    async def get(self) -> M:
        """The next message. Raises `ChannelClosed` once closed and empty. Cancelling it loses nothing."""
        items = self._items
        while not items:
            if self._closed is not None:
                raise ChannelClosed(self._closed.reason)
            waiter = asyncio.get_running_loop().create_future()
            self._receivers.append(waiter)
            try:
                await waiter
            except BaseException:
                if waiter.done() and not waiter.cancelled():
                    # Woken and cancelled at once: somebody else may take what there is.
                    self._wake()
                elif waiter in self._receivers:
                    self._receivers.remove(waiter)
                raise
        message = items.popleft()
        if self._senders and len(items) <= self._low:
            self._offer_room()
        if items and self._receivers:
            self._wake()
        return message

    def _wake(self) -> None:
        while self._receivers:
            waiter = self._receivers.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _offer_room(self) -> None:
        # Not for each single message: what waits would be read, and acknowledged, in steps of one.
        # To all that fit: one that has nothing waiting leaves its room to the next, and no `get` may follow.
        while self._senders and self._capacity is not None and self.room * 2 >= self._capacity:
            key = next(iter(self._senders))
            self._senders.pop(key)()
