"""What a participant has to tell, and what it asks to have sent."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum

import msgspec

from strata.channels.sds.messages import HistoryEntry

__all__ = [
    "AckedBy",
    "Acknowledged",
    "Delivered",
    "DeliveryFailed",
    "EphemeralReceived",
    "Lost",
    "MissingFound",
    "PossiblyAcknowledged",
    "Retransmit",
    "SdsEvent",
    "SendRepair",
    "SendSync",
]


class AckedBy(enum.Enum):
    """What acknowledged a message."""

    HISTORY = "history"
    """A received history names it (C-120)."""
    DESCENDANT = "descendant"
    """A received history names a message that follows it, and the filter has it (C-123)."""
    FILTERS = "filters"
    """Enough received filters have it (C-122)."""


class Delivered(msgspec.Struct, frozen=True):
    """A message of another participant, in causal order, once."""

    message_id: str
    sender_id: str
    content: bytes
    lamport_timestamp: int
    retrieval_hint: bytes | None


class EphemeralReceived(msgspec.Struct, frozen=True):
    """An ephemeral message: as it came, unordered, unlogged (C-138)."""

    message_id: str
    sender_id: str
    content: bytes


class PossiblyAcknowledged(msgspec.Struct, frozen=True):
    """A received filter newly has an own message; `count` filters so far (C-121)."""

    message_id: str
    count: int


class Acknowledged(msgspec.Struct, frozen=True):
    """An own message is with another participant; said once, even after `DeliveryFailed` (C-055)."""

    message_id: str
    by: AckedBy
    sender_id: str
    """Who acknowledged it."""


class DeliveryFailed(msgspec.Struct, frozen=True):
    """Nobody acknowledged an own message, and all its retransmissions are used up (C-084)."""

    message_id: str


class MissingFound(msgspec.Struct, frozen=True):
    """Messages that others name and that are not here: fetch them, by their hints (C-162)."""

    entries: tuple[HistoryEntry, ...]


class Lost(msgspec.Struct, frozen=True):
    """A missing message was given up; what waited for it is delivered without it (C-126)."""

    entry: HistoryEntry
    first_missing_at: int


class Retransmit(msgspec.Struct, frozen=True):
    """Send an own message again, the bytes unchanged, and say `dispatched` when it is out (C-090)."""

    message_id: str
    data: bytes


class SendSync(msgspec.Struct, frozen=True):
    """Send this sync message; say `sync_failed` if that is impossible."""

    data: bytes


class SendRepair(msgspec.Struct, frozen=True):
    """Send another's message again, the bytes unchanged: somebody asked for it (C-159)."""

    message_id: str
    data: bytes


SdsEvent = (
    Delivered
    | EphemeralReceived
    | PossiblyAcknowledged
    | Acknowledged
    | DeliveryFailed
    | MissingFound
    | Lost
    | Retransmit
    | SendSync
    | SendRepair
)
