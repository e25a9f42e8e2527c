"""The values with which a channel describes itself."""

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
    """A message sent here that no other participant has acknowledged as a whole."""

    request_id: str
    message_id: str
    total_chunks: int
    sent: int
    """The number of chunks that the transport has."""
    acknowledged: int
    """The number of chunks that another participant has."""
    undelivered: bool
    """Whether its retransmissions are used up; a late acknowledgement still counts."""


@dataclass(frozen=True, slots=True)
class MissingMessage:
    """A message that other participants name and that this one lacks."""

    message_id: str
    sender_id: str | None
    retrieval_hint: bytes | None
    since: int
    """When it was first found missing, in Unix milliseconds."""
    released: bool = False
    """Whether no message waits for it any more; it is handed over if it arrives anyway."""


@dataclass(frozen=True, slots=True)
class SyncStatus:
    """The sync status of a channel (C-297): its outstanding and its missing messages, and since when."""

    outstanding: tuple[OutstandingMessage, ...]
    missing: tuple[MissingMessage, ...]
    queued: int
    """The number of chunks that wait for the rate limit or the transport."""
    partial_messages: int
    """The number of received messages that still lack chunks."""
    inbox: int
    """The number of whole messages that the program has not taken."""
    rate_limit_utilization: int
    caught_up: bool = True
    """Whether everything has been read that the relays had when they were last reached (`query_on_connect`).
    Also False while others' messages arrive and none has been decrypted yet: see `MessagesUndecryptable`."""
    syncing: SyncProgress | None = None
    """The progress of reading missed messages; None while nothing is being read."""

    @property
    def is_synced(self) -> bool:
        """Whether every sent message has arrived somewhere, and every known or stored message is here.

        Messages that are known to be gone (`MissingMessage.released`) do not count.
        """
        missing = any(not each.released for each in self.missing)
        return self.caught_up and not (self.outstanding or missing or self.queued or self.partial_messages)


@dataclass(frozen=True, slots=True)
class AtRisk:
    """The events, and the message, that a crash at this moment would permanently keep from the program.

    They are between the store and the program, where a store cannot guarantee anything. Each is reported once
    or never: it is reported when the store has confirmed it, and if the program is killed after the write but
    before the confirmation, it is not reported again.
    """

    message: MessageReceived | None
    """With `hand_over="at_most_once"`: the message that leaves the store and is not with the program yet."""
    events: tuple[ChannelEvent, ...]


@dataclass(frozen=True, slots=True)
class ChannelHealth:
    """Whether a channel can do its work."""

    started: bool
    connection: ConnectionStatus
    store: WriterHealth
    """While the store fails, the channel holds back what must be stored before it leaves, and tries again
    (C-256)."""
    sender_conflict: SenderIdConflict | None = None
    """Another program that uses the same sender id and was heard from within the last ten minutes."""
    inbox_full: bool = False
    """Whether the inbox is full, so that the channel reads and acknowledges nothing: see `InboxFull`."""
    undecryptable: int = 0
    """How many messages in a row the hook could not decrypt: see `MessagesUndecryptable`."""
    error: Exception | None = None
    """The `ChannelFailed` of a channel that has closed itself."""


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """The counts since the channel was opened."""

    sds: SdsStatistics
    reassembly: ReassemblyStatistics
    undecryptable: int
    """The number of received payloads that the hook could not decrypt (C-073)."""
    undecodable: int
    """The number of received payloads that the decoder could not read (C-010)."""
    senders_forged: int
    ephemerals_invalid: int
    ephemerals_repeated: int
    ephemerals_not_taken: int
    retrievals: int
    retrievals_failed: int
