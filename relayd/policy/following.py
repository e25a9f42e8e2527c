"""Keeps a process in step with what operators rule, in whichever process they rule it.

A notification triggers a look at once. There is also a look every half second, so that a lost notification
does no harm: the last line of the log says whether there is a new ruling. A ban with an end date ends here,
by the clock of this process, and holds again if that clock goes back. While the database cannot be reached,
the bans of the last reading hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from relayd.faults import FaultLog
from relayd.logs import get_logger, problem_of
from relayd.moderation import NOTHING_READ, Ban, Bans, LastRuling, RulingsRead
from relayd.store.types import StoreError

__all__ = ["BanFollower"]

_log = get_logger("relayd.policy")

_LOOK_INTERVAL: Final = 0.5


class _Rulings(Protocol):
    async def last(self) -> LastRuling: ...

    async def read(self, since: LastRuling) -> RulingsRead: ...


class BanFollower:
    """The bans in force. `on_change` is called when the bans have changed, with False, and after an erasure,
    with True, because what this process holds of the log in memory may have been erased. `on_close` is
    called with the ids of the sessions that operators have closed since this process began to follow."""

    def __init__(
        self,
        rulings: _Rulings,
        *,
        clock: Callable[[], int],
        on_change: Callable[[bool], None],
        on_close: Callable[[list[str]], None] = lambda sessions: None,
        faults: FaultLog,
    ) -> None:
        self.bans = Bans()
        self._rulings = rulings
        self._clock = clock
        self._on_change = on_change
        self._on_close = on_close
        self._faults = faults
        self._rows: Sequence[Ban] = ()
        self._counted_at = 0
        """When `bans` was counted: it is counted anew at an earlier time too."""
        self._last = NOTHING_READ
        self._is_half_told = False
        """`on_change` has failed on the current bans: it is called again at the next look."""
        self._unread = False
        self._rung = asyncio.Event()

    def ring(self) -> None:
        """Look at once: there may be a new ruling."""
        self._rung.set()

    async def look(self) -> None:
        """Read what is new, and apply it. Raises `StoreError`."""
        last, rows = await self._rulings.last(), self._rows
        erased, closed, now = False, list[str](), self._clock()
        if last != self._last:
            last, rows, erased, closed = await self._rulings.read(self._last)
            if self._last == NOTHING_READ:
                closed = []  # these were for processes of an earlier time
        elif not self._is_half_told and self._counted_at <= now < (self.bans.changes_at or math.inf):
            return
        bans, self._counted_at = Bans.at(now, rows), now
        if bans != self.bans or erased or self._is_half_told:
            self.bans, self._is_half_told = bans, True
            self._on_change(erased)
            self._is_half_told = False
        if closed:
            self._on_close(closed)
        self._last, self._rows = last, rows

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_INTERVAL):
                    await self._rung.wait()
            self._rung.clear()
            try:
                await self.look()
                self._unread = False
            except StoreError as error:
                if not self._unread:
                    _log.warning("bans_unread", problem=problem_of(error))
                self._unread = True
            except Exception as error:
                self._faults.caught("background", error)
