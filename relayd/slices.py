"""The turns of the event loop, kept short: what a crowd causes at once is done a slice at a time.

A thousand sockets may send, or go, within one turn of the loop, and each costs little. So whatever peers
cause asks here whether the turn has had its slice. What is left then waits in one line, first come, first
served, and the loop looks after everything else in between.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from relayd.faults import Faults

__all__ = ["Slices"]

_SECONDS: Final = 0.004
"""A turn may hold this much, the piece of work that began last, and what is no peer's doing."""


class Slices:
    """The slice of each turn, and the jobs that wait for one of the next. Use it on one event loop."""

    def __init__(self, faults: Faults | None = None, *, seconds: float = _SECONDS) -> None:
        self._faults = faults or Faults()
        self.seconds = seconds
        self._until: float | None = None  # None: nothing has been done in this turn
        self._waiting: deque[Callable[[], object]] = deque()

    def is_over(self) -> bool:
        """Whether this turn has had its slice: what can wait belongs into `later` now."""
        now = time.monotonic()
        if self._until is None:
            self._begin(now)
            return False
        return now >= self._until

    def later(self, job: Callable[[], object]) -> None:
        """Call this in one of the next turns, after those that wait already.

        It does a piece of its work, and comes here again where something is left.
        """
        self._waiting.append(job)
        if self._until is None:
            self._begin(time.monotonic())

    def _begin(self, now: float) -> None:
        self._until = now + self.seconds
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._until = None
        for _ in range(len(self._waiting)):  # what comes again waits for the turn after
            if self.is_over():
                return
            try:
                self._waiting.popleft()()
            except Exception as error:
                self._faults.caught("background", error)
