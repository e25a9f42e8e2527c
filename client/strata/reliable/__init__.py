"""Reliable channels: every message to every participant, once, in causal order, over relays.

`channel` is what a program uses, `client` makes one. `engine` decides everything, without I/O, by `requests`
(own messages), `inbox` (received ones), `retrieval` and `catching_up` (when to ask the store). The shells are
`hub` (sends for all channels of a node), `asking` (reads the store) and `handing_over` (tells the program).
"""

from __future__ import annotations

from strata.reliable.channel import ReliableChannel
from strata.reliable.client import (
    ReliableClient,
    close_channel,
    create_reliable_channel,
    make_channel,
    open_channel,
    send,
)
from strata.reliable.config import (
    DEFAULT_RELIABLE_CHANNEL_CONFIG,
    DefaultReliableChannelOptions,
    ReliableChannelConfig,
    configure,
)
from strata.reliable.errors import (
    AlreadyOpen,
    ChannelError,
    ChannelNotOpen,
    EmptyPayload,
    EventsMissed,
    InvalidEnvelope,
    MessageTooLarge,
    NotStarted,
    SegmentDoesNotFit,
    UnknownChannel,
)
from strata.reliable.events import (
    CHANNEL_EVENTS,
    ChannelEvent,
    ChunkInfo,
    EphemeralMessageDropped,
    EventMessageReceived,
    EventMessageSendError,
    EventMessageSent,
    EventReliableMessageSent,
    FailureStage,
    IrretrievableMessage,
    MessageAcknowledged,
    MessagePossiblyAcknowledged,
    MessageReceived,
    MessageSent,
    ReliableEnvelope,
    ReliableMessageDelivered,
    ReliableMessageDeliveryError,
    ReliableMessageReceived,
    ReliableMessageSendError,
    ReliableMessageSent,
    SendingMessage,
    SendingMessageIrrecoverableError,
)
from strata.reliable.values import (
    ChannelHealth,
    ChannelStatistics,
    MissingMessage,
    OutstandingMessage,
    SyncStatus,
)

__all__ = [
    "CHANNEL_EVENTS",
    "DEFAULT_RELIABLE_CHANNEL_CONFIG",
    "AlreadyOpen",
    "ChannelError",
    "ChannelEvent",
    "ChannelHealth",
    "ChannelNotOpen",
    "ChannelStatistics",
    "ChunkInfo",
    "DefaultReliableChannelOptions",
    "EmptyPayload",
    "EphemeralMessageDropped",
    "EventMessageReceived",
    "EventMessageSendError",
    "EventMessageSent",
    "EventReliableMessageSent",
    "EventsMissed",
    "FailureStage",
    "InvalidEnvelope",
    "IrretrievableMessage",
    "MessageAcknowledged",
    "MessagePossiblyAcknowledged",
    "MessageReceived",
    "MessageSent",
    "MessageTooLarge",
    "MissingMessage",
    "NotStarted",
    "OutstandingMessage",
    "ReliableChannel",
    "ReliableChannelConfig",
    "ReliableClient",
    "ReliableEnvelope",
    "ReliableMessageDelivered",
    "ReliableMessageDeliveryError",
    "ReliableMessageReceived",
    "ReliableMessageSendError",
    "ReliableMessageSent",
    "SegmentDoesNotFit",
    "SendingMessage",
    "SendingMessageIrrecoverableError",
    "SyncStatus",
    "UnknownChannel",
    "close_channel",
    "configure",
    "create_reliable_channel",
    "make_channel",
    "open_channel",
    "send",
]
