"""The two ends: `Tx` posts messages, `Rx` receives them (T-001 … T-026)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Generic, Self, TypeVar

from strata.txrx.addresses import Address
from strata.txrx.errors import (
    CodecError,
    OversizedMessage,
    SendError,
    TxRxClosed,
    TxRxError,
)
from strata.txrx.queue import RxQueue
from strata.txrx.receiving import ReceiverCounters
from strata.txrx.returns import ReturnChannel
from strata.txrx.sending import SenderCounters
from strata.txrx.status import ACTIVE, TxStatus, Watch

__all__ = ["Rx", "Tx", "when_forgotten"]

M = TypeVar("M")

_log = logging.getLogger(__name__)


class Tx(ABC, Generic[M]):
    """The sending end, on one event loop. `close` it, or use it as a context manager.

    The messages of one Tx arrive in the order posted; messages of different Tx have no order. A message that
    is returned with `DeliveryStatus.UNKNOWN` may have been delivered: its acknowledgement may have been lost.
    Success means that the message is in the receiver's queue, not that the receiver took it from there.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._status = Watch(ACTIVE)

    def addr(self) -> Address:
        """The address of the receiving end."""
        return self._address

    def status(self) -> Watch[TxStatus]:
        """Active until this end is closed permanently, by its owner, the receiver or the delivery timeout."""
        return self._status

    def try_post(self, message: M, return_channel: ReturnChannel[M] | None = None) -> ReturnChannel[M]:
        """Put a message into the outbox, and return its return channel at once.

        The return channel settles once: with None when the message is in the receiver's queue, or with the
        `SendError` that returns the message. Raises `ValueError` for another message's return channel.
        """
        channel: ReturnChannel[M] = ReturnChannel() if return_channel is None else return_channel
        channel._take()
        self._do_post(message, channel)
        return channel

    def post(self, message: M) -> None:
        """Post without a return channel. A message that cannot be delivered is dropped and counted.

        Watch `status()` instead. Raises `SendError` only for a message that no Tx of this type can send,
        such as an oversized one.
        """
        error = self._do_post(message, None)
        if error is not None and isinstance(error.error, CodecError | OversizedMessage):
            raise error

    async def send(self, message: M) -> None:
        """Post, and wait until the message is in the receiver's queue.

        Raises `SendError` with the message if it is returned. Cancelling it only ends the waiting: the
        message stays where it is, and may be delivered. `status()` says whether the Tx is open (T-060).
        """
        channel: ReturnChannel[M] = ReturnChannel()
        self._do_post(message, channel)
        self._hurry()
        error = await channel
        if error is not None:
            raise error

    @abstractmethod
    def _do_post(self, message: M, return_channel: ReturnChannel[M] | None) -> SendError[M] | None:
        """Take a message. If it is refused, settle its return channel with the error and return the error."""

    def _hurry(self) -> None:
        """Write at once, because a `send` waits for the last message."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """The number of messages that are neither delivered nor returned."""

    @property
    def outbox_size(self) -> int:
        """The number of messages waiting to be written."""
        return 0

    @property
    def unacked_size(self) -> int:
        """The number of messages that were written and are not acknowledged."""
        return 0

    @abstractmethod
    async def drain(self, most: int = 0) -> None:
        """Wait until at most `most` messages are pending: the others were delivered or returned.

        Cancelling it only ends the waiting.
        """

    @abstractmethod
    async def close(self) -> list[SendError[M]]:
        """Refuse further messages, wait for pending ones up to the delivery timeout, and return the rest.

        Cancelling it closes at once: pending messages are returned on their return channels.
        """

    @abstractmethod
    def statistics(self) -> SenderCounters:
        """The counters of this end so far."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @staticmethod
    def _refused(error: TxRxError, message: M, channel: ReturnChannel[M] | None) -> SendError[M]:
        returned = SendError(error, message)
        if channel is not None:
            channel._settle(returned)
        return returned

    def _set_closed(self, error: TxRxError) -> None:
        self._status._set(TxStatus(closed=True, reason=str(error)))


class Rx(ABC, Generic[M]):
    """The receiving end. `close` it, or use it as a context manager; iterate over it to receive.

    A message in the queue belongs to the receiver. A message that is never received is lost with the Rx,
    although its sender has been informed that it arrived (T-070); `unread` is the number of such messages.
    """

    def __init__(self, address: Address, queue: RxQueue[M]) -> None:
        self._address = address
        self._queue = queue

    def addr(self) -> Address:
        """The address that is served, with the real port."""
        return self._address

    def recv(self) -> Coroutine[object, None, M]:
        """Receive the next message. Cancelling it loses none.

        Raises `TxRxClosed` once the Rx is closed and its queue is empty.
        """
        # This is the queue's own coroutine: another one around it would cost time for each message.
        return self._queue.get()

    @property
    def unread(self) -> int:
        """The number of messages waiting to be received."""
        return len(self._queue)

    def __aiter__(self) -> AsyncIterator[M]:
        """Iterate over messages until the Rx is closed.

        Cancelling the wait for a message loses none, and the iteration can continue.
        """
        return _Messages(self)

    @abstractmethod
    def close(self) -> None:
        """Acknowledge the accepted messages, inform the senders, and free the address. Does not wait.

        The connection of a sender that does not read is aborted after a few seconds.
        """

    @abstractmethod
    async def join(self) -> None:
        """Close, and wait until the senders have been informed, for a few seconds at most.

        Cancelling it leaves the end closed.
        """

    @abstractmethod
    def statistics(self) -> ReceiverCounters:
        """The counters of this end so far."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.join()
        if self.unread:
            _log.warning("%d messages at %s were never received", self.unread, self._address)


def when_forgotten(end: Rx[M], close: Callable[[str], None]) -> weakref.finalize[..., Rx[M]]:
    """Make an end close itself when no reference to it remains. `detach` the result when the end is closed.

    `close` must not refer to the end.
    """
    finalizer = weakref.finalize(end, _close_soon, close, asyncio.get_running_loop())
    finalizer.atexit = False
    return finalizer


def _close_soon(close: Callable[[str], None], loop: asyncio.AbstractEventLoop) -> None:
    # Garbage collection may run on any thread, and after the loop is closed.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(close, "the receiver is gone")


class _Messages(AsyncIterator[M]):
    """The messages of an `Rx`. Not a generator, which a cancelled wait would end permanently."""

    __slots__ = ("_end",)

    def __init__(self, end: Rx[M]) -> None:
        self._end = end  # keeps the end alive

    async def __anext__(self) -> M:
        try:
            return await self._end.recv()
        except TxRxClosed:
            raise StopAsyncIteration from None
