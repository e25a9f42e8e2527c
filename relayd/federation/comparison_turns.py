"""Turns of comparing sets: one peer at a time, because a set takes memory, and no peer holds up the others.

A turn is for one part of a comparison: its set is made, compared and let go. Turns are shared as those at the
database are (`relayd.store.turns`), by the time that each peer has used: a peer that answers slowly waits
behind the others, not they behind it. A turn that has lasted for long ends as soon as another peer waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from strata.protocol.errors import StrataError

from relayd.store.turns import Turn, Turns

__all__ = ["TURN_SECONDS", "ComparisonTurns", "TurnOver"]

TURN_SECONDS: Final = 120.0
"""A turn that has lasted for this long ends when another peer waits: most parts take some seconds."""


class TurnOver(StrataError):
    """A part of a comparison took long, and other peers wait."""

    def __str__(self) -> str:
        return f"a part took longer than {TURN_SECONDS:.0f} seconds, and other peers wait"


class ComparisonTurns:
    """The turns of the peers, by their numbers."""

    def __init__(self) -> None:
        self._turns = Turns(1)
        self._waiting: dict[Turn, asyncio.Future[None]] = {}
        self._limit: asyncio.Timeout | None = None
        """The limit of the turn under way."""
        self._began = 0.0
        """When that turn began, on the clock of the loop."""

    @contextlib.asynccontextmanager
    async def turn(self, peer_id: int) -> AsyncIterator[float]:
        """Wait for a turn, which lasts as long as the block. Returns for how many seconds it was waited for.

        Raises `TurnOver` in the block if it has lasted for long and another peer waits. Cancelling it while
        it waits takes no turn.
        """
        loop = asyncio.get_running_loop()
        asked_at, began = loop.time(), None
        turn = self._turns.ask(peer_id)
        self._waiting[turn] = begun = loop.create_future()
        try:
            self._look()
            await begun
            self._began = began = loop.time()
            async with self._limited():
                yield began - asked_at
        finally:
            self._waiting.pop(turn, None)
            self._turns.end(turn, 0.0 if began is None else loop.time() - began)
            self._look()

    @contextlib.asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limit = limit
                self._look()
                try:
                    yield
                finally:
                    self._limit = None
        except TimeoutError:
            if limit.expired():
                raise TurnOver from None
            raise

    def _look(self) -> None:
        """Give the next turn, and limit the one under way as long as another peer waits."""
        if (turn := self._turns.begin()) is not None:
            begun = self._waiting.pop(turn)
            if not begun.done():  # a waiter that was cancelled in this very step ends its turn itself
                begun.set_result(None)
        if self._limit is not None and not self._limit.expired():
            now = asyncio.get_running_loop().time()
            self._limit.reschedule(max(now, self._began + TURN_SECONDS) if self._waiting else None)
