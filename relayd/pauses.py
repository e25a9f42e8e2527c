"""Waits between failed attempts: each twice as long as the last, up to a limit, minus a random part."""

from __future__ import annotations

import asyncio
import random

__all__ = ["Pauses"]


class Pauses:
    """The waits of one repeated attempt. Processes that are cut off together come back at different times."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self.next = first
        """The longest that the next wait can take, in seconds."""

    def reset(self) -> None:
        """Begin again with the shortest wait, after a success."""
        self.next = self._first

    async def wait(self) -> None:
        """Wait between half and all of `next`, and then double it. Cancelling ends the wait."""
        seconds, self.next = self.next, min(self.next * 2, self._longest)
        await asyncio.sleep(seconds * random.uniform(0.5, 1.0))
