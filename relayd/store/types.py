"""The values that pass into and out of the store: no SQL, no connection, no I/O.

A **sequence** is a position in the relay's log: one integer below 2**53, given in commit order (A-040). Its
upper part is the UTC day of `received_at`, its lower 32 bits count up from 1 within that day, without a
gap. So a day is a range of sequences (`strata.protocol.sequences`), retention drops days, and a missing
number is a missing row.
"""

# Core: no I/O, no clock, no randomness (held by tests/test_layout.py).

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.packets import Packet
from strata.protocol.provenance.manifest import CLIENT_MANIFEST

__all__ = [
    "EXEMPT_TYPES",
    "SERVES",
    "AbuseEntry",
    "AppendOutcome",
    "Appended",
    "Declined",
    "Disposition",
    "Gone",
    "IdentitiesMoved",
    "LogEntry",
    "LogLost",
    "LogPage",
    "LogQuery",
    "NewPacket",
    "NotArchived",
    "PeerMark",
    "RelaySecrets",
    "StoreError",
    "StoreTimeout",
    "StoreUnavailable",
    "StoredPacket",
    "TimeMoved",
    "TrustRow",
    "Unproven",
    "UnsafeDatabase",
]

SERVES = "for programs of "
"""The start of the comment on the table `alembic_version`; the revisions of the programs it serves follow."""

RELAY_DESCRIPTOR = "RELAY_DESCRIPTOR"

EXEMPT_TYPES = (*sorted(IDENTITY_TYPES), CLIENT_MANIFEST, RELAY_DESCRIPTOR)
"""Content types that outlive retention, manifests and descriptors while they are current (R-073, R-309)."""


class Unproven(enum.StrEnum):
    """Why a day cannot be dropped."""

    UNREADABLE = "unreadable"
    INVALID = "invalid"
    BEHIND = "behind"
    DIFFERS = "differs"


_ACTIONS = {
    Unproven.UNREADABLE: "make the folder of archive_manifests readable for the relay",
    Unproven.INVALID: "bring the lake's _manifests back as they were written, from a copy",
    Unproven.BEHIND: "let `strata-pipeline archive` catch up with the log",
    Unproven.DIFFERS: "find out with `strata-pipeline audit` whether the lake or the log was changed",
}


class NotArchived(Exception):
    """The lake does not prove that it holds a day."""

    def __init__(self, reason: Unproven, problem: str) -> None:
        self.reason = reason
        self.problem = problem
        super().__init__(problem)

    @property
    def action(self) -> str:
        """What an operator should do about it."""
        return _ACTIONS[self.reason]


class StoreError(Exception):
    """The store could not do its work."""


class StoreUnavailable(StoreError):
    """The database cannot be reached now; the outcome of an append in flight is unknown."""


class StoreTimeout(StoreError):
    """A read took longer than its limit and was cancelled in the database."""


class UnsafeDatabase(StoreError):
    """The database could lose acknowledged packets, or this program cannot use it."""


class LogLost(StoreUnavailable):
    """The database lacks what this process knows to be committed: it was replaced by an older copy.

    Nothing that this process has in memory about the log can be trusted: start over.
    """


class IdentitiesMoved(StoreError):
    """Nothing was appended: another process has committed an identity packet that this one has not applied,
    or an act of trust that it has not counted.

    `sequence` is how far the log must be followed before the batch may be appended again (R-074, R-241).
    """

    def __init__(self, sequence: int) -> None:
        super().__init__(f"identities have changed up to sequence {sequence}")
        self.sequence = sequence


class TimeMoved(StoreError):
    """Nothing was appended: the log would give another time than the one as of which the batch was judged."""


class NewPacket(msgspec.Struct, frozen=True, gc=False):
    """An admitted packet on its way into the log."""

    packet_id: bytes
    """BLAKE3-256, 32 bytes."""
    author_id: str
    content_type: str
    timestamp: int
    expires_at: int | None
    body: bytes
    """The canonical bytes of the whole packet; the record that everything else is derived from (A-006)."""
    equivalence_key: bytes | None = None
    """32 bytes shared by packets of which the log keeps only the first, beside the id (R-113, R-114)."""
    annotation: bytes | None = None
    """The relay's finding about the packet's provenance, if it serves another origin than the signed one
    (R-208): an encoded `strata.protocol.provenance.Downgrade`."""
    witnessed_at: int | None = None
    """When the first relay received it, according to the peer that delivered it; None if it was published
    here, or if the peer's statement does not count (R-367, R-369). In the log also when this relay received
    it, if the log's own time was ahead then (R-099)."""
    ingest_peer: int | None = None
    """The number of the peer that delivered it; None if it was published here (R-375). In the log also 0:
    then `witnessed_at` is the time of this relay itself."""


