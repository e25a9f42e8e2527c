"""Whether something that is looked at again and again stays as it is: a line through its latter half."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Line", "Point", "Trend", "fit", "trend"]

Point = tuple[float, float]
"""Seconds, and what was seen then."""

_DOUBT = 2.0
"""So many standard errors are taken for chance."""


@dataclass(frozen=True, slots=True)
class Line:
    """The line of least squares, in units for each second, and the standard error of its slope."""

    slope: float
    error: float


@dataclass(frozen=True, slots=True)
class Trend:
    """What became of one thing over the latter half of its points."""

    mean: float
    growth: float
    """From the beginning to the end of that half, by the line."""
    doubt: float
    """How much of the growth may be chance."""

    @property
    def least(self) -> float:
        """The growth that is no chance, which is nothing where it may all be."""
        return max(0.0, self.growth - self.doubt)


def fit(points: Sequence[Point]) -> Line:
    """The line through these points, of which there are three at least."""
    count = len(points)
    mean_x, mean_y = (sum(point[axis] for point in points) / count for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return Line(slope, math.sqrt(rest / (count - 2) / spread))


def trend(points: Sequence[Point]) -> Trend:
    """What became of it; the first half is for warming up."""
    half = points[len(points) // 2 :]
    line, span = fit(half), half[-1][0] - half[0][0]
    mean = sum(y for _, y in half) / len(half)
    return Trend(mean, line.slope * span, _DOUBT * line.error * span)
