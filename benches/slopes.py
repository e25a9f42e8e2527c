"""Whether repeated samples of something stay level: a line through their latter half."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Line", "Point", "Trend", "fit", "trend"]

Point = tuple[float, float]
"""A time in seconds, and the value then."""

_DOUBT = 2.0
"""The number of standard errors that count as chance."""


@dataclass(frozen=True, slots=True)
class Line:
    """The least-squares line, in units per second, and the standard error of its slope."""

    slope: float
    error: float


@dataclass(frozen=True, slots=True)
class Trend:
    """The trend over the latter half of the points."""

    mean: float
    growth: float
    """The growth from the beginning to the end of that half, by the line."""
    doubt: float
    """How much of the growth may be chance."""

    @property
    def least(self) -> float:
        """The growth that is not chance: 0 if all of it may be."""
        return max(0.0, self.growth - self.doubt)


def fit(points: Sequence[Point]) -> Line:
    """The line through these points; there must be at least three."""
    count = len(points)
    mean_x, mean_y = (sum(point[axis] for point in points) / count for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return Line(slope, math.sqrt(rest / (count - 2) / spread))


def trend(points: Sequence[Point]) -> Trend:
    """The trend of these points; the first half is for warming up."""
    half = points[len(points) // 2 :]
    line, span = fit(half), half[-1][0] - half[0][0]
    mean = sum(y for _, y in half) / len(half)
    return Trend(mean, line.slope * span, _DOUBT * line.error * span)
