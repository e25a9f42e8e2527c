"""Events of a participant, messages that it asks to have sent, and its statistics."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from strata.channels.sds.messages import HistoryEntry

__all__ = [
    "NO_ORIGIN",
    "AckedBy",
    "Acknowledged",
    "Delivered",
    "DeliveryFailed",
    "EphemeralReceived",
    "Lost",
    "MissingFound",
    "Origin",
    "PossiblyAcknowledged",
    "RefusedOld",
    "Retransmit",
    "SdsEvent",
    "SdsStatistics",
    "SendRepair",
    "SendSync",
    "SenderShared",
    "WaitingMessage",
]


class AckedBy(enum.Enum):
    """How a message was acknowledged."""

    HISTORY = "history"
    """A received history names it (C-120)."""
    DESCENDANT = "descendant"
    """A received history names a message that follows it, and the filter has it (C-123)."""
    FILTERS = "filters"
    """Enough received filters have it (C-122)."""
    RECEIPT = "receipt"
    """A received list of receipts has it (`strata.channels.sds.receipts`)."""


class Origin(msgspec.Struct, frozen=True):
    """What the transport knows about the sending of a message. SDS keeps it with the message."""

    author: str | None = None
    """The signer of the message."""
    sent_at: int | None = None
    """When the author says it was sent, in Unix seconds."""
    meta: bytes | None = None
    """The metadata that the transport carried with it; lost in a restart while the message waits."""
    stored_at: int | None = None
    """When the store received it, by the store's clock, in Unix seconds."""


NO_ORIGIN = Origin()


class Delivered(msgspec.Struct, frozen=True):
    """A message of another participant, delivered once and in causal order."""

    message_id: str
    sender_id: str
    content: bytes
    lamport_timestamp: int
    retrieval_hint: bytes | None
    origin: Origin = NO_ORIGIN


class RefusedOld(msgspec.Struct, frozen=True):
    """A message so old that it can no longer be known whether it was delivered: it is dropped.

    Reported once for each of the last thousand such messages.
    """

    message_id: str
    sender_id: str
    retrieval_hint: bytes | None
    stored: bool
    """Whether it was read from a store, and not heard."""


class WaitingMessage(msgspec.Struct, frozen=True):
    """A received message that is not delivered yet, because messages before it are missing."""

    message_id: str
    sender_id: str
    lamport_timestamp: int
    unmet: tuple[str, ...]
    """The ids of the messages that it waits for."""
    since: int
    """When it came, in wall milliseconds."""


class EphemeralReceived(msgspec.Struct, frozen=True):
    """An ephemeral message, neither ordered nor logged (C-138)."""

    message_id: str
    sender_id: str
    content: bytes
    origin: Origin = NO_ORIGIN


class PossiblyAcknowledged(msgspec.Struct, frozen=True):
    """A received filter has one of our messages; `count` filters have it so far (C-121)."""

    message_id: str
    count: int


class Acknowledged(msgspec.Struct, frozen=True):
    """Another participant has one of our messages. Reported once, even after `DeliveryFailed` (C-055)."""

    message_id: str
    by: AckedBy
    sender_id: str
    """The participant that acknowledged it; if several filters were counted, the sender of the last."""


class DeliveryFailed(msgspec.Struct, frozen=True):
    """One of our messages was not acknowledged, and all its retransmissions are used up (C-084)."""

    message_id: str


class MissingFound(msgspec.Struct, frozen=True):
    """Messages that others name and that have not arrived: fetch them by their hints (C-162)."""

    entries: tuple[HistoryEntry, ...]


class Lost(msgspec.Struct, frozen=True):
    """A missing message was given up; messages that waited for it are delivered without it (C-126)."""

    entry: HistoryEntry
    first_missing_at: int


class Retransmit(msgspec.Struct, frozen=True):
    """Send one of our messages again, byte for byte, and call `dispatched` when it has gone out (C-090)."""

    message_id: str
    data: bytes


class SendSync(msgspec.Struct, frozen=True):
    """Send this sync message; call `sync_failed` if that is impossible."""

    data: bytes


class SendRepair(msgspec.Struct, frozen=True):
    """Send a message again, byte for byte, because another participant requested it (C-159)."""

    message_id: str
    data: bytes


class SenderShared(msgspec.Struct, frozen=True):
    """A message under our sender id that this participant has not sent.

    Another participant uses the id, or this one sent the message before its state was lost; the shell can
    tell. `Participant.shared` returns it; `events` does not.
    """

    message_id: str
    lamport_timestamp: int
    follows_own: bool
    """Whether it names a message that we sent in this run, so it is later than that message."""
    origin: Origin


SdsEvent = (
    Delivered
    | EphemeralReceived
    | PossiblyAcknowledged
    | Acknowledged
    | DeliveryFailed
    | MissingFound
    | Lost
    | RefusedOld
    | Retransmit
    | SendSync
    | SendRepair
)


@dataclass(slots=True)
class SdsStatistics:
    """Counts since the participant was made."""

    received: int = 0
    """Readable messages of this channel."""
    delivered: int = 0
    duplicates: int = 0
    own_echoes: int = 0
    other_channels: int = 0
    undecodable: int = 0
    """Bytes that are not a message, and messages of no kind, with unusable ids, or that name too many."""
    oversized: int = 0
    refused_old: int = 0
    """Messages from before the horizon, perhaps delivered already (`strata.channels.sds.log.KnownIds`)."""
    refused_full: int = 0
    """Messages for which the incoming buffer had no room."""
    unwanted: int = 0
    """Messages from before this participant joined the channel."""
    retransmissions: int = 0
    repairs_sent: int = 0
    syncs_sent: int = 0
    overfull_filters: int = 0
    """Received filters with so many bits that they mean nothing: their acknowledgements were ignored."""
