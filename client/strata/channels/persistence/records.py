"""What the records of a channel mean, SDS apart (C-248, C-250).

Each kind of record is a struct: `put(record)` makes the change that stores it, `remove(kind, key)` the one
that takes it away, `read_records` turns what a store loaded back into structs. A struct is written as an
array with its optional fields last, so a later version may add fields and still read what this one wrote. The
records of SDS are in `strata.channels.sds.state`; `strata.channels.persistence.state` puts the two together.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import ClassVar, TypeVar

import msgspec

from strata.channels.persistence.interface import CorruptStore, Put, Remove

__all__ = [
    "EpochCount",
    "InboxMessage",
    "PartialSegment",
    "QueryMark",
    "QueuedSend",
    "Record",
    "RequestName",
    "SegmentsFinished",
    "SegmentsGivenUp",
    "SenderName",
    "SentChunk",
    "put",
    "read_records",
    "remove",
]


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One record. `KIND` names its kind, `key` tells it from others of the kind."""

    KIND: ClassVar[str] = ""

    @property
    def key(self) -> str:
        """Unique among the records of this kind that a participant has."""
        raise NotImplementedError


class SentChunk(Record, frozen=True, array_like=True, gc=False):
    """Which part of which request an own SDS message is, so that events after a restart name it (C-257).

    What SDS knows of the message is in its own records; this one goes once the request has ended.
    """

    KIND: ClassVar[str] = "sent_chunk"

    message_id: str
    request_id: str
    message_hash: bytes
    chunk_index: int
    total_chunks: int
    dispatched: bool = False
    acknowledged: bool = False
    acknowledged_by: str | None = None

    @property
    def key(self) -> str:
        """The SDS message id."""
        return self.message_id


class RequestName(Record, frozen=True, array_like=True, gc=False):
    """A request id that a program chose, and the hash of the message it named: a repetition sends nothing."""

    KIND: ClassVar[str] = "request_name"

    request_id: str
    message_hash: bytes

    @property
    def key(self) -> str:
        """The request id."""
        return self.request_id


class PartialSegment(Record, frozen=True, array_like=True, gc=False):
    """A received segment of a message that is not whole yet (C-211)."""

    KIND: ClassVar[str] = "segment"

    message_id: str
    sender_id: str
    instance: int
    received_at: int
    segment: bytes

    @property
    def key(self) -> str:
        """The SDS message id that carried the segment."""
        return self.message_id


class SegmentsFinished(Record, frozen=True, array_like=True, gc=False):
    """A message that was whole before all its segments came: late ones belong to it, and to no new one."""

    KIND: ClassVar[str] = "segments_finished"

    instance: int
    sender_id: str
    message_hash: bytes
    data_segment_count: int
    parity_segment_count: int
    lacking: tuple[int, ...]
    finished_at: int
    request_id: str | None = None

    @property
    def key(self) -> str:
        """The number of the instance."""
        return str(self.instance)


class SegmentsGivenUp(Record, frozen=True, array_like=True, gc=False):
    """A partial message that was given up: its segments are taken from the log should the rest come."""

    KIND: ClassVar[str] = "segments_given_up"

    number: int
    sender_id: str
    message_hash: bytes
    message_ids: tuple[str, ...]
    request_id: str | None = None

    @property
    def key(self) -> str:
        """The number that the instance had."""
        return str(self.number)


class QueuedSend(Record, frozen=True, array_like=True, gc=False):
    """A chunk that waits for the rate limit (C-227)."""

    KIND: ClassVar[str] = "queued"

    position: int
    message_id: str
    opens_message: bool

    @property
    def key(self) -> str:
        """The position in the queue."""
        return str(self.position)


class EpochCount(Record, frozen=True, array_like=True, gc=False):
    """What was sent in an epoch (C-235), under the participant `("", transport identity)`."""

    KIND: ClassVar[str] = "epoch"

    epoch: int
    messages: int
    segments: int

    @property
    def key(self) -> str:
        """There is one: a later epoch replaces an earlier one."""
        return "current"


class InboxMessage(Record, frozen=True, array_like=True, gc=False):
    """A whole received message that the application has not taken yet."""

    KIND: ClassVar[str] = "inbox"

    position: int
    request_id: str
    message_hash: bytes
    sender_id: str
    payload: bytes
    received_at: int
    retrieval_hint: bytes | None = None
    author: str | None = None
    sent_at: int | None = None
    lamport: int | None = None
    sds_id: str | None = None

    @property
    def key(self) -> str:
        """Its place in the order of delivery."""
        return str(self.position)


class QueryMark(Record, frozen=True, array_like=True, gc=False):
    """Until when the store's history has been read (C-173), in Unix milliseconds."""

    KIND: ClassVar[str] = "query_mark"

    succeeded_at: int
    received_at: int
    position: str | None = None
    """Where the reading is to go on, in the words of the node."""
    joined_from: int = 0
    """Messages from before this time were never wanted; 0: all are."""

    @property
    def key(self) -> str:
        """There is one."""
        return "current"


class SenderName(Record, frozen=True, array_like=True, gc=False):
    """The sender id that was made for an identity in this channel (C-006), under the participant
    `(channel, "")`. Earlier versions kept one for all identities, without an owner."""

    KIND: ClassVar[str] = "sender_name"

    sender_id: str
    owner: str = "current"

    @property
    def key(self) -> str:
        """There is one for each owner."""
        return self.owner


_Kind = TypeVar("_Kind", bound=Record)

_ENCODER = msgspec.msgpack.Encoder()


def put(record: Record) -> Put:
    """The change that stores a record."""
    return Put(record.KIND, record.key, _ENCODER.encode(record))


def remove(kind: type[Record], key: str) -> Remove:
    """The change that takes a record away."""
    return Remove(kind.KIND, key)


@functools.cache
def _decoder(kind: type[_Kind]) -> msgspec.msgpack.Decoder[_Kind]:
    return msgspec.msgpack.Decoder(kind)


def read_records(kind: type[_Kind], stored: Mapping[str, bytes]) -> dict[str, _Kind]:
    """The structs of one kind, in the order they are given. Raises `CorruptStore`."""
    decode = _decoder(kind).decode
    try:
        return {key: decode(value) for key, value in stored.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptStore(f"a record of kind {kind.KIND!r} cannot be read: {error}") from None
