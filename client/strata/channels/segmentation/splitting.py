"""Cutting a payload into segments (C-188 … C-193, C-201, C-214 … C-216)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from strata.channels.segmentation.messages import (
    MAX_REQUEST_ID_BYTES,
    MAX_SENT_SEGMENTS,
    InvalidSegment,
    Segment,
    decode_segment,
    encode_segment,
    message_hash,
)
from strata.channels.segmentation.parity import ParityCodec, require_codec, shard_bytes
from strata.channels.spelling import in_camel_case
from strata.protocol.errors import StrataError

__all__ = [
    "DEFAULT_SEGMENT_BYTES",
    "PayloadTooLarge",
    "SegmentationConfig",
    "message_contents",
    "segment_counts",
    "segment_message",
]

DEFAULT_SEGMENT_BYTES = 102_400
"""The default segment size, which a channel makes smaller if the transport has less room."""


class PayloadTooLarge(StrataError):
    """A payload that would take more segments than one message may have (C-201)."""

    def __init__(self, payload_bytes: int, max_bytes: int) -> None:
        super().__init__(payload_bytes, max_bytes)
        self.payload_bytes = payload_bytes
        self.max_bytes = max_bytes

    def __str__(self) -> str:
        return (
            f"a payload of {self.payload_bytes} bytes is too large: one message holds {self.max_bytes} bytes"
        )


@in_camel_case()
@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentationConfig:
    """How payloads are cut and reassembled. Only the segment size may need setting (C-218).

    Construction raises `ValueError` for a value that cannot work, and `ParityUnavailable` if parity is
    enabled and its library is missing (C-213).
    """

    segmentation: Literal["always", "auto", "off", "raw"] = "always"
    """The contents of SDS messages. `always`: segments are sent, and only segments are received. `auto`: a
    payload that fits one segment is sent as it is, as other implementations of channels do, and a larger one
    in segments; both are received. `off`, or `raw`: every payload is sent and received as it is."""
    segment_size_bytes: int = DEFAULT_SEGMENT_BYTES
    """The most bytes of payload in one segment; SDS, encryption and encoding need room too (C-191). A channel
    fits the default to its transport, and refuses any other size that does not fit."""
    enable_reed_solomon: bool = False
    """Whether to send parity. `strata.channels.segmentation.parity` says which programs understand it."""
    parity_rate: float = 0.125
    """The number of parity segments per data segment; the product is rounded up (C-216)."""

    reassembly_timeout_ms: int = 600_000
    """How long to keep a partial message after its latest segment (C-209)."""
    max_segment_bytes: int = 1_048_576
    """The largest payload of a received segment; transports usually carry far smaller ones."""
    max_partial_messages: int = 1024
    """The most partial messages in total (C-210)."""
    max_partial_bytes: int = 134_217_728
    """The most bytes of partial messages in total."""
    max_partial_messages_per_sender: int = 64
    """The most partial messages of one sender; beyond it the least recently changed one is given up."""
    max_partial_bytes_per_sender: int = 33_554_432
    """The most bytes of one sender's partial messages. By default a message has up to 26 112 000 bytes."""

    def __post_init__(self) -> None:
        for name in (
            "segment_size_bytes",
            "reassembly_timeout_ms",
            "max_segment_bytes",
            "max_partial_messages",
            "max_partial_bytes",
            "max_partial_messages_per_sender",
            "max_partial_bytes_per_sender",
        ):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1")
        if self.segmentation == "raw":
            object.__setattr__(self, "segmentation", "off")
        if self.segmentation not in ("always", "auto", "off"):
            raise ValueError("segmentation must be one of always, auto, off")
        if not 0 < self.parity_rate <= 1:
            raise ValueError("parity_rate must be above 0 and at most 1")
        if self.enable_reed_solomon:
            require_codec()

    @property
    def max_payload_bytes(self) -> int:
        """The longest payload that can be sent with these options, in bytes."""
        if self.segmentation == "off":
            return self.segment_size_bytes
        data = MAX_SENT_SEGMENTS
        while data + _parity_count(data, self) > MAX_SENT_SEGMENTS:
            data -= 1
        return data * self.segment_size_bytes


