"""Channels within one event loop: no frames, no acknowledgements (T-046, T-047, T-057, T-069, T-087).

A message is handed over as the object it is; only its class is looked at.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from typing import Any, TypeVar

from strata.txrx.addresses import LocalAddress
from strata.txrx.ends import Rx, Tx
from strata.txrx.errors import (
    AddressInUse,
    ChannelClosed,
    ChannelError,
    CodecError,
    OutboxFull,
    SendError,
)
from strata.txrx.inbox import Inbox
from strata.txrx.receiving import ReceiverCounters
from strata.txrx.returns import ReturnChannel
from strata.txrx.sending import SenderCounters

__all__ = ["LocalRx", "LocalTx", "dial_local", "serve_local_at"]

M = TypeVar("M")

_served: weakref.WeakValueDictionary[int, LocalRx[Any]] = weakref.WeakValueDictionary()
_ids = itertools.count(1)


class LocalRx(Rx[M]):
    """The receiving end; its queue has no bound unless it was given one."""

    def __init__(self, address: LocalAddress, message_type: Any, capacity: int | None) -> None:
        super().__init__(address, Inbox(capacity))
        self._loop = asyncio.get_running_loop()
        self._type = message_type if isinstance(message_type, type) else object
        self._senders: set[LocalTx[M]] = set()
        self._counters = ReceiverCounters()
        # Senders hold on to the queue, and not to this: who forgets to close it has it closed.
        self._finalizer = weakref.finalize(self, _close, address, self._inbox, self._senders)
        self._finalizer.atexit = False
        _served[address.id] = self

    def close(self) -> None:
        self._finalizer()

    async def join(self) -> None:
        self.close()

    def statistics(self) -> ReceiverCounters:
        return self._counters


def _close(address: LocalAddress, inbox: Inbox[Any], senders: set[LocalTx[Any]]) -> None:
    _served.pop(address.id, None)
    reason = ChannelClosed(f"{address} is closed")
    inbox.close(reason)
    for sender in senders:
        sender._receiver_closed(reason)
    senders.clear()


class LocalTx(Tx[M]):
    """The transmitting end. A message is delivered, or comes back, in the step that posts it."""

    def __init__(self, receiver: LocalRx[M]) -> None:
        super().__init__(receiver.addr())
        self._senders = receiver._senders
        self._inbox = receiver._inbox
        self._received = receiver._counters
        self._type = receiver._type
        self._closed: ChannelError | None = None
        self._counters = SenderCounters()
        self._senders.add(self)

    @property
    def pending(self) -> int:
        return 0

    def _do_post(self, message: M, return_channel: ReturnChannel[M] | None) -> SendError[M] | None:
        error = self._closed
        if error is None:
            if not isinstance(message, self._type):
                error = CodecError(f"a channel of {self._type.__qualname__} cannot send {type(message)!r}")
            elif self._inbox.room:
                self._inbox.put_one(message)
                self._received.messages_accepted += 1
                self._counters.messages_posted += 1
                if return_channel is not None:
                    return_channel._settle()
                return None
            else:
                self._received.queue_full += 1
                error = OutboxFull(f"{self._address} has {len(self._inbox)} messages waiting already")
        self._counters.messages_refused += 1
        return self._refused(error, message, return_channel)

    async def drain(self, most: int = 0) -> None:
        pass

    async def close(self) -> list[SendError[M]]:
        if self._closed is None:
            self._senders.discard(self)
            self._receiver_closed(ChannelClosed("closed by its owner"))
        return []

    def _receiver_closed(self, reason: ChannelError) -> None:
        self._closed = reason
        self._set_closed(reason)

    def statistics(self) -> SenderCounters:
        self._counters.messages_delivered = self._counters.messages_posted
        return self._counters


def serve_local_at(address: LocalAddress, message_type: Any, capacity: int | None) -> LocalRx[Any]:
    """Serve an id, or with 0 a free one. Raises `AddressInUse`."""
    number = address.id
    if number == 0:
        number = next(one for one in _ids if one not in _served)
    elif number in _served:
        raise AddressInUse(f"local:{number} is served already")
    return LocalRx(LocalAddress(number), message_type, capacity)


def dial_local(address: LocalAddress) -> LocalTx[Any]:
    """The transmitting end. Raises `ChannelClosed` where nobody serves the id on this event loop."""
    receiver = _served.get(address.id)
    if receiver is None:
        raise ChannelClosed(f"nobody serves {address} in this process")
    if receiver._loop is not asyncio.get_running_loop():
        raise ChannelClosed(f"{address} is served on another event loop; use unix: or tcp: between threads")
    return LocalTx(receiver)
