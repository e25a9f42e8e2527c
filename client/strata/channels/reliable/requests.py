"""The channel's own messages and chunks, from `send` to acknowledgement, and their events (channel.md §3).

    queued ──▶ sent ──▶ acknowledged          all chunks sent: `reliable:message:sent`
      │          │                            all acknowledged: `reliable:message:delivered`
      ▼          ▼
    failed     exhausted ──▶ acknowledged     a late acknowledgement still counts (C-055)

Each chunk changes state independently (C-089). The events of a message follow from its chunks, each event
once. A message that nobody has acknowledged is remembered for a late acknowledgement while there is room.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from strata.channels.persistence.interface import Change
from strata.channels.persistence.records import SentChunk, put, remove
from strata.channels.reliable.events import (
    ChannelEvent,
    ChunkInfo,
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
from strata.channels.sds import person_of

__all__ = ["Chunk", "Request", "Requests"]

_MAX_UNDELIVERED = 1_024
NOT_ACKNOWLEDGED = "not_acknowledged"


@dataclass(slots=True)
class Chunk:
    """One part of a message, sent as one SDS message."""

    message_id: str
    sent: bool = False
    acknowledged: bool = False
    acknowledged_by: str | None = None
    """The sender id of the participant that acknowledged it first."""


class Request:
    """One `send`."""

    __slots__ = ("announced_sent", "chunks", "message_hash", "request_id", "undelivered")

    def __init__(self, request_id: str, message_hash: bytes, chunks: list[Chunk]) -> None:
        self.request_id = request_id
        self.message_hash = message_hash
        self.chunks = chunks
        self.announced_sent = False
        self.undelivered = False
        """Whether its retransmissions are used up."""

    @property
    def message_id(self) -> str:
        """The logical id: the hash of the payload (A-108)."""
        return self.message_hash.hex()

    @property
    def acknowledged(self) -> tuple[int, ...]:
        """The indices of the acknowledged chunks."""
        return tuple(index for index, chunk in enumerate(self.chunks) if chunk.acknowledged)

    @property
    def acknowledged_by(self) -> tuple[str, ...]:
        """The sender ids of the participants that acknowledged its chunks, without repetition."""
        senders = (chunk.acknowledged_by for chunk in self.chunks)
        return tuple(dict.fromkeys(sender for sender in senders if sender is not None))

    def info(self, index: int) -> ChunkInfo:
        """The chunk as it appears in events."""
        return ChunkInfo(index, len(self.chunks))


class Requests:
    """All messages of this participant that are still followed."""

    def __init__(
        self,
        sent_event_on: Literal["network", "participants"] = "network",
        *,
        stored: Iterable[SentChunk] = (),
        place: Callable[[Iterable[str]], tuple[int, str] | None] = lambda _: None,
        bound: bool = False,
    ) -> None:
        """`stored` are the records of an earlier run. `place` returns the place of SDS messages in the shared
        order. `bound`: sender ids are proven, so that events name people."""
        self._place = place
        self._bound = bound
        self._on_network = sent_event_on == "network"
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self._chunks: dict[str, tuple[Request, int]] = {}
        self._unsent: dict[str, int] = {}
        """How many chunks the transport does not have yet, by request; only requests with such chunks."""
        self._departed: list[str] = []
        self._undelivered: OrderedDict[str, None] = OrderedDict()
        self._events: list[ChannelEvent] = []
        self._changes: list[Change] = []
        self._restore(stored)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def find(self, message_id: str) -> tuple[Request, int] | None:
        """The request and index of this participant's SDS message; None if it is no longer followed."""
        return self._chunks.get(message_id)

    def add(self, request_id: str, message_hash: bytes, message_ids: list[str]) -> Request:
        """Follow a message from now on."""
        request = Request(request_id, message_hash, [Chunk(message_id) for message_id in message_ids])
        self._requests[request_id] = request
        self._unsent[request_id] = len(message_ids)
        for index in range(len(message_ids)):
            self._store(request, index)
        return request

    # State changes of chunks.

    def sending(self, message_id: str) -> None:
        """A chunk goes out, for the first time or again."""
        if (found := self._chunks.get(message_id)) is not None:
            request, index = found
            self._events.append(
                SendingMessage(
                    request_id=request.request_id,
                    message_id=request.message_id,
                    chunk_info=request.info(index),
                )
            )

    def sent(self, message_id: str) -> None:
        """The transport has a chunk, for the first time or again."""
        if (found := self._chunks.get(message_id)) is None:
            return
        request, index = found
        if not request.chunks[index].acknowledged:  # else it was reported with the acknowledgement
            self._events.append(
                MessageSent(
                    request_id=request.request_id,
                    message_id=request.message_id,
                    chunk_info=request.info(index),
                    sds_id=message_id,
                )
            )
        if not request.chunks[index].sent:
            request.chunks[index].sent = True
            self._unsent[request.request_id] -= 1
            if not self._unsent[request.request_id]:
                self._depart(request)
            self._store(request, index)
            if self._on_network:
                self._announce_sent(request)

    def possibly_acknowledged(self, message_id: str, count: int) -> None:
        """One more filter seems to contain a chunk."""
        if (found := self._chunks.get(message_id)) is not None and not found[0].chunks[found[1]].acknowledged:
            request, index = found
            self._events.append(
                MessagePossiblyAcknowledged(
                    request_id=request.request_id,
                    message_id=request.message_id,
                    chunk_info=request.info(index),
                    possible_ack_count=count,
                )
            )

    def acknowledged(self, message_id: str, sender_id: str | None = None) -> None:
        """A participant has a chunk. The transport may report only later that the chunk has gone out."""
        found = self._chunks.get(message_id)
        if found is None or found[0].chunks[found[1]].acknowledged:
            return
        request, index = found
        if not request.chunks[index].sent:
            self.sent(message_id)
        request.chunks[index].acknowledged = True
        request.chunks[index].acknowledged_by = sender_id
        self._store(request, index)
        senders = request.acknowledged_by
        self._events.append(
            MessageAcknowledged(
                request_id=request.request_id,
                message_id=request.message_id,
                chunks_acknowledged=request.acknowledged,
                total_chunks=len(request.chunks),
                acknowledged_by=senders,
                people=self._people(senders),
            )
        )
        if len(request.acknowledged) == len(request.chunks):
            self._announce_sent(request)
            self._events.append(
                ReliableMessageDelivered(
                    request_id=request.request_id,
                    message_id=request.message_id,
                    acknowledged_by=senders,
                    people=self._people(senders),
                )
            )
            self._end(request)

    def exhausted(self, message_id: str) -> None:
        """Nobody has acknowledged a chunk that went out as often as allowed."""
        if (found := self._chunks.get(message_id)) is None or found[0].undelivered:
            return
        request = found[0]
        error = "nobody has acknowledged the message, and all its retransmissions are used up"
        self._events += [
            ReliableMessageSendError(
                request_id=request.request_id,
                message_id=request.message_id,
                error=error,
                code=NOT_ACKNOWLEDGED,
                stage=FailureStage.DELIVERY,
            ),
            ReliableMessageDeliveryError(
                request_id=request.request_id,
                message_id=request.message_id,
                error=error,
                code=NOT_ACKNOWLEDGED,
            ),
        ]
        self._note_undelivered(request)

    def failed(self, message_id: str, error: str, code: str) -> list[str]:
        """A chunk can never be sent, and so its message cannot be sent either.

        Returns all chunks of the message, none of which need go out any more.
        """
        if (found := self._chunks.get(message_id)) is None:
            return []
        request, index = found
        self._events += [
            SendingMessageIrrecoverableError(
                request_id=request.request_id,
                message_id=request.message_id,
                chunk_info=request.info(index),
                error=error,
                code=code,
            ),
            ReliableMessageSendError(
                request_id=request.request_id,
                message_id=request.message_id,
                error=error,
                code=code,
                stage=FailureStage.DISPATCH,
            ),
        ]
        self._end(request)
        return [chunk.message_id for chunk in request.chunks]

    def replace(self, message_id: str, new_id: str) -> None:
        """A chunk that never went out was wrapped again, under a new id."""
        request, index = self._chunks.pop(message_id)
        self._changes.append(remove(SentChunk, message_id))
        request.chunks[index].message_id = new_id
        self._store(request, index)

    def events(self) -> list[ChannelEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def changes_to_store(self) -> list[Change]:
        """The changes to store since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def get(self, request_id: str) -> Request | None:
        """The message with this request id, if it is still followed."""
        return self._requests.get(request_id)

    @property
    def unsent(self) -> tuple[str, ...]:
        """The requests for which the transport does not have all chunks, oldest first."""
        return tuple(self._unsent)

    def departed(self) -> list[str]:
        """The requests that have left `unsent` since the last call: they are out, or never will be."""
        departed, self._departed = self._departed, []
        return departed

    def mark_undelivered(self, message_id: str) -> None:
        """This chunk's retransmissions were used up in an earlier run, which reported it to the program."""
        if (found := self._chunks.get(message_id)) is not None and not found[0].undelivered:
            self._note_undelivered(found[0])

    # Inside.

    def _people(self, senders: Iterable[str]) -> tuple[str, ...]:
        dids = (person_of(sender) for sender in senders if sender.startswith("did:"))
        return tuple(dict.fromkeys(dids)) if self._bound else ()

    def _announce_sent(self, request: Request) -> None:
        due = not self._on_network or all(chunk.sent for chunk in request.chunks)
        if due and not request.announced_sent:
            request.announced_sent = True
            self._events.append(
                ReliableMessageSent(
                    request_id=request.request_id,
                    message_id=request.message_id,
                    order=self._place(chunk.message_id for chunk in request.chunks),
                )
            )

    def _store(self, request: Request, index: int) -> None:
        chunk = request.chunks[index]
        self._chunks[chunk.message_id] = (request, index)
        self._changes.append(
            put(
                SentChunk(
                    chunk.message_id,
                    request.request_id,
                    request.message_hash,
                    index,
                    len(request.chunks),
                    chunk.sent,
                    chunk.acknowledged,
                    chunk.acknowledged_by,
                )
            )
        )

    def _note_undelivered(self, request: Request) -> None:
        request.undelivered = True
        self._undelivered[request.request_id] = None
        if len(self._undelivered) > _MAX_UNDELIVERED:
            self._end(self._requests[next(iter(self._undelivered))])

    def _depart(self, request: Request) -> None:
        if self._unsent.pop(request.request_id, None) is not None:
            self._departed.append(request.request_id)

    def _end(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        self._depart(request)
        self._undelivered.pop(request.request_id, None)
        for chunk in request.chunks:
            self._chunks.pop(chunk.message_id, None)
            self._changes.append(remove(SentChunk, chunk.message_id))

    def _restore(self, stored: Iterable[SentChunk]) -> None:
        for record in stored:
            request = self._requests.get(record.request_id)
            if request is None:
                blank = [Chunk("") for _ in range(record.total_chunks)]
                request = self._requests[record.request_id] = Request(
                    record.request_id, record.message_hash, blank
                )
            if record.chunk_index < len(request.chunks):
                request.chunks[record.chunk_index] = Chunk(
                    record.message_id, record.dispatched, record.acknowledged, record.acknowledged_by
                )
                self._chunks[record.message_id] = (request, record.chunk_index)
        for request in self._requests.values():
            if lacking := sum(not chunk.sent for chunk in request.chunks):
                self._unsent[request.request_id] = lacking
            request.announced_sent = self._on_network and not lacking
