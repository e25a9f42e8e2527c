"""The values that a pool of relays takes and returns: plain data, no I/O."""

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
    """The state of one relay's copy of a publish."""

    PENDING = "pending"
    STORED = "stored"
    """The relay said OK."""
    REFUSED = "refused"
    FAILED = "failed"
    """The relay could not be reached or did not answer: it may or may not have the packet."""


@dataclass(frozen=True, slots=True)
class PoolPublished:
    """Confirmation by enough relays that a packet is durably stored."""

    packet_id: str
    received_at: int | None
    """The earliest time at which a relay says it first saw the packet, in Unix seconds (R-106)."""
    copies: Mapping[str, Copy]
    """The state of each relay's copy when `publish` returned; pending ones continue in the background."""
    duplicate: bool = False
    """Every relay that has answered already had the packet."""
    queued: bool = False
    """Stored, but without effect yet (R-190)."""


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a subscription at one relay."""

    cursor: str | None
    """The cursor of the last packet delivered from this relay; None if the relay gives none."""
    received_at: int
    """When this relay received that packet, in Unix seconds."""


def check_positions(positions: object) -> None:
    """Raise `TypeError` unless these are positions."""
    if not isinstance(positions, Mapping) or not all(isinstance(one, Position) for one in positions.values()):
        raise TypeError("positions must be a mapping from URLs to Position, as PoolSubscription.positions is")


class PoolFetchOptions(PacketSelection, total=False):
    """The keyword options of `Pool.fetch`."""

    positions: Mapping[str, Position] | None
    """`PoolSubscription.positions` of an earlier session: where to resume at the relays it names."""


class PoolSubscribeOptions(PoolFetchOptions, total=False):
    """The keyword options of `Pool.subscribe`."""

    live: bool
    """Whether to continue with new packets after the stored ones; True by default."""


@dataclass(frozen=True, slots=True)
class RelayView:
    """What the pool knows about one relay now."""

    url: str
    standing: Standing
    score: float
    """Between 0 and 1; the formula is in `strata.relays.conduct`."""
    connected: bool
    latency: float | None
    """The mean round trip over seven days, in seconds."""
    throughput: float | None
    """The mean rate of reading history over seven days, in bytes per second."""
    uptime: float | None
    """The share of connection attempts and pings that succeeded over seven days."""
    last_seen_at: float | None
    """When it last answered, in Unix seconds."""
    blacklisted_until: float | None = None


@dataclass(slots=True)
class PoolStatistics:
    """Counts of what has happened in one pool since it was opened. They only grow."""

    published: int = 0
    """Publishes confirmed by enough relays."""
    publish_failures: int = 0
    copies_sent: int = 0
    copies_stored: int = 0
    copies_failed: int = 0
    copies_abandoned: int = 0
    """Times the copies of a confirmed publish were abandoned, because more than `max_background` copies were
    under way."""
    presence_missing: int = 0
    """Times a relay did not have a packet that it had acknowledged (C-274)."""
    presence_resent: int = 0
    presence_given_up: int = 0
    """Acknowledged packets that were then found on no relay."""
    presence_thin: int = 0
    """Packets that were found on fewer relays than wanted."""
    packets_merged: int = 0
    """Packets delivered, each once."""
    copies_dropped: int = 0
    """Further copies of packets, dropped (C-271)."""
    log_resets: int = 0
    """Times a relay's log had lost the position of a subscription; the other relays are then swept."""
    packets_recovered: int = 0
    """Packets that no reader brought and a sweep found (C-275)."""
    readers_replaced: int = 0
    """Times a subscription changed to another relay (C-272, C-277)."""
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
    """Times old ids could not be written to disk and stayed in memory instead."""
