"""Reads of keys, few at a time: those who have them read take turns, by what their reads have taken.

How long a chain takes to read is known only afterwards. Without turns, one who names many long chains at once
would have all of them read before anybody else's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

from relayd.store.turns import Turn, Turns

__all__ = ["ReadingTurns"]


class ReadingTurns:
    """At most `size` reads at a time. Callers without a payer share one line."""

    def __init__(self, size: int) -> None:
        self._turns = Turns(size)
        self._waiting: dict[Turn, asyncio.Future[None]] = {}

    async def begin(self, payer: Hashable = None) -> Turn:
        """Wait for a turn, which the caller must `end`. Cancelling this takes none."""
        turn = self._turns.ask(payer)
        self._waiting[turn] = given = asyncio.get_running_loop().create_future()
        self._give()
        try:
            await given
        except BaseException:
            self._waiting.pop(turn, None)
            self.end(turn, 0.0)
            raise
        return turn

    def close(self) -> None:
        """Cancel all who wait."""
        for given in list(self._waiting.values()):
            given.cancel()

    def end(self, turn: Turn, seconds: float) -> None:
        """The read of this turn is over; it took so long."""
        self._turns.end(turn, seconds)
        self._give()

    def _give(self) -> None:
        while (turn := self._turns.begin()) is not None:
            given = self._waiting.pop(turn)
            if not given.done():  # a waiter that was cancelled in this very step ends its turn itself
                given.set_result(None)
