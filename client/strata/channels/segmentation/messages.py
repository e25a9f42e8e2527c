"""One segment on the wire: `SegmentMessageProto`, its encoding and its rules.

The field numbers 1–7 are those of the segmentation document; 1001 and 1002 are our additions, which other
decoders skip (C-187). The fields have no presence: zero, false and empty are never written, so vectors W1 and
W2 hold byte for byte.

Received bytes enter only through `decode_segment`. It returns a `Segment` that keeps every rule of
C-194 … C-199, or raises `InvalidSegment` with a reason that can be counted.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from Crypto.Hash import keccak
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from strata.protocol.errors import StrataError

__all__ = [
    "HASH_BYTES",
    "MAX_RECEIVED_SEGMENTS",
    "MAX_REQUEST_ID_BYTES",
    "MAX_SENT_SEGMENTS",
    "InvalidSegment",
    "Segment",
    "SegmentFault",
    "decode_segment",
    "encode_segment",
    "message_hash",
]

HASH_BYTES = 32

MAX_SENT_SEGMENTS = 255
"""The most segments, data and parity together, of a sent message (C-196)."""

MAX_RECEIVED_SEGMENTS = 256
"""The most segments of a received message: the two bounds in the document differ by one (A-149)."""

MAX_REQUEST_ID_BYTES = 128
"""The longest `request_id`, in UTF-8 bytes; the document has no bound, but memory needs one (C-302)."""


class SegmentFault(enum.StrEnum):
    """Why the bytes of a segment were refused; statistics count each reason."""

    UNDECODABLE = "undecodable"
    HASH_LENGTH = "hash_length"
    NO_PAYLOAD = "no_payload"
    NO_DATA_SEGMENTS = "no_data_segments"
    TOO_MANY_SEGMENTS = "too_many_segments"
    INDEX_OUT_OF_RANGE = "index_out_of_range"
    MIXED_ROLES = "mixed_roles"
    REQUEST_ID_LENGTH = "request_id_length"
    ORIGINAL_LENGTH = "original_length"


class InvalidSegment(StrataError):
    """Bytes that are not a valid segment; `fault` says why. The error never quotes the bytes."""

    def __init__(self, fault: SegmentFault) -> None:
        super().__init__(fault)
        self.fault = fault

    def __str__(self) -> str:
        return f"not a valid segment: {self.fault.value.replace('_', ' ')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One piece of a message, data or parity."""

    entire_message_hash: bytes
    data_segment_count: int
    payload: bytes
    data_segment_index: int = 0
    parity_segment_index: int = 0
    parity_segment_count: int = 0
    is_parity: bool = False
    request_id: str | None = None
    original_length: int | None = None

    @property
    def index(self) -> int:
        """The place among all segments of the message: data first, then parity."""
        return (
            self.data_segment_count + self.parity_segment_index if self.is_parity else self.data_segment_index
        )


_FieldProto = descriptor_pb2.FieldDescriptorProto

_FIELDS = (
    ("entire_message_hash", 1, _FieldProto.TYPE_BYTES),
    ("data_segment_index", 2, _FieldProto.TYPE_UINT32),
    ("data_segment_count", 3, _FieldProto.TYPE_UINT32),
    ("payload", 4, _FieldProto.TYPE_BYTES),
    ("parity_segment_index", 5, _FieldProto.TYPE_UINT32),
    ("parity_segment_count", 6, _FieldProto.TYPE_UINT32),
    ("is_parity", 7, _FieldProto.TYPE_BOOL),
    ("request_id", 1001, _FieldProto.TYPE_STRING),
    ("original_length", 1002, _FieldProto.TYPE_UINT64),
)


def _message_class() -> Any:
    """Build the protobuf class here, so that no generated file and no compiler is needed."""
    file = descriptor_pb2.FileDescriptorProto(
        name="strata/segment.proto", package="strata.segmentation", syntax="proto3"
    )
    message = file.message_type.add(name="SegmentMessageProto")
    for name, number, kind in _FIELDS:
        message.field.add(name=name, number=number, type=kind, label=_FieldProto.LABEL_OPTIONAL)
    # A separate pool: the whole process shares the default pool, which refuses to add a name twice.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName("strata.segmentation.SegmentMessageProto")
    )


_SegmentMessageProto = _message_class()


def message_hash(payload: bytes) -> bytes:
    """The Keccak-256 of a whole payload, with the original padding, not SHA-3's (C-189): 32 bytes."""
    return keccak.new(digest_bits=256, data=payload).digest()


def encode_segment(segment: Segment) -> bytes:
    """The bytes of a segment, which is not checked: segments of `segment_message` are valid."""
    message = _SegmentMessageProto(
        entire_message_hash=segment.entire_message_hash,
        data_segment_index=segment.data_segment_index,
        data_segment_count=segment.data_segment_count,
        payload=segment.payload,
        parity_segment_index=segment.parity_segment_index,
        parity_segment_count=segment.parity_segment_count,
        is_parity=segment.is_parity,
        request_id=segment.request_id or "",
        original_length=segment.original_length or 0,
    )
    data: bytes = message.SerializeToString()
    return data


def decode_segment(data: bytes) -> Segment:
    """The segment in these bytes. Raises `InvalidSegment`, and no other error, for any other bytes.

    The caller bounds the size of `data`; the memory used here does not exceed it.
    """
    message = _SegmentMessageProto()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise InvalidSegment(SegmentFault.UNDECODABLE) from None
    segment = Segment(
        entire_message_hash=message.entire_message_hash,
        data_segment_count=message.data_segment_count,
        payload=message.payload,
        data_segment_index=message.data_segment_index,
        parity_segment_index=message.parity_segment_index,
        parity_segment_count=message.parity_segment_count,
        is_parity=message.is_parity,
        request_id=message.request_id or None,
        original_length=message.original_length or None,
    )
    fault = _fault(segment)
    if fault is not None:
        raise InvalidSegment(fault)
    return segment


def _fault(segment: Segment) -> SegmentFault | None:
    if len(segment.entire_message_hash) != HASH_BYTES:  # C-194
        return SegmentFault.HASH_LENGTH
    if not segment.payload:
        return SegmentFault.NO_PAYLOAD
    if segment.data_segment_count < 1:  # C-195
        return SegmentFault.NO_DATA_SEGMENTS
    if segment.data_segment_count + segment.parity_segment_count > MAX_RECEIVED_SEGMENTS:  # C-196
        return SegmentFault.TOO_MANY_SEGMENTS
    if segment.request_id is not None and len(segment.request_id.encode()) > MAX_REQUEST_ID_BYTES:
        return SegmentFault.REQUEST_ID_LENGTH
    # Every segment holds at least one byte, so a message has at least as many bytes as segments.
    if segment.original_length is not None and segment.original_length < segment.data_segment_count:
        return SegmentFault.ORIGINAL_LENGTH
    return _role_fault(segment)


def _role_fault(segment: Segment) -> SegmentFault | None:
    """Check the fields of a segment's role, data or parity; only those may be set (C-197 … C-199)."""
    if segment.is_parity:
        if segment.data_segment_index:
            return SegmentFault.MIXED_ROLES
        in_range = segment.parity_segment_index < segment.parity_segment_count
    else:
        if segment.parity_segment_index:
            return SegmentFault.MIXED_ROLES
        in_range = segment.data_segment_index < segment.data_segment_count
    return None if in_range else SegmentFault.INDEX_OUT_OF_RANGE
