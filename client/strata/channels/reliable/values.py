"""What a channel tells about itself when asked."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from dataclasses import dataclass

from strata.channels.messaging.values import ConnectionStatus
from strata.channels.persistence.writer import WriterHealth
from strata.channels.reliable.events import ChannelEvent, MessageReceived
from strata.channels.sds.events import Statistics
from strata.channels.segmentation.reassembly import ReassemblyStatistics

__all__ = [
    "AtRisk",
    "ChannelHealth",
    "ChannelStatistics",
    "MissingMessage",
    "OutstandingMessage",
    "SyncStatus",
]


@dataclass(frozen=True, slots=True)
class OutstandingMessage:
    """An own message that is not with another participant as a whole."""

    request_id: str
    message_id: str
    total_chunks: int
    sent: int
    """Chunks that the transport has."""
    acknowledged: int
    """Chunks that somebody has."""
    undelivered: bool
    """Its retransmissions are used up; a late acknowledgement still counts."""


@dataclass(frozen=True, slots=True)
class MissingMessage:
    """A message that others name and that is not here."""

    message_id: str
    sender_id: str | None
    retrieval_hint: bytes | None
    since: int
    """When it was first found missing, in Unix milliseconds."""


@dataclass(frozen=True, slots=True)
class SyncStatus:
    """Where a channel stands (C-297): what is outstanding, what is missing, since when."""

    outstanding: tuple[OutstandingMessage, ...]
    missing: tuple[MissingMessage, ...]
    queued: int
    """Chunks that wait for the rate limit or the transport."""
    partial_messages: int
    """Received messages some of whose chunks are not here."""
    inbox: int
    """Whole messages that the program has not taken."""
    rate_limit_utilization: int

    @property
    def is_synced(self) -> bool:
        """Whether everything sent has arrived somewhere, and everything known of is here."""
        return not (self.outstanding or self.missing or self.queued or self.partial_messages)


@dataclass(frozen=True, slots=True)
class AtRisk:
    """What no store can promise: it is between the store and the program.

    Each is told once or never. It is told when the store has confirmed it; should the program be killed when
    the disk has the write and before the word of that is here, it is not told again.
    """

    message: MessageReceived | None
    """Leaving the store for who iterates, with `hand_over="once"`."""
    events: tuple[ChannelEvent, ...]


@dataclass(frozen=True, slots=True)
class ChannelHealth:
    """Whether a channel can do its work."""

    started: bool
    connection: ConnectionStatus
    store: WriterHealth
    """A store that fails holds back what must not leave before it is stored; it is tried again (C-256)."""


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """What was counted since the channel was opened."""

    sds: Statistics
    reassembly: ReassemblyStatistics
    undecryptable: int
    """Received bytes that the hook could not read (C-073)."""
    undecodable: int
    """Received bytes that the decoder could not read (C-010)."""
    senders_forged: int
    ephemerals_invalid: int
    ephemerals_repeated: int
    ephemerals_not_taken: int
    retrievals: int
    retrievals_failed: int
