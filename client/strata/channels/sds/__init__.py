"""Scalable Data Sync: a channel's messages in one order for all, acknowledged, and repaired if lost.

A `Participant` is one sender's part in one channel. It does no I/O and has no clock; the reliable channel
drives it. Participants exchange `SdsMessage`s, compatible with the JavaScript package of the same protocol.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from strata.channels.sds.bloom import BloomFilter, BloomParameters
from strata.channels.sds.config import SdsConfig
from strata.channels.sds.events import (
    AckedBy,
    Acknowledged,
    Delivered,
    DeliveryFailed,
    EphemeralReceived,
    Lost,
    MissingFound,
    Origin,
    PossiblyAcknowledged,
    RefusedOld,
    Retransmit,
    SdsEvent,
    SdsStatistics,
    SenderShared,
    SendRepair,
    SendSync,
    WaitingMessage,
)
from strata.channels.sds.messages import (
    NO_CHANNEL,
    HistoryEntry,
    InvalidSdsMessage,
    Kind,
    SdsFault,
    SdsMessage,
    person_of,
)
from strata.channels.sds.outgoing import OutgoingState
from strata.channels.sds.participant import OutgoingFull, Participant
from strata.channels.sds.repair import eligible, hash64, request_offset, response_groups, response_offset
from strata.channels.sds.state import Change, SdsState

__all__ = [
    "NO_CHANNEL",
    "AckedBy",
    "Acknowledged",
    "BloomFilter",
    "BloomParameters",
    "Change",
    "Delivered",
    "DeliveryFailed",
    "EphemeralReceived",
    "HistoryEntry",
    "InvalidSdsMessage",
    "Kind",
    "Lost",
    "MissingFound",
    "Origin",
    "OutgoingFull",
    "OutgoingState",
    "Participant",
    "PossiblyAcknowledged",
    "RefusedOld",
    "Retransmit",
    "SdsConfig",
    "SdsEvent",
    "SdsFault",
    "SdsMessage",
    "SdsState",
    "SdsStatistics",
    "SendRepair",
    "SendSync",
    "SenderShared",
    "WaitingMessage",
    "eligible",
    "hash64",
    "person_of",
    "request_offset",
    "response_groups",
    "response_offset",
]
