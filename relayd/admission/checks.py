"""The checks of a PUBLISH that need no signature and no database (relay.md §11, decision A-059).

    5 schema and canonical form ─ 6 size ─ 7 packet id         `Packet.parse`, in strata
    8 duplicate                                                the pipeline: memory, then the log
    9 policy ─ 10 freshness and expiry ─ 11 author's key       here, in this order
    11 signature                                               the verify threads

The first failure decides the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.errors import ErrorCode, InvalidPacket
from strata.ids import public_key_from_did
from strata.packets import Packet, check_freshness

__all__ = ["Policy", "author_key", "check_policy", "judge"]


@dataclass(frozen=True, slots=True)
class Policy:
    """What this relay declines, by explicit configuration alone (A-069)."""

    blocked_authors: frozenset[str] = frozenset()
    blocked_packet_ids: frozenset[str] = frozenset()
    blocked_media_hashes: frozenset[str] = frozenset()
    max_age_seconds: int = 86_400


def check_policy(packet: Packet, policy: Policy) -> None:
    """Raise `InvalidPacket` for what the operator blocks (R-185 … R-187)."""
    if packet.author_id in policy.blocked_authors:
        raise InvalidPacket(ErrorCode.BLOCKED_AUTHOR, "this relay does not accept packets of this author")
    if packet.packet_id in policy.blocked_packet_ids:
        raise InvalidPacket(
            ErrorCode.POLICY_REJECTED, "this relay declines this packet", detail="blocked_packet_id"
        )
    if policy.blocked_media_hashes and not policy.blocked_media_hashes.isdisjoint(packet.media_hashes):
        raise InvalidPacket(
            ErrorCode.POLICY_REJECTED, "this relay declines media of this packet", detail="blocked_media"
        )


def author_key(packet: Packet) -> bytes:
    """The key that must have signed the packet: the one its self-certifying author id carries (A-018, A-020).

    Raises `InvalidPacket` when the id carries none (A-019).
    """
    key = public_key_from_did(packet.author_id)
    if key is None:
        raise InvalidPacket(
            ErrorCode.INVALID_SIGNATURE, "the author's key is not known here", detail="unresolved_key"
        )
    return key


def judge(packet: Packet, policy: Policy, now: int) -> bytes:
    """Run checks 9 to 11 short of the signature; return the key it must verify under.

    Raises `InvalidPacket` for the first that fails.
    """
    check_policy(packet, policy)
    check_freshness(packet, now, max_age_seconds=policy.max_age_seconds)
    return author_key(packet)
