"""Own messages until they are acknowledged: who has them, when to send them again, when to give up.

A message is *unacknowledged*, *possibly acknowledged* (some filter has it) or *exhausted* (sent as often as
allowed; kept for a late acknowledgement). Acknowledged ones leave (C-094, C-104).

A history of two entries cannot name the five chunks of a message. But whoever lists a message has delivered
it, hence had all it follows. So an own message that a listed one follows, and that is in the same message's
filter, is acknowledged too (C-123, A-137). Which own messages a logged one follows is kept as two numbers,
see `strata.channels.sds.log.Entry.floor` and `run`; no graph is walked.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from strata.channels.sds.bloom import BloomParameters
from strata.channels.sds.bodies import Body
from strata.channels.sds.config import SdsConfig
from strata.channels.sds.events import AckedBy, Acknowledged, DeliveryFailed, PossiblyAcknowledged, Retransmit
from strata.channels.sds.timing import Schedule

__all__ = ["Outgoing", "OutgoingBuffer", "OutgoingState"]

_MAX_EXHAUSTED = 1_024
"""Messages given up for which a late acknowledgement is still noticed."""


class OutgoingState(enum.Enum):
    """Where an own message stands."""

    UNACKNOWLEDGED = "unacknowledged"
    POSSIBLY_ACKNOWLEDGED = "possibly-acknowledged"
    EXHAUSTED = "exhausted"


class Outgoing:
    """An own message that nobody has acknowledged."""

    __slots__ = (
        "bits",
        "body",
        "dispatched_at",
        "message_id",
        "number",
        "owns_body",
        "retries",
        "seen_in",
        "state",
    )

    def __init__(self, message_id: str, number: int, body: Body, bits: Sequence[int]) -> None:
        self.message_id = message_id
        self.number = number
        self.body = body
        self.bits = bits
        self.state = OutgoingState.UNACKNOWLEDGED
        self.dispatched_at: int | None = None
        """When it last went out, in steady time; None before it ever did."""
        self.retries = 0
        """Retransmissions so far."""
        self.seen_in: set[tuple[str, int]] = set()
        """Messages, by sender and Lamport time, whose filters had this one."""
        self.owns_body = False
        """Whether the log has let go of the message."""


class OutgoingBuffer:
    """All own messages that nobody has acknowledged."""

    def __init__(self, config: SdsConfig, parameters: BloomParameters) -> None:
        self._config = config
        self._parameters = parameters
        self._active: dict[str, Outgoing] = {}
        self._exhausted: dict[str, Outgoing] = {}
        self._timers: Schedule[Outgoing] = Schedule()

    def __len__(self) -> int:
        return len(self._active)

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._active or message_id in self._exhausted

    @property
    def is_empty(self) -> bool:
        """Whether no acknowledgement would be news."""
        return not self._active and not self._exhausted

    def get(self, message_id: str) -> Outgoing | None:
        """The message of this id, if nobody has acknowledged it."""
        return self._active.get(message_id) or self._exhausted.get(message_id)

    def states(self) -> dict[str, OutgoingState]:
        """Where each message stands, oldest first."""
        return {each.message_id: each.state for each in (*self._exhausted.values(), *self._active.values())}

    def undispatched(self) -> list[str]:
        """Messages that never went out, oldest first."""
        return [each.message_id for each in self._active.values() if each.dispatched_at is None]

    def add(self, message_id: str, number: int, body: Body) -> Outgoing:
        """Begin to track an own message (C-109)."""
        outgoing = Outgoing(message_id, number, body, self._parameters.positions(message_id))
        self._active[message_id] = outgoing
        return outgoing

    def restore(self, outgoing: Outgoing, now: int) -> None:
        """Track a message of an earlier life: its timers go on from where they were (C-257)."""
        if outgoing.state is OutgoingState.EXHAUSTED:
            self._exhausted[outgoing.message_id] = outgoing
        else:
            self._active[outgoing.message_id] = outgoing
            if outgoing.dispatched_at is not None:
                outgoing.dispatched_at = min(outgoing.dispatched_at, now)
                self._timers.put(
                    outgoing.message_id, self._due_at(outgoing, outgoing.dispatched_at), outgoing
                )

    def dispatched(self, message_id: str, now: int) -> None:
        """The message is on its way: only now its timer runs (C-067)."""
        outgoing = self._active.get(message_id)
        if outgoing is not None:
            outgoing.dispatched_at = now
            self._timers.put(message_id, self._due_at(outgoing, now), outgoing)

    def discard(self, message_id: str) -> Outgoing | None:
        """Stop tracking a message."""
        self._timers.discard(message_id)
        return self._active.pop(message_id, None) or self._exhausted.pop(message_id, None)

    @property
    def next_at(self) -> float:
        """When something is due, in steady time."""
        return self._timers.next_at

    def take_due(self, now: int) -> tuple[list[Retransmit | DeliveryFailed], list[Outgoing]]:
        """What is to be sent again, unacknowledged ones first (C-087), and what has failed.

        The second list has what was forgotten: messages that failed long ago.
        """
        due = [outgoing for _, outgoing in self._timers.take_due(now)]
        due.sort(key=lambda each: (each.state is OutgoingState.POSSIBLY_ACKNOWLEDGED, each.number))
        events: list[Retransmit | DeliveryFailed] = []
        forgotten: list[Outgoing] = []
        for outgoing in due:
            if outgoing.retries < self._config.max_retransmissions:
                outgoing.retries += 1
                events.append(Retransmit(outgoing.message_id, outgoing.body.restore()))
                continue
            del self._active[outgoing.message_id]
            outgoing.state = OutgoingState.EXHAUSTED
            self._exhausted[outgoing.message_id] = outgoing
            if len(self._exhausted) > _MAX_EXHAUSTED:
                forgotten.append(self._exhausted.pop(next(iter(self._exhausted))))
            events.append(DeliveryFailed(outgoing.message_id))
        return events, forgotten

    def review_history(self, ids: Iterable[str], sender_id: str) -> list[Acknowledged]:
        """A received history names these messages (C-120)."""
        return [
            Acknowledged(message_id, AckedBy.HISTORY, sender_id) for message_id in ids if message_id in self
        ]

    def review_filter(
        self, data: bytes, sender_id: str, lamport: int, runs: Sequence[tuple[int, int]]
    ) -> list[Acknowledged | PossiblyAcknowledged]:
        """A received filter, with the runs of own messages that the same message's history follows."""
        found: list[Acknowledged | PossiblyAcknowledged] = []
        contains = self._parameters.contains
        for buffer in (self._exhausted, self._active):
            for outgoing in buffer.values():
                # What never went out can be in no filter; that it seems so is chance.
                if outgoing.dispatched_at is None or not contains(data, outgoing.bits):
                    continue
                if any(first <= outgoing.number <= last for first, last in runs):
                    found.append(Acknowledged(outgoing.message_id, AckedBy.DESCENDANT, sender_id))
                elif (event := self._seen(outgoing, sender_id, lamport)) is not None:
                    found.append(event)
        return found

    def _seen(
        self, outgoing: Outgoing, sender_id: str, lamport: int
    ) -> Acknowledged | PossiblyAcknowledged | None:
        # A message is the same as another if its sender and Lamport time are: ids of syncs repeat (C-132).
        key = (sender_id, 0 if self._config.possible_acks_from_distinct_senders else lamport)
        threshold = self._config.possible_acks_threshold
        if key in outgoing.seen_in or (threshold == 0 and len(outgoing.seen_in) >= 2):
            return None
        outgoing.seen_in.add(key)
        if len(outgoing.seen_in) == threshold:
            return Acknowledged(outgoing.message_id, AckedBy.FILTERS, sender_id)
        if outgoing.state is OutgoingState.UNACKNOWLEDGED:
            outgoing.state = OutgoingState.POSSIBLY_ACKNOWLEDGED
            if outgoing.message_id in self._timers and outgoing.dispatched_at is not None:
                at = self._due_at(outgoing, outgoing.dispatched_at)
                self._timers.put(outgoing.message_id, at, outgoing)
        return PossiblyAcknowledged(outgoing.message_id, len(outgoing.seen_in))

    def _due_at(self, outgoing: Outgoing, since: int) -> int:
        timeout: float = self._config.acknowledgement_timeout_ms
        if outgoing.state is OutgoingState.POSSIBLY_ACKNOWLEDGED:
            timeout *= self._config.possible_ack_retry_factor
        return since + round(timeout)
