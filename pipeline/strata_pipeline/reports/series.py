"""Series over time without omissions: a day without values appears as such.

If a long time is missing, as after one packet from a clock that was decades late, one entry stands for all of
it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import TypeVar

from strata_pipeline.days.figures import week_of

__all__ = ["LONGEST", "by_day", "by_month", "by_number", "by_week"]

T = TypeVar("T")

LONGEST = 31
"""The most empty entries in a row."""


def by_day(values: Mapping[str, T], nothing: T) -> list[tuple[str, T]]:
    """Values by day (2026-11-26), in order, with `nothing` for days in between that have none."""
    numbers = {datetime.date.fromisoformat(day).toordinal(): value for day, value in values.items()}
    return by_number(numbers, nothing, lambda number: str(datetime.date.fromordinal(number)))


def by_week(values: Mapping[str, T], nothing: T) -> list[tuple[str, T]]:
    """The same by week (2026-W48)."""
    numbers = {_monday(week).toordinal() // 7: value for week, value in values.items()}
    # The first day of the calendar is a Monday, and has the number 1.
    return by_number(numbers, nothing, lambda number: week_of(str(datetime.date.fromordinal(7 * number + 1))))


def by_month(values: Mapping[str, T], nothing: T) -> list[tuple[str, T]]:
    """The same by month (2026-11)."""
    numbers = {int(month[:-3]) * 12 + int(month[-2:]) - 1: value for month, value in values.items()}
    return by_number(numbers, nothing, lambda number: f"{number // 12:04}-{number % 12 + 1:02}")


def by_number(values: Mapping[int, T], nothing: T, label: Callable[[int], str]) -> list[tuple[str, T]]:
    """The same by whole number, each under its label."""
    points: list[tuple[str, T]] = []
    following: int | None = None
    for number in sorted(values):
        missing = range(number if following is None else following, number)
        if len(missing) > LONGEST:
            points.append(("…", nothing))
        else:
            points += [(label(each), nothing) for each in missing]
        points.append((label(number), values[number]))
        following = number + 1
    return points


def _monday(week: str) -> datetime.date:
    year, number = week.split("-W")
    return datetime.date.fromisocalendar(int(year), int(number), 1)
