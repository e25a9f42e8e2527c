"""The built-in policies: each is a small function from a packet to a refusal or nothing.

A policy has the name that the setting `policies` calls it by, and reads the one list of `Lists` with that
name. So a policy whose list is empty can refuse nothing, and is left out when the policies are put in order.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.packets import Packet

from relayd.store.declined import refers_to

__all__ = ["RULES", "Lists", "Rule"]


@dataclass(frozen=True, slots=True)
class Lists:
    """The lists of the built-in policies."""

    blocked_authors: frozenset[str] = frozenset()
    blocked_packet_ids: frozenset[str] = frozenset()
    blocked_media_hashes: frozenset[str] = frozenset()
    blocked_types: frozenset[str] = frozenset()
    allowed_authors: frozenset[str] = frozenset()
    allowed_types: frozenset[str] = frozenset()
    abuse: frozenset[str] = frozenset()
    """The authors whom the abuse table blocks."""


Rule = Callable[[Packet, Lists], InvalidPacket | None]


def _blocked_authors(packet: Packet, lists: Lists) -> InvalidPacket | None:
    if packet.author_id not in lists.blocked_authors:
        return None
    # the same code, whether the author or a peer sends the packet.
    return InvalidPacket(ErrorCode.BLOCKED_AUTHOR, "this relay does not accept packets of this author")


def _blocked_packet_ids(packet: Packet, lists: Lists) -> InvalidPacket | None:
    if packet.packet_id not in lists.blocked_packet_ids:
        return None
    return _rejected("this relay declines this packet", "blocked_packet_id")


def _blocked_media_hashes(packet: Packet, lists: Lists) -> InvalidPacket | None:
    # The same test as when serving, so that the relay takes no packet that it would never serve.
    if not refers_to(packet.canonical, lists.blocked_media_hashes):
        return None
    return _rejected("this relay declines media of this packet", "blocked_media")


def _blocked_types(packet: Packet, lists: Lists) -> InvalidPacket | None:
    if packet.content_type not in lists.blocked_types:
        return None
    return _rejected("this relay does not take packets of this type", "blocked_type")


def _allowed_authors(packet: Packet, lists: Lists) -> InvalidPacket | None:
    if packet.author_id in lists.allowed_authors:
        return None
    return _rejected("this relay takes packets of certain authors only", "author_not_allowed")


def _allowed_types(packet: Packet, lists: Lists) -> InvalidPacket | None:
    # Without its key events, a revoked key would go on signing: no list of types excludes them.
    if packet.content_type in lists.allowed_types or packet.content_type in IDENTITY_TYPES:
        return None
    return _rejected("this relay takes packets of certain types only", "type_not_allowed")


def _abuse(packet: Packet, lists: Lists) -> InvalidPacket | None:
    if packet.author_id not in lists.abuse:
        return None
    return InvalidPacket(
        ErrorCode.BLOCKED_AUTHOR, "this relay accepts no packets of this author now", detail="abuse"
    )


def _rejected(reason: str, detail: str) -> InvalidPacket:
    """R-187, A-061: all refusals except that of an author share one code."""
    return InvalidPacket(ErrorCode.POLICY_REJECTED, reason, detail=detail)


RULES: Mapping[str, Rule] = {
    "blocked_authors": _blocked_authors,
    "blocked_packet_ids": _blocked_packet_ids,
    "blocked_media_hashes": _blocked_media_hashes,
    "blocked_types": _blocked_types,
    "allowed_authors": _allowed_authors,
    "allowed_types": _allowed_types,
    "abuse": _abuse,
}
"""Every built-in policy by name, in the order in which they apply by default."""
