"""Own messages until they are acknowledged: when to send them again, and when to give up.

A message is *unacknowledged*, *possibly acknowledged* (some filter has it) or *exhausted* (sent as often as
allowed; kept for a late acknowledgement). An acknowledged message leaves the buffer (C-094, C-104).

A history of two entries cannot name all five chunks of a message. But a participant that names a message has
delivered it, after all messages that it follows. So one of our messages is acknowledged too if a named
message follows it and the filter of the same received message has it (C-123, A-137). Two numbers say which of
our messages a logged message follows (`LoggedMessage.floor` and `run` in `strata.channels.sds.log`); no graph
is traversed.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from strata.channels.sds.bloom import BloomParameters
from strata.channels.sds.bodies import Body
from strata.channels.sds.config import SdsConfig
from strata.channels.sds.events import AckedBy, Acknowledged, DeliveryFailed, PossiblyAcknowledged, Retransmit
from strata.channels.sds.receipts import receipt
from strata.channels.sds.timing import Schedule

__all__ = ["Outgoing", "OutgoingBuffer", "OutgoingState", "WireCache"]

_MAX_CACHED_BYTES = 4 << 20
_MAX_EXHAUSTED = 1_024
"""The most exhausted messages for which a late acknowledgement is still noticed."""


class OutgoingState(enum.Enum):
    """The progress of one of our messages towards its acknowledgement."""

    UNACKNOWLEDGED = "unacknowledged"
    POSSIBLY_ACKNOWLEDGED = "possibly-acknowledged"
    EXHAUSTED = "exhausted"


class Outgoing:
    """One of our messages, which no other participant has acknowledged."""

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
        """When it last went out, in steady time; None before the first time."""
        self.retries = 0
        """Retransmissions so far."""
        self.seen_in: set[tuple[str, int]] = set()
        """The messages, by sender and Lamport time, whose filters had this message."""
        self.owns_body = False
        """Whether the log has dropped the message, so that the body is kept for this buffer alone."""


class OutgoingBuffer:
    """All own messages that no other participant has acknowledged."""

    def __init__(self, config: SdsConfig, parameters: BloomParameters) -> None:
        self._config = config
        self._parameters = parameters
        self._active: dict[str, Outgoing] = {}
        self._exhausted: dict[str, Outgoing] = {}
        self._timers: Schedule[Outgoing] = Schedule()
        self._by_receipt: dict[bytes, str] = {}

    def __len__(self) -> int:
        return len(self._active)

    def __contains__(self, message_id: str) -> bool:
        return message_id in self._active or message_id in self._exhausted

    @property
    def is_empty(self) -> bool:
        """Whether there is no message to acknowledge."""
        return not self._active and not self._exhausted

    def get(self, message_id: str) -> Outgoing | None:
        """The message of this id, if it is in the buffer."""
        return self._active.get(message_id) or self._exhausted.get(message_id)

    def states(self) -> dict[str, OutgoingState]:
        """The state of each message, oldest first."""
        return {each.message_id: each.state for each in (*self._exhausted.values(), *self._active.values())}

    def undispatched(self) -> list[str]:
        """The ids of messages that have never gone out, oldest first."""
        return [each.message_id for each in self._active.values() if each.dispatched_at is None]

    def add(self, message_id: str, number: int, body: Body) -> Outgoing:
        """Begin to track one of our messages (C-109)."""
        outgoing = Outgoing(message_id, number, body, self._parameters.positions(message_id))
        self._active[message_id] = outgoing
        self._by_receipt[receipt(message_id)] = message_id
        return outgoing

    def restore(self, outgoing: Outgoing, now: int) -> None:
        """Track a message of an earlier run: its timer continues from where it was (C-257)."""
        self._by_receipt[receipt(outgoing.message_id)] = outgoing.message_id
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
        """Note that the message has gone out; its timer starts (C-067)."""
        outgoing = self._active.get(message_id)
        if outgoing is not None:
            outgoing.dispatched_at = now
            self._timers.put(message_id, self._due_at(outgoing, now), outgoing)

    def discard(self, message_id: str) -> Outgoing | None:
        """Stop tracking a message."""
        self._timers.discard(message_id)
        self._by_receipt.pop(receipt(message_id), None)
        return self._active.pop(message_id, None) or self._exhausted.pop(message_id, None)

    @property
    def next_at(self) -> float:
        """When the next message is due, in steady time."""
        return self._timers.next_at

    def take_due(self, now: int) -> tuple[list[Retransmit | DeliveryFailed], list[Outgoing]]:
        """The messages to send again, unacknowledged ones first (C-087), and messages that have failed.

        The second list has the messages that were forgotten because they failed long ago.
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
                oldest = self._exhausted.pop(next(iter(self._exhausted)))
                self._by_receipt.pop(receipt(oldest.message_id), None)
                forgotten.append(oldest)
            events.append(DeliveryFailed(outgoing.message_id))
        return events, forgotten

    def review_history(self, ids: Iterable[str], sender_id: str) -> list[Acknowledged]:
        """The acknowledgements in a received history, which names these ids (C-120)."""
        return [
            Acknowledged(message_id, AckedBy.HISTORY, sender_id) for message_id in ids if message_id in self
        ]

    def review_receipts(self, receipts: Collection[bytes], sender_id: str) -> list[Acknowledged]:
        """The acknowledgements in a received list. A message that never went out can be in no list."""
        found = [self.get(self._by_receipt[each]) for each in receipts if each in self._by_receipt]
        return [
            Acknowledged(outgoing.message_id, AckedBy.RECEIPT, sender_id)
            for outgoing in found
            if outgoing is not None and outgoing.dispatched_at is not None
        ]

    def review_filter(
        self, data: bytes, sender_id: str, lamport: int, runs: Sequence[tuple[int, int]]
    ) -> list[Acknowledged | PossiblyAcknowledged]:
        """Compare a received filter. The same message's history follows our messages numbered in `runs`."""
        found: list[Acknowledged | PossiblyAcknowledged] = []
        contains = self._parameters.contains
        for buffer in (self._exhausted, self._active):
            for outgoing in buffer.values():
                # A message that never went out is in no filter, even if its bits are set.
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
        # Sender and Lamport time identify a message, since the ids of syncs repeat (C-132).
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


class WireCache:
    """Own messages as they travel, until they go out: nearly all are needed once, and soon.

    The cache holds a few megabytes. A message that was evicted is restored from its body.
    """

    def __init__(self) -> None:
        self._messages: OrderedDict[str, bytes] = OrderedDict()
        self._size_bytes = 0

    def put(self, message_id: str, data: bytes) -> None:
        """Keep a message."""
        self._messages[message_id] = data
        self._size_bytes += len(data)
        while self._size_bytes > _MAX_CACHED_BYTES:
            self._size_bytes -= len(self._messages.popitem(last=False)[1])

    def get(self, message_id: str) -> bytes | None:
        """The bytes of a message, if they are kept."""
        return self._messages.get(message_id)

    def discard(self, message_id: str) -> None:
        """Drop a message that has gone out, or never will."""
        data = self._messages.pop(message_id, None)
        if data is not None:
            self._size_bytes -= len(data)
