"""What days to come may bring, by a straight line through those that were. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Forecast", "forecast"]

_FEWEST = 7
"""Fewer days have no trend."""
_USUAL = 1.28
"""Four of five values lie within so many standard deviations."""

_SURE = 2.0
"""A slope counts that is more than so many of its standard deviations."""


@dataclass(frozen=True)
class Forecast:
    """The sum of so many days to come, and between which sums it lies in four of five cases."""

    days: int
    expected: float
    low: float
    high: float


def forecast(values: Sequence[float], days: int) -> Forecast | None:
    """The sum of the next `days` values of a daily series; None for fewer than seven values.

    The line rises or falls only where the values say so beyond doubt. The bounds know how the values vary
    around it, and how little so few values tell of its slope.
    """
    count = len(values)
    if count < _FEWEST:
        return None
    middle, mean = (count - 1) / 2, sum(values) / count
    spread = sum((place - middle) ** 2 for place in range(count))
    slope = sum((place - middle) * (value - mean) for place, value in enumerate(values)) / spread
    rest = sum((value - mean - slope * (place - middle)) ** 2 for place, value in enumerate(values))
    if slope**2 * spread <= _SURE**2 * rest / (count - 2):  # chance alone makes such a slope
        slope, rest = 0.0, sum((value - mean) ** 2 for value in values)
    variance = rest / (count - 2)
    reach = days * (count - 1 + (days + 1) / 2 - middle) if slope else 0.0
    # No day takes back what others have brought: a line that falls ends at zero.
    expected = sum(max(0.0, mean + slope * (place - middle)) for place in range(count, count + days))
    doubt = _USUAL * math.sqrt(variance * (days + days**2 / count + reach**2 / spread))
    return Forecast(days, expected, max(0.0, expected - doubt), expected + doubt)
