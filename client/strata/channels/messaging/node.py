"""The interface between a channel and the transport below it (C-259). Relays are one such transport."""

from __future__ import annotations

import unicodedata
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from strata.channels.messaging.emitter import EventEmitter
from strata.channels.messaging.values import ConnectionStatus, MessageEnvelope, NodeMessageReceived
from strata.protocol.errors import StrataError

__all__ = ["InvalidContentTopic", "MessagingNode", "NodeError", "check_content_topic"]

_MAX_TOPIC_BYTES = 256


class NodeError(StrataError):
    """A call of a messaging node that can never succeed (C-265)."""


class InvalidContentTopic(NodeError, ValueError):
    """A content topic that no relay could accept."""

    def __init__(self, topic: str) -> None:
        super().__init__(topic)
        self.topic = topic

    def __str__(self) -> str:
        return (
            f"{self.topic[:80]!r} is not a content topic: those begin with '/', have 2 to {_MAX_TOPIC_BYTES} "
            "bytes and no control characters, as /chat/1/room/proto"
        )


def check_content_topic(topic: str) -> str:
    """Return the topic. Raises `InvalidContentTopic` if it is invalid (C-281)."""
    usable = (
        topic.startswith("/")
        # By category, because these two are the same in every version of Unicode.
        and not any(unicodedata.category(character) in ("Cc", "Cs") for character in topic)
        and 2 <= len(topic.encode()) <= _MAX_TOPIC_BYTES
    )
    if not usable:
        raise InvalidContentTopic(topic)
    return topic


class MessagingNode(Protocol):
    """A transport that carries bytes on content topics and stores the messages it has carried.

    Only `history` and `fetch` wait for a peer; events report the outcome of a message.
    `strata.channels.messaging.outcomes` turns these events into a value.
    """

    hub: object = None
    """The state that the channels of this node share. The channels set it; a node only has the attribute."""

    if not TYPE_CHECKING:  # a node may lack it
        read = None
        """A method that reads the store in either order, starting at a position: `PagedHistory`."""
        subscribe_live = None
        """A method like `subscribe`, for channels that read the store. It leaves out what the store already
        has, and `read` waits until it is settled where that ends, so that there is no gap between the two."""
        receipts = False
        """Whether channels list receipts instead of filters while all participants do (decision 46)."""
        finds_by_hash = True
        """Whether `fetch` costs less than reading the store."""

        def store_time(self):
            """The latest time by the stores' clocks, in Unix seconds; None if they have not reported one.

            From this and `NodeMessageReceived.received_at` a channel knows how old a message is, whatever its
            own clock shows.
            """

    @property
    def transport_identity(self) -> str:
        """The identity that the transport sees; nodes that share it share its limits (C-234)."""
        ...

    @property
    def defaults(self) -> object:
        """A `ReliableChannelConfig` for settings that a channel leaves open (C-031), or None."""
        ...

    def wall(self) -> float:
        """The time by this node's clock, in Unix seconds."""
        ...

    @property
    def message_events(self) -> EventEmitter:
        """`message_received`, `message_sent`, `message_propagated`, `message_error`."""
        ...

    @property
    def health_events(self) -> EventEmitter:
        """`connection_status_change`, `content_topic_health_change`."""
        ...

    @property
    def connection_status(self) -> ConnectionStatus:
        """The current connection status of the node."""
        ...

    def largest_payload(self, content_topic: str, *, repairable: bool = False) -> int | None:
        """The largest payload of one message on this topic, in bytes; None without a limit (C-035).

        `repairable`: small enough for `send_again` to send it too.
        """
        ...

    def declared_limit(self) -> tuple[int, int] | None:
        """The transport's limit, as messages and milliseconds, if it has declared one (C-221)."""
        ...

    async def send(self, envelope: MessageEnvelope, *, request_id: str | None = None) -> str:
        """Begin to send; returns the request id, the one given or a new one, at once (C-012).

        `message_sent` or `message_error` with that id follows, once. Raises `NodeError` for a message that
        can never be sent.
        """
        ...

    async def send_again(
        self, message_hash: bytes, *, topic: str, request_id: str, retention_seconds: int | None = None
    ) -> None:
        """Send the message that a store has under this hash again, with the proof of its author (C-294).

        An event follows as after `send`.
        """
        ...

    async def subscribe(self, topics: Sequence[str], *, authors: Iterable[str] = ()) -> None:
        """Receive messages on these topics from now on, only from these authors if any are named.

        Raises `NodeError` for a topic that can never be received.
        """
        ...

    async def unsubscribe(self, topics: Sequence[str]) -> None:
        """Stop receiving topics. Raises `NodeError` for a topic that is not subscribed."""
        ...

    def history(self, topic: str, *, since_ms: int) -> AsyncGenerator[Sequence[NodeMessageReceived], None]:
        """The messages of a topic that the store has since `since_ms`, in pages, newest first (C-172).

        Raises `StrataError` if no store answers in time.
        """
        ...

    def fetch(self, topic: str, hashes: Sequence[bytes]) -> AsyncGenerator[NodeMessageReceived, None]:
        """The messages that the store has under these hashes, in any order. Raises as `history` does."""
        ...
