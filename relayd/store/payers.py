"""Those for whom the relay works, and those at whose expense connections to the database are lent.

Whoever makes the relay ask the database takes turns at the connections with all others, and its account is
charged with the time. So many questions of one stranger wait behind a single one of anybody else.
What has no payer is the relay's own: the feed, the writer, its timers.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Final, Protocol

__all__ = ["NOBODY", "Asker", "Payer", "Together", "Unbilled", "line_of"]

_TOGETHER: Final = "together"


class Payer(Hashable, Protocol):
    """The party to which a connection is lent; payers are compared as dictionary keys are."""

    def used_database(self, seconds: float, now: float) -> None:
        """A connection was lent for `seconds` at this payer's expense, until `now` on the monotonic clock."""


class Asker(Protocol):
    """The party for whom a piece of work is done: who pays for it, and when it has its turn."""

    @property
    def payer(self) -> Payer | None:
        """The account that takes turns at the database; None for the relay's own work."""

    def checked_for(self, seconds: float) -> None:
        """Charge processor time that a thread spent. It may be called when the asker has gone."""

    def turn(self, now: float) -> float:
        """The place of its expensive work among that of others; lowest first. `now` is monotonic."""


class _Nobody:
    """The asker of the relay's own work, which is charged nothing and has its place in order of arrival."""

    @property
    def payer(self) -> Payer | None:
        return None

    def checked_for(self, seconds: float) -> None:
        pass

    def turn(self, now: float) -> float:
        return now


NOBODY: Final[Asker] = _Nobody()


class Unbilled(_Nobody):
    """An asker that is charged nothing, but takes its turn at the database among the others."""

    @property
    def payer(self) -> Payer:
        """Itself."""
        return self

    def used_database(self, seconds: float, now: float) -> None:
        """Charge nothing."""


class Together:
    """Several payers for whom one question is asked: each pays for its part, as often as it is named.

    All such questions share one line, because they are asked one at a time.
    """

    def __init__(self, payers: Iterable[Payer]) -> None:
        self._parts = Counter(payers)

    def used_database(self, seconds: float, now: float) -> None:
        """Charge each payer for its part."""
        for payer, parts in self._parts.items():
            payer.used_database(seconds * parts / self._parts.total(), now)


def line_of(payer: Payer | None) -> Hashable:
    """The line in which this payer waits for its turn; callers without a payer share one."""
    return _TOGETHER if isinstance(payer, Together) else payer
