"""Turns at a scarce resource: fair queueing by the cost of each payer's work.

Work is done in pieces, a page of history each, and the cost of a piece is unknown until it is done. Every
payer has a mark: how much it has used, on a scale that all share. The payer that has used least goes next.
Its mark moves by the expected cost of a piece when the piece begins, and is corrected when it ends. So a
payer of expensive pieces waits behind the others in proportion to what it used, however many connections ask
on its behalf, and nobody waits forever (start-time fair queueing).

A payer that arrives, or returns, begins where the last piece began: it gets no credit for the time that it
was idle. The marks of idle payers are kept while they are ahead of that; if there are too many, the furthest
behind are forgotten first: they owe least. No I/O and no clock: costs are passed in.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from typing import Final

__all__ = ["Turn", "Turns"]

_MAX_IDLE: Final = 4096
_FIRST_GUESS: Final = 0.005
_WEIGHT_OF_LAST: Final = 0.25


class Turn:
    """One piece of work: requested, begun, then done or given up."""

    __slots__ = ("charged", "is_begun", "line")

    def __init__(self, line: _Line) -> None:
        self.line = line
        self.charged = 0.0
        self.is_begun = False


class _Line:
    """The waiting turns of one payer, and what it has used."""

    __slots__ = ("expected", "is_entered", "mark", "payer", "under_way", "waiting")

    def __init__(self, payer: Hashable, mark: float) -> None:
        self.payer = payer
        self.mark = mark
        self.expected = _FIRST_GUESS
        self.is_entered = False
        self.under_way = 0
        self.waiting: deque[Turn] = deque()

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.under_way


class Turns:
    """At most `size` pieces at a time. `ask`, then call `begin` until it returns None; `end` each turn."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._begun_at = 0.0
        self._lines: dict[Hashable, _Line] = {}
        self._order: list[tuple[float, int, _Line]] = []
        self._number = 0

    def __len__(self) -> int:
        """The number of known payers."""
        return len(self._lines)

    def ask(self, payer: Hashable) -> Turn:
        """Wait for a turn at this payer's expense."""
        line = self._lines.get(payer)
        if line is None:
            line = self._lines[payer] = _Line(payer, self._begun_at)
        elif line.is_idle:
            line.mark = max(line.mark, self._begun_at)
        turn = Turn(line)
        line.waiting.append(turn)
        self._enter(line)
        return turn

    def begin(self) -> Turn | None:
        """The turn that may begin now, if there is one and there is room for it."""
        while self._free and self._order:
            mark, _, line = heapq.heappop(self._order)
            line.is_entered = False
            if not line.waiting:
                continue
            if mark != line.mark:  # it was corrected while the line waited
                self._enter(line)
                continue
            turn = line.waiting.popleft()
            turn.is_begun = True
            turn.charged = line.expected
            self._begun_at = max(self._begun_at, mark)
            line.mark += line.expected
            line.under_way += 1
            self._free -= 1
            if line.waiting:
                self._enter(line)
            return turn
        return None

    def end(self, turn: Turn, cost: float) -> None:
        """End this turn: it had this cost, or was given up before it began."""
        line = turn.line
        if turn.is_begun:
            self._free += 1
            line.under_way -= 1
            line.mark += cost - turn.charged
            line.expected += (cost - line.expected) * _WEIGHT_OF_LAST
        else:
            line.waiting.remove(turn)
        if line.is_idle:
            self._forget(line)

    def _enter(self, line: _Line) -> None:
        if not line.is_entered:  # once, however often its turns are requested and given up
            line.is_entered = True
            self._number += 1
            heapq.heappush(self._order, (line.mark, self._number, line))

    def _forget(self, line: _Line) -> None:
        if line.mark <= self._begun_at:
            del self._lines[line.payer]
        elif len(self._lines) > _MAX_IDLE:
            idle = sorted((each.mark, n) for n, each in enumerate(self._lines.values()) if each.is_idle)
            lines = list(self._lines.values())
            for _, n in idle[: len(idle) // 2]:
                del self._lines[lines[n].payer]
