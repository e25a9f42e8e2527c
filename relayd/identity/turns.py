"""Reads of keys, few at a time: those go first who owe least for what was done for them.

How long a chain takes to read is known, and charged, only afterwards. Without turns, one who names many long
chains at once would have all of them read before anybody else's.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable

__all__ = ["ReadingTurns"]

Place = Callable[[float], float]
"""When nothing will be owed any more, of now, in monotonic seconds: see `Quota.turn`."""


class ReadingTurns:
    """At most `size` reads at a time. Among those who owe the same, who has asked first goes first."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._numbers = itertools.count()
        # By when each has asked, plus what it owed when that was last looked at. What is owed grows with each
        # read that ends, so it is looked at again before a turn is given.
        self._waiting: list[tuple[float, int, float, Place, asyncio.Future[None]]] = []

    async def begin(self, place: Place) -> asyncio.Future[None]:
        """Wait for a turn, and return what the caller must cancel when its turn is over.

        Cancelling this takes no turn.
        """
        loop, asked_at = asyncio.get_running_loop(), time.monotonic()
        given: asyncio.Future[None] = loop.create_future()
        entry = place(asked_at), next(self._numbers), asked_at, place, given
        heapq.heappush(self._waiting, entry)
        try:
            self._give()
            await given
            over: asyncio.Future[None] = loop.create_future()
            over.add_done_callback(self._over)
        except BaseException:
            if not given.cancel() and not given.cancelled():  # the turn was given in this very step
                self._free += 1
                self._give()
            raise
        return over

    def close(self) -> None:
        """Cancel all who wait."""
        for *_, given in self._waiting:
            given.cancel()

    def _over(self, over: asyncio.Future[None]) -> None:
        self._free += 1
        self._give()

    def _give(self) -> None:
        now = time.monotonic()
        while self._free and self._waiting:
            due, number, asked_at, place, given = self._waiting[0]
            if given.done():  # nobody waits for it any more
                heapq.heappop(self._waiting)
            elif (owing := asked_at + place(now) - now) > due:
                heapq.heapreplace(self._waiting, (owing, number, asked_at, place, given))
            else:
                heapq.heappop(self._waiting)
                self._free -= 1
                given.set_result(None)
