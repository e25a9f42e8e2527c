"""Both ends on one event loop: no frames, no acknowledgements (T-046, T-047, T-057, T-069, T-087).

A message is passed on as the same object; only its class is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import weakref
from typing import Any, TypeVar

from strata.txrx.addresses import LocalAddress
from strata.txrx.codecs import MessageCodec
from strata.txrx.ends import Rx, Tx
from strata.txrx.errors import (
    AddressInUse,
    CodecError,
    OutboxFull,
    SendError,
    TxRxClosed,
    TxRxError,
)
from strata.txrx.queue import RxQueue
from strata.txrx.receiving import ReceiverCounters
from strata.txrx.returns import ReturnChannel
from strata.txrx.sending import SenderCounters

__all__ = ["LocalRx", "LocalTx", "dial_local", "serve_local_at"]

M = TypeVar("M")

_served: weakref.WeakValueDictionary[int, LocalRx[Any]] = weakref.WeakValueDictionary()
_ids = itertools.count(1)


class LocalRx(Rx[M]):
    """The receiving end. Without `capacity` its queue is unbounded."""

    def __init__(
        self, address: LocalAddress, message_type: type[M] | MessageCodec[M], capacity: int | None
    ) -> None:
        super().__init__(address, RxQueue(capacity))
        self._served_at = address
        self._loop = asyncio.get_running_loop()
        self._type: type[object] = message_type if isinstance(message_type, type) else object
        self._senders: set[LocalTx[M]] = set()
        self._counters = ReceiverCounters()
        # Senders refer to the queue and not to this end, so that an unreferenced end closes itself.
        self._finalizer = weakref.finalize(
            self, _close_where_it_belongs, self._loop, address, self._queue, self._senders
        )
        self._finalizer.atexit = False
        _served[address.id] = self

    def close(self) -> None:
        if self._finalizer.detach() is not None:
            _served.pop(self._served_at.id, None)
            _close(self._served_at, self._queue, self._senders)

    async def join(self) -> None:
        self.close()

    def statistics(self) -> ReceiverCounters:
        return self._counters


def _close_where_it_belongs(
    loop: asyncio.AbstractEventLoop,
    address: LocalAddress,
    queue: RxQueue[Any],
    senders: set[LocalTx[Any]],
) -> None:
    # Garbage collection may run on any thread, and after the loop is closed.
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        _close(address, queue, senders)
        return
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_close, address, queue, senders)


def _close(address: LocalAddress, queue: RxQueue[Any], senders: set[LocalTx[Any]]) -> None:
    # The address is not freed here: an unreferenced end no longer has it, and another end may have it now.
    reason = TxRxClosed(f"{address} is closed")
    queue.close(reason)
    for sender in senders:
        sender._receiver_closed(reason)
    senders.clear()


class LocalTx(Tx[M]):
    """The transmitting end. Posting a message delivers it or returns it immediately."""

    def __init__(self, receiver: LocalRx[M]) -> None:
        super().__init__(receiver.addr())
        self._senders = receiver._senders
        self._queue = receiver._queue
        self._received = receiver._counters
        self._type = receiver._type
        self._closed: TxRxError | None = None
        self._counters = SenderCounters()
        self._senders.add(self)

    @property
    def pending(self) -> int:
        return 0

    def _do_post(self, message: M, return_channel: ReturnChannel[M] | None) -> SendError[M] | None:
        error = self._closed
        if error is None:
            if not isinstance(message, self._type):
                error = CodecError(f"a Tx of {self._type.__qualname__} cannot send {type(message)!r}")
            elif self._queue.room:
                self._queue.put_one(message)
                self._received.messages_accepted += 1
                self._counters.messages_posted += 1
                if return_channel is not None:
                    return_channel._settle()
                return None
            else:
                self._received.queue_full += 1
                error = OutboxFull(f"{self._address} has {len(self._queue)} messages waiting already")
        self._counters.messages_refused += 1
        return self._refused(error, message, return_channel)

    async def drain(self, most: int = 0) -> None:
        pass

    async def close(self) -> list[SendError[M]]:
        if self._closed is None:
            self._senders.discard(self)
            self._receiver_closed(TxRxClosed("closed by its owner"))
        return []

    def _receiver_closed(self, reason: TxRxError) -> None:
        self._closed = reason
        self._set_closed(reason)

    def statistics(self) -> SenderCounters:
        self._counters.messages_delivered = self._counters.messages_posted
        return self._counters


def serve_local_at(
    address: LocalAddress, message_type: type[M] | MessageCodec[M], capacity: int | None
) -> LocalRx[M]:
    """Serve an id; 0 takes a free id. Raises `AddressInUse`."""
    number = address.id
    if number == 0:
        number = next(one for one in _ids if one not in _served)
    elif number in _served:
        raise AddressInUse(f"local:{number} is served already")
    return LocalRx(LocalAddress(number), message_type, capacity)


def dial_local(address: LocalAddress) -> LocalTx[M]:
    """Return the transmitting end. Raises `TxRxClosed` if the id is not served on this event loop."""
    receiver: LocalRx[M] | None = _served.get(address.id)
    if receiver is None:
        raise TxRxClosed(f"nobody serves {address} in this process")
    if receiver._loop is not asyncio.get_running_loop():
        raise TxRxClosed(f"{address} is served on another event loop; use unix: or tcp: between threads")
    return LocalTx(receiver)
