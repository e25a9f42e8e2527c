"""The two ends: `Tx` posts, `Rx` receives, and neither does the other's work (T-001 … T-026)."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from strata.txrx.addresses import Address
from strata.txrx.errors import (
    ChannelClosed,
    ChannelError,
    CodecError,
    OversizedMessage,
    SendError,
)
from strata.txrx.inbox import Inbox
from strata.txrx.receiving import ReceiverCounters
from strata.txrx.returns import ReturnChannel
from strata.txrx.sending import SenderCounters
from strata.txrx.status import ACTIVE, TxStatus, Watch

__all__ = ["Rx", "Tx"]

M = TypeVar("M")

_log = logging.getLogger(__name__)


class Tx(ABC, Generic[M]):
    """The transmitting end of a channel, on one event loop. `close` it, or use it as a context manager.

    Messages of one Tx arrive in the order posted; between different ones there is no order. Whatever comes
    back as undelivered with `Delivery.UNKNOWN` may have been delivered: its acknowledgement was lost. Success
    means that the message is in the receiver's queue, and nothing about what became of it there.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._status = Watch(ACTIVE)

    def addr(self) -> Address:
        """Where it sends to."""
        return self._address

    def status(self) -> Watch[TxStatus]:
        """Active, until it is closed for good: by its owner, by the receiver, or by the delivery timeout."""
        return self._status

    def try_post(self, message: M, return_channel: ReturnChannel[M] | None = None) -> ReturnChannel[M]:
        """Put a message into the outbox, and return at once, whatever becomes of it.

        What is returned settles once: with None when the message is in the receiver's queue, with the
        `SendError` that brings it back otherwise. Raises `ValueError` for a return channel that another
        message has.
        """
        channel: ReturnChannel[M] = ReturnChannel() if return_channel is None else return_channel
        channel._take()
        self._do_post(message, channel)
        return channel

    def post(self, message: M) -> None:
        """Fire and forget: watch `status()`. A message that could not be delivered is gone, and counted.

        Raises `SendError` for what no channel of this type could ever send; never for reasons of delivery.
        """
        error = self._do_post(message, None)
        if error is not None and isinstance(error.error, CodecError | OversizedMessage):
            raise error

    async def send(self, message: M) -> None:
        """Post, and wait until the message is in the receiver's queue.

        Raises `SendError` with the message when it comes back. Cancelling it ends the waiting alone: the
        message stays where it is, and may be delivered; `status()` tells how the channel fares (T-060).
        """
        channel: ReturnChannel[M] = ReturnChannel()
        self._do_post(message, channel)
        self._hurry()
        error = await channel
        if error is not None:
            raise error

    @abstractmethod
    def _do_post(self, message: M, return_channel: ReturnChannel[M] | None) -> SendError[M] | None:
        """Take a message, or settle its return channel with the error, which is given back too."""

    def _hurry(self) -> None:
        """Somebody waits for the last message."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Messages that are neither delivered nor returned."""

    @property
    def outbox_size(self) -> int:
        """Messages that wait to be written."""
        return 0

    @property
    def unacked_size(self) -> int:
        """Messages that were written, and are not acknowledged."""
        return 0

    @abstractmethod
    async def drain(self, most: int = 0) -> None:
        """Wait until no more than `most` messages are pending; also when they have come back."""

    @abstractmethod
    async def close(self) -> list[SendError[M]]:
        """Take no more, wait for what is pending up to the delivery timeout, and return what is left.

        Cancelling it closes at once: what was pending comes back on its return channels.
        """

    @abstractmethod
    def statistics(self) -> SenderCounters:
        """What it has done so far."""

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
    def _refused(error: ChannelError, message: M, channel: ReturnChannel[M] | None) -> SendError[M]:
        returned = SendError(error, message)
        if channel is not None:
            channel._settle(returned)
        return returned

    def _set_closed(self, error: ChannelError) -> None:
        self._status._set(TxStatus(closed=True, reason=str(error)))


class Rx(ABC, Generic[M]):
    """The receiving end of a channel. `close` it, or use it as a context manager; iterate over it to receive.

    A message in the queue is the receiver's: one that is never received is gone with the Rx, though its
    sender was told that it is here (T-070); `unread` says how many there are.
    """

    def __init__(self, address: Address, inbox: Inbox[M]) -> None:
        self._address = address
        self._inbox = inbox

    def addr(self) -> Address:
        """The address that is served: with the real port."""
        return self._address

    def recv(self) -> Coroutine[Any, Any, M]:
        """The next message. Cancelling it loses none.

        Raises `ChannelClosed` once the channel is closed and what was in the queue has been taken.
        """
        # The inbox's own coroutine, and not one around it, which every message would pay for.
        return self._inbox.get()

    @property
    def unread(self) -> int:
        """Messages that wait to be received."""
        return len(self._inbox)

    async def __aiter__(self) -> AsyncIterator[M]:
        """Messages, until the channel is closed."""
        get = self._inbox.get
        while True:
            try:
                message = await get()
            except ChannelClosed:
                return
            yield message

    @abstractmethod
    def close(self) -> None:
        """Take no more, acknowledge what was taken, tell the senders, and free the address. Does not wait."""

    @abstractmethod
    async def join(self) -> None:
        """Close, and wait until the senders have been told, for a few seconds at most."""

    @abstractmethod
    def statistics(self) -> ReceiverCounters:
        """What it has done so far."""

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
