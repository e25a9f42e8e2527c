"""The queue that `recv` reads; connections or a local sender fill it (T-020, T-021, T-050 … T-058)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from strata.txrx.errors import TxRxClosed

__all__ = ["RxQueue"]

M = TypeVar("M")


class RxQueue(Generic[M]):
    """A first-in, first-out queue. A sender checks `room` before it adds messages, and queues for more room.

    A message leaves the queue in the same step in which `get` returns it, so cancelling `get` loses none.
    """

    __slots__ = ("_capacity", "_closed", "_items", "_low", "_receivers", "_senders")

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._low = 0 if capacity is None else capacity // 2
        """The most messages with which half of the queue is free."""
        self._items: deque[M] = deque()
        self._receivers: deque[asyncio.Future[None]] = deque()
        self._senders: dict[object, Callable[[], None]] = {}
        self._closed: TxRxClosed | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def closed(self) -> TxRxClosed | None:
        """Why no further message follows; None while the queue is open."""
        return self._closed

    @property
    def room(self) -> int:
        """How many messages fit now; a large number for an unbounded queue."""
        if self._capacity is None:
            return 2**31
        return max(0, self._capacity - len(self._items))

    def put(self, messages: Iterable[M]) -> None:
        """Add messages, which must fit."""
        self._items.extend(messages)
        if self._receivers:
            self._wake()

    def put_one(self, message: M) -> None:
        """Add a message, which must fit."""
        self._items.append(message)
        if self._receivers:
            self._wake()

    def when_room(self, key: object, call: Callable[[], None]) -> None:
        """Call `call` when half the queue is free, in the order of requests; one call for each key."""
        self._senders.setdefault(key, call)

    def forget(self, key: object) -> None:
        """Remove a key that no longer waits for room."""
        self._senders.pop(key, None)

    def close(self, reason: TxRxClosed) -> None:
        """Accept no further message; the messages in the queue can still be taken."""
        if self._closed is None:
            self._closed = reason
            self._senders.clear()
            while self._receivers:
                self._wake()

    async def get(self) -> M:
        """Take the next message. Raises `TxRxClosed` once closed and empty. Cancelling it loses none."""
        items = self._items
        while not items:
            if self._closed is not None:
                raise TxRxClosed(self._closed.reason)
            waiter = asyncio.get_running_loop().create_future()
            self._receivers.append(waiter)
            try:
                await waiter
            except BaseException:
                if waiter.done() and not waiter.cancelled():
                    # Woken and cancelled at the same time: another receiver may take the message.
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
        # Not after each single message: otherwise waiting messages would be read and acknowledged one by one.
        # Room is offered until it is used: a sender without a waiting message leaves it to the next sender,
        # and no further `get` may follow.
        while self._senders and self._capacity is not None and self.room * 2 >= self._capacity:
            key = next(iter(self._senders))
            self._senders.pop(key)()
