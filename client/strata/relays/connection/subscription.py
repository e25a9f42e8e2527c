"""A subscription as a program sees it: an asynchronous iterator of verified packets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from strata.relays.connection.inspection import KEYS_WANTED, Candidate, Inspector
from strata.relays.connection.subscribing import Phase, SubscriptionState
from strata.relays.connection.values import Delivery, Query

__all__ = ["Subscription"]

_EVENTS_PER_TURN = 32
"""Events handed on before other tasks get their turn: about 3 ms of verifying."""


class Feed(Protocol):
    """What a subscription needs of its relay."""

    def taken(self, state: SubscriptionState, *, delivered: bool) -> None:
        """The event taken from `state` was dealt with."""

    def unsubscribe(self, state: SubscriptionState) -> None:
        """Close `state` for good."""

    async def fetch_keys(self, state: SubscriptionState, candidate: Candidate) -> None:
        """Have the relay asked for the keys of the candidate's author. Raises what iterating may raise."""


class Subscription:
    """Verified packets, each once and in the relay's order, across any number of reconnects.

        async for delivery in relay.subscribe(types=["POST"]):
            ...

    Packets are verified as they are asked for, so verifying goes at the consumer's pace. The queue behind it
    is bounded (`Options.queue_events`, `queue_bytes`): when it is full the subscription leaves the relay's
    feed and reads on from the relay's store once there is room, at no cost to anything else on the
    connection. Only for a relay that has given it no cursor to come back to does the whole connection wait.

    It ends, with UNSUBSCRIBE, by `aclose`, by leaving its `async with` block, or when nothing refers to it
    any more, as after `break` in the loop above.
    """

    def __init__(
        self,
        feed: Feed,
        state: SubscriptionState,
        inspector: Inspector,
        *,
        arrived: asyncio.Event,
        call_soon: Callable[..., object],
    ) -> None:
        self._feed = feed
        self._state = state
        self._inspector = inspector
        self._arrived = arrived
        self._call_soon = call_soon
        self._receiving = False
        self._candidate: Candidate | None = None  # taken, and not yet judged for want of its author's keys
        self._taken = 0
        self._closed = False

    @property
    def query(self) -> Query:
        """What the subscription is for."""
        return self._state.query

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        """The next packet. Cancelling loses nothing, nor does an error: the next call goes on.

        Raises `RequestRefused` if the relay refuses the subscription for good, `MissingCapability` if it does
        not let the authenticated session subscribe, `RequestTimeout` if promised history or an author's keys
        do not come, `ConnectionFailed` if the relay cannot be reached any more, `Closed` if the relay
        connection was closed on this side; each only after what had arrived was handed on.
        """
        if self._receiving:
            raise RuntimeError("another task is already receiving from this subscription")
        self._receiving = True
        try:
            return await self._next()
        finally:
            self._receiving = False

    async def _next(self) -> Delivery:
        state = self._state
        while not self._closed:
            if self._taken >= _EVENTS_PER_TURN:
                self._taken = 0
                await asyncio.sleep(0)
            candidate = self._candidate
            if candidate is None and (event := state.take()) is not None:
                self._taken += 1
                candidate = self._candidate = self._inspector.read(event)
                if candidate is None:
                    self._feed.taken(state, delivered=False)
                    continue
            if candidate is not None:
                delivery = self._inspector.judge(candidate)
                if delivery is KEYS_WANTED:
                    await self._feed.fetch_keys(state, candidate)
                    continue
                # No await from here to the return: a packet taken is a packet handed on.
                self._candidate = None
                self._feed.taken(state, delivered=delivery is not None)
                if delivery is not None:
                    return delivery
            elif state.phase is Phase.ENDED:
                error, state.error = state.error, None
                if error is not None:
                    raise error
                break
            else:
                self._taken = 0
                self._arrived.clear()
                await self._arrived.wait()
        raise StopAsyncIteration

    def end(self) -> None:
        """Ask the relay for nothing more; what has arrived can still be taken, then iteration stops."""
        self._feed.unsubscribe(self._state)

    async def aclose(self) -> None:
        """End at once: iteration stops and what has arrived is dropped. Idempotent; never waits."""
        self._closed = True
        self._feed.unsubscribe(self._state)
        self._arrived.set()

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
        # `break` leaves an asynchronous iterator without a word, so this is how the relay gets to know. The
        # collector may run in any thread, and after the loop is gone.
        if not getattr(self, "_closed", True) and self._state.phase is not Phase.ENDED:
            try:
                self._call_soon(self._feed.unsubscribe, self._state)
            except RuntimeError:
                pass  # the loop is closed, and the connection with it
