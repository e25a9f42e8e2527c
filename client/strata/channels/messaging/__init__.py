"""Messaging nodes, which carry bytes on content topics over any transport (channel.md §14).

`node` is the interface that channels use, `values` has its messages and events, `emitter` calls handlers, and
`outcomes` turns the outcome of a message into an awaitable value. `relay_node` is the node over relays,
`heard` subscribes to a topic, `stored` reads what relays have stored, and `binding` puts messages into
packets.
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
