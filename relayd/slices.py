"""The turns of the event loop, kept short: what a crowd causes at once is done a slice at a time.

A thousand sockets may send, or go, within one turn of the loop, and each costs little. So whatever peers
cause asks here whether the turn has had its slice. What is left then waits in one line, and the loop looks
after everything else in between.

In the line whoever has had little of the loop lately stands before those who have had much: each job has its
place, the moment from which its payer owes nothing (`Quota.turn`), and the earliest goes first.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Final

from relayd.faults import Faults

__all__ = ["SLICE_SECONDS", "Slices"]

SLICE_SECONDS: Final = 0.002
"""A turn may hold this much, the piece of work that began last, and what is no peer's doing."""


class Slices:
    """The slice of each turn, and the jobs that wait for one of the next. Use it on one event loop."""

    def __init__(self, faults: Faults | None = None, *, seconds: float = SLICE_SECONDS) -> None:
        self._faults = faults or Faults()
        self.seconds = seconds
        self._until: float | None = None  # None: nothing has been done in this turn
        self._waiting: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def is_over(self) -> bool:
        """Whether this turn has had its slice: what can wait belongs into `later` now."""
        now = time.monotonic()
        if self._until is None:
            self._begin(now)
            return False
        return now >= self._until

    def later(self, job: Callable[[], object], place: float | None = None) -> None:
        """Call this in one of the next turns: after those that wait already, or at its place among them.

        It does a piece of its work, and comes here again where something is left.
        """
        now = time.monotonic()
        heapq.heappush(self._waiting, (now if place is None else place, next(self._numbers), job))
        if self._until is None:
            self._begin(now)

    async def next(self, place: float | None = None) -> None:
        """Wait for one of the next turns, as `later` does. Cancelling it changes nothing."""
        given = asyncio.Event()
        self.later(functools.partial(self._give, given), place)
        await given.wait()

    def _give(self, given: asyncio.Event) -> None:
        """Let a task go on. It works in a step of its own, and that is the slice of this turn."""
        given.set()
        self._until = float("-inf")

    def _begin(self, now: float) -> None:
        self._until = now + self.seconds
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._until = None
        for _ in range(len(self._waiting)):  # what comes again waits for the turn after
            if self.is_over():
                return
            try:
                heapq.heappop(self._waiting)[2]()
            except Exception as error:
                self._faults.caught("background", error)
