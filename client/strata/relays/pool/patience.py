"""How long a reader waits for a relay that brings nothing, or next to nothing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Self, TypeVar

from strata.protocol.errors import RequestTimeout
from strata.relays.peer_timeout import LATE_SECONDS, LOOK_SECONDS, PeerTimeout

__all__ = ["FindPatience", "ReadPatience"]

_T = TypeVar("_T")

_GIVEN_BACK = 1 / 20
"""The part of its time that a relay gets back for each packet found."""


class ReadPatience:
    """Ends what stands inside it with `RequestTimeout` if nothing was heard for `seconds` and it `may_end`.

    Being heard costs no more than setting a number: whether it was long ago is looked up once a second. A
    pause of the program does not count.
    """

    def __init__(self, seconds: float, may_end: Callable[[], bool], what: str) -> None:
        self._seconds = seconds
        self._may_end = may_end
        self._what = what
        self._step = min(seconds, LOOK_SECONDS)
        self._since = math.inf
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await self._limit.__aenter__()
        self.wait()
        self._looked_at = self._since
        self._look()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._timer is not None
        self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            raise RequestTimeout(self._what, self._seconds) from None

    def wait(self) -> None:
        """What is waited for is expected from now on."""
        self._since = self._loop.time()

    def heard(self) -> None:
        """Something has come: until `wait`, nothing is expected."""
        self._since = math.inf

    def _look(self) -> None:
        now, last = self._loop.time(), self._looked_at
        self._looked_at = now
        if now - last > self._step + LATE_SECONDS:
            self._since += now - last
        if now - self._since >= self._seconds and self._may_end():
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._step, self._look)


class FindPatience:
    """The time that a relay has left to find packets: `seconds` at first and at most.

    Waiting uses it up, and each packet gives some of it back. If each gave back all, a relay could keep the
    packets that others have from a reader for as long as it likes, with one now and then.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = self._left = seconds

    async def next(self, found: AsyncGenerator[_T, None]) -> _T | None:
        """The next one found; None at the end. Raises `RequestTimeout` once the time is over, and what the
        generator raises."""
        try:
            async with PeerTimeout(self._left) as patience:
                one = await anext(found, None)
        except TimeoutError:
            raise RequestTimeout("the search for packets", self._seconds) from None
        self._left = min(self._seconds, patience.left + self._seconds * _GIVEN_BACK)
        return one
