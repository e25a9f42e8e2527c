"""The type names of the three documents, for types that have another name or module here.

`ReliableChannelOptions` is a mapping for `options=`; everything else is an alias. The documents' `WakuNode`
is any `MessagingNode`; `strata.channels.waku` has the implementation that talks to a Waku node.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from typing import TypedDict

from strata.channels.encryption import Encryption
from strata.channels.messaging.emitter import EventEmitter
from strata.channels.messaging.values import MessageEnvelope
from strata.channels.persistence.interface import Persistence
from strata.channels.rate_limit.values import DefaultRateLimitConfig, RateLimitConfig
from strata.channels.reliable.events import (
    EphemeralMessageDropped,
    MessageAcknowledged,
    MessagePossiblyAcknowledged,
    MessageReceived,
    MessageSent,
    SendingMessage,
    SendingMessageIrrecoverableError,
)
from strata.channels.sds import HistoryEntry, SdsConfig
from strata.channels.segmentation.splitting import SegmentationConfig

__all__ = [
    "ChannelId",
    "ContentTopic",
    "DecodedMessage",
    "DefaultRateLimitConfig",
    "EphemeralDropReason",
    "HistoryEntry",
    "IEncryption",
    "IPersistence",
    "MessageAcknowledgedEvent",
    "MessageEnvelope",
    "MessageError",
    "MessageEvents",
    "MessageId",
    "MessagePayload",
    "MessageSentEvent",
    "PossibleAcknowledgment",
    "RateLimitConfig",
    "ReliableChannelEvents",
    "ReliableChannelOptions",
    "RequestId",
    "SdsConfig",
    "SegmentationConfig",
    "SenderId",
    "SendingMessageEvent",
]

ChannelId = str
SenderId = str
MessageId = str
RequestId = str
ContentTopic = str
MessagePayload = bytes

IEncryption = Encryption
IPersistence = Persistence

MessageEvents = EventEmitter
ReliableChannelEvents = EventEmitter

DecodedMessage = MessageReceived
SendingMessageEvent = SendingMessage
MessageSentEvent = MessageSent
MessageAcknowledgedEvent = MessageAcknowledged
PossibleAcknowledgment = MessagePossiblyAcknowledged
MessageError = SendingMessageIrrecoverableError
EphemeralDropReason = EphemeralMessageDropped
"""Has `reason` and `rate_limit_utilization`; `strata.channels.rate_limit` has the reasons themselves."""


class ReliableChannelOptions(TypedDict, total=False):
    """The options of 2025 under their original names, for `options`. Times are in milliseconds."""

    sync_min_interval_ms: int
    retry_interval_ms: int
    max_retry_attempts: int
    retrieve_frequency_ms: int
    sweep_in_buf_interval_ms: int
    query_on_connect: bool
    auto_start: bool
    process_task_min_elapse_ms: int
    causal_history_size: int
    bloom_filter_size: int
