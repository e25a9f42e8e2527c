"""Waits between attempts that fail: each twice as long, up to a limit, and a random part shorter."""

from __future__ import annotations

import asyncio
import random

__all__ = ["Pauses"]


class Pauses:
    """The waits of one thing that is tried again and again. Processes cut off together come back apart."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self.next = first
        """Seconds that the next wait takes at most."""

    def reset(self) -> None:
        """It worked: begin again with the shortest wait."""
        self.next = self._first

    async def wait(self) -> None:
        """Wait, between half and all of the time that it is the turn of. Cancelling ends the wait."""
        seconds, self.next = self.next, min(self.next * 2, self._longest)
        await asyncio.sleep(seconds * random.uniform(0.5, 1.0))
