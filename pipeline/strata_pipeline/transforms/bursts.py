"""Hours in which an author sent far more in one second than usual.

Each author has a habit. Take the fullest second of each hour in which an author sent anything. The median of
these seconds is the habit. Their median distance from the habit, times 1.4826, is how far an hour usually
strays: the standard deviation of normally distributed hours, which a single wild hour does not change.
An hour is a burst if its fullest second has more than

    median + 6 × max(distance, median / 4)

packets. A quarter of the median covers authors whose hours are all alike. Three bounds keep this sane:
nothing up to `floor` is a burst; everything above `ceiling` is one, regardless of the habit; and `floor`
alone decides for an author with fewer than six hours, whose habit is unknown.
"""

from __future__ import annotations

from pyspark.sql import Window
from pyspark.sql import functions as F

from strata_pipeline.datasets.traffic import AuthorHours, Bursts
from strata_pipeline.transforms.thresholds import BURST_CEILING, BURST_FLOOR

__all__ = ["find_bursts"]

_MIN_HOURS = 6
_STRAYS = 6.0
_NORMAL = 1.4826
_LEAST_STRAY = 0.25


def find_bursts(hours: AuthorHours, floor: int = BURST_FLOOR, ceiling: int = BURST_CEILING) -> Bursts:
    """The hours whose fullest second is above the author's threshold. `floor`, `ceiling` are in packets.

    The hours are shuffled once, by author.
    """
    of_author = Window.partitionBy("author_id")
    peak, median = F.col("peak_packets"), F.col("median")
    habits = hours.frame.withColumns(
        {"median": F.percentile(peak, 0.5).over(of_author), "hours": F.count(F.lit(1)).over(of_author)}
    )
    strays = habits.withColumn("distance", F.percentile(F.abs(peak - median), 0.5).over(of_author))
    stray = F.greatest(_NORMAL * F.col("distance"), _LEAST_STRAY * median)
    bounded = F.least(
        F.greatest(median + _STRAYS * stray, F.lit(float(floor))), F.lit(float(max(floor, ceiling)))
    )
    threshold = F.when(F.col("hours") < _MIN_HOURS, F.lit(float(floor))).otherwise(bounded)
    judged = strays.withColumn("threshold", threshold)
    return Bursts(judged.where(peak > F.col("threshold")))
