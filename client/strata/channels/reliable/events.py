"""Everything a channel tells, under the exact names of the documents (channel.md §3).

Two generations of names over one engine: the 2025 events follow each chunk, `reliable:message:*` of 2026 each
message. All of a sender's events carry both `request_id`, new for each `send`, and `message_id`, the hash of
the payload (C-037).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from strata.channels.messaging.values import MessageEnvelope
from strata.channels.rate_limit.values import EphemeralDropReason
from strata.channels.spelling import in_camel_case

__all__ = [
    "CHANNEL_EVENTS",
    "ChannelEvent",
    "ChunkInfo",
    "EphemeralMessageDropped",
    "EventMessageReceived",
    "EventMessageSendError",
    "EventMessageSent",
    "EventReliableMessageSent",
    "FailureStage",
    "IrretrievableMessage",
    "MessageAcknowledged",
    "MessagePossiblyAcknowledged",
    "MessageReceived",
    "MessageSent",
    "ReliableEnvelope",
    "ReliableMessageDelivered",
    "ReliableMessageDeliveryError",
    "ReliableMessageReceived",
    "ReliableMessageSendError",
    "ReliableMessageSent",
    "SendingMessage",
    "SendingMessageIrrecoverableError",
]


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """Which part of a message an event is about; an unsegmented one is part 0 of 1."""

    chunk_index: int = 0
    total_chunks: int = 1


@in_camel_case()
@dataclass(frozen=True, slots=True, kw_only=True)
class ReliableEnvelope:
    """A message and the channel it belongs to; with an empty `channel_id` it is ephemeral, and of none."""

    message_envelope: MessageEnvelope
    channel_id: str = ""


class FailureStage(enum.StrEnum):
    """Where a message failed (C-053)."""

    DISPATCH = "dispatch"
    """It could not be sent."""
    DELIVERY = "delivery"
    """It was sent as often as allowed, and nobody has acknowledged it."""


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class SendingMessage:
    """A chunk is about to go out, for the first time or again (C-038)."""

    name: ClassVar[str] = "sending-message"
    request_id: str
    message_id: str
    chunk_info: ChunkInfo


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSent:
    """A chunk, or an ephemeral message, is over the wire; nobody has acknowledged it (C-039)."""

    name: ClassVar[str] = "message-sent"
    request_id: str
    message_id: str
    chunk_info: ChunkInfo


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePossiblyAcknowledged:
    """Another filter seems to have a chunk; `possible_ack_count` so far (C-041)."""

    name: ClassVar[str] = "message-possibly-acknowledged"
    request_id: str
    message_id: str
    chunk_info: ChunkInfo
    possible_ack_count: int


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class MessageAcknowledged:
    """A further chunk is acknowledged: all that are, ascending (C-042)."""

    name: ClassVar[str] = "message-acknowledged"
    request_id: str
    message_id: str
    chunks_acknowledged: tuple[int, ...]
    total_chunks: int


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class SendingMessageIrrecoverableError:
    """A chunk can never be sent (C-044)."""

    name: ClassVar[str] = "sending-message-irrecoverable-error"
    request_id: str
    message_id: str
    chunk_info: ChunkInfo
    error: str
    code: str


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReceived:
    """A whole message of another participant, once (C-046). Times are Unix milliseconds."""

    name: ClassVar[str] = "message-received"
    request_id: str
    """The sender's, if the message carries it, else `message_id` (C-050)."""
    message_id: str
    sender_id: str
    payload: bytes
    content_topic: str
    timestamp: int
    """When it became whole here."""
    ephemeral: bool = False
    hash: bytes | None = None
    """The transport's hash of the packet that completed it, where that is known."""
    meta: bytes | None = None
    """What the transport carried beside the payload; relays carry none, and no store keeps it."""
    pubsub_topic: str = ""
    """A notion of other transports; relays have none."""


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class IrretrievableMessage:
    """A message that is known to exist, and given up (C-056)."""

    name: ClassVar[str] = "irretrievable-message"
    message_id: str
    """Its SDS id; the hash of the payload where it was some of its chunks that never came."""
    retrieval_hint: bytes | None
    sender_id: str | None
    channel_id: str
    first_missing_at: int


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class EphemeralMessageDropped:
    """An ephemeral message was not sent, for the rate limit's sake (C-057)."""

    name: ClassVar[str] = "ephemeral-message-dropped"
    request_id: str
    message_id: str
    reason: EphemeralDropReason
    rate_limit_utilization: int


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReliableMessageReceived:
    """`message-received` of 2026: the message in its envelope."""

    name: ClassVar[str] = "reliable:message:received"
    request_id: str
    envelope: ReliableEnvelope


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReliableMessageSent:
    """All of a message is sent (C-051): once."""

    name: ClassVar[str] = "reliable:message:sent"
    request_id: str
    message_id: str


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReliableMessageDelivered:
    """All of a message is with another participant (C-052): once."""

    name: ClassVar[str] = "reliable:message:delivered"
    request_id: str
    message_id: str


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReliableMessageSendError:
    """A message failed (C-053): once."""

    name: ClassVar[str] = "reliable:message:send-error"
    request_id: str
    message_id: str
    error: str
    code: str
    stage: FailureStage


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReliableMessageDeliveryError:
    """Nobody has acknowledged all of a message (C-054). It may be there all the same, and be said to be
    delivered later (C-055)."""

    name: ClassVar[str] = "reliable:message:delivery-error"
    request_id: str
    message_id: str
    error: str
    code: str


EventMessageReceived = ReliableMessageReceived
EventReliableMessageSent = ReliableMessageSent
EventMessageSent = ReliableMessageSent
"""The documents define one name and use the other (C-060)."""
EventMessageSendError = ReliableMessageSendError

ChannelEvent = (
    SendingMessage
    | MessageSent
    | MessagePossiblyAcknowledged
    | MessageAcknowledged
    | SendingMessageIrrecoverableError
    | MessageReceived
    | IrretrievableMessage
    | EphemeralMessageDropped
    | ReliableMessageReceived
    | ReliableMessageSent
    | ReliableMessageDelivered
    | ReliableMessageSendError
    | ReliableMessageDeliveryError
)

CHANNEL_EVENTS: tuple[str, ...] = (
    SendingMessage.name,
    MessageSent.name,
    MessagePossiblyAcknowledged.name,
    MessageAcknowledged.name,
    SendingMessageIrrecoverableError.name,
    MessageReceived.name,
    IrretrievableMessage.name,
    EphemeralMessageDropped.name,
    ReliableMessageReceived.name,
    ReliableMessageSent.name,
    ReliableMessageDelivered.name,
    ReliableMessageSendError.name,
    ReliableMessageDeliveryError.name,
)
