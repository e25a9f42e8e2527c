"""Outgoing messages: cut, wrapped, named, planned, and given up if they are refused.

The hub takes a transmission from the rate limiter, `data` and `plan` say what it is and how to carry it, and
the shell reports its outcome. `outbox` holds what waits; `requests` follows each message of the program.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from strata.channels.persistence.interface import Change
from strata.channels.persistence.state import ChannelState
from strata.channels.rate_limit.values import Priority, Transmission
from strata.channels.reliable.config import ReliableChannelConfig
from strata.channels.reliable.errors import EmptyPayload, RequestIdInUse
from strata.channels.reliable.outbox import Outbox, Repair, Sync
from strata.channels.reliable.request_names import RequestNames
from strata.channels.reliable.requests import Requests
from strata.channels.sds import OutgoingFull, OutgoingState, Participant, SdsMessage
from strata.channels.segmentation.messages import message_hash
from strata.channels.segmentation.splitting import SegmentationConfig, message_contents, segment_counts

__all__ = ["SendPlan", "Sending"]

_SYNC_SECONDS = 3_600
"""While any participant is online there is a sync every half minute, so stores need not keep them all."""
_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class SendPlan:
    """How the transport should carry one transmission."""

    request_id: str | None
    """`R:1` … `R:N` for the chunks of request `R` (C-070); None for a sync or repair."""
    retention_seconds: int | None
    original: bytes | None = None
    """Send the packet that a store has under this hash, as its author signed it (C-294)."""
    again: bool = False
    """Whether it repeats another participant's message without proof."""


