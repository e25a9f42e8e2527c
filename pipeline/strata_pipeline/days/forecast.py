"""A forecast of coming days, by a straight line through past ones. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Forecast", "forecast"]

_FEWEST = 7
"""The fewest days that have a trend."""
_USUAL = 1.28
"""The number of standard deviations within which four of five values lie."""

_SURE = 2.0
"""The number of its standard deviations that a slope must exceed to count."""


@dataclass(frozen=True)
class Forecast:
    """The expected sum of a number of coming days, and the bounds between which it lies in four of five
    cases."""

    days: int
    expected: float
    low: float
    high: float


def forecast(values: Sequence[float], days: int) -> Forecast | None:
    """The sum of the next `days` values of a daily series; None for fewer than seven values.

    The line has a slope only if the values show one beyond chance. The bounds take into account how the
    values vary around the line, and how uncertain a slope from so few values is.
    """
    count = len(values)
    if count < _FEWEST:
        return None
    middle, mean = (count - 1) / 2, sum(values) / count
    spread = sum((place - middle) ** 2 for place in range(count))
    slope = sum((place - middle) * (value - mean) for place, value in enumerate(values)) / spread
    rest = sum((value - mean - slope * (place - middle)) ** 2 for place, value in enumerate(values))
    if slope**2 * spread <= _SURE**2 * rest / (count - 2):  # chance alone can make such a slope
        slope, rest = 0.0, sum((value - mean) ** 2 for value in values)
    variance = rest / (count - 2)
    reach = days * (count - 1 + (days + 1) / 2 - middle) if slope else 0.0
    # A day cannot have less than nothing: a falling line ends at zero.
    expected = sum(max(0.0, mean + slope * (place - middle)) for place in range(count, count + days))
    doubt = _USUAL * math.sqrt(variance * (days + days**2 / count + reach**2 / spread))
    return Forecast(days, expected, max(0.0, expected - doubt), expected + doubt)
