"""The messages and events of a messaging node (LIP-168; channel.md §14)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from strata.channels.spelling import in_camel_case

__all__ = [
    "HEALTH_EVENTS",
    "MESSAGE_EVENTS",
    "ConnectionStatus",
    "ConnectionStatusChange",
    "ContentTopicHealthChange",
    "MessageEnvelope",
    "NodeMessageError",
    "NodeMessagePropagated",
    "NodeMessageReceived",
    "NodeMessageSent",
    "ReceivedEnvelope",
    "TopicHealth",
]


@in_camel_case()
@dataclass(frozen=True, slots=True, kw_only=True)
class MessageEnvelope:
    """One message to send (C-260)."""

    content_topic: str
    payload: bytes
    ephemeral: bool = False
    meta: bytes | None = None
    """A proof for transports that require one (C-236). Relays carry none."""
    retention_seconds: int | None = None
    """How long stores should keep the message; None leaves it to them (C-295)."""
    again: bool = False
    """Whether it repeats another participant's message, so that its sender did not write it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedEnvelope:
    """One message as received from the transport."""

    content_topic: str
    payload: bytes
    ephemeral: bool = False
    author: str | None = None
    """The signer, if the transport proves it: on relays the DID of the packet's author. None for a message
    that someone else repeats without the proof."""
    timestamp: int | None = None
    """The time at which the author claims to have sent it, in Unix seconds; None if unknown."""
    meta: bytes | None = None
    """Metadata that some transports carry beside the payload. Relays carry none."""


@dataclass(frozen=True, slots=True)
class NodeMessageReceived:
    """A message on a subscribed topic (C-261)."""

    name: ClassVar[str] = "message_received"
    message_hash: bytes
    """The hash that finds the message in a store: on relays the 32 bytes of the packet id (C-283)."""
    message: ReceivedEnvelope
    stored: bool = False
    """Whether the transport's store had it before the subscription had caught up, so that reading the store
    brings it too."""
    received_at: int | None = None
    """When the store got it, by its own clock, in Unix seconds; None if unknown."""
    live: bool = True
    """Whether it arrived after the subscription had caught up with the store; False if stored before that."""


@dataclass(frozen=True, slots=True)
class NodeMessageSent:
    """The required number of relays have the message."""

    name: ClassVar[str] = "message_sent"
    request_id: str
    message_hash: bytes


@dataclass(frozen=True, slots=True)
class NodeMessagePropagated:
    """The first relay has the message (C-262)."""

    name: ClassVar[str] = "message_propagated"
    request_id: str
    message_hash: bytes


@dataclass(frozen=True, slots=True)
class NodeMessageError:
    """A message could not be sent."""

    name: ClassVar[str] = "message_error"
    request_id: str
    message_hash: bytes | None
    error: str
    """An explanation for people."""
    code: str = "error"
    recoverable: bool = True
    """Whether sending it again may succeed (C-292)."""
    retry_after_ms: int | None = None
    """How long to send nothing, if the transport's limit is reached."""


class ConnectionStatus(enum.StrEnum):
    """How a node is connected (C-266)."""

    DISCONNECTED = "Disconnected"
    PARTIALLY_CONNECTED = "PartiallyConnected"
    CONNECTED = "Connected"


class TopicHealth(enum.StrEnum):
    """The health of a content topic's subscription."""

    UNHEALTHY = "UNHEALTHY"
    MINIMALLY_HEALTHY = "MINIMALLY_HEALTHY"
    SUFFICIENTLY_HEALTHY = "SUFFICIENTLY_HEALTHY"
    NOT_SUBSCRIBED = "NOT_SUBSCRIBED"


@dataclass(frozen=True, slots=True)
class ConnectionStatusChange:
    """The connection status of the node has changed."""

    name: ClassVar[str] = "connection_status_change"
    status: ConnectionStatus


@dataclass(frozen=True, slots=True)
class ContentTopicHealthChange:
    """The health of a content topic has changed."""

    name: ClassVar[str] = "content_topic_health_change"
    content_topic: str
    health: TopicHealth


MESSAGE_EVENTS = (
    NodeMessageReceived.name,
    NodeMessageSent.name,
    NodeMessagePropagated.name,
    NodeMessageError.name,
)
HEALTH_EVENTS = (ConnectionStatusChange.name, ContentTopicHealthChange.name)
