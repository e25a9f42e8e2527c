"""Ephemeral messages, which are sent whole and once, received once, and never kept (C-176 … C-186)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from strata.channels.rate_limit.values import EphemeralDropReason
from strata.channels.reliable.config import ReliableChannelConfig
from strata.channels.reliable.errors import EmptyPayload, MessageTooLarge
from strata.channels.reliable.events import (
    ChannelEvent,
    ChunkInfo,
    EphemeralMessageDropped,
    MessageSent,
    SendingMessageIrrecoverableError,
)
from strata.channels.reliable.outbox import Outbox
from strata.channels.sds import EphemeralReceived, SdsMessage
from strata.channels.segmentation.messages import message_hash
from strata.channels.segmentation.reassembly import whole_payload
from strata.channels.segmentation.splitting import SegmentationConfig, message_contents

__all__ = ["Ephemeral", "Ephemerals"]

_REMEMBERED = 4_096


@dataclass(frozen=True, slots=True)
class Ephemeral:
    """An outgoing ephemeral message, which is sent at once or never."""

    request_id: str
    message_id: str
    data: bytes


class Ephemerals:
    """The ephemeral messages of one channel. `wrap` makes an SDS message from a content."""

    def __init__(
        self,
        config: ReliableChannelConfig,
        segmentation: SegmentationConfig,
        outbox: Outbox,
        wrap: Callable[[bytes, int], SdsMessage],
    ) -> None:
        self._config = config
        self._segmentation = segmentation
        self._outbox = outbox
        self._wrap = wrap
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._events: list[ChannelEvent] = []
        self.invalid = 0
        """The number of received messages that were not in this channel's form."""
        self.repeated = 0
        """The number of received messages that had been received before."""

    def send(self, payload: bytes, request_id: str, now_ms: int, max_bytes: int | None) -> Ephemeral | None:
        """Build an ephemeral message; None if the rate limit drops it (C-177 … C-181).

        Raises `EmptyPayload`, and `MessageTooLarge` above `max_bytes`.
        """
        if not payload:
            raise EmptyPayload
        if max_bytes is not None and len(payload) > max_bytes:
            raise MessageTooLarge(len(payload), max_bytes)
        digest = message_hash(payload)
        reason = self._outbox.admit_ephemeral(now_ms)
        if reason is not None:
            self._drop(request_id, digest.hex(), reason, now_ms)
            return None
        whole = replace(self._segmentation, segment_size_bytes=len(payload), enable_reed_solomon=False)
        carried = request_id if self._config.send_request_id else None
        _, (content,) = message_contents(payload, whole, request_id=carried)
        message = self._wrap(content, now_ms)
        return Ephemeral(request_id, digest.hex(), message.encode())

    def _drop(self, request_id: str, message_id: str, reason: EphemeralDropReason, now_ms: int) -> None:
        self._events.append(
            EphemeralMessageDropped(
                request_id=request_id,
                message_id=message_id,
                reason=reason,
                rate_limit_utilization=self._outbox.utilisation(now_ms),
            )
        )

    def sent(self, ephemeral: Ephemeral) -> None:
        """The transport has an ephemeral message (C-058)."""
        self._events.append(
            MessageSent(
                request_id=ephemeral.request_id, message_id=ephemeral.message_id, chunk_info=ChunkInfo()
            )
        )

    def failed(self, ephemeral: Ephemeral, error: str, code: str) -> None:
        """The transport refused an ephemeral message; there is no second attempt."""
        self._events.append(
            SendingMessageIrrecoverableError(
                request_id=ephemeral.request_id,
                message_id=ephemeral.message_id,
                chunk_info=ChunkInfo(),
                error=error,
                code=code,
            )
        )

    def receive(self, event: EphemeralReceived) -> tuple[bytes, str | None] | None:
        """The payload and request id of a received message; None if it is a repetition or invalid."""
        if event.message_id in self._seen:
            self.repeated += 1
            return None
        self._seen[event.message_id] = None
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        found = whole_payload(event.content, event.message_id, self._segmentation)
        if found is None:
            self.invalid += 1
        return found

    def events(self) -> list[ChannelEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events
