"""Requesting authors' identity packets from a relay: many authors at once, one request at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass

from strata.protocol.errors import RequestRefused, RequestTimeout
from strata.protocol.keys import MAX_CHAIN_EVENTS
from strata.relays.author_questions import Answers, AuthorQuestions
from strata.relays.connection.keyring import Event, KeyRing

__all__ = ["MAX_AUTHORS", "KeyFetcher"]

MAX_AUTHORS = 500
"""The most authors in one request."""

_MAX_EVENTS = 2 * MAX_CHAIN_EVENTS
_MAX_BYTES = 8 * 2**20
"""The most that is read of one author's identity packets. This project's relay keeps less; if a relay sends
more, all packets of the author fail."""

_MOST_BYTES = 4 * _MAX_BYTES
"""The most that is kept of one answer. If a relay sends more, it is asked about fewer authors at a time."""

_LONG_BYTES = 64 * 1024
"""If this much of one author has arrived when the time is over, the author has too much for this connection:
all packets of the author fail, because those behind them must not wait for ever."""

_EVENTS_AT_ONCE = 16
"""Longer chains are verified on a thread; this many take about 1 ms."""


class _TooMuch(Exception):
    """The answer about several authors is too long to be kept."""


@dataclass(frozen=True, slots=True)
class _Question:
    """One author's part in a request to the relay: when the request was made, and its outcome."""

    asked_at: float
    answered: asyncio.Future[None]


class KeyFetcher:
    """Fills a `KeyRing` on demand.

    `read` yields the identity packets of some authors, unverified, and ends when the relay has no more; it
    raises `StrataError`. Authors wanted while a request is under way are collected for the next one.
    """

    def __init__(
        self,
        ring: KeyRing,
        read: Callable[[tuple[str, ...]], AsyncGenerator[Event, None]],
        *,
        timeout: float,
        name: str,
    ) -> None:
        self.ring = ring
        self._read = read
        self._timeout = timeout
        self._questions: AuthorQuestions[None] = AuthorQuestions(
            self._put, most=MAX_AUTHORS, at_once=1, name=name
        )

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
        answered = self._questions.answer(author, since)
        for other in others:
            self._questions.want(other)
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
                self._questions.want(author, now)
            self.ring.stale.clear()

    async def close(self) -> None:
        """Stop asking; waiting calls raise `Closed`."""
        await self._questions.close()

    async def _put(self, authors: tuple[str, ...]) -> Answers[None]:
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
                except _TooMuch:
                    self._ask_for_fewer()
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
        else:
            self._ask_for_fewer()

    def _ask_for_fewer(self) -> None:
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
        kept = 0
        is_late = False
        try:
            async with asyncio.timeout(self._timeout):
                async with contextlib.aclosing(self._read(authors)) as answer:
                    async for packet, received_at in answer:
                        sizes[packet.author_id] += packet.size_bytes
                        found = events[packet.author_id]
                        if sizes[packet.author_id] <= _MAX_BYTES and len(found) <= _MAX_EVENTS:
                            found.append((packet, received_at))
                            kept += packet.size_bytes
                        if kept > _MOST_BYTES and len(authors) > 1:
                            raise _TooMuch
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
