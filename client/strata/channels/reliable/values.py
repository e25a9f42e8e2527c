"""The values in which a channel describes itself."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from dataclasses import dataclass

from strata.channels.messaging.values import ConnectionStatus
from strata.channels.persistence.writer import WriterHealth
from strata.channels.reliable.catching_up import SyncProgress
from strata.channels.reliable.events import ChannelEvent, MessageReceived, SenderIdConflict
from strata.channels.sds import SdsStatistics
from strata.channels.segmentation.reassembly import ReassemblyStatistics

__all__ = [
    "AtRisk",
    "ChannelHealth",
    "ChannelStatistics",
    "MissingMessage",
    "OutstandingMessage",
    "SyncProgress",
    "SyncStatus",
]


@dataclass(frozen=True, slots=True)
class OutstandingMessage:
    """An own message that no other participant has acknowledged as a whole."""

    request_id: str
    message_id: str
    total_chunks: int
    sent: int
    """Chunks that the transport has."""
    acknowledged: int
    """Chunks that another participant has."""
    undelivered: bool
    """Its retransmissions are used up; a late acknowledgement still counts."""


@dataclass(frozen=True, slots=True)
class MissingMessage:
    """A message that other participants name and that this one lacks."""

    message_id: str
    sender_id: str | None
    retrieval_hint: bytes | None
    since: int
    """When it was first found missing, in Unix milliseconds."""
    released: bool = False
    """No message waits for it any more; it is handed over if it comes all the same."""


@dataclass(frozen=True, slots=True)
class SyncStatus:
    """The standing of a channel (C-297): its outstanding and its missing messages, and since when."""

    outstanding: tuple[OutstandingMessage, ...]
    missing: tuple[MissingMessage, ...]
    queued: int
    """Chunks that wait for the rate limit or the transport."""
    partial_messages: int
    """Received messages that still lack chunks."""
    inbox: int
    """Whole messages that the program has not taken."""
    rate_limit_utilization: int
    caught_up: bool = True
    """Whether everything is read that the relays had when they were last reached (`query_on_connect`).
    False too while others' messages come and none was decrypted so far: see `MessagesUndecryptable`."""
    syncing: SyncProgress | None = None
    """How far the reading of what was missed has come; None while nothing is being read."""

    @property
    def is_synced(self) -> bool:
        """Whether everything sent has arrived somewhere, and everything is here that is known of or stored.

        What is known to be gone (`MissingMessage.released`) is not waited for.
        """
        missing = any(not each.released for each in self.missing)
        return self.caught_up and not (self.outstanding or missing or self.queued or self.partial_messages)


@dataclass(frozen=True, slots=True)
class AtRisk:
    """The events, and the message, that a crash at this moment would keep from the program for good.

    They are between the store and the program, where no store can keep a promise. Each is told once or never:
    it is told when the store has confirmed it, and if the program is killed after the write and before the
    confirmation, it is not told again.
    """

    message: MessageReceived | None
    """With `hand_over="at_most_once"`: it leaves the store and is not with the program yet."""
    events: tuple[ChannelEvent, ...]


@dataclass(frozen=True, slots=True)
class ChannelHealth:
    """Whether a channel can do its work."""

    started: bool
    connection: ConnectionStatus
    store: WriterHealth
    """A store that fails holds back what must not leave before it is stored; it is tried again (C-256)."""
    sender_conflict: SenderIdConflict | None = None
    """Another program that uses the same sender id, heard of within the last ten minutes."""
    inbox_full: bool = False
    """The program takes no messages, so that the channel reads and acknowledges nothing: see `InboxFull`."""
    undecryptable: int = 0
    """How many messages in a row the hook could not decrypt: see `MessagesUndecryptable`."""
    error: Exception | None = None
    """The `ChannelFailed` of a channel that has closed itself."""


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """What was counted since the channel was opened."""

    sds: SdsStatistics
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
