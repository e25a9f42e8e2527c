"""What a link works with, what it reports, and how it ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from strata.protocol.ids import Identity

from relayd.admission.pipeline import Admission
from relayd.federation.intake import PeerVerdict
from relayd.federation.mesh import Mesh
from relayd.store.types import PeerMark

__all__ = ["LinkEnded", "LinkParts", "LinkReports", "NotListed"]


class LinkEnded(Exception):
    """The peer cannot be read from for now; the text says why."""


class NotListed(LinkEnded):
    """The peer does not let this relay replicate (R-356)."""


@dataclass(slots=True)
class LinkReports:
    """What a link reports about the packets it reads."""

    verdicts: Callable[[PeerVerdict], None]
    refused_witness: Callable[[], None]
    skipped: Callable[[bytes, int, str], None]
    malformed: Callable[[], None]
    forged: Callable[[str], None]
    doubted: Callable[[], None] = lambda: None
    """Called if the peer's log is not the one that was read: cursors may have skipped packets."""


@dataclass(slots=True, kw_only=True)
class LinkParts:
    """What a link works with."""

    identity: Identity
    admission: Admission
    mesh: Mesh
    store_mark: Callable[[PeerMark], Awaitable[None]]
    """Stores how far a peer was read if no packet is stored with it."""
    clock: Callable[[], int]
    max_backfill_seconds: int
    told: LinkReports