class LogEntry(msgspec.Struct, frozen=True, gc=False):
    """A packet at its place in the log."""

    sequence: int
    received_at: int
    """The log's own time, which never decreases and determines days, cursors and retention."""
    packet: NewPacket
    parsed: Packet | None = None
    """The parsed body of the packet, if the creator of the entry has parsed it."""

    @property
    def told_at(self) -> int:
        """When the first relay received it: the time shown to readers and used to judge keys."""
        witnessed_at = self.packet.witnessed_at
        return self.received_at if witnessed_at is None else witnessed_at

    @property
    def filtered_at(self) -> int:
        """The time by which filters find it: when this relay received it."""
        return self.told_at if self.packet.ingest_peer == 0 else self.received_at


class PeerMark(NamedTuple):
    """How far a peer has been read: everything it sent up to `cursor` is in the log or was refused."""

    peer_id: int
    fence: int
    """The fence of the process that holds the link; a mark with an earlier fence changes nothing."""
    stream: str
    """The selection of packets that is read."""
    cursor: str | None
    last_witness: int | None


class AppendOutcome(enum.Enum):
    """The outcome of appending one packet."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    ERASED = "erased"
    """It states the same as a packet that was erased, and is not stored."""
    INVALID = "invalid"
    """The database refused this row alone; the others of its batch are stored."""


class Disposition(NamedTuple):
    """The place of one appended packet; for a duplicate, `sequence` and `received_at` are the first copy's.

    `duplicate_of` is the id of that first copy if it is another packet with the same equivalence key and is
    still stored.
    """

    outcome: AppendOutcome
    sequence: int
    received_at: int
    duplicate_of: bytes | None = None


class Appended(NamedTuple):
    """The result of one committed batch, in the order given.

    `previous` is the last sequence before the batch: a reader at that place has missed nothing.
    """

    previous: int
    dispositions: list[Disposition]


class StoredPacket(NamedTuple):
    """One row of a page; `received_at` is the time shown to readers."""

    sequence: int
    received_at: int
    body: bytes
    annotation: bytes | None = None


class TrustRow(NamedTuple):
    """What a budget needs to know about one trust packet of the log."""

    packet_id: bytes
    received_at: int
    content_type: str
    strength: float | None
    """None if `content.strength` is missing or not a number."""


class LogPage(NamedTuple):
    """The result of one read of the log. The next page begins after `reached`, or else after the last row."""

    rows: list[StoredPacket]
    exhausted: bool
    """Whether no further row matches: the page ended for lack of rows, not for its limit, size or cost."""
    reached: int | None = None
    """The last sequence that the search looked at, if the page ended for its cost: everything that matches up
    to there is in `rows`. Such a page may be empty."""


class Gone(NamedTuple):
    """The place of a packet that was stored and is no longer served: expired, declined, or removed."""

    sequence: int
    received_at: int


@dataclass(frozen=True, slots=True, repr=False)
class RelaySecrets:
    """The secrets that all processes on one database share: drawn when the first of them opens it."""

    identity_seed: bytes
    """32 bytes, the Ed25519 seed of the relay's own DID."""
    cursor_key: bytes
    """32 bytes, the key of the cursors' integrity check."""
    created_at: int

    def __repr__(self) -> str:
        return f"RelaySecrets(created_at={self.created_at})"


@dataclass(frozen=True, slots=True)
class Declined:
    """The packets that this relay does not serve, although the log may hold them (R-323)."""

    authors: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()
    packet_ids: frozenset[bytes] = frozenset()
    media_hashes: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.authors or self.types or self.packet_ids or self.media_hashes)

    def exceeds(self, other: Declined) -> bool:
        """Whether this declines anything that the other does not."""
        return not (
            self.authors <= other.authors
            and self.types <= other.types
            and self.packet_ids <= other.packet_ids
            and self.media_hashes <= other.media_hashes
        )


class AbuseEntry(NamedTuple):
    """One row of the abuse table, which the pipeline or an operator fills and policy reads."""

    author_id: str
    verdict: str
    """`block` refuses this author's packets; `limit` applies the limits of anonymous sessions to them."""
    reason: str
    expires_at: int | None


@dataclass(frozen=True, slots=True)
class LogQuery:
    """The packets of the log that a page selects. Empty sets restrict nothing; bounds on time are inclusive.

    `after` and `up_to` bound the sequence: `after < sequence <= up_to`, in whichever direction the page runs.
    """

    after: int = 0
    up_to: int | None = None
    ascending: bool = True
    authors: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()
    packet_ids: frozenset[bytes] = frozenset()
    since: int | None = None
    until: int | None = None
    received_since: int | None = None
    received_until: int | None = None
    not_peers: frozenset[int] = frozenset()
    """Peers whose packets are left out."""