def segment_counts(payload_bytes: int, options: SegmentationConfig) -> tuple[int, int]:
    """The numbers of data and parity segments of a payload.

    Raises `PayloadTooLarge` if there are too many, and `ValueError` for an empty payload.
    """
    if payload_bytes < 1:
        raise ValueError("an empty payload has no segments")
    data = -(-payload_bytes // options.segment_size_bytes)
    if options.segmentation == "off":
        if data > 1:
            raise PayloadTooLarge(payload_bytes, options.max_payload_bytes)
        return 1, 0
    parity = _parity_count(data, options)
    if data + parity > MAX_SENT_SEGMENTS:  # C-196
        raise PayloadTooLarge(payload_bytes, options.max_payload_bytes)
    return data, parity


def message_contents(
    payload: bytes, options: SegmentationConfig, *, request_id: str | None = None
) -> tuple[bytes, Iterator[bytes]]:
    """The hash of a payload, and the contents of the SDS messages that carry it.

    With `segmentation="auto"` a payload that could be mistaken for a segment is sent in a segment. Raises the
    same errors as `segment_message`.
    """
    fits = len(payload) <= options.segment_size_bytes
    if options.segmentation == "off" or (options.segmentation == "auto" and fits and _is_unlike(payload)):
        segment_counts(len(payload), options)
        return message_hash(payload), iter((payload,))
    segments = segment_message(payload, options, request_id=request_id)
    first = next(segments)
    return first.entire_message_hash, map(encode_segment, chain((first,), segments))


def _is_unlike(payload: bytes) -> bool:
    """Whether no receiver can mistake these bytes for a segment."""
    try:
        decode_segment(payload)
    except InvalidSegment:
        return True
    return False


def segment_message(
    payload: bytes, options: SegmentationConfig, *, request_id: str | None = None
) -> Iterator[Segment]:
    """The segments of a payload: the data in order, then the parity.

    Each segment is made when it is taken, so a large payload is not held twice. `request_id` is the
    additional field; None omits it (C-187). The call itself raises `PayloadTooLarge` for a payload with too
    many segments, and `ValueError` for an empty payload or an id that is too long.
    """
    if request_id is not None and len(request_id.encode()) > MAX_REQUEST_ID_BYTES:
        raise ValueError(f"request_id is longer than {MAX_REQUEST_ID_BYTES} bytes")
    counts = segment_counts(len(payload), options)
    codec = require_codec() if counts[1] else None
    return _segments(payload, options.segment_size_bytes, counts, request_id, codec)


def _segments(
    payload: bytes, size: int, counts: tuple[int, int], request_id: str | None, codec: ParityCodec | None
) -> Iterator[Segment]:
    data_count, parity_count = counts
    digest = message_hash(payload)
    # C-192, C-193: every segment has both counts, but only the index of its own kind.
    for index in range(data_count):
        yield Segment(
            entire_message_hash=digest,
            data_segment_index=index,
            data_segment_count=data_count,
            parity_segment_count=parity_count,
            payload=payload[index * size : (index + 1) * size],
            request_id=request_id,
        )
    if codec is None:
        return
    width = shard_bytes(min(size, len(payload)))
    shards = [
        payload[start : start + size].ljust(width, b"\x00") for start in range(0, len(payload), size)
    ]  # C-214
    for index, shard in enumerate(codec.encode(shards, parity_count)):
        yield Segment(
            entire_message_hash=digest,
            data_segment_count=data_count,
            parity_segment_index=index,
            parity_segment_count=parity_count,
            is_parity=True,
            payload=shard,
            request_id=request_id,
            original_length=len(payload),  # C-215
        )


def _parity_count(data_count: int, options: SegmentationConfig) -> int:
    if not options.enable_reed_solomon:
        return 0
    # C-216. 0.07 × 100 is 7.000000000000001 in binary: a rounding error must not add a segment.
    return max(1, math.ceil(data_count * options.parity_rate - 1e-9))
