"""How much traffic is too much. No Spark is needed to read these figures: command lines show them."""

from __future__ import annotations

from dataclasses import dataclass

from strata_pipeline.errors import UsageError

__all__ = ["BURST_CEILING", "BURST_FLOOR", "Thresholds", "check_counts"]

BURST_FLOOR = 50
"""Packets within one second that are no burst, whatever the author's habit: no person sends as many."""
BURST_CEILING = 1_000
"""Packets within one second above which every hour counts as a burst."""
_MOST = 10**15
"""No bound is higher: so many hours are still a number of seconds to Spark and to PostgreSQL."""


@dataclass(frozen=True)
class Thresholds:
    """How much traffic of an author is abuse. The defaults hit no person who writes and no bot that reports.

    Raises `UsageError` for values that make no sense.
    """

    burst_hours: int = 3
    """Hours with a burst: limit."""
    limit_copies: int = 600
    """Near-duplicates within one hour, one in six seconds: limit."""
    block_copies: int = 6_000
    """The same: block."""
    copies_share: float = 0.8
    """Share of an hour's texts that must be near-duplicates for either."""
    hours: int = 24
    """How long a verdict holds after the last hour that gave cause."""

    def __post_init__(self) -> None:
        check_counts(self.burst_hours, self.limit_copies, self.block_copies, self.hours)
        if not 0 < self.copies_share <= 1:
            raise UsageError("the share of near-duplicates is above 0 and at most 1")
        if self.block_copies < self.limit_copies:
            raise UsageError("an author is blocked for more near-duplicates than limited, or for as many")


def check_counts(*counts: int) -> None:
    """Raises `UsageError` for a bound that is none of a count."""
    if min(counts) < 1 or max(counts) > _MOST:
        raise UsageError(f"bounds of bursts and thresholds of abuse are from 1 to {_MOST}")
