"""A subscription over several relays as a program sees it: an asynchronous iterator of packets, each once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Self

from strata.protocol.errors import StrataError
from strata.relays.connection.driver import check_loop
from strata.relays.connection.values import Delivery, Query
from strata.relays.pool.reading import Reading
from strata.relays.pool.values import Position

__all__ = ["PoolSubscription"]


class PoolSubscription:
    """Verified packets from several relays, each once, in the order in which the first copy arrives.

        async for delivery in relays.subscribe(types=["POST"]):
            ...

    `Delivery.cursor` is None, because a cursor belongs to one relay. `positions` has the cursors of all
    relays, as of the packet last taken; passed to `subscribe` in another session, they resume there. A packet
    that came from one relay before, and comes from another relay only afterwards, is delivered again in the
    new session.

    Each relay's packets come in that relay's order, merged as they arrive; packets that a sweep recovers come
    when they are found. The queue is bounded (`PoolOptions.queue_packets`): if the consumer is slow, the
    relays' streams wait.

    The subscription ends at `aclose`, at the end of its `async with` block, with the pool, and when nothing
    refers to it any more, as after `break` in the loop above.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._loop = asyncio.get_running_loop()
        self._receiving = False

    @property
    def query(self) -> Query:
        """The query that the subscription was made for."""
        return self._reading.query

    @property
    def positions(self) -> Mapping[str, Position]:
        """The position at each relay as of the packet last taken, by URL: a copy."""
        return MappingProxyType(dict(self._reading.merging.taken_positions))

    @property
    def unfinished(self) -> Mapping[str, StrataError]:
        """For a query that ends: the relays that were read from and have not come to the end, by URL, each
        with its last problem: a copy.

        Packets that only these relays have may be missing. Relays left at the `limit` are not named.
        """
        return MappingProxyType(self._reading.unfinished)

    @property
    def finished(self) -> frozenset[str]:
        """For a query that ends: the URLs of the relays that were read to the end, so that nothing that they
        have is missing. They may be fewer than `PoolOptions.readers`, if not so many were connected.

        A relay that does not mark the end of its history counts once it falls silent.
        """
        return self._reading.finished

    @property
    def relays(self) -> list[str]:
        """The relays it reads from now."""
        return self._reading.relays

    def received_at(self, packet_id: str) -> int | None:
        """The earliest time at which any relay is known to have received a delivered packet (R-106).

        A later copy can make it earlier than the delivery's own. None for packets outside the window of
        `PoolOptions.dedup_packets`.
        """
        return self._reading.merging.received_at(bytes.fromhex(packet_id.removeprefix("0x")))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        """Return the next packet. Cancelling loses nothing.

        Raises `RequestRefused` if every relay refuses the subscription permanently, and `Closed` once the
        pool is closed; each only after the packets that had arrived were delivered.
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
        """Read nothing more; packets that have arrived can still be taken, and then iteration stops.

        Idempotent.
        """
        self._reading.end()

    async def aclose(self) -> None:
        """End at once: iteration stops and packets that have arrived are dropped. Idempotent; never waits."""
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
        # An asynchronous iterator is not notified of `break`. The collector may run in any thread, and after
        # the loop is closed.
        reading = getattr(self, "_reading", None)
        if reading is not None and not reading.has_ended:
            try:
                self._loop.call_soon_threadsafe(reading.end)
            except RuntimeError:
                pass  # the loop is closed, and the pool with it
