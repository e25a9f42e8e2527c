"""Settings and values of the rate limit manager."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from strata.channels.spelling import in_camel_case
from strata.protocol.errors import StrataError

__all__ = [
    "DEFAULT_RATE_LIMIT_CONFIG",
    "DefaultRateLimitConfig",
    "EphemeralDropReason",
    "Priority",
    "RateLimitConfig",
    "SendQueueFull",
    "Transmission",
]


class SendQueueFull(StrataError):
    """Too many chunks of a channel already wait for the rate limit (C-227). Nothing was queued."""

    def __init__(self, lane: str, waiting: int, max_queued: int) -> None:
        super().__init__(lane, waiting, max_queued)
        self.lane = lane
        self.waiting = waiting
        self.max_queued = max_queued

    def __str__(self) -> str:
        return f"{self.waiting} of at most {self.max_queued} chunks wait for the rate limit already"


class Priority(enum.IntEnum):
    """The kind of a transmission; lower numbers go first (C-230)."""

    CONTENT = 0
    RETRANSMISSION = 1
    BACKGROUND = 2
    """Sync and repair."""


class EphemeralDropReason(enum.StrEnum):
    """Why an ephemeral message was dropped (C-057)."""

    APPROACHED = "rate_limit_approached"
    REACHED = "rate_limit_reached"


@in_camel_case()
@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimitConfig:
    """The limits of a transport; None means that no limit is known. Raises `ValueError` for invalid values.

    With `enabled` false only the transport itself delays transmissions: a relay's pause, or a limit that the
    transport declares (C-220, C-221, C-232).
    """

    enabled: bool = True
    epoch_size_ms: int = 600_000
    messages_per_epoch: int | None = None
    segments_per_epoch: int | None = None
    chunk_accounting: Literal["first", "each"] = "first"
    """Whether only a message's first chunk counts as a message, or each of its chunks (C-223, C-224)."""
    approach_threshold: float = 0.9
    """The used part of the budget from which ephemerals are dropped and retransmissions wait (C-229)."""
    max_queued: int = 10_000
    """The most transmissions of each kind that wait in one lane."""
    max_pause_ms: int = 3_600_000
    """The longest pause because of one answer of a relay; the relay can ask again (C-302)."""

    def __post_init__(self) -> None:
        for name in (
            "epoch_size_ms",
            "messages_per_epoch",
            "segments_per_epoch",
            "max_queued",
            "max_pause_ms",
        ):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ValueError(f"{name} must be at least 1")
        if not 0 < self.approach_threshold <= 1:
            raise ValueError("approach_threshold must be above 0 and at most 1")
        if self.chunk_accounting not in ("first", "each"):
            raise ValueError("chunk_accounting must be 'first' or 'each'")


DEFAULT_RATE_LIMIT_CONFIG = RateLimitConfig()
DefaultRateLimitConfig = DEFAULT_RATE_LIMIT_CONFIG
"""The same object, under its name in the documents (C-029)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transmission:
    """A chunk or other message that waits for its turn, or that was taken."""

    lane: str
    message_id: str
    priority: Priority
    opens_message: bool = False
    counted_in: int = -1
    """The epoch whose message budget was charged; -1 if none was."""
    position: int = 0
    """The place in the stored queue; 0 if it is not stored."""
