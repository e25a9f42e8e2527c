"""The folders into which a day's packets are sorted by content type. No I/O.

A stranger can choose any string as a content type, so content types cannot name folders: a day could then
have any number of them. Each type of RFC-0002 has a folder, all content topics of channels share one, and all
other types share `other`. The column `content_type` holds the type itself.
"""

from __future__ import annotations

import functools
import re

__all__ = ["CHANNEL", "KINDS", "OTHER", "kind_of"]

CHANNEL = "channel"
"""For packets whose type is a content topic (`/chat/1/room/proto`): the messages of channels (A-049)."""
OTHER = "other"

KINDS = frozenset(
    {
        "ATTESTATION",
        "ATTESTATION_RETRACTION",
        "CLIENT_MANIFEST",
        "CONSENSUS_METRIC",
        "CORRECTION",
        "DID_DOCUMENT",
        "KEY_EVENT",
        "NOTE",
        "POST",
        "PROFILE",
        "REACTION",
        "RECOVERY_APPROVAL",
        "RELAY_DESCRIPTOR",
        "SERVICE_CONFIG",
        "TRUST_EDGE",
        "TRUST_REVOCATION",
    }
)
"""The types that have their own folder."""

_is_topic = re.compile(r"(/[^/]+){4}").fullmatch


@functools.lru_cache(maxsize=4096)
def kind_of(content_type: str) -> str:
    """The folder of a content type."""
    if content_type in KINDS:
        return content_type
    return CHANNEL if _is_topic(content_type) else OTHER
