"""Requesting authors' identity packets from a relay: many authors at once, one request at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection

from strata.protocol.errors import RequestRefused, RequestTimeout
from strata.protocol.keys import MAX_CHAIN_EVENTS
from strata.relays.author_questions import Answers, AuthorQuestions
from strata.relays.connection.keyring import Event, KeyRing
from strata.relays.peer_timeout import PeerTimeout

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
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if answered.done():
                answered.result()
        finally:
            answered.cancel()

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
            await self._ask(authors)
        except TimeoutError:
            late = RequestTimeout("the question for authors' keys", self._timeout)
            return False, dict.fromkeys(authors, late)
        except _TooMuch:
            return False, {}
        except RequestRefused as refusal:
            if len(authors) == 1 or refusal.retry_after is not None:
                raise
            return False, {}  # a relay may take fewer authors at once
        return True, dict.fromkeys(authors, None)

    async def _ask(self, authors: tuple[str, ...]) -> None:
        asked_at = asyncio.get_running_loop().time()
        events: dict[str, list[Event]] = {author: [] for author in authors}
        sizes = dict.fromkeys(authors, 0)
        kept = 0
        is_late = False
        try:
            async with PeerTimeout(self._timeout):
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
