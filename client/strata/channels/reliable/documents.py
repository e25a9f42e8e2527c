"""The type names of the three documents, for the types that have another name here.

`ReliableChannelOptions` is a mapping for `options=`; everything else is an alias.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from typing import TypedDict

from strata.channels.encryption import Encryption
from strata.channels.messaging.emitter import EventEmitter
from strata.channels.persistence.interface import Persistence
from strata.channels.reliable.events import (
    MessageAcknowledged,
    MessagePossiblyAcknowledged,
    MessageReceived,
    MessageSent,
    SendingMessage,
    SendingMessageIrrecoverableError,
)

__all__ = [
    "ChannelId",
    "ContentTopic",
    "DecodedMessage",
    "IEncryption",
    "IPersistence",
    "MessageAcknowledgedEvent",
    "MessageError",
    "MessageEvents",
    "MessageId",
    "MessagePayload",
    "MessageSentEvent",
    "PossibleAcknowledgment",
    "ReliableChannelEvents",
    "ReliableChannelOptions",
    "RequestId",
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


class ReliableChannelOptions(TypedDict, total=False):
    """The options of 2025 under their names, to be given as `options`. Times are milliseconds."""

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
