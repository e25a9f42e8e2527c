"""How long to wait for others: time counts only while the program looks."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from typing import Final, Self

__all__ = ["LATE_SECONDS", "LOOK_SECONDS", "READ_SECONDS", "PeerTimeout"]

LOOK_SECONDS: Final = 1.0
"""A program that waits looks at least this often."""
LATE_SECONDS: Final = 1.0
"""A look that is later than this ends a pause: the program was stopped, or busy with something else."""
READ_SECONDS: Final = 0.5
"""How long, after a pause, reading what has come meanwhile may take before anything is judged."""

_RESOLUTION_SECONDS: Final = 0.001
"""Less than this is nothing: the sum of many steps is not exact."""


class PeerTimeout:
    """Like `asyncio.timeout`, except that a pause of the program does not count.

    During a pause the answer may have come: it lies in the socket until the program goes on.
    """

    def __init__(self, seconds: float | None) -> None:
        self.left = math.inf if seconds is None else max(seconds, 0.0)
        """The seconds that were left at the last look."""
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._read = READ_SECONDS

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await self._limit.__aenter__()
        self._wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._count()
        await self._limit.__aexit__(kind, error, trace)

    def _wait(self) -> None:
        self._step = min(self.left, LOOK_SECONDS)
        self._since = self._loop.time()
        if self.left != math.inf:
            self._timer = self._loop.call_later(self._step, self._look)

    def _look(self) -> None:
        self._count()
        if self.left > _RESOLUTION_SECONDS:
            self._wait()
        else:
            self._limit.reschedule(self._loop.time())

    def _count(self) -> None:
        passed = self._loop.time() - self._since
        if passed <= self._step + LATE_SECONDS:
            self.left -= passed
            return
        # A program that pauses again and again must not wait for ever.
        self.left = max(self.left - self._step / 2, self._read)
        self._read /= 2
