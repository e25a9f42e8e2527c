"""Which sessions hold a set to compare: few at a time, because each set may take tens of megabytes."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from typing import Final, Protocol

__all__ = ["Comparisons", "SetHolder"]

_MOST_OPEN: Final = 3
_LONG_SECONDS: Final = 90.0
"""An identity that has compared for this long makes way for another one. Most take some seconds."""
_AWAY_SECONDS: Final = 30.0
"""Who was turned away keeps its place in the line for this long, twice as long as it was told to wait."""


class SetHolder(Protocol):
    """The holder of the set of one comparison."""

    def superseded(self) -> None:
        """A newer comparison of this identity has begun: release the set."""

    def makes_way(self) -> None:
        """The comparison has been open for long, and another identity wants to compare: release the set."""


class Comparisons:
    """The comparisons that are open in a process. Each identity has at most one, the newest.

    Places are given in the order in which they were asked for, and no identity keeps its place for long while
    another one waits: a few that answer slowly, or come again and again, must not keep the others out.
    """

    def __init__(self, most: int = _MOST_OPEN) -> None:
        self._most = most
        self._holders: dict[str, tuple[SetHolder, float]] = {}
        """By identity, each with the time since when it has had a place."""
        self._turned_away: dict[str, float] = {}
        """The identities that wait, in order, and when each was last turned away."""

    def __len__(self) -> int:
        return len(self._holders)

    def begin(self, identity: str, holder: SetHolder, now: float) -> bool:
        """Open a comparison, replacing an earlier one of this identity; False if too many are open. `now` is
        monotonic."""
        waiting = self._turned_away.items()
        self._turned_away = {each: at for each, at in waiting if now - at < _AWAY_SECONDS}
        before, since = self._holders.get(identity, (None, now))
        if before is not None and self._turned_away and now - since >= _LONG_SECONDS:
            del self._holders[identity]
            before.makes_way()
        elif before is not None or self._has_place(identity, now):
            self._turned_away.pop(identity, None)
            self._holders[identity] = holder, since
            if before is not None and before is not holder:
                before.superseded()
            return True
        self._turned_away[identity] = now
        return False

    def _has_place(self, identity: str, now: float) -> bool:
        """Whether there is a place for this identity besides those that were turned away before it; one that
        has been taken for long is made free."""
        line = [*self._turned_away, identity]
        free = self._most - len(self._holders) - line.index(identity)
        if free > 0:
            return True
        long = [each for each, (_, since) in self._holders.items() if now - since >= _LONG_SECONDS]
        if free + len(long) <= 0:
            return False
        slow, _ = self._holders.pop(min(long, key=lambda each: self._holders[each][1]))
        slow.makes_way()
        return True

    def holds(self, holder: SetHolder) -> bool:
        """Whether this holder's comparison is still open."""
        return any(each is holder for each, _ in self._holders.values())

    def end(self, holder: SetHolder) -> None:
        """End the comparison of this holder. Idempotent."""
        for identity, (each, _) in list(self._holders.items()):
            if each is holder:
                del self._holders[identity]
