"""The relay's description of itself at `/.well-known/strata-relay.json` (RFC-0007 §11, R-389).

It states what the running relay enforces and nothing else, and it establishes no trust (R-390): a client that
pinned a relay keeps its pin, whatever a manifest says.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from strata.protocol.documents import DidDocument
from strata.protocol.keys import DEFAULT_CLOCK_SKEW_SECONDS
from strata.protocol.wire import EXTENSIONS

from relayd.access.auth import CAPABILITIES, OPERATE
from relayd.config import Settings
from relayd.feed.profiles import PROFILES
from relayd.moderation import Bans
from relayd.version import VERSION

__all__ = ["build_manifest"]

_MAX_DID_DOCS: Final = 1000


def build_manifest(
    settings: Settings,
    *,
    relay_id: str,
    ws_endpoint: str,
    status: str,
    clock_skew_seconds: int = DEFAULT_CLOCK_SKEW_SECONDS,
    did_docs: Iterable[DidDocument] = (),
    bans: Bans = Bans(),  # noqa: B008 - immutable
) -> dict[str, object]:
    """The manifest. `public_url` takes the place of `ws_endpoint`; `status` is `ok` or why it is not ready.

    `did_docs` are the documents that the operator vouches for; the manifest points to the newest (R-057).
    """
    newest = sorted(did_docs, key=lambda document: document.created_at, reverse=True)[:_MAX_DID_DOCS]
    return {
        "relay_id": relay_id,
        "ws_endpoint": settings.public_url or ws_endpoint,
        "status": status,
        "software": {"name": "relayd", "version": VERSION},
        "extensions": list(EXTENSIONS),
        "clock_skew_seconds": clock_skew_seconds,
        "recovery_delay_seconds": settings.recovery_delay_seconds,
        "limits": {**_limits(settings), "rates": _rates(settings)},
        "auth": _auth(settings),
        "policy": _policy(settings, bans),
        "replication": _replication(settings),
        "did_docs": [{"did": document.did, "did_doc_hash": document.hash} for document in newest],
    }


def _replication(settings: Settings) -> dict[str, object]:
    """R-389: whether peers may replicate from here; neither which peers, nor which relays this one reads."""
    accepts = bool(settings.replication_peers)
    return {
        "accepts_peer_subscriptions": accepts,
        "supported_profiles": list(PROFILES) if accepts else [],
        "requires_auth": True,
    }


def _limits(settings: Settings) -> dict[str, int]:
    return {
        "max_packet_bytes": settings.max_packet_bytes,
        "max_identity_bytes": settings.max_identity_bytes,
        "max_frame_bytes": settings.max_frame_bytes,
        "max_json_depth": settings.max_json_depth,
        "max_json_values": settings.max_json_values,
        "default_limit": settings.default_limit,
        "max_limit": settings.max_limit,
        "max_subscriptions": settings.max_subscriptions,
        "max_filter_values": settings.max_filter_values,
        "max_filter_bytes": settings.max_filter_bytes,
        "max_pending_publishes": settings.max_pending_publishes,
    }


def _rates(settings: Settings) -> dict[str, object]:
    """The limits in each window, as enforced by all workers together (R-317); no limit if absent."""
    anonymous = {
        "publishes": settings.anonymous_publish_limit,
        "subscribes": settings.anonymous_subscribe_limit,
        "backfill_bytes": settings.anonymous_backfill_limit_bytes,
    }
    authenticated = {
        "publishes": settings.publish_limit,
        "subscribes": settings.subscribe_limit,
        "backfill_bytes": settings.backfill_limit_bytes,
    }
    addresses = {
        "connections": settings.max_connections_per_address,
        "connects": settings.connection_limit,
        "auths": settings.auth_limit,
        "identities": settings.identities_per_address,
    }
    return {
        "window_seconds": settings.limit_window_seconds,
        "enforced_by": "process" if settings.workers == 1 else "machine",
        "processes": settings.workers,
        "anonymous_address": _enforced(anonymous),
        "identity": _enforced(authenticated),
        "address": _enforced(addresses),
    }


def _enforced(limits: dict[str, int]) -> dict[str, int]:
    return {name: limit for name, limit in limits.items() if limit}


def _auth(settings: Settings) -> dict[str, object]:
    """The use of AUTH here (R-292); not who the members and peers are."""
    return {
        "required_for": list(settings.require_auth),
        "members_only": bool(settings.members),
        "capabilities": [*CAPABILITIES, OPERATE] if settings.operators else list(CAPABILITIES),
        "challenge_lifetime_seconds": settings.challenge_lifetime,
    }


def _policy(settings: Settings, bans: Bans) -> dict[str, object]:
    """R-325: which packets are accepted, how long they are kept and how served, and if any are declined.

    The lists themselves stay private: a public list of blocked authors and packets would advertise them.
    """
    policy: dict[str, object] = {
        "accepts_public_packets": not settings.allowed_authors,
        "max_packet_age_seconds": settings.max_packet_age_seconds,
        "dedup_window_seconds": settings.dedup_window_seconds,
        "protected_accounts": "none",
        "declines": {
            "authors": bool(settings.blocked_authors or bans.authors),
            "packet_ids": bool(settings.blocked_packet_ids or bans.packet_ids),
            "media_hashes": bool(settings.blocked_media_hashes or bans.media_hashes),
        },
        "declined_types": list(dict.fromkeys((*settings.blocked_types, *sorted(bans.types)))),
        "abuse_table": "abuse" in settings.policies,
        "plugins": bool(settings.policy_plugins),
        "provenance_downgrade": settings.provenance_downgrade,
    }
    if settings.allowed_types:  # absent means any
        policy["accepted_types"] = list(settings.allowed_types)
    if settings.retention_days:  # absent means forever: 0 would read as "not at all"
        policy["default_retention_days"] = settings.retention_days
    return policy
