"""Counts of seconds in buckets that grow by a tenth: they add up, and give percentiles to 5 %. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

__all__ = ["GROWTH", "added", "percentile", "seconds_of", "share_below"]

GROWTH = 1.1
"""Bucket n > 0 holds seconds s with n - 1 < log(1 + s) / log(GROWTH) <= n; bucket -n holds these for -s."""


def seconds_of(bucket: int) -> float:
    """The seconds that a bucket represents: the middle of the whole numbers that fall into it."""
    if bucket == 0:
        return 0.0
    low, high = (GROWTH**size - 1 for size in (abs(bucket) - 1, abs(bucket)))
    first, last = math.floor(low) + 1, math.floor(high)
    middle = (first + last if first <= last else low + high) / 2
    return middle if bucket > 0 else -middle


def added(histograms: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """The sum of histograms."""
    total: dict[int, int] = {}
    for histogram in histograms:
        for bucket, count in histogram.items():
            total[bucket] = total.get(bucket, 0) + count
    return total


def percentile(histogram: Mapping[int, int], share: float) -> float | None:
    """The seconds at or below which a share of the counted values lies; None if there are none."""
    wanted = share * sum(histogram.values())
    passed = 0
    for bucket in sorted(histogram):
        passed += histogram[bucket]
        if passed >= wanted:
            return seconds_of(bucket)
    return None


def share_below(histogram: Mapping[int, int], seconds: float) -> float | None:
    """The share of the counted values below a number of seconds; None if there are none."""
    total = sum(histogram.values())
    if not total:
        return None
    return sum(count for bucket, count in histogram.items() if seconds_of(bucket) < seconds) / total
