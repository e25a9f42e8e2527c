"""The keywords that open a channel, typed, as in `relay.channel("room", topic=topic, receive=False)`.

The meaning and default of each setting are documented at the field of that name in `ReliableChannelConfig`,
`SdsConfig`, `SegmentationConfig` or `RateLimitConfig`. A test checks that names and types match those fields.
"""

from __future__ import annotations

from random import Random
from typing import Literal, TypedDict

from strata.channels.encryption import Encryption
from strata.channels.persistence.interface import Persistence
from strata.channels.rate_limit.proof import ProofProvider
from strata.channels.reliable.codec import Decoder, Encoder
from strata.channels.reliable.config import ReliableChannelConfig

__all__ = ["ChannelOptions", "ConfigOptions"]


class ConfigOptions(TypedDict, total=False):
    """Every keyword except `config`, for functions that take the configuration as a separate argument."""

    profile: str | None
    """A preset of settings (C-033)."""
    encoder: Encoder | None
    decoder: Decoder | None
    rng: Random | None
    """The source of ids and delays; None takes the system's."""

    # ReliableChannelConfig; the call itself names the node, the channel and the topic.
    encryption: Encryption | None
    persistence: Persistence | None
    retrieve_frequency_ms: int
    process_task_min_elapse_ms: int
    query_on_connect: bool
    force_query_threshold_ms: int
    query_window_ms: int
    join: Literal["history", "now"]
    since: int | None
    auto_start: bool
    sent_event_on: Literal["network", "participants"]
    send_request_id: bool
    sender_binding: Literal["off", "did"]
    device: str | None
    members: tuple[str, ...]
    retention_seconds: int | None
    proof_provider: ProofProvider | None
    receive: bool
    hand_over: Literal["at_most_once", "at_least_once", "once", "again"]
    auto_ack: bool
    drain_timeout_ms: int
    max_inbox_messages: int
    max_inbox_bytes: int

    # SdsConfig.
    acknowledgement_timeout_ms: int
    max_retransmissions: int
    causal_history_size: int
    bloom_filter_size: int
    bloom_filter_error_rate: float
    possible_acks_threshold: int
    possible_acks_from_distinct_senders: bool
    acknowledged_by_people: bool
    possible_ack_retry_factor: float
    lost_message_timeout_ms: int
    hold_back_ms: int
    enable_repair: bool
    repair_t_min_ms: int
    repair_t_max_ms: int
    expected_participants: int
    max_repair_requests: int
    sync_min_interval_ms: int
    sweep_in_buf_interval_ms: int
    max_history: int
    max_history_bytes: int
    max_known_ids: int
    max_unacknowledged: int
    max_waiting: int
    max_waiting_bytes: int
    max_missing: int
    max_repair_buffer: int
    max_received_history: int
    max_message_bytes: int

    # SegmentationConfig.
    segmentation: Literal["always", "auto", "off", "raw"]
    segment_size_bytes: int
    enable_reed_solomon: bool
    parity_rate: float
    reassembly_timeout_ms: int
    max_segment_bytes: int
    max_partial_messages: int
    max_partial_bytes: int
    max_partial_messages_per_sender: int
    max_partial_bytes_per_sender: int

    # RateLimitConfig.
    enabled: bool
    epoch_size_ms: int
    messages_per_epoch: int | None
    segments_per_epoch: int | None
    chunk_accounting: Literal["first", "each"]
    approach_threshold: float
    max_queued: int
    max_pause_ms: int


class ChannelOptions(ConfigOptions, total=False):
    """Every keyword of `relay.channel`."""

    config: ReliableChannelConfig | None
    """Settings as an object; a keyword overrides the field of the same name."""
