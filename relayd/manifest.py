"""The relay's description of itself at `/.well-known/strata-relay.json` (RFC-0007 §11, R-389).

It states what the running relay enforces and nothing else, and it establishes no trust (R-390): a client
that pinned a relay keeps to its pin, whatever a manifest says.
"""

from __future__ import annotations

from typing import Any

from strata.wire import EXTENSIONS

from relayd.config import Settings
from relayd.version import VERSION

__all__ = ["CLOCK_SKEW_SECONDS", "build_manifest"]

CLOCK_SKEW_SECONDS = 300
"""How far two clocks may disagree (RFC-0000 §6.1)."""


def build_manifest(settings: Settings, *, relay_id: str, ws_endpoint: str, status: str) -> dict[str, Any]:
    """The manifest. `public_url` stands in for `ws_endpoint`; `status` is `ok` or why it is not ready."""
    return {
        "relay_id": relay_id,
        "ws_endpoint": settings.public_url or ws_endpoint,
        "status": status,
        "software": {"name": "relayd", "version": VERSION},
        "extensions": list(EXTENSIONS),
        "clock_skew_seconds": CLOCK_SKEW_SECONDS,
        "limits": _limits(settings),
        "policy": _policy(settings),
        # Peers are served as ordinary subscribers; nothing is promised beyond that yet.
        "replication": {"accepts_peer_subscriptions": False, "supported_profiles": [], "requires_auth": True},
        "did_docs": [],
    }


def _limits(settings: Settings) -> dict[str, int]:
    return {
        "max_packet_bytes": settings.max_packet_bytes,
        "max_frame_bytes": settings.max_frame_bytes,
        "max_json_depth": settings.max_json_depth,
        "default_limit": settings.default_limit,
        "max_limit": settings.max_limit,
        "max_subscriptions": settings.max_subscriptions,
        "max_filter_values": settings.max_filter_values,
        "max_pending_publishes": settings.max_pending_publishes,
    }


def _policy(settings: Settings) -> dict[str, Any]:
    """R-325: what is taken, how long it is kept, and whether anything is declined; not what or whom."""
    policy: dict[str, Any] = {
        "accepts_public_packets": True,
        "max_packet_age_seconds": settings.max_packet_age_seconds,
        "dedup_window_seconds": settings.dedup_window_seconds,
        "protected_accounts": "none",
        "declines": {
            "authors": bool(settings.blocked_authors),
            "packet_ids": bool(settings.blocked_packet_ids),
            "media_hashes": bool(settings.blocked_media_hashes),
        },
    }
    if settings.retention_days:  # absent means for ever: 0 would read as "not at all"
        policy["default_retention_days"] = settings.retention_days
    return policy
