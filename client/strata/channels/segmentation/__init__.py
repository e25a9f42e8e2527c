"""Cuts payloads of any size into segments of bounded size, and joins them again (channel.md §10)."""

from __future__ import annotations

from strata.channels.segmentation.messages import (
    InvalidSegment,
    Segment,
    SegmentFault,
    decode_segment,
    encode_segment,
    message_hash,
)
from strata.channels.segmentation.parity import ParityUnavailable
from strata.channels.segmentation.reassembly import (
    Abandoned,
    AbandonReason,
    DropReason,
    Reassembled,
    Reassembler,
    ReassemblyStatistics,
)
from strata.channels.segmentation.splitting import (
    PayloadTooLarge,
    SegmentationConfig,
    message_contents,
    segment_counts,
    segment_message,
)

__all__ = [
    "AbandonReason",
    "Abandoned",
    "DropReason",
    "InvalidSegment",
    "ParityUnavailable",
    "PayloadTooLarge",
    "Reassembled",
    "Reassembler",
    "ReassemblyStatistics",
    "Segment",
    "SegmentFault",
    "SegmentationConfig",
    "decode_segment",
    "encode_segment",
    "message_contents",
    "message_hash",
    "segment_counts",
    "segment_message",
]
