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
from strata.channels.reliable.handed_over import HandedOver
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
    sds_id: str | None = None
    """The chunk's id in `log`; None for an ephemeral message."""


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
    acknowledged_by: tuple[str, ...] = ()
    """Sender ids: of each chunk's first acknowledgement, each once."""
    people: tuple[str, ...] = ()
    """Their DIDs, where senders are bound to them (`sender_binding`)."""


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
    """A whole message of another participant, once (C-046). Times are Unix milliseconds.

    Sort by `order` for the order that all participants share: that of `log`. A message that comes later may
    belong before one that is here. `author`, `sent_at` and `order` are None where nobody knows them:
    ephemeral messages have no order.
    """

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
    author: str | None = None
    """The DID that signed it. Only `sender_binding="did"` proves that the author is the sender."""
    sent_at: int | None = None
    """When the sender says it sent it, by the sender's clock."""
    lamport_timestamp: int | None = None
    sds_id: str | None = None
    """The id in `log`; of a message in several chunks, that of its first."""

    @property
    def device(self) -> str | None:
        """Which of its person's devices sent it: what stands behind the `#` of a sender id `DID#device`."""
        device = self.sender_id.partition("#")[2] if self.sender_id.startswith("did:") else ""
        return device or None

    @property
    def order(self) -> tuple[int, str] | None:
        """Its place in the order that all participants share: a key to sort by."""
        if self.lamport_timestamp is None or self.sds_id is None:
            return None
        return self.lamport_timestamp, self.sds_id


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
class HistoryGap:
    """A stretch of the history that no relay has any more. The channel goes on behind it.

    Its times are those of the order that all participants share, in Unix milliseconds as far as their clocks
    are right. A message of the gap that another participant still supplies is handed over late.
    """

    name: ClassVar[str] = "history-gap"
    channel_id: str
    from_time: int | None
    """When the last message that is here before the gap was sent; None: it begins with the channel."""
    to_time: int
    """When the first message behind the gap was sent."""
    from_id: str | None
    """The SDS id of the last message before the gap."""
    to_id: str
    """The SDS id of the first message behind it; of the last one of the gap, where the gap had been read and
    its messages expired before there was room for them."""
    message_ids: tuple[str, ...]
    """The messages of the gap that are known by name, at most 1 000."""
    at_least: int
    """How many messages are known by name: the gap has so many or more."""


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
class ReliableMessageReceived(HandedOver):
    """`message-received` of 2026: the message in its envelope."""

    name: ClassVar[str] = "reliable:message:received"
    request_id: str
    envelope: ReliableEnvelope
    message: MessageReceived | None = None
    """The same message with all that is known of it: who sent it, and when."""


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReliableMessageSent:
    """All of a message is sent (C-051): once."""

    name: ClassVar[str] = "reliable:message:sent"
    request_id: str
    message_id: str
    order: tuple[int, str] | None = None
    """Its place among those of `MessageReceived.order`."""


@in_camel_case(made=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class ReliableMessageDelivered:
    """All of a message is with another participant (C-052): once."""

    name: ClassVar[str] = "reliable:message:delivered"
    request_id: str
    message_id: str
    acknowledged_by: tuple[str, ...] = ()
    """As in `MessageAcknowledged`."""
    people: tuple[str, ...] = ()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Syncing:
    """Messages are known to be missing, and looked for. Told again as the counts change, once a second."""

    name: ClassVar[str] = "syncing"
    received: int
    """Messages of others, in SDS, that came since the channel was opened."""
    missing: int
    lost: int
    """Messages that were given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Synced:
    """No message is known to be missing, but for those given up. The counts are those of `Syncing`."""

    name: ClassVar[str] = "synced"
    received: int
    missing: int
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderIdConflict:
    """Another program sends under this channel's sender id: the two are deaf to each other.

    Told once for each, until nothing was heard of it for ten minutes. `ChannelHealth.sender_conflict` has it
    as long as it lasts.
    """

    name: ClassVar[str] = "sender-id-conflict"
    sender_id: str
    author: str | None
    """Who signed its message, if the transport proves it."""
    sds_id: str
    """The message that was never sent here."""
    detected_at: int
    """Unix milliseconds."""
    reason: str
    """For people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxFull:
    """The program takes no messages, and no more are kept for it: the channel reads no further until it does.

    Told once, and again when the inbox was emptied and is full again. Until the program takes messages, the
    others' messages stay at the relays, and the channel acknowledges none of them. It does not hear the
    acknowledgement of its own either. A program that only sends says `receive=False`.
    """

    name: ClassVar[str] = "inbox-full"
    messages: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesUndecryptable:
    """The encryption hook cannot decrypt what comes in: the key is wrong, or a stranger writes on the topic.

    Told with the first one, and once a minute at most. `ChannelHealth.undecryptable` counts those in a row.
    Once a message of somebody else is decrypted, and these are then too, they are read again; a channel
    that is closed before reads them when it is opened again.
    """

    name: ClassVar[str] = "messages-undecryptable"
    channel_id: str
    count: int
    """How many in a row so far."""
    since: int
    """When the first of these came, in Unix milliseconds."""


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
"""Those of the documents, all about messages."""

CHANNEL_STATUS_EVENTS: tuple[str, ...] = (
    Syncing.name,
    Synced.name,
    SenderIdConflict.name,
    MessagesUndecryptable.name,
)
"""Those about the channel as a whole: who wants to hear them names them."""
