"""What is read from a peer: how the connection behaves, what it requests, and the name of that selection."""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.provenance.manifest import CLIENT_MANIFEST
from strata.relays.connection.options import Options
from strata.relays.connection.values import Query

from relayd.access.auth import REPLICATE, SUBSCRIBE
from relayd.federation.peers_file import Upstream

__all__ = ["options_for", "query_for", "stream_of", "types_of"]

_FALLBACK_SECONDS = 86_700
"""How many seconds a packet's timestamp may lie before its receipt, with both clocks' error (A-042)."""
_LONGEST_NAME: Final = 2600
"""The most bytes of a stream's name: the database indexes it, and no entry of an index has more than 2704."""


def options_for(peer: Upstream) -> Options:
    """How the connection to a peer behaves: it is held to its DID (R-298) and authenticates first (R-353)."""
    return Options(
        relay_id=peer.relay_id,
        authenticate="always",
        capabilities=(SUBSCRIBE, REPLICATE),
        resolve_keys=False,
        ping_interval=10.0,
        ping_timeout=20.0,
        backoff_base=0.5,
        backoff_cap=15.0,
    )


def stream_of(peer: Upstream) -> str:
    """The name of what is read from a peer: another selection is another stream, and begins anew."""
    if peer.is_whole:
        return "all"
    name = "\n".join(["types", *sorted(peer.types), "authors", *sorted(peer.authors)])
    if len(name.encode()) <= _LONGEST_NAME and "\0" not in name:
        return name
    return f"sha256 {hashlib.sha256(name.encode()).hexdigest()}"


def types_of(peer: Upstream) -> tuple[str, ...]:
    """The types that a peer is asked for, with those that carry keys; empty for all."""
    types = (*peer.types, *sorted(IDENTITY_TYPES), CLIENT_MANIFEST) if peer.types else ()
    return tuple(dict.fromkeys(types))


def query_for(
    peer: Upstream,
    cursor: str | None,
    not_via: Sequence[str],
    *,
    last_witness: int | None,
) -> Query:
    """The request to a peer (R-360, R-365, R-366): from where it was read to, else from its beginning.

    Without a cursor no time bounds the request, not even the oldest one that was read (R-365 allows either):
    a log is in the order of arrival, so what is still unread may be older than all that was read.
    `last_witness` is the latest time at which a packet read so far was first received anywhere.
    """
    return Query(
        authors=peer.authors,
        types=types_of(peer),
        cursor=cursor,
        since=0 if cursor is None else None,
        cursor_fallback_since=max(0, last_witness - _FALLBACK_SECONDS) if last_witness is not None else 0,
        not_via=tuple(not_via),
        replication_profile="FULL_ARCHIVE",
    )
