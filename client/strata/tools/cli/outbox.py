"""The state of each message typed into `strata channel`, from the events of the channel. No I/O."""

from __future__ import annotations

import enum
from collections.abc import Iterator

from strata.channels.reliable.events import (
    ChannelEvent,
    FailureStage,
    MessageAcknowledged,
    MessagePossiblyAcknowledged,
    MessageSent,
    ReliableMessageDelivered,
    ReliableMessageDeliveryError,
    ReliableMessageSendError,
    ReliableMessageSent,
    SendingMessage,
    SendingMessageIrrecoverableError,
)

__all__ = ["ChatOutbox", "OwnMessage", "Stage"]


class Stage(enum.StrEnum):
    """The stages of a message."""

    WAITING = "waiting"
    SENDING = "sending"
    SENDING_AGAIN = "sending again"
    SENT = "sent"
    PERHAPS = "perhaps received"
    ACKNOWLEDGED = "acknowledged"
    DELIVERED = "delivered"
    FAILED = "failed"


_ENDS = frozenset({Stage.DELIVERED, Stage.FAILED})
_MOST_DELIVERED = 4096
"""About how many delivered messages are remembered for late events, since a chat may last for months."""


class OwnMessage:
    """One message of this participant, and its stage."""

    def __init__(self, message_id: str, *, line: int | None, text: str) -> None:
        self.message_id = message_id
        self.line = line
        """The number of its input line; None for a message of an earlier run."""
        self.text = text
        self.stage = Stage.WAITING
        self.reason = ""
        """The reason of a failure."""
        self.on_relay = False
        """Whether a relay has the whole message."""
        self._sent: set[int] = set()
        self._acknowledged = 0
        self._chunks = 1

    @property
    def is_settled(self) -> bool:
        """Whether no further event is expected; an acknowledgement may still follow a failure."""
        return self.stage in _ENDS

    @property
    def state(self) -> str:
        """The stage in words, with the number of chunks for a message of several chunks."""
        if self.stage is Stage.FAILED:
            return f"failed: {self.reason}"
        if self._chunks > 1 and not self.is_settled:
            if self.stage is Stage.ACKNOWLEDGED:
                return f"acknowledged {self._acknowledged}/{self._chunks}"
            if len(self._sent) < self._chunks:
                return f"{self.stage} {len(self._sent)}/{self._chunks}"
        return str(self.stage)

    def apply(self, event: ChannelEvent) -> None:
        """Update the stage from an event."""
        match event:
            case SendingMessage() if self._acknowledged == 0 and not self.is_settled:
                again = event.chunk_info.chunk_index in self._sent
                self.stage = Stage.SENDING_AGAIN if again else Stage.SENDING
                self._chunks = event.chunk_info.total_chunks
            case MessageSent():
                self._chunks = event.chunk_info.total_chunks
                self._sent.add(event.chunk_info.chunk_index)
                self.on_relay = len(self._sent) == self._chunks
                if self.stage is Stage.SENDING_AGAIN:
                    self.stage = Stage.SENT
            case ReliableMessageSent() if self.stage in (Stage.WAITING, Stage.SENDING, Stage.SENDING_AGAIN):
                self.on_relay = True
                self.stage = Stage.SENT
            case MessagePossiblyAcknowledged() if self._acknowledged == 0 and not self.is_settled:
                self.stage = Stage.PERHAPS
            case MessageAcknowledged():
                self._chunks = event.total_chunks
                self._acknowledged = len(event.chunks_acknowledged)
                if self._chunks > 1:  # otherwise `delivered` follows at once and says the same
                    self.stage = Stage.ACKNOWLEDGED
            case ReliableMessageDelivered():
                self.stage = Stage.DELIVERED
            case SendingMessageIrrecoverableError() | ReliableMessageDeliveryError():
                self._fail(event.error)
            case ReliableMessageSendError():
                self.on_relay = self.on_relay or event.stage is FailureStage.DELIVERY
                self._fail(event.error)
            case _:
                pass

    def _fail(self, reason: str) -> None:
        self.stage = Stage.FAILED
        self.reason = reason


class ChatOutbox:
    """The messages of one run, and those of earlier runs that were still on their way when it began."""

    def __init__(self) -> None:
        self._messages: list[OwnMessage] = []
        self._by_request: dict[str, OwnMessage] = {}
        self._unbound: OwnMessage | None = None
        self._forgotten = 0
        self._look_at = 2 * _MOST_DELIVERED

    def __iter__(self) -> Iterator[OwnMessage]:
        return iter(self._messages)

    def __len__(self) -> int:
        """The number of messages, including those forgotten."""
        return len(self._messages) + self._forgotten

    @property
    def unsettled(self) -> int:
        """The number of messages in flight."""
        return sum(not each.is_settled for each in self._messages)

    @property
    def undelivered(self) -> list[OwnMessage]:
        """The messages that no participant has confirmed, oldest first."""
        return [each for each in self._messages if each.stage is not Stage.DELIVERED]

    def resume(self, request_id: str, message_id: str) -> OwnMessage:
        """Take over a message from an earlier run."""
        own = OwnMessage(message_id, line=None, text=f"(of an earlier run, {message_id[:8]})")
        self._messages.append(own)
        self._by_request[request_id] = own
        return own

    def begin(self, message_id: str, line: int, text: str) -> OwnMessage:
        """Add a message before it is sent; `bind` or an event gives its request id later."""
        if len(self._messages) >= self._look_at:
            self._forget_delivered()
        own = self._unbound = OwnMessage(message_id, line=line, text=text)
        self._messages.append(own)
        return own

    def bind(self, request_id: str) -> None:
        """Give the message begun last its request id, unless an event has given it one."""
        if self._unbound is not None:
            self._by_request[request_id] = self._unbound
            self._unbound = None

    def find(self, event: ChannelEvent) -> OwnMessage | None:
        """The message that an event concerns."""
        request_id = getattr(event, "request_id", None)
        if request_id is None:
            return None
        unbound = self._unbound
        # An event may arrive before `send` returns; then the hash of the payload identifies the message.
        if unbound is not None and request_id not in self._by_request:
            if event.message_id == unbound.message_id:  # type: ignore[union-attr]
                self.bind(request_id)
        return self._by_request.get(request_id)

    def _forget_delivered(self) -> None:
        """Forget old delivered messages; the undelivered ones are kept, to be reported at the end."""
        old = self._messages[:-_MOST_DELIVERED]
        gone = {each for each in old if each.stage is Stage.DELIVERED}
        self._forgotten += len(gone)
        self._messages = [each for each in self._messages if each not in gone]
        self._by_request = {name: each for name, each in self._by_request.items() if each not in gone}
        self._look_at = len(self._messages) + _MOST_DELIVERED
