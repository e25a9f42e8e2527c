"""The turns of the event loop, kept short: what a crowd causes at once is done a slice at a time.

A thousand sockets may send, or go, within one turn of the loop, and each costs little. So whatever peers
cause asks here whether the turn has had its slice. What is left then waits in one line, and the loop looks
after everything else in between.

In the line whoever has had little of the loop lately stands before those who have had much: each job has its
place, the moment from which its payer owes nothing (`Quota.turn`), and the earliest goes first. A request
needs eight turns or so, and each may be somebody else's: so whoever has had much, and whatever turns out to
take long, gets a fourth of a slice.
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

_SHORT: Final = 0.25
"""The part of a slice after which whoever has had much makes way. Work that waits and takes longer than that
has a turn of its own."""
_FEW: Final = 8
"""Where more wait than these, every slice is short: whoever comes in meanwhile, and stands before most of
them, is seen sooner."""
_MUCH_SECONDS: Final = 0.005
"""What somebody has had is much, if it will not have come back by then: of a share of a tenth, half a
millisecond."""


class Slices:
    """The slice of each turn, and the jobs that wait for one of the next. Use it on one event loop."""

    def __init__(
        self,
        faults: Faults | None = None,
        *,
        seconds: float = SLICE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._faults = faults or Faults()
        self._clock = clock
        self.seconds = seconds
        self._begun: float | None = None  # None: nothing has been done in this turn
        self._waiting: list[tuple[float, int, Callable[[], object], Callable[[Exception], None]]] = []
        self._numbers = itertools.count()

    def is_over(self, place: float | None = None) -> bool:
        """Whether this turn has had its slice: what can wait belongs into `later` now.

        For work whose `place` says that its payer has had much, the slice is shorter: whatever comes in
        meanwhile is seen that much sooner.
        """
        now = self._clock()
        if self._begun is None:
            self._begin(now)
            return False
        is_short = len(self._waiting) > _FEW or (place is not None and place - now > _MUCH_SECONDS)
        return now - self._begun >= (_SHORT * self.seconds if is_short else self.seconds)

    def later(
        self,
        job: Callable[[], object],
        place: float | None = None,
        lost: Callable[[Exception], None] | None = None,
    ) -> None:
        """Call this in one of the next turns: after those that wait already, or at its place among them.

        It does a piece of its work, and comes here again where something is left. What it raises goes to
        `lost`, which must not raise, or is counted as a fault.
        """
        now = self._clock()
        at = now if place is None else place
        heapq.heappush(self._waiting, (at, next(self._numbers), job, lost or self._caught))
        if self._begun is None:
            self._begin(now)

    async def next(self, place: float | None = None) -> None:
        """Wait for one of the next turns, as `later` does. Cancelling it changes nothing."""
        given = asyncio.Event()
        self.later(functools.partial(self._give, given), place)
        await given.wait()

    def _give(self, given: asyncio.Event) -> None:
        """Let a task go on. It works in a step of its own, and that is the slice of this turn."""
        given.set()
        self._begun = float("-inf")

    def _caught(self, error: Exception) -> None:
        self._faults.caught("background", error)

    def _begin(self, now: float) -> None:
        self._begun = now
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._begun = None
        for _ in range(len(self._waiting)):  # what comes again waits for the turn after
            place, _, job, lost = self._waiting[0]
            if self.is_over(place):
                return
            heapq.heappop(self._waiting)
            begun = self._clock()
            try:
                job()
            except Exception as error:
                lost(error)
            if self._clock() - begun >= _SHORT * self.seconds:
                self._begun = float("-inf")  # a long piece of work has a turn of its own
                return
