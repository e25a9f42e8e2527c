"""The faults of a simulated network: how often they strike, and how often they did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

__all__ = ["NO_FAULTS", "FaultCounts", "Faults"]

FaultCounts = Counter[str]
"""How often each fault has struck, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities from 0 to 1, rates per minute, and times in virtual seconds.

    Raises `ValueError` for values that are out of range.
    """

    loss: float = 0.0
    """The probability that a hop is lost: a message to a relay, its answer, or a message to a subscriber."""
    duplication: float = 0.0
    """The probability that a message to a subscriber arrives twice."""
    latency: tuple[float, float] = (0.01, 0.2)
    """The least and most that a hop takes; in a wider range, messages overtake each other more often."""
    forgetting: float = 0.0
    """The probability that a relay acknowledges a message and hands it on without storing it."""
    disk_delay: tuple[float, float] = (0.0, 0.01)
    """The least and most that a write to a participant's store takes."""
    disk_failure: float = 0.0
    """The probability that a write fails, with or without having taken effect."""
    partitions: float = 0.0
    """How many times a minute a participant is cut off from a relay, for some seconds."""
    relay_crashes: float = 0.0
    """How many times a minute a relay is down for some seconds; it keeps its stored messages."""
    crashes: float = 0.0
    """How many times a minute a participant is killed, and comes back with its store."""
    disk_losses: float = 0.0
    """The share of those crashes after which it comes back without its store."""
    clock_jumps: float = 0.0
    """How many times a minute a participant's clock is set, by up to an hour in either direction."""
    outage: tuple[float, float] = (1.0, 20.0)
    """The least and most that an outage lasts."""

    def __post_init__(self) -> None:
        for name in ("loss", "duplication", "forgetting", "disk_failure"):
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be below 1, or nothing ever works")
        if self.disk_losses > 1:
            raise ValueError("disk_losses is a part of the crashes, at most 1")
        for field in fields(self):
            value = getattr(self, field.name)
            low, high = value if isinstance(value, tuple) else (0.0, value)
            if not 0 <= low <= high:
                raise ValueError(f"{field.name} must not be negative, nor end before it begins")


NO_FAULTS = Faults()
