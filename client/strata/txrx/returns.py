"""The one-shot return channel of a message that could not be delivered (T-006, T-007; decision A-161)."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Generic, TypeVar

from strata.txrx.errors import SendError

__all__ = ["ReturnChannel"]

M = TypeVar("M")


class ReturnChannel(Generic[M]):
    """An awaitable for the outcome: None if the message was delivered, or the `SendError` that returns it.

    Any number of tasks may wait, and cancelling one of them does not affect the message. A future is made
    only for a task that waits.
    """

    __slots__ = ("_error", "_settled", "_taken", "_waiting")

    def __init__(self) -> None:
        self._taken = False
        self._settled = False
        self._error: SendError[M] | None = None
        self._waiting: list[asyncio.Future[None]] | None = None

    @property
    def settled(self) -> bool:
        """Whether the message has been delivered or returned."""
        return self._settled

    @property
    def error(self) -> SendError[M] | None:
        """The error that returned the message; None while it is in transit and after its delivery."""
        return self._error

    def __await__(self) -> Generator[object, None, SendError[M] | None]:
        while not self._settled:
            waiter = asyncio.get_running_loop().create_future()
            if self._waiting is None:
                self._waiting = []
            self._waiting.append(waiter)
            try:
                yield from waiter
            except asyncio.CancelledError:
                if self._waiting is not None:
                    self._waiting.remove(waiter)
                raise
        return self._error

    def _take(self) -> None:
        if self._taken:
            raise ValueError("a return channel is for one message")
        self._taken = True

    def _settle(self, error: SendError[M] | None = None) -> None:
        self._settled, self._error = True, error
        waiting, self._waiting = self._waiting, None
        for waiter in waiting or ():
            if not waiter.done():
                waiter.set_result(None)
