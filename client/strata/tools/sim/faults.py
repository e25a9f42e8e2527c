"""What goes wrong in a simulated network, how often, and how often it did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

__all__ = ["NO_FAULTS", "FaultCounts", "Faults"]

FaultCounts = Counter[str]
"""How often each fault has struck, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probabilities between 0 and 1, and times in virtual seconds. Raises `ValueError` for anything else."""

    loss: float = 0.0
    """Each passage, of a message to a relay, of its answer, of the message to each subscriber."""
    duplication: float = 0.0
    """Each passage to a subscriber happens twice."""
    latency: tuple[float, float] = (0.01, 0.2)
    """Each passage takes between; the wider, the more messages overtake each other."""
    forgetting: float = 0.0
    """A relay says it stored a message, hands it on, and has not stored it."""
    disk_delay: tuple[float, float] = (0.0, 0.01)
    """What a write to a participant's store takes."""
    disk_failure: float = 0.0
    """A write fails, and has or has not taken effect."""
    partitions: float = 0.0
    """How many times a minute a participant is cut off from a relay, for some seconds."""
    relay_crashes: float = 0.0
    """How many times a minute a relay is down for some seconds; it keeps its stored messages."""
    crashes: float = 0.0
    """How many times a minute a participant is killed, and comes back with its store."""
    disk_losses: float = 0.0
    """How many of those come back without it."""
    clock_jumps: float = 0.0
    """How many times a minute a participant's clock is set, by up to an hour either way."""
    outage: tuple[float, float] = (1.0, 20.0)
    """The length of an outage, in seconds: least and most."""

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
