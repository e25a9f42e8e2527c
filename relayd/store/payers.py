"""Those at whose expense connections to the database are lent.

Whoever makes the relay ask the database takes turns at the connections with all others, and its account is
charged with the time. So many questions of one stranger wait behind a single one of anybody else.
What has no payer is the relay's own: the feed, the writer, its timers.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Final, Protocol

__all__ = ["Payer", "Together", "Unbilled", "line_of"]

_TOGETHER: Final = "together"


class Payer(Hashable, Protocol):
    """The party to which a connection is lent; payers are compared as dictionary keys are."""

    def used_database(self, seconds: float, now: float) -> None:
        """A connection was lent for `seconds` at this payer's expense, until `now` on the monotonic clock."""


class Unbilled:
    """A payer that is charged nothing, but takes its turn among the others."""

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
