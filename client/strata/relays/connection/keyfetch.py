"""Requesting authors' identity packets from a relay: many authors at once, one request at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass

from strata.protocol.errors import Closed, RequestRefused, RequestTimeout, StrataError
from strata.protocol.keys import MAX_CHAIN_EVENTS
from strata.relays.connection.keyring import Event, KeyRing

__all__ = ["MAX_AUTHORS", "KeyFetcher"]

_log = logging.getLogger("strata.relay")

MAX_AUTHORS = 500
"""The most authors in one request."""
_FEWER = 8
"""After a request that took too long, the next one is for this many times fewer authors."""

_MAX_EVENTS = 2 * MAX_CHAIN_EVENTS
_MAX_BYTES = 8 * 2**20
"""The most that is read of one author's identity packets. This project's relay keeps less; if a relay sends
more, all packets of the author fail."""

_LONG_BYTES = 64 * 1024
"""If this much of one author has arrived when the time is over, the author has too much for this connection:
all packets of the author fail, because those behind them must not wait for ever."""

_EVENTS_AT_ONCE = 16
"""Longer chains are verified on a thread; this many take about 1 ms."""


@dataclass(frozen=True, slots=True)
class _Question:
    """One author's part in a request to the relay: when the request was made, and its outcome."""

    asked_at: float
    answered: asyncio.Future[None]


class KeyFetcher:
    """Fills a `KeyRing` on demand.

    `read` yields the identity packets of some authors, unverified, and ends when the relay has no more; it
    raises `StrataError`. Authors wanted while a request is under way are collected for the next one, so there
    is at most one task and one request.
    """

    def __init__(
        self,
        ring: KeyRing,
        read: Callable[[tuple[str, ...]], AsyncIterator[Event]],
        *,
        timeout: float,
        name: str,
    ) -> None:
        self.ring = ring
        self._read = read
        self._timeout = timeout
        self._name = name
        self._wanted: dict[str, asyncio.Future[None]] = {}
        self._asking: dict[str, _Question] = {}
        self._task: asyncio.Task[None] | None = None
        self._most = MAX_AUTHORS
        """The authors in the next request: fewer after one that took too long, because chains can be long."""

    async def fetch(
        self,
        author: str,
        others: Collection[str],
        *,
        since: float,
        given_up: asyncio.Future[None] | None = None,
    ) -> None:
        """Have the ring learn `author`, by a request made no earlier than `since`.

        Stops waiting once `given_up` is done. `others` are requested along with the author, and not waited
        for. Raises `RequestTimeout`, or the relay's refusal. Neither cancelling nor `given_up` stops the
        request, because other callers may be waiting for it.
        """
        answered = self._want(author, since)
        for other in others:
            if other not in self._wanted and other not in self._asking:
                self._want(other, since)
        ends = [answered] if given_up is None else [answered, given_up]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if answered.done():
            answered.result()

    def refresh_stale(self) -> None:
        """Ask again, in the background, for the authors that the ring calls stale.

        After a failure, the next refresh tries again.
        """
        if self.ring.stale:
            now = asyncio.get_running_loop().time()
            for author in self.ring.stale:
                self._want(author, now)
            self.ring.stale.clear()

    async def close(self) -> None:
        """Stop asking; waiting calls raise `Closed`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.result()  # errors in our own code must not go unnoticed

    def _want(self, author: str, since: float) -> asyncio.Future[None]:
        asking = self._asking.get(author)
        if asking is not None and asking.asked_at >= since:
            return asking.answered
        answered = self._wanted.get(author)
        if answered is None:
            answered = self._wanted[author] = asyncio.get_running_loop().create_future()
            answered.add_done_callback(_seen)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(), name=self._name)
            # A task that is cancelled before its first step runs no `finally`.
            self._task.add_done_callback(self._ended)
        return answered

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task is self._task:  # else another task is already asking
            self._end()

    async def _work(self) -> None:
        """Ask until no author is wanted any more."""
        try:
            while self._wanted:
                batch = tuple(self._wanted)[: self._most]
                asked_at = asyncio.get_running_loop().time()
                self._asking = {did: _Question(asked_at, self._wanted.pop(did)) for did in batch}
                try:
                    await self._ask(batch, asked_at)
                except TimeoutError:
                    self._most = max(1, len(batch) // _FEWER)
                    self._answer(RequestTimeout("the question for authors' keys", self._timeout))
                except RequestRefused as refusal:
                    self._refused(refusal)
                except StrataError as error:
                    self._answer(error)
                else:
                    self._most = min(2 * self._most, MAX_AUTHORS)
                    self._answer(None)
        finally:
            self._end()

    def _refused(self, refusal: RequestRefused) -> None:
        """Ask for fewer authors, since a relay may take fewer at once; if there is one only, that is all."""
        if len(self._asking) == 1 or refusal.retry_after is not None:
            self._answer(refusal)
            return
        self._most = max(1, len(self._asking) // _FEWER)
        again = {author: question.answered for author, question in self._asking.items()}
        for author in again.keys() & self._wanted.keys():
            _follow(self._wanted[author], again[author])
        self._asking, self._wanted = {}, again | self._wanted  # in this order, with the latest futures

    def _end(self) -> None:
        """Fail every waiting call: no answer will come."""
        self._answer(Closed("the relay connection was closed"))
        for answered in self._wanted.values():
            answered.set_exception(Closed("the relay connection was closed"))
        self._wanted.clear()

    def _answer(self, failure: StrataError | None) -> None:
        """Report the outcome of the current request to the calls that wait for it."""
        for question in self._asking.values():
            if failure is None:
                question.answered.set_result(None)
            else:
                question.answered.set_exception(failure)
        if failure is not None and self._asking:
            _log.debug("keys of %d authors could not be had: %s", len(self._asking), failure)
        self._asking = {}

    async def _ask(self, authors: tuple[str, ...], asked_at: float) -> None:
        events: dict[str, list[Event]] = {author: [] for author in authors}
        sizes = dict.fromkeys(authors, 0)
        is_late = False
        try:
            async with asyncio.timeout(self._timeout):
                async for packet, received_at in self._read(authors):
                    sizes[packet.author_id] += packet.size_bytes
                    found = events[packet.author_id]
                    if sizes[packet.author_id] <= _MAX_BYTES and len(found) <= _MAX_EVENTS:
                        found.append((packet, received_at))
        except TimeoutError:
            is_late = len(authors) == 1 and sizes[authors[0]] >= _LONG_BYTES
            if not is_late:
                raise
        for author, found in events.items():
            if is_late or sizes[author] > _MAX_BYTES or len(found) > _MAX_EVENTS:
                self.ring.learn(author, None, asked_at, is_overgrown=True)
                continue
            if len(found) > _EVENTS_AT_ONCE:
                chain = await asyncio.to_thread(self.ring.build, author, found)
            else:
                chain = self.ring.build(author, found)
            self.ring.learn(author, chain, asked_at)


def _follow(leader: asyncio.Future[None], follower: asyncio.Future[None]) -> None:
    """Answer the one as the other will be answered."""

    def answer(done: asyncio.Future[None]) -> None:
        if (error := done.exception()) is not None:
            follower.set_exception(error)
        else:
            follower.set_result(None)

    leader.add_done_callback(answer)


def _seen(answered: asyncio.Future[None]) -> None:
    """Retrieve the failure: nothing may be waiting for a refresh, and then the loop would complain."""
    if not answered.cancelled():
        answered.exception()