class Sending:
    """Sends one participant's own messages, until the transport has them."""

    def __init__(
        self,
        config: ReliableChannelConfig,
        segmentation: SegmentationConfig,
        sds: Participant,
        outbox: Outbox,
        requests: Requests,
        *,
        now_ms: int,
        random: Callable[[], float],
        state: ChannelState,
    ) -> None:
        self._config = config
        self._segmentation = segmentation
        self._sds = sds
        self._outbox = outbox
        self._requests = requests
        self._names = RequestNames(state.request_names.values())
        self._wrapped: list[str] = []
        self._amends = False
        """Whether a waiting message may name one that was refused."""
        # Ids of an earlier run are not repeated, however the clock was set: its Lamport time was no earlier.
        # A run that remembers nothing chooses its own moment within each millisecond.
        self._last_ns = (sds.lamport + 1) * _NS if sds.lamport > now_ms else 0
        self._moment_ns = int(random() * _NS)
        self._resume(state)

    def _resume(self, state: ChannelState) -> None:
        """Continue where an earlier run ended (C-257)."""
        outgoing = self._sds.outgoing()
        queued = [each for each in state.queue.values() if each.message_id in outgoing]
        self._outbox.restore(queued)
        self._amends = bool(queued)
        # A message that is neither sent nor queued was under way when the program ended.
        waiting = {each.message_id for each in queued}
        for message_id in self._sds.undispatched():
            if message_id not in waiting:
                found = self._requests.find(message_id)
                self._outbox.queue([message_id], opens_message=found is None or found[1] == 0)
        # A chunk that is neither acknowledged nor tracked was also exhausted, so long ago that SDS forgot it.
        for request in list(self._requests):
            for chunk in request.chunks:
                where = outgoing.get(chunk.message_id, OutgoingState.EXHAUSTED)
                if where is OutgoingState.EXHAUSTED and not chunk.acknowledged:
                    self._requests.mark_undelivered(chunk.message_id)

    def send(self, payload: bytes, request_id: str, now_ms: int, *, chosen: bool = False) -> None:
        """Register a message; its chunks are tracked and queued from here on (C-062 … C-064).

        `chosen`: the program chose the request id, and a repetition registers nothing. Raises, having
        registered nothing, `EmptyPayload`, `PayloadTooLarge`, `OutgoingFull`, `SendQueueFull` and
        `RequestIdInUse`.
        """
        if not payload:
            raise EmptyPayload
        if chosen and self._is_repeated(payload, request_id):
            return
        count = sum(segment_counts(len(payload), self._segmentation))
        if count > self._sds.room:
            raise OutgoingFull(f"{len(self._sds.outgoing())} messages await acknowledgement")
        self._outbox.check_room(count)
        carried = request_id if self._config.send_request_id else None
        digest, contents = message_contents(payload, self._segmentation, request_id=carried)
        message_ids = [self._wrap(content, now_ms) for content in contents]
        self._requests.add(request_id, digest, message_ids)
        if chosen:
            self._names.add(request_id, digest)
        self._outbox.queue(message_ids)

    def _is_repeated(self, payload: bytes, request_id: str) -> bool:
        digest = message_hash(payload)
        followed = self._requests.get(request_id)
        if followed is not None and followed.message_hash != digest:
            raise RequestIdInUse(request_id)
        return self._names.is_repeated(request_id, digest) or followed is not None

    def wrap_ephemeral(self, content: bytes, now_ms: int) -> SdsMessage:
        """Make an ephemeral message, which no message follows."""
        return self._sds.wrap_ephemeral(content, self._next_ns(now_ms))

    def data(self, transmission: Transmission) -> bytes | None:
        """Return the SDS message to send; None if it need not go out any more and was withdrawn.

        Also None if it must be stored first because it was amended after a refusal.
        """
        message_id = transmission.message_id
        data: bytes | None = None
        if transmission.priority is Priority.BACKGROUND:
            background = self._outbox.background(transmission)
            data = None if background is None else background.data
        elif self._sds.is_outgoing(message_id):
            if self._amends and self._sds.amend(message_id):
                self._wrapped.append(message_id)
                return None
            data = self._sds.encoded(message_id)
        if data is None:
            self._outbox.withdraw(message_id)
        return data

    def plan(self, transmission: Transmission) -> SendPlan | None:
        """Return how to carry a transmission; None if its origin could not be proven."""
        retention = self._config.retention_seconds
        repeated = self._repeat_seconds
        match self._outbox.background(transmission):
            case Sync():
                return SendPlan(None, min(_SYNC_SECONDS, retention or _SYNC_SECONDS))
            case Repair(message_id) if self._config.sender_binding == "did":
                # The author did not sign this transmission; only the original proves who wrote it.
                original = self._sds.retrieval_hint(message_id)
                return None if original is None else SendPlan(None, repeated, original)
            case Repair():
                return SendPlan(None, repeated, again=True)
        found = self._requests.find(transmission.message_id)
        if transmission.priority is Priority.RETRANSMISSION:
            retention = repeated
        return SendPlan(None if found is None else f"{found[0].request_id}:{found[1] + 1}", retention)

    @property
    def _repeat_seconds(self) -> int:
        """The retention of repeats: stores need not keep them for longer than participants read back."""
        window = max(1, self._config.query_window_ms // 1000)
        return min(window, self._config.retention_seconds or window)

    def taken(self, transmission: Transmission) -> None:
        """The transmission was taken and goes out now."""
        self._outbox.sending(transmission)
        if transmission.priority is not Priority.BACKGROUND:
            self._requests.sending(transmission.message_id)
        self._amends = self._amends and self._outbox.waits

    def dispatched(self, transmission: Transmission, now_ms: int, hint: bytes | None) -> None:
        """The transport has the transmission; a store finds it by `hint`."""
        message_id = transmission.message_id
        self._outbox.sent(transmission)
        if transmission.priority is not Priority.BACKGROUND:
            self._sds.dispatched(message_id, now_ms, hint)
            self._requests.sent(message_id)
            self._forget_orphan(message_id)

    def not_dispatched(self, transmission: Transmission, now_ms: int) -> None:
        """The transport could not take it now; it keeps its place, and no attempt is counted (C-292)."""
        message_id = transmission.message_id
        if transmission.priority is Priority.BACKGROUND:
            # A later sync will say more, and another participant may answer the repair request.
            self._background_failed(transmission, now_ms)
            return
        self._forget_orphan(message_id)
        self._outbox.not_sent(transmission, again=self._sds.is_outgoing(message_id))

    def refused(self, transmission: Transmission, now_ms: int, error: str, code: str) -> None:
        """The transmission can never go out (C-044, C-045).

        Messages that follow it are amended when their turn comes, so that no participant waits for a message
        that never arrives; payloads already made for them are out of date.
        """
        message_id = transmission.message_id
        if transmission.priority is Priority.BACKGROUND:
            self._background_failed(transmission, now_ms)
            self._outbox.withdraw(message_id)
            return
        self._outbox.sent(transmission)
        self._outbox.withdraw(message_id)
        if (found := self._requests.find(message_id)) is not None:
            self._names.forget(found[0].request_id)
        for each in {message_id, *self._requests.failed(message_id, error, code)}:
            if not self._outbox.is_in_flight(each):
                self._outbox.withdraw(each)
                self._sds.failed(each)
        self._amends = True

    def _background_failed(self, transmission: Transmission, now_ms: int) -> None:
        background = self._outbox.background(transmission)
        self._outbox.not_sent(transmission, again=False)
        if isinstance(background, Sync):
            self._sds.sync_failed(now_ms)

    def _forget_orphan(self, message_id: str) -> None:
        """Stop sending a chunk whose message failed while the chunk was under way."""
        if self._requests.find(message_id) is None:
            self._sds.failed(message_id)

    def wrap_anew(self, now_ms: int, *, before: float = math.inf) -> None:
        """Wrap own messages again that never went out and have a Lamport time below `before`."""
        held: list[tuple[str, bytes]] = []
        for message_id in self._sds.undispatched():
            message = self._sds.message(message_id)
            if self._outbox.is_in_flight(message_id) or message is None or message.content is None:
                continue
            if self._requests.find(message_id) is not None and (message.lamport_timestamp or 0) < before:
                held.append((message_id, message.content))
        for message_id, _ in held:
            self._outbox.withdraw(message_id)
            self._sds.failed(message_id)
        for message_id, content in held:
            new_id = self._wrap(content, now_ms)
            self._requests.replace(message_id, new_id)
            found = self._requests.find(new_id)
            self._outbox.queue([new_id], opens_message=found is not None and found[1] == 0)

    # Output for the shell.

    def wrapped(self) -> list[str]:
        """The SDS messages made since the last call; they go out once the step that made them is stored."""
        wrapped, self._wrapped = self._wrapped, []
        return wrapped

    def note_wrapped(self, name: str | None) -> None:
        """A sync or repair was made; it may acknowledge messages received in the same step."""
        if name is not None:
            self._wrapped.append(name)

    def changes_to_store(self) -> list[Change]:
        """The changes to store since the last call."""
        return self._names.changes_to_store()

    def _wrap(self, content: bytes, now_ms: int) -> str:
        message_id = self._sds.wrap(content, now_ms, self._next_ns(now_ms, self._moment_ns)).message_id
        self._wrapped.append(message_id)
        return message_id

    def _next_ns(self, now_ms: int, within: int = 0) -> int:
        self._last_ns = max(now_ms * _NS + within, self._last_ns + 1)
        return self._last_ns
