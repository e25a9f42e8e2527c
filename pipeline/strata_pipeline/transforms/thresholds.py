"""How much traffic is too much. These figures need no Spark, because command lines show them."""

from __future__ import annotations

from dataclasses import dataclass

from strata_pipeline.errors import UsageError

__all__ = ["BURST_CEILING", "BURST_FLOOR", "Thresholds", "check_counts"]

BURST_FLOOR = 50
"""Packets within one second up to which nothing is a burst, regardless of the author's habit: no person sends
as many."""
BURST_CEILING = 1_000
"""Packets within one second above which any hour is a burst."""
_MOST = 10**15
"""The highest bound: in seconds, this many hours still fit into a number of Spark and of PostgreSQL."""


@dataclass(frozen=True)
class Thresholds:
    """How much traffic of an author is abuse. The defaults affect no person who writes and no bot that
    reports.

    Raises `UsageError` for values that make no sense.
    """

    burst_hours: int = 3
    """The number of hours with a burst from which an author is limited."""
    limit_copies: int = 600
    """The number of near-duplicates within one hour (one in six seconds) from which an author is limited."""
    block_copies: int = 6_000
    """The number of near-duplicates within one hour from which an author is blocked."""
    copies_share: float = 0.8
    """The share of an hour's texts that must be near-duplicates for either verdict."""
    hours: int = 24
    """How many hours a verdict holds after the last hour that gave cause."""

    def __post_init__(self) -> None:
        check_counts(self.burst_hours, self.limit_copies, self.block_copies, self.hours)
        if not 0 < self.copies_share <= 1:
            raise UsageError("the share of near-duplicates is above 0 and at most 1")
        if self.block_copies < self.limit_copies:
            raise UsageError("an author is blocked for more near-duplicates than limited, or for as many")


def check_counts(*counts: int) -> None:
    """Check bounds for counts. Raises `UsageError` for one that is out of range."""
    if min(counts) < 1 or max(counts) > _MOST:
        raise UsageError(f"bounds of bursts and thresholds of abuse are from 1 to {_MOST}")
