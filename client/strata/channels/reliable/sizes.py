"""The largest segment, from the largest possible size of everything around it (C-035, C-127; A-127)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from dataclasses import replace

from strata.channels.reliable.errors import SegmentDoesNotFit
from strata.channels.sds import BloomParameters
from strata.channels.sds.config import MAX_ID_BYTES, SdsConfig
from strata.channels.segmentation.messages import HASH_BYTES, MAX_REQUEST_ID_BYTES
from strata.channels.segmentation.splitting import DEFAULT_SEGMENT_BYTES, SegmentationConfig

__all__ = ["fitted_segments", "largest_ephemeral", "largest_segment", "message_overhead"]

_LEAST_FITTED_BYTES = 4_096
"""The smallest size to which default segments are reduced; less room is most likely a mistake."""
_HINT_BYTES = 32
_MESSAGE_ID_BYTES = 64
_FIELD_BYTES = 6  # tag and length of a field of at most a megabyte or two
_SEGMENT_BYTES = HASH_BYTES + MAX_REQUEST_ID_BYTES + 10 * _FIELD_BYTES


def message_overhead(channel_id: str, sender_id: str, config: SdsConfig) -> int:
    """The largest size of an SDS message without its content, in bytes."""
    entry = MAX_ID_BYTES + _HINT_BYTES + _MESSAGE_ID_BYTES + 4 * _FIELD_BYTES
    entries = config.causal_history_size + config.max_repair_requests
    filter_bytes = BloomParameters(config.bloom_filter_size, config.bloom_filter_error_rate).size_bytes
    ids = len(channel_id.encode()) + len(sender_id.encode()) + _MESSAGE_ID_BYTES
    return ids + filter_bytes + entries * entry + 8 * _FIELD_BYTES


def largest_segment(
    largest_payload: int | None, channel_id: str, sender_id: str, config: SdsConfig, *, hook_overhead: int
) -> int | None:
    """The largest segment whose encrypted SDS message fits into `largest_payload`; None if unlimited."""
    if largest_payload is None:
        return None
    around = message_overhead(channel_id, sender_id, config) + _SEGMENT_BYTES + hook_overhead
    return max(0, largest_payload - around)


def largest_ephemeral(
    largest_payload: int | None, channel_id: str, sender_id: str, *, hook_overhead: int
) -> int | None:
    """The largest payload of an ephemeral message, which has no history and no filter; None if unlimited."""
    if largest_payload is None:
        return None
    ids = len(channel_id.encode()) + len(sender_id.encode()) + _MESSAGE_ID_BYTES
    return max(0, largest_payload - ids - _SEGMENT_BYTES - hook_overhead - 8 * _FIELD_BYTES)


def fitted_segments(config: SegmentationConfig, largest: int | None) -> SegmentationConfig:
    """Return the configuration with segments of at most `largest` bytes, if their size is the default.

    Raises `SegmentDoesNotFit` for a chosen size that does not fit, and if there is next to no room.
    """
    size = config.segment_size_bytes
    if largest is None or size <= largest:
        return config
    if size != DEFAULT_SEGMENT_BYTES or largest < _LEAST_FITTED_BYTES:
        raise SegmentDoesNotFit(size, largest)
    return replace(config, segment_size_bytes=largest)
