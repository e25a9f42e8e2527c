"""The messages of one channel that wait to be sent, in the channel's lane of its node's rate limiter.

The hub takes transmissions from the limiter; a channel reaches the limiter only through its outbox. Chunks of
the channel's own messages wait under their SDS message ids. Syncs and repairs are kept here with their bytes,
and wait under names that nothing else reads.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from strata.channels.persistence.interface import Change
from strata.channels.persistence.records import QueuedSend
from strata.channels.rate_limit.limiter import RateLimiter
from strata.channels.rate_limit.values import EphemeralDropReason, Priority, Transmission

__all__ = ["Background", "Outbox", "Repair", "Sync"]


@dataclass(frozen=True, slots=True)
class Sync:
    """A sync message, which tells the others what this participant has."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Repair:
    """A message of any participant, sent again for a participant that lacks it."""

    message_id: str
    data: bytes


Background = Sync | Repair
"""A transmission of `Priority.BACKGROUND`; all others are chunks of the channel's own messages."""


class Outbox:
    """One lane of a rate limiter, and the transmissions that the transport has not answered."""

    def __init__(self, limiter: RateLimiter, lane: str) -> None:
        self.lane = lane
        self._limiter = limiter
        self._background: dict[str, Background] = {}
        self._in_flight: set[str] = set()
        self._syncs = 0

    # Queueing.

    def check_room(self, count: int) -> None:
        """Raise `SendQueueFull` unless `count` more chunks can be queued."""
        self._limiter.check_room(self.lane, count)

    def queue(self, message_ids: Sequence[str], *, opens_message: bool = True) -> None:
        """Queue the first transmissions of a message's chunks: all, or none with `SendQueueFull` (C-227).

        `opens_message` is false for later chunks of a message whose first chunk has already been charged.
        """
        self._limiter.offer(self.lane, message_ids, opens_message=opens_message)

    def queue_again(self, message_id: str) -> None:
        """Queue the retransmission of a chunk, unless it is already waiting."""
        self._limiter.offer_again(self.lane, message_id, Priority.RETRANSMISSION)

    def queue_sync(self, data: bytes) -> str | None:
        """Queue a sync, replacing one that still waits. Returns its name; None if too many are queued."""
        self.withdraw(f"sync:{self._syncs}")
        self._syncs += 1
        return self._queue_background(f"sync:{self._syncs}", Sync(data))

    def queue_repair(self, message_id: str, data: bytes) -> str | None:
        """Queue a repair. Returns its name; None if it is already waiting or too many are queued."""
        return self._queue_background(f"repair:{message_id}", Repair(message_id, data))

    def _queue_background(self, name: str, background: Background) -> str | None:
        if not self._limiter.offer_again(self.lane, name, Priority.BACKGROUND):
            return None
        self._background[name] = background
        return name

    def withdraw(self, name: str) -> None:
        """Remove a waiting transmission that is unnecessary or can never go out."""
        if name not in self._in_flight:
            self._background.pop(name, None)
        self._limiter.withdraw(self.lane, name)

    def admit_ephemeral(self, now_ms: int) -> EphemeralDropReason | None:
        """Charge an ephemeral message, which goes out at once, or return why it must be dropped (C-181)."""
        return self._limiter.admit_ephemeral(now_ms)

    def restore(self, queued: Iterable[QueuedSend]) -> None:
        """Queue the transmissions that a store kept from an earlier run, in order (C-227)."""
        self._limiter.restore(self.lane, queued)

    # Transmissions that the hub has taken.

    def background(self, transmission: Transmission) -> Background | None:
        """The sync or repair behind a transmission; None for a chunk or a withdrawn transmission."""
        if transmission.priority is not Priority.BACKGROUND:
            return None
        return self._background.get(transmission.message_id)

    def is_in_flight(self, message_id: str) -> bool:
        """Whether the transport was given the message and has not answered."""
        return message_id in self._in_flight

    def sending(self, transmission: Transmission) -> None:
        """The transmission is given to the transport now."""
        self._in_flight.add(transmission.message_id)

    def sent(self, transmission: Transmission) -> None:
        """The transmission needs no further attempt: the transport has it, or it can never go out."""
        self._end(transmission)
        self._limiter.sent(transmission)

    def not_sent(self, transmission: Transmission, *, again: bool) -> None:
        """The transport could not take the transmission. With `again` it returns to its place (C-232)."""
        self._end(transmission)
        if again:
            self._limiter.put_back(transmission)
        else:
            self._limiter.sent(transmission)

    def _end(self, transmission: Transmission) -> None:
        self._in_flight.discard(transmission.message_id)
        if transmission.priority is Priority.BACKGROUND:
            self._background.pop(transmission.message_id, None)

    # Inspection.

    def heads(self) -> list[Transmission]:
        """The transmission at the head of each queue; the hub takes one of these next."""
        return self._limiter.heads(self.lane)

    @property
    def waits(self) -> bool:
        """Whether any transmission waits."""
        return self._limiter.waits(self.lane)

    @property
    def queued(self) -> int:
        """The number of transmissions that wait."""
        return sum(self._limiter.queued(self.lane, priority) for priority in Priority)

    def utilisation(self, now_ms: int) -> int:
        """The part of the identity's budget used in this epoch, from 0 to 100 (C-233)."""
        return self._limiter.utilisation(now_ms)

    def changes_to_store(self) -> list[Change]:
        """The changes of the queue to store, since the last call."""
        return self._limiter.changes_to_store(self.lane)
