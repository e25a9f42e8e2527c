"""A subscription over several relays as a program sees it: an asynchronous iterator of packets, each once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Self

from strata.relays.connection.driver import check_loop
from strata.relays.connection.values import Delivery, Query
from strata.relays.pool.reading import Reading
from strata.relays.pool.values import Position

__all__ = ["PoolSubscription"]


class PoolSubscription:
    """Verified packets from several relays, each once, in the order in which the first copy arrives.

        async for delivery in relays.subscribe(types=["POST"]):
            ...

    `Delivery.cursor` is None: a cursor belongs to one relay. `positions` has them all, as of the packet last
    taken; given to `subscribe` in another session they go on from there. A packet that one relay had brought
    then, and another one brings only afterwards, comes again in the new session.

    The order is each relay's own, merged as it comes; packets a sweep recovers come when they are found. For
    a slow consumer the queue is bounded (`PoolOptions.queue_packets`), and the relays' streams wait.

    It ends by `aclose`, by leaving its `async with` block, with the pool, and when nothing refers to it any
    more, as after `break` in the loop above.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._loop = asyncio.get_running_loop()
        self._receiving = False

    @property
    def query(self) -> Query:
        """What the subscription is for."""
        return self._reading.query

    @property
    def positions(self) -> Mapping[str, Position]:
        """Where each relay stood at the packet last taken, by URL: a copy."""
        return MappingProxyType(dict(self._reading.merging.taken_positions))

    @property
    def relays(self) -> list[str]:
        """The relays it reads from just now."""
        return self._reading.relays

    def received_at(self, packet_id: str) -> int | None:
        """The earliest time any relay is known to have received a packet handed on (R-106).

        It can be lower than the delivery's own, once a later copy has shown it; None for packets out of the
        window of `PoolOptions.dedup_packets`.
        """
        return self._reading.merging.received_at(bytes.fromhex(packet_id.removeprefix("0x")))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        """The next packet. Cancelling loses nothing.

        Raises `RequestRefused` if every relay refuses the subscription for good, `Closed` once the pool is
        closed; each only after the packets that had arrived were handed on.
        """
        if self._receiving:
            raise RuntimeError("another task is already receiving from this subscription")
        if not self._reading.has_ended:
            check_loop(self._loop, "the pool")
        self._receiving = True
        reading = self._reading
        try:
            while True:
                delivery = reading.take()
                if delivery is not None:
                    return delivery
                if reading.has_ended:
                    error, reading.error = reading.error, None
                    if error is not None:
                        raise error
                    raise StopAsyncIteration
                reading.arrived.clear()
                await reading.arrived.wait()
        finally:
            self._receiving = False

    def end(self) -> None:
        """Read nothing more; what has arrived can still be taken, then iteration stops. Idempotent."""
        self._reading.end()

    async def aclose(self) -> None:
        """End at once: iteration stops and what has arrived is dropped. Idempotent; never waits."""
        self._reading.end()
        self._reading.error = None
        self._reading.merging.drop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # `break` leaves an asynchronous iterator without a word. The collector may run in any thread, and
        # after the loop is gone.
        reading = getattr(self, "_reading", None)
        if reading is not None and not reading.has_ended:
            try:
                self._loop.call_soon_threadsafe(reading.end)
            except RuntimeError:
                pass  # the loop is closed, and the pool with it
