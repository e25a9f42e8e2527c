"""Where a replicated packet comes from, and as of which time it is judged (RFC-0007 §6.3, decision A-097).

A publish is judged as of its arrival. A packet of a peer was judged before, when the first relay accepted
it, and may be days old now: it is judged as of that time, which the peer reports. The peer may lie about it
(A-098), so its word counts only within bounds.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import math
from dataclasses import dataclass

from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.packets import Packet, check_freshness

from relayd.store.types import EXEMPT_TYPES

__all__ = ["PeerOrigin", "check_age", "check_asked", "witness_of"]

_SKEW_SECONDS = 300


@dataclass(frozen=True, slots=True)
class PeerOrigin:
    """The peer that delivered a packet, and what the peer said about it."""

    peer_id: int
    received_at: int
    """When the first relay received the packet, according to the peer; nothing of this has been checked."""
    is_trusted: bool
    """Whether the operator lets the peer's word about that time count."""
    max_backfill_seconds: int
    types: frozenset[str] = frozenset()
    """The types that the peer was asked for; empty for all."""
    authors: frozenset[str] = frozenset()
    """The authors that the peer was asked for; empty for all."""


def check_asked(packet: Packet, origin: PeerOrigin) -> None:
    """Refuse a packet that the peer was not asked for: the operator has not selected it."""
    is_of_types = not origin.types or packet.content_type in origin.types
    if not is_of_types or (origin.authors and packet.author_id not in origin.authors):
        reason = "the peer was not asked for it"
        raise InvalidPacket(ErrorCode.POLICY_REJECTED, reason, detail="not_asked_for")


def witness_of(packet: Packet, origin: PeerOrigin, now: int) -> int | None:
    """When the first relay received the packet; None if the peer's word does not count (R-369).

    Never later than now, because a peer's clock may be fast.
    """
    if not origin.is_trusted:
        return None
    if not packet.timestamp - _SKEW_SECONDS <= origin.received_at <= now + _SKEW_SECONDS:
        return None
    return min(origin.received_at, now)


def check_age(
    packet: Packet, origin: PeerOrigin, witness: int | None, now: int, *, max_age_seconds: int
) -> None:
    """Check 10 for a packet of a peer (R-370). Raises `InvalidPacket` as `check_freshness` does.

    Packets that are kept forever may have any age: without an author's old key events, nothing that the
    author has signed since could be verified here.
    """
    check_freshness(packet, now, max_age_seconds=math.inf)
    if packet.content_type in EXEMPT_TYPES:
        return
    if now - packet.timestamp > origin.max_backfill_seconds:
        raise InvalidPacket(
            ErrorCode.TIMESTAMP_TOO_OLD,
            f"timestamp is more than {origin.max_backfill_seconds} s in the past",
            detail="max_backfill",
        )
    at = now if witness is None else witness
    if at - packet.timestamp > max_age_seconds:
        raise InvalidPacket(
            ErrorCode.TIMESTAMP_TOO_OLD,
            f"timestamp was more than {max_age_seconds} s in the past when a relay first received it",
        )
