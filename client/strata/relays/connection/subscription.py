"""A subscription as a program sees it: an asynchronous iterator of verified packets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from strata.relays.connection.feed import Feed
from strata.relays.connection.inspection import KEYS_WANTED, Candidate, Inspector
from strata.relays.connection.values import Delivery, LogReset, Query

__all__ = ["Subscription"]

_log = logging.getLogger("strata.relay")

_EVENTS_PER_TURN = 32
"""Events processed before other tasks get their turn: about 3 ms of verifying."""


class Subscription:
    """Verified packets, each once and in the relay's order, across any number of reconnects.

        async for delivery in relay.subscribe(types=["POST"]):
            ...

    Each packet is verified when the consumer asks for it, so verification keeps to the consumer's pace. The
    queue behind the subscription is bounded (`Options.queue_events`, `queue_bytes`). When the queue is full,
    the subscription leaves the relay's feed, and continues from the relay's store once there is room; nothing
    else on the connection waits. Only if the relay gave no cursor to resume from does the whole connection
    wait.

    A relay may lose the end of its log, when its operator restores an older backup. The subscription then
    calls `on_log_reset` and continues from the last good place.

    The subscription ends, with UNSUBSCRIBE, at `aclose`, at the end of its `async with` block, and when
    nothing refers to it any more, as after `break` in the loop above.
    """

    def __init__(
        self, feed: Feed, inspector: Inspector, on_log_reset: Callable[[LogReset], None] | None = None
    ) -> None:
        self._on_log_reset = on_log_reset or _warn
        self._feed = feed
        self._inspector = inspector
        self._receiving = False
        self._candidate: Candidate | None = None  # taken, but not yet judged: its author's keys are missing
        self._taken = 0
        self._closed = False

    @property
    def query(self) -> Query:
        """The query that the subscription was made for."""
        return self._feed.query

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        """Return the next packet. Neither cancelling nor an error loses a packet: the next call continues.

        Raises `RequestRefused` if the relay refuses the subscription permanently, `MissingCapability` if it
        does not let the authenticated session subscribe, `RequestTimeout` if promised history or an author's
        keys do not arrive, `ConnectionFailed` if the relay cannot be reached any more, and `Closed` if the
        relay connection was closed on this side. An error that ends the subscription is raised only after the
        packets that had arrived were delivered.
        """
        if self._receiving:
            raise RuntimeError("another task is already receiving from this subscription")
        self._feed.check_loop()
        self._receiving = True
        try:
            return await self._next()
        finally:
            self._receiving = False

    async def _next(self) -> Delivery:
        feed = self._feed
        while not self._closed:
            if self._taken >= _EVENTS_PER_TURN:
                self._taken = 0
                await asyncio.sleep(0)
            candidate = self._candidate
            if candidate is None and (event := feed.take()) is not None:
                self._taken += 1
                if isinstance(event, LogReset):
                    feed.taken(delivered=False)
                    self._on_log_reset(event)
                    continue
                candidate = self._candidate = self._inspector.read(event)
                if candidate is None:
                    feed.taken(delivered=False)
                    continue
            if candidate is not None:
                delivery = self._inspector.judge(candidate)
                if delivery is KEYS_WANTED:
                    await feed.fetch_keys(candidate)
                    continue
                # No await from here to the return, so that a packet that was taken is always delivered.
                self._candidate = None
                feed.taken(delivered=delivery is not None)
                if delivery is not None:
                    return delivery
            elif feed.has_ended:
                error = feed.take_error()
                if error is not None:
                    raise error
                break
            else:
                self._taken = 0
                feed.arrived.clear()
                await feed.arrived.wait()
        raise StopAsyncIteration

    def end(self) -> None:
        """Request nothing more; packets that have arrived can still be taken, and then iteration stops."""
        self._feed.end()

    async def aclose(self) -> None:
        """End at once: iteration stops and packets that have arrived are dropped. Idempotent; never waits."""
        self._closed = True
        self._feed.end()
        self._feed.arrived.set()
        self._feed.give_up_keys()

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
        # An asynchronous iterator is not notified of `break`, so UNSUBSCRIBE is sent from here. The collector
        # may run in any thread, and after the loop is closed.
        if not getattr(self, "_closed", True) and not self._feed.has_ended:
            try:
                self._feed.end_soon()
            except RuntimeError:
                pass  # the loop is closed, and the connection with it


def _warn(reset: LogReset) -> None:
    _log.warning("the relay's log has lost its end; packets may be missing: %s", reset)
