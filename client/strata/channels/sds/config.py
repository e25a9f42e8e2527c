"""Every setting of a participant, with its unit and default (channel.md §2)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from strata.channels.spelling import in_camel_case

__all__ = ["FAR_AHEAD_MS", "MAX_ID_BYTES", "SdsConfig"]

MAX_ID_BYTES = 256
"""The longest sender, channel or message id, in UTF-8 bytes (C-002)."""
FAR_AHEAD_MS = 24 * 3600 * 1000
"""A Lamport time further ahead of the wall clock than this does not advance our own (C-119)."""


@in_camel_case()
@dataclass(frozen=True, slots=True)
class SdsConfig:
    """Settings of one channel. All participants need equal settings of the filter and of repair (C-146).

    Times are in milliseconds. Raises `ValueError` for a value that makes no sense (C-032).
    """

    acknowledgement_timeout_ms: int = 5_000
    max_retransmissions: int = 5
    """With 0 the delivery fails after one timeout (C-036)."""
    causal_history_size: int = 2
    bloom_filter_size: int = 10_000
    """The number of ids that a filter is sized for; it rolls over when it holds this many."""
    bloom_filter_error_rate: float = 0.001
    possible_acks_threshold: int = 2
    """How many filters, of different messages, count as an acknowledgement; with 0 no number does."""
    possible_acks_from_distinct_senders: bool = False
    """Count at most one filter of each sender (A-136)."""
    acknowledged_by_people: bool = False
    """Count people: an acknowledgement by another device of the same person does not count."""
    possible_ack_retry_factor: float = 2.0
    lost_message_timeout_ms: int = 600_000
    """How long to look for a missing message; with 0 it is never given up."""
    hold_back_ms: int = 0
    """How long a message waits for a missing message that it follows. Then it is delivered, and the search
    for the missing one continues. With 0 it waits until the missing one is given up."""
    enable_repair: bool = True
    repair_t_min_ms: int = 30_000
    repair_t_max_ms: int = 120_000
    expected_participants: int = 1
    max_repair_requests: int = 3
    """The most entries in one message's `repair_request`."""
    sync_min_interval_ms: int = 30_000
    """With 0 no sync message is sent automatically."""
    sweep_in_buf_interval_ms: int = 5_000

    # Bounds on memory and work (C-095, C-302). Nothing here is part of the protocol.
    max_history: int = 10_000
    """The most messages in the log; the message that was logged first leaves first."""
    max_history_bytes: int = 128 << 20
    """The most bytes of logged messages kept for repair."""
    max_known_ids: int = 100_000
    """The most ids remembered, in and beyond the log, so that no message is delivered twice."""
    max_unacknowledged: int = 4_096
    """The most own messages that may await acknowledgement; `wrap` refuses more."""
    max_waiting: int = 10_000
    """The most messages held for their dependencies; a further message is refused, hence not acknowledged."""
    max_waiting_bytes: int = 64 << 20
    max_missing: int = 10_000
    """The most missing messages tracked; as many again are remembered as lost."""
    max_repair_buffer: int = 1_000
    """The most entries in each of the two repair buffers."""
    max_received_history: int = 1_000
    """The most entries in a received history or repair request; a message with more is dropped."""
    max_message_bytes: int = 1 << 20
    """The largest received message; a larger one is dropped unread."""

    persistence: object | None = None
    """The store of a reliable channel, which the 2026 document has here. A participant itself uses none."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name != "persistence"):
            value = getattr(self, name)
            if type(value) is not bool and not value >= 0:
                raise ValueError(f"{name} must not be negative")
            if value == math.inf and not name.startswith("max_"):  # times are computed in whole milliseconds
                raise ValueError(f"{name} must be finite")
        for name in _AT_LEAST_ONE:
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1")
        if not 0 < self.bloom_filter_error_rate < 1:
            raise ValueError("bloom_filter_error_rate must lie between 0 and 1")
        if not self.possible_ack_retry_factor >= 1:
            raise ValueError("possible_ack_retry_factor must be at least 1")
        if self.repair_t_max_ms <= self.repair_t_min_ms:
            raise ValueError("repair_t_max_ms must be greater than repair_t_min_ms")
        if self.max_known_ids < self.max_history:
            raise ValueError("max_known_ids must be at least max_history")


_AT_LEAST_ONE = (
    "acknowledgement_timeout_ms",
    "causal_history_size",
    "bloom_filter_size",
    "expected_participants",
    "sweep_in_buf_interval_ms",
    "max_history",
    "max_history_bytes",
    "max_known_ids",
    "max_unacknowledged",
    "max_waiting",
    "max_waiting_bytes",
    "max_missing",
    "max_repair_buffer",
    "max_received_history",
    "max_message_bytes",
)
