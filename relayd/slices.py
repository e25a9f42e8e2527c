"""Short turns of the event loop: work that a crowd of peers causes at once is done a slice at a time.

A thousand sockets may send, or close, within one turn of the loop, and each costs little. So work caused by
peers asks here whether the turn has used up its slice. The rest then waits in one queue, and the loop does
everything else in between.

In the queue, payers who have used little of the loop lately come before those who have used much: each job
has its place, the moment from which its payer owes nothing (`Quota.turn`), and the earliest goes first. A
request needs about eight turns, and each may be taken by somebody else's work: so payers who have used much,
and work that turns out to take long, get a quarter of a slice.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Final

from relayd.faults import FaultLog

__all__ = ["SLICE_SECONDS", "Slices"]

SLICE_SECONDS: Final = 0.002
"""The work in one turn, besides the piece that began last and work that no peer caused."""

_SHORT: Final = 0.25
"""The part of a slice after which payers who have used much make way. Queued work that takes longer than this
ends the turn."""
_FEW: Final = 8
"""If more jobs than this wait, every slice is short: a request that arrives meanwhile, and comes before most
of them, is served sooner."""
_MUCH_SECONDS: Final = 0.005
"""A payer has used much if it will owe nothing only after this time: with a share of a tenth, that is half a
millisecond of use."""


class Slices:
    """The slice of each turn, and the jobs that wait for a later turn. Use it on one event loop."""

    def __init__(
        self,
        faults: FaultLog | None = None,
        *,
        seconds: float = SLICE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._faults = faults or FaultLog()
        self._clock = clock
        self.seconds = seconds
        self._begun: float | None = None  # None: nothing has been done in this turn
        self._waiting: list[tuple[float, int, Callable[[], object], Callable[[Exception], None]]] = []
        self._numbers = itertools.count()

    def is_over(self, place: float | None = None) -> bool:
        """Whether this turn has used up its slice: pass what can wait to `later` now.

        For work whose `place` says that its payer has used much, the slice is shorter, so that what arrives
        meanwhile is served sooner.
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
        """Call `job` in one of the next turns: after the jobs that wait already, or at its place among them.

        A job does a piece of its work, and calls this again if something is left. An exception of the job
        goes to `lost`, which must not raise; without `lost` it is counted as a fault.
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
        """Let a task continue. It runs in its own step of the loop, which uses up the slice of this turn."""
        given.set()
        self._begun = float("-inf")

    def _caught(self, error: Exception) -> None:
        self._faults.caught("background", error)

    def _begin(self, now: float) -> None:
        self._begun = now
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._begun = None
        for _ in range(len(self._waiting)):  # a job that comes again waits for the turn after
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
                self._begun = float("-inf")  # a long piece of work ends the turn
                return
