"""The interface between a hub and the open channels of its node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from strata.channels.messaging.values import MessageEnvelope, NodeMessageError, NodeMessageReceived
from strata.channels.persistence.interface import Persistence
from strata.channels.rate_limit.values import Transmission
from strata.channels.reliable.ephemerals import Ephemeral
from strata.channels.reliable.outbox import Outbox

__all__ = ["Dispatch", "HubMember"]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A message to send for a channel, and how to send it."""

    request_id: str
    envelope: MessageEnvelope
    original: bytes | None = None
    """Send the packet that a store has under this hash instead, as its author signed it (C-294)."""


class HubMember(Protocol):
    """The part of an open channel that a hub uses."""

    @property
    def outbox(self) -> Outbox: ...

    @property
    def store(self) -> Persistence: ...

    @property
    def content_topic(self) -> str: ...

    @property
    def channel(self) -> object:
        """The channel object that programs use."""
        ...

    async def close_with_node(self) -> None:
        """Close the channel object, because the connection below is closing."""
        ...

    def is_ready(self) -> bool:
        """Whether the next transmission of each of its queues can go out immediately."""
        ...

    def dispatch(self, transmission: Transmission) -> Dispatch | None:
        """Return what to send for a transmission; None if it need not go out any more."""
        ...

    def accepted(self, sent: Transmission | Ephemeral, message_hash: bytes) -> None: ...

    def not_accepted(self, sent: Transmission | Ephemeral, error: NodeMessageError) -> None: ...

    @property
    def is_full(self) -> bool: ...

    def pass_over(self) -> None: ...

    async def receive(self, event: NodeMessageReceived) -> object: ...

    def status_changed(self, online: bool) -> None: ...

    def clock_stepped(self, by_ms: int) -> None:
        """The clock has jumped; see `ChannelClock`."""
        ...

    def fail(self, task: str, error: BaseException) -> None:
        """Close the channel, because something that the hub did for it, or the hub itself, has failed."""
        ...
