"""What a pool of relays takes and gives: plain values, no I/O."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from strata.relays.conduct import Standing
from strata.relays.connection.values import PacketSelection

__all__ = [
    "Copy",
    "PoolFetchOptions",
    "PoolPublished",
    "PoolStatistics",
    "PoolSubscribeOptions",
    "Position",
    "RelayView",
    "check_positions",
]


class Copy(enum.StrEnum):
    """What has become of one relay's copy of a publish."""

    PENDING = "pending"
    STORED = "stored"
    """The relay said OK."""
    REFUSED = "refused"
    FAILED = "failed"
    """It could not be reached or did not answer: it may have the packet or not."""


@dataclass(frozen=True, slots=True)
class PoolPublished:
    """Enough relays say that a packet is durably stored."""

    packet_id: str
    received_at: int | None
    """The earliest time a relay says it first saw the packet, in Unix seconds (R-106)."""
    copies: Mapping[str, Copy]
    """What each relay's copy had come to when `publish` returned; pending ones go on in the background."""
    duplicate: bool = False
    """Every relay that has answered had the packet already."""
    queued: bool = False
    """Stored, but without effect yet (R-190)."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a subscription stands with one relay."""

    cursor: str | None
    """The last cursor handed on; None for a relay that gives none."""
    received_at: int
    """When that relay received the last packet of its own handed on, in Unix seconds."""


def check_positions(positions: object) -> None:
    """Raise `TypeError` for what are no positions."""
    if not isinstance(positions, Mapping) or not all(isinstance(one, Position) for one in positions.values()):
        raise TypeError("positions must be a mapping from URLs to Position, as PoolSubscription.positions is")


class PoolFetchOptions(PacketSelection, total=False):
    """The keyword options of `Pool.fetch`."""

    positions: Mapping[str, Position] | None
    """`PoolSubscription.positions` of an earlier session: where to go on at the relays it names."""


class PoolSubscribeOptions(PoolFetchOptions, total=False):
    """The keyword options of `Pool.subscribe`."""

    live: bool
    """Whether to go on with new packets once the stored ones are read; True unless given."""


@dataclass(frozen=True, slots=True)
class RelayView:
    """What the pool knows about one relay at this moment."""

    url: str
    standing: Standing
    score: float
    """Between 0 and 1: `strata.relays.pool.reputation`."""
    connected: bool
    latency: float | None
    """Mean seconds of a round trip over seven days."""
    throughput: float | None
    """Mean bytes a second of history over seven days."""
    uptime: float | None
    """Share of connection attempts and pings that succeeded over seven days."""
    last_seen_at: float | None
    """When it last answered, in Unix seconds."""
    blacklisted_until: float | None = None


@dataclass(slots=True)
class PoolStatistics:
    """What has happened in one pool since it was opened. Every number only grows."""

    published: int = 0
    """Publishes confirmed by enough relays."""
    publish_failures: int = 0
    copies_sent: int = 0
    copies_stored: int = 0
    copies_failed: int = 0
    copies_abandoned: int = 0
    """Copies given up because `max_background` others were under way."""
    presence_missing: int = 0
    """Times a relay did not have a packet that it had acknowledged (C-274)."""
    presence_resent: int = 0
    presence_given_up: int = 0
    """Packets acknowledged that no relay was seen to have."""
    presence_thin: int = 0
    """Packets that fewer relays than wanted were seen to have."""
    packets_merged: int = 0
    """Packets handed on, each once."""
    copies_dropped: int = 0
    """Further copies of packets handed on before (C-271)."""
    log_resets: int = 0
    """Times a relay's log had lost the place where a subscription stood: the other relays are swept then."""
    packets_recovered: int = 0
    """Packets that no reader brought and a sweep found (C-275)."""
    readers_replaced: int = 0
    """Times a subscription went over to another relay (C-272, C-277)."""
    sweeps: int = 0
    sweeps_failed: int = 0
    pings_failed: int = 0
    probes: int = 0
    probes_missed: int = 0
    relays_blacklisted: int = 0
    relays_sampled: int = 0
    scores_lost: int = 0
    """Observations that could not be written to the scores file."""
    forgotten_failures: int = 0
    """Times old ids could not be put on disk and stayed in memory instead."""
