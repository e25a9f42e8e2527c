"""The meaning of a channel's records, except those of SDS (C-248, C-250).

Each kind of record is a struct. `put(record)` makes the change that stores it, `remove(kind, key)` the change
that removes it, and `read_records` turns loaded records back into structs. A struct is written as an array
with its optional fields last, so a later version may add fields and still read what this one wrote. The
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
    """One record. `KIND` names its kind, and `key` distinguishes it from others of that kind."""

    KIND: ClassVar[str] = ""

    @property
    def key(self) -> str:
        """The key, unique among a participant's records of this kind."""
        raise NotImplementedError


class SentChunk(Record, frozen=True, array_like=True, gc=False):
    """The request and chunk of an own SDS message, so that events after a restart can name them (C-257).

    SDS keeps its own records of the message; this record is removed once the request has ended.
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
    """A request id that a program chose, and the hash of its message, so that a repetition sends nothing."""

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
        """The id of the SDS message that carried the segment."""
        return self.message_id


class SegmentsFinished(Record, frozen=True, array_like=True, gc=False):
    """A message that was whole before all its segments had arrived; late ones belong to it, not a new one."""

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
    """A partial message that was given up; if the rest arrives, its segments are taken from the log."""

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
    """The numbers of messages and segments sent in an epoch (C-235), under the participant
    `("", transport identity)`."""

    KIND: ClassVar[str] = "epoch"

    epoch: int
    messages: int
    segments: int

    @property
    def key(self) -> str:
        """The only key: a later epoch replaces an earlier one."""
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
        """The message's place in the order of delivery."""
        return str(self.position)


class QueryMark(Record, frozen=True, array_like=True, gc=False):
    """The time up to which the store's history has been read (C-173), in Unix milliseconds."""

    KIND: ClassVar[str] = "query_mark"

    succeeded_at: int
    received_at: int
    position: str | None = None
    """Where the reading should continue, as given by the node."""
    joined_from: int = 0
    """Messages from before this time were never wanted; 0: all are."""

    @property
    def key(self) -> str:
        """The only key."""
        return "current"


class SenderName(Record, frozen=True, array_like=True, gc=False):
    """The sender id that was made for an identity in this channel (C-006), under the participant
    `(channel, "")`. Earlier versions kept a single id for all identities, without an owner."""

    KIND: ClassVar[str] = "sender_name"

    sender_id: str
    owner: str = "current"

    @property
    def key(self) -> str:
        """The owner: there is one record for each."""
        return self.owner


_Kind = TypeVar("_Kind", bound=Record)

_ENCODER = msgspec.msgpack.Encoder()


def put(record: Record) -> Put:
    """The change that stores a record."""
    return Put(record.KIND, record.key, _ENCODER.encode(record))


def remove(kind: type[Record], key: str) -> Remove:
    """The change that removes a record."""
    return Remove(kind.KIND, key)


@functools.cache
def _decoder(kind: type[_Kind]) -> msgspec.msgpack.Decoder[_Kind]:
    return msgspec.msgpack.Decoder(kind)


def read_records(kind: type[_Kind], stored: Mapping[str, bytes]) -> dict[str, _Kind]:
    """The structs of one kind, in the given order. Raises `CorruptStore` if one cannot be read."""
    decode = _decoder(kind).decode
    try:
        return {key: decode(value) for key, value in stored.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptStore(f"a record of kind {kind.KIND!r} cannot be read: {error}") from None
