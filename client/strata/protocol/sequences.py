"""The sequences of a relay's log (decision 1): the UTC day in the high bits, a counter from 1 in the low.

Within a day no number is skipped, so the number of packets between two sequences is known without a query.
"""

from __future__ import annotations

import datetime
from typing import NamedTuple

__all__ = ["DAY_SECONDS", "Span", "day_of", "day_text", "first_of_day", "is_day", "parse_day"]

DAY_SECONDS = 86_400
_ORDINAL_BITS = 32
_EPOCH = datetime.date(1970, 1, 1)
_LAST_DAY = (datetime.date.max - _EPOCH).days


class Span(NamedTuple):
    """The sequences `after < sequence <= up_to`."""

    after: int
    up_to: int

    @property
    def day(self) -> int:
        """The day of its last sequence, counted from 1970-01-01 UTC."""
        return day_of(self.up_to)

    @property
    def ordinals(self) -> int:
        """The number of its sequences in its day; this is the number of packets if none was removed."""
        return self.up_to - max(self.after, first_of_day(self.day))

    def overlaps(self, other: Span) -> bool:
        """Whether any sequence lies in both."""
        return self.after < other.up_to and other.after < self.up_to

    def __str__(self) -> str:
        return f"{self.after + 1}-{self.up_to}"


def first_of_day(day: int) -> int:
    """The number just below a day's first sequence."""
    return day << _ORDINAL_BITS


def day_of(sequence: int) -> int:
    """The day in which the packet at this sequence was received."""
    return sequence >> _ORDINAL_BITS


def is_day(day: int) -> bool:
    """Whether a log can contain this day and `day_text` can write it."""
    return 0 <= day <= _LAST_DAY


def day_text(day: int) -> str:
    """A day as text, such as `2026-11-21`."""
    return (_EPOCH + datetime.timedelta(days=day)).isoformat()


def parse_day(text: str) -> int:
    """The inverse of `day_text`. Raises ValueError."""
    return (datetime.date.fromisoformat(text) - _EPOCH).days
