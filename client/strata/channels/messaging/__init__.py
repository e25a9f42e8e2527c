"""Messaging nodes: bytes on content topics, whatever carries them (channel.md §14).

`node` is the interface that channels use, `values` its messages and events, `emitter` calls handlers, and
`outcomes` makes the outcome of a message a value to await. `relay_node` is the node over relays, `heard` how
it hears a topic, `stored` how it reads what relays have, `binding` how its messages travel in packets.
"""

from __future__ import annotations

from strata.channels.messaging.emitter import EventEmitter
from strata.channels.messaging.node import InvalidContentTopic, MessagingNode, NodeError, check_content_topic
from strata.channels.messaging.relay_node import RelayNode
from strata.channels.messaging.values import (
    ConnectionStatus,
    ConnectionStatusChange,
    ContentTopicHealthChange,
    MessageEnvelope,
    NodeMessageError,
    NodeMessagePropagated,
    NodeMessageReceived,
    NodeMessageSent,
    ReceivedEnvelope,
    TopicHealth,
)

__all__ = [
    "ConnectionStatus",
    "ConnectionStatusChange",
    "ContentTopicHealthChange",
    "EventEmitter",
    "InvalidContentTopic",
    "MessageEnvelope",
    "MessagingNode",
    "NodeError",
    "NodeMessageError",
    "NodeMessagePropagated",
    "NodeMessageReceived",
    "NodeMessageSent",
    "ReceivedEnvelope",
    "RelayNode",
    "TopicHealth",
    "check_content_topic",
]
