"""Replication profiles: the kind of packets a peer requests (RFC-0007 §6.2, decision A-096)."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

from typing import Final

from msgspec.structs import replace
from strata.protocol.wire import Filters

__all__ = ["PROFILES", "UNSUPPORTED_PROFILE", "of_profile"]

FULL_ARCHIVE: Final = "FULL_ARCHIVE"
PUBLIC_SOCIAL: Final = "PUBLIC_SOCIAL"
PROFILES: Final = (FULL_ARCHIVE, PUBLIC_SOCIAL)
"""The profiles that a peer may request; an unknown profile has no effect (R-362)."""

UNSUPPORTED_PROFILE: Final = "HIGH_TRUST_ONLY"
"""The profile that is refused: a peer that took all packets for trusted would be misled."""

_SOCIAL: Final = (
    "POST",
    "PROFILE",
    "SOCIAL_EDGE",
    "REACTION",
    "GROUP",
    "GROUP_MEMBERSHIP",
    "CONSENSUS_METRIC",
    "ATTESTATION",
)


def of_profile(filters: Filters, profile: str | None) -> Filters:
    """The filters with the profile's restrictions added: a packet must meet both (R-144)."""
    if profile != PUBLIC_SOCIAL:
        return filters
    types = [name for name in _SOCIAL if not filters.types or name in filters.types]
    if not types:  # an empty list would request all types; no packet was received in an empty time range
        return replace(filters, received_since=1, received_until=0)
    return replace(filters, types=types)
