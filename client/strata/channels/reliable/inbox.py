"""Keeps received messages until the program has taken them.

A message that SDS has delivered is acknowledged to its sender, so neither a busy program nor a crash may lose
it. The message enters the store in the step that delivered it, and leaves the store when the program takes
it. Ephemeral messages are not stored, and the oldest are dropped when a new one needs room.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from strata.channels.messaging.emitter import Handler
from strata.channels.persistence.interface import Change
from strata.channels.persistence.records import InboxMessage, put, remove
from strata.channels.reliable.events import MessageReceived, ReliableMessageReceived

__all__ = ["MessageInbox", "Received"]


class Received:
    """A message and its place in the order of delivery."""

    __slots__ = (
        "acknowledged",
        "announced",
        "envelope",
        "heard",
        "message",
        "message_hash",
        "position",
        "untold",
    )

    def __init__(self, position: int, message: MessageReceived, message_hash: bytes) -> None:
        self.position = position
        self.message_hash = message_hash
        self.message = message
        self.announced = False
        """Whether handlers have begun to be called with it."""
        self.heard = False
        """Whether a handler called with it has returned."""
        self.envelope: ReliableMessageReceived | None = None
        """The second form in which handlers get the message."""
        self.untold: dict[str, list[Handler]] = {}
        """The handlers still to be called with it, the first time or again after they raised, by event."""
        self.acknowledged = False


class MessageInbox:
    """The messages that wait to be taken, in the order of delivery."""

    def __init__(
        self, content_topic: str, *, max_messages: int, max_bytes: int, stored: Iterable[InboxMessage] = ()
    ) -> None:
        """`stored` are the records of an earlier run."""
        self._topic = content_topic
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._waiting: OrderedDict[int, Received] = OrderedDict()
        self._handed: dict[int, Received] = {}
        """Messages that the program has but has not acknowledged; they stay in the store."""
        self._bytes = 0
        self._changes: list[Change] = []
        self.ephemerals_dropped = 0
        """The number of ephemeral messages that the program did not take in time."""
        for record in sorted(stored, key=lambda each: each.position):
            self._append(Received(record.position, self._message(record), record.message_hash))
        self._next_position = max(self._waiting, default=0) + 1

    def __len__(self) -> int:
        return len(self._waiting) + len(self._handed)

    def __iter__(self) -> Iterator[Received]:
        return iter(self._waiting.values())

    @property
    def newest(self) -> int:
        """The position of the last message received."""
        return self._next_position - 1

    @property
    def size_bytes(self) -> int:
        """Payload bytes of the messages that are kept."""
        return self._bytes

    @property
    def is_full(self) -> bool:
        """Whether the channel should receive no more until the program takes a message."""
        return len(self) >= self._max_messages or self._bytes >= self._max_bytes

    def put(self, message: MessageReceived, message_hash: bytes) -> Received:
        """Keep a message, even if the inbox is full: the channel then stops reading, and drops nothing."""
        received = Received(self._next_position, message, message_hash)
        self._next_position += 1
        if message.ephemeral:
            self._drop_ephemerals()
        else:
            self._store(received)
        self._append(received)
        return received

    def put_back(self, received: Received) -> None:
        """Put the message taken last, which was not handed over after all, first again."""
        self._append(received)
        self._waiting.move_to_end(received.position, last=False)
        if not received.message.ephemeral:
            self._store(received)

    def _store(self, received: Received) -> None:
        message = received.message
        record = InboxMessage(
            received.position,
            message.request_id,
            received.message_hash,
            message.sender_id,
            message.payload,
            message.timestamp,
            message.hash,
            message.author,
            message.sent_at,
            message.lamport_timestamp,
            message.sds_id,
        )
        self._changes.append(put(record))

    def first(self) -> Received | None:
        """The message to be taken next."""
        return next(iter(self._waiting.values()), None)

    def hand(self, received: Received) -> None:
        """The program has this message and will acknowledge it; keep it until `take`."""
        if self._waiting.pop(received.position, None) is not None:
            self._handed[received.position] = received

    def take_back(self) -> None:
        """Make unacknowledged messages the next to be handed over again, in their order."""
        again = OrderedDict(sorted(self._handed.items()))
        again.update(self._waiting)
        self._waiting = again
        self._handed.clear()

    def take(self, received: Received) -> None:
        """The program is done with this message; remove it."""
        held = self._waiting.pop(received.position, None) or self._handed.pop(received.position, None)
        if held is not None:
            self._bytes -= len(received.message.payload)
            if not received.message.ephemeral:
                self._changes.append(remove(InboxMessage, str(received.position)))

    def changes_to_store(self) -> list[Change]:
        """The changes to store since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def _append(self, received: Received) -> None:
        self._waiting[received.position] = received
        self._bytes += len(received.message.payload)

    def _drop_ephemerals(self) -> None:
        while self.is_full:
            oldest = next((each for each in self._waiting.values() if each.message.ephemeral), None)
            if oldest is None:
                return
            self.take(oldest)
            self.ephemerals_dropped += 1

    def _message(self, record: InboxMessage) -> MessageReceived:
        return MessageReceived(
            request_id=record.request_id,
            message_id=record.message_hash.hex(),
            sender_id=record.sender_id,
            payload=record.payload,
            content_topic=self._topic,
            timestamp=record.received_at,
            hash=record.retrieval_hint,
            author=record.author,
            sent_at=record.sent_at,
            lamport_timestamp=record.lamport,
            sds_id=record.sds_id,
        )
