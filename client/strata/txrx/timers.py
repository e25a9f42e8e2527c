"""A timer that can be set several times before it fires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Timer"]


class Timer:
    """Calls once, at the earliest time for which it was armed since its last call.

    It stores the time itself: uvloop's handle has no time if that is less than half a millisecond away.
    """

    __slots__ = ("_at", "_call", "_handle", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop = loop
        self._call = call
        self._handle: asyncio.Handle | None = None
        self._at = 0.0

    def arm(self, at: float | None) -> None:
        """Call at this time of the loop, or at an earlier time already set; None changes nothing."""
        if at is None or (self._handle is not None and self._at <= at):
            return
        self.cancel()
        self._at = at
        self._handle = self._loop.call_at(at, self._fire)

    def cancel(self) -> None:
        """Do not call until it is armed again."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._call()
