"""One subscription's access to its relay: takes events, ends the subscription, requests keys."""

from __future__ import annotations

import asyncio

from strata.protocol.errors import StrataError
from strata.relays.connection.driver import Driver
from strata.relays.connection.inspection import Candidate, author_of
from strata.relays.connection.keyfetch import MAX_AUTHORS, KeyFetcher
from strata.relays.connection.queue import QueuedEvent
from strata.relays.connection.stream import Phase
from strata.relays.connection.values import LogReset, Query

__all__ = ["Feed"]


class Feed:
    """An open subscription of one connection. It ends at `end`, or when the driver ends all of them."""

    def __init__(self, driver: Driver, query: Query, keys: KeyFetcher) -> None:
        self.query = query
        self._driver = driver
        self._keys = keys
        self._given_up: asyncio.Future[None] | None = None
        self._stream, self.arrived = driver.subscribe(query)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will arrive; what has arrived can still be taken."""
        return self._stream.phase is Phase.ENDED

    @property
    def position(self) -> str | None:
        """The cursor after what has arrived; None if the relay has given none."""
        return self._stream.position

    def check_loop(self) -> None:
        """Raise `RuntimeError` on an event loop other than the connection's."""
        self._driver.check_loop()

    def take(self) -> QueuedEvent | LogReset | None:
        """Take the next event or `LogReset`, if any. The caller must then call `taken`."""
        return self._stream.take()

    def take_error(self) -> StrataError | None:
        """Why the subscription ended, if not by request. Returned once."""
        error, self._stream.error = self._stream.error, None
        return error

    def taken(self, *, delivered: bool) -> None:
        """Note that the event last taken was delivered, or dropped."""
        with self._driver.step as core:
            core.taken(self._stream, delivered=delivered, now=self._driver.loop.time())
        self._keys.refresh_stale()

    def end(self) -> None:
        """Request nothing more from the relay. Idempotent."""
        with self._driver.step as core:
            core.unsubscribe(self._stream)

    def end_soon(self) -> None:
        """Call `end` from any thread. Raises `RuntimeError` once the loop is closed."""
        self._driver.loop.call_soon_threadsafe(self.end)

    async def fetch_keys(self, candidate: Candidate) -> None:
        """Ask the relay for the keys of the candidate's author, and of the authors of packets behind it.

        Raises `RequestTimeout`, or the relay's refusal. Neither cancelling nor `give_up_keys`, which ends the
        wait, stops the request.
        """
        waiting = {author for event in self._stream.waiting() if (author := author_of(event)) is not None}
        others = [author for author in waiting if self._keys.ring.wants(author)][:MAX_AUTHORS]
        self._given_up = self._driver.loop.create_future()
        self._await_keys(True)
        try:
            await self._keys.fetch(
                candidate.packet.author_id,
                others,
                since=candidate.event.arrived_at,
                given_up=self._given_up,
            )
        finally:
            self._await_keys(False)

    def give_up_keys(self) -> None:
        """End a wait for keys, if there is one."""
        if self._given_up is not None and not self._given_up.done():
            self._given_up.set_result(None)

    def _await_keys(self, awaits: bool) -> None:
        with self._driver.step as core:
            core.await_keys(self._stream, awaits)
