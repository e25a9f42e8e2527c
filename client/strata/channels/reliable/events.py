"""Everything a channel reports, under the exact names of the documents (channel.md §3).

There are two generations of names over one engine: the 2025 events follow each chunk, and the
`reliable:message:*` events of 2026 follow each message. All of a sender's events carry both `request_id`, new
for each `send`, and `message_id`, the hash of the payload (C-037).
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from strata.channels.messaging.values import MessageEnvelope
from strata.channels.rate_limit.values import EphemeralDropReason
from strata.channels.reliable.program_acks import HandedOver
from strata.channels.spelling import in_camel_case

__all__ = [
    "CHANNEL_EVENTS",
    "CHANNEL_STATUS_EVENTS",
    "ChannelEvent",
    "ChunkInfo",
    "EphemeralMessageDropped",
    "EventMessageReceived",
    "EventMessageSendError",
    "EventMessageSent",
    "EventReliableMessageSent",
    "FailureStage",
    "HistoryGap",
    "InboxFull",
    "IrretrievableMessage",
    "MessageAcknowledged",
    "MessagePossiblyAcknowledged",
    "MessageReceived",
    "MessageSent",
    "MessagesUndecryptable",
    "ReliableEnvelope",
    "ReliableMessageDelivered",
    "ReliableMessageDeliveryError",
    "ReliableMessageReceived",
    "ReliableMessageSendError",
    "ReliableMessageSent",
    "SenderIdConflict",
    "SendingMessage",
    "SendingMessageIrrecoverableError",
    "Synced",
    "Syncing",
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
    """A message and its channel; with an empty `channel_id` it is ephemeral and belongs to no channel."""

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
    """A chunk, or an ephemeral message, was sent over the wire; nobody has acknowledged it yet (C-039)."""

    name: ClassVar[str] = "message-sent"
    request_id: str
    message_id: str
    chunk_info: ChunkInfo
    sds_id: str | None = None
    """The chunk's id in `log`; None for an ephemeral message."""


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePossiblyAcknowledged:
    """A filter of another participant seems to contain a chunk; `possible_ack_count` is the count so far
    (C-041)."""

    name: ClassVar[str] = "message-possibly-acknowledged"
    request_id: str
    message_id: str
    chunk_info: ChunkInfo
    possible_ack_count: int


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class MessageAcknowledged:
    """A further chunk is acknowledged; the event lists all acknowledged chunks in ascending order (C-042)."""

    name: ClassVar[str] = "message-acknowledged"
    request_id: str
    message_id: str
    chunks_acknowledged: tuple[int, ...]
    total_chunks: int
    acknowledged_by: tuple[str, ...] = ()
    """The sender ids of each chunk's first acknowledgement, without repetition."""
    people: tuple[str, ...] = ()
    """Their DIDs, if senders are bound to DIDs (`sender_binding`)."""


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
class MessageReceived(HandedOver):
    """A whole message of another participant, reported once (C-046). Times are in Unix milliseconds.

    Sort by `order` to get the order that all participants share, which is that of `log`. A message that
    arrives later may belong before one that is already here. `author`, `sent_at` and `order` are None if they
    are unknown; ephemeral messages have no order.
    """

    name: ClassVar[str] = "message-received"
    request_id: str
    """The sender's request id, if the message carries it, else `message_id` (C-050)."""
    message_id: str
    sender_id: str
    payload: bytes
    content_topic: str
    timestamp: int
    """When the message became whole here."""
    ephemeral: bool = False
    hash: bytes | None = None
    """The transport's hash of the packet that completed the message, if known."""
    meta: bytes | None = None
    """Metadata that the transport carried beside the payload; relays carry none, and no store keeps it."""
    pubsub_topic: str = ""
    """A concept of other transports; relays have none."""
    author: str | None = None
    """The DID that signed the message. Only `sender_binding="did"` proves that the author is the sender."""
    sent_at: int | None = None
    """When the sender claims to have sent the message, by the sender's clock."""
    lamport_timestamp: int | None = None
    sds_id: str | None = None
    """The message's id in `log`; for a message in several chunks, that of its first chunk."""

    @property
    def device(self) -> str | None:
        """The name of the sending device: the part after the `#` of a sender id `DID#device`."""
        device = self.sender_id.partition("#")[2] if self.sender_id.startswith("did:") else ""
        return device or None

    @property
    def order(self) -> tuple[int, str] | None:
        """The message's place in the order that all participants share, as a sort key."""
        if self.lamport_timestamp is None or self.sds_id is None:
            return None
        return self.lamport_timestamp, self.sds_id


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class IrretrievableMessage:
    """A message that is known to exist and was given up (C-056)."""

    name: ClassVar[str] = "irretrievable-message"
    message_id: str
    """The message's SDS id, or the hash of its payload if only some of its chunks never arrived."""
    retrieval_hint: bytes | None
    sender_id: str | None
    channel_id: str
    first_missing_at: int


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryGap:
    """A stretch of the history that no relay has any more. The channel continues after it.

    The times are Lamport times, those of the order that all participants share. They are Unix milliseconds as
    far as the participants' clocks are right. A message of the gap that another participant still supplies is
    handed over late.
    """

    name: ClassVar[str] = "history-gap"
    channel_id: str
    from_time: int | None
    """When the last message before the gap that is present here was sent; None if the gap begins with the
    channel."""
    to_time: int
    """When the first message after the gap was sent."""
    from_id: str | None
    """The SDS id of the last message before the gap."""
    to_id: str
    """The SDS id of the first message after the gap; or of the last message in the gap, if the gap had been
    read and its messages expired before there was room for them."""
    message_ids: tuple[str, ...]
    """The messages of the gap whose ids are known, at most 1 000."""
    at_least: int
    """How many messages of the gap are known by id: the gap has at least this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EphemeralMessageDropped:
    """An ephemeral message was not sent, because of the rate limit (C-057)."""

    name: ClassVar[str] = "ephemeral-message-dropped"
    request_id: str
    message_id: str
    reason: EphemeralDropReason
    rate_limit_utilization: int


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReliableMessageReceived(HandedOver):
    """`message-received` of 2026: the message in its envelope."""

    name: ClassVar[str] = "reliable:message:received"
    request_id: str
    envelope: ReliableEnvelope
    message: MessageReceived | None = None
    """The same message with everything known about it, such as who sent it, and when."""


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReliableMessageSent:
    """All of a message is sent (C-051); reported once."""

    name: ClassVar[str] = "reliable:message:sent"
    request_id: str
    message_id: str
    order: tuple[int, str] | None = None
    """The message's place in the order of `MessageReceived.order`."""


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReliableMessageDelivered:
    """Another participant has all of a message (C-052); reported once."""

    name: ClassVar[str] = "reliable:message:delivered"
    request_id: str
    message_id: str
    acknowledged_by: tuple[str, ...] = ()
    """As in `MessageAcknowledged`."""
    people: tuple[str, ...] = ()


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReliableMessageSendError:
    """A message failed (C-053); reported once."""

    name: ClassVar[str] = "reliable:message:send-error"
    request_id: str
    message_id: str
    error: str
    code: str
    stage: FailureStage


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReliableMessageDeliveryError:
    """Nobody has acknowledged all of a message (C-054). It may have arrived anyway, and may be reported as
    delivered later (C-055)."""

    name: ClassVar[str] = "reliable:message:delivery-error"
    request_id: str
    message_id: str
    error: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Syncing:
    """Messages are known to be missing and are being looked for. Repeated as the counts change, at most once
    a second."""

    name: ClassVar[str] = "syncing"
    received: int
    """The number of SDS messages of others that arrived since the channel was opened."""
    missing: int
    lost: int
    """The number of messages that were given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """No message is known to be missing, except those given up. The counts are those of `Syncing`."""

    name: ClassVar[str] = "synced"
    received: int
    missing: int
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderIdConflict:
    """Another program sends under this channel's sender id; the two cannot hear each other.

    Reported once for each author, and again if the author returns after ten minutes of silence.
    `ChannelHealth.sender_conflict` has the event as long as the conflict lasts.
    """

    name: ClassVar[str] = "sender-id-conflict"
    sender_id: str
    author: str | None
    """The author who signed the other program's message, if the transport proves it."""
    sds_id: str
    """The id of the message, which this channel never sent."""
    detected_at: int
    """Unix milliseconds."""
    reason: str
    """An explanation for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxFull:
    """The inbox is full because the program takes no messages; the channel reads no further until it does.

    Reported once, and again when the inbox has been emptied and is full again. Until the program takes
    messages, those of other participants stay at the relays, and the channel acknowledges none of them. The
    channel does not receive acknowledgements of its own messages either. A program that only sends should set
    `receive=False`.
    """

    name: ClassVar[str] = "inbox-full"
    messages: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesUndecryptable:
    """The encryption hook cannot decrypt what arrives: the key is wrong, or a stranger writes on the topic.

    Reported with the first such message, and then at most once a minute. `ChannelHealth.undecryptable` counts
    how many came in a row. They are read again once another participant's message has been decrypted, and
    they themselves can be decrypted too. A channel that is closed before that reads them after it is opened
    again.
    """

    name: ClassVar[str] = "messages-undecryptable"
    channel_id: str
    count: int
    """How many in a row so far."""
    since: int
    """When the first of them arrived, in Unix milliseconds."""


EventMessageReceived = ReliableMessageReceived
EventReliableMessageSent = ReliableMessageSent
EventMessageSent = ReliableMessageSent
"""The documents define one name but use the other (C-060)."""
EventMessageSendError = ReliableMessageSendError

ChannelEvent = (
    SendingMessage
    | MessageSent
    | MessagePossiblyAcknowledged
    | MessageAcknowledged
    | SendingMessageIrrecoverableError
    | MessageReceived
    | IrretrievableMessage
    | HistoryGap
    | EphemeralMessageDropped
    | ReliableMessageReceived
    | ReliableMessageSent
    | ReliableMessageDelivered
    | ReliableMessageSendError
    | ReliableMessageDeliveryError
    | Syncing
    | Synced
    | SenderIdConflict
    | InboxFull
    | MessagesUndecryptable
)

CHANNEL_EVENTS: tuple[str, ...] = (
    SendingMessage.name,
    MessageSent.name,
    MessagePossiblyAcknowledged.name,
    MessageAcknowledged.name,
    SendingMessageIrrecoverableError.name,
    MessageReceived.name,
    IrretrievableMessage.name,
    HistoryGap.name,
    EphemeralMessageDropped.name,
    ReliableMessageReceived.name,
    ReliableMessageSent.name,
    ReliableMessageDelivered.name,
    ReliableMessageSendError.name,
    ReliableMessageDeliveryError.name,
    InboxFull.name,
)
"""The names of the events in the documents, all about messages."""

CHANNEL_STATUS_EVENTS: tuple[str, ...] = (
    Syncing.name,
    Synced.name,
    SenderIdConflict.name,
    MessagesUndecryptable.name,
)
"""The names of the events about the channel as a whole; a listener receives them only if it names them."""
