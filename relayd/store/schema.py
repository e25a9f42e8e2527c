"""The tables of the store as SQLAlchemy metadata, with which Alembic compares a database.

The migrations contain the statements that make the tables; the statements that the store runs are in `log`,
`reader` and `retention`. A test keeps the three consistent.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB, OID

from relayd.store.identities import INDEXED

__all__ = ["METADATA", "is_ours"]

METADATA = sa.MetaData()

LOG_HEAD = sa.Table(
    "log_head",
    METADATA,
    sa.Column("only_row", sa.Boolean, primary_key=True, server_default=sa.true()),
    sa.Column("last_sequence", sa.BigInteger, nullable=False),
    sa.Column("last_received_at", sa.BigInteger, nullable=False),
    sa.Column(
        "generation_days",
        sa.Integer,
        nullable=False,
        comment="Days covered by the next partition of packet_ids.",
    ),
    sa.Column(
        "last_identity_sequence",
        sa.BigInteger,
        nullable=False,
        server_default="0",
        comment="The last packet that changed an identity.",
    ),
    sa.Column("tag", sa.LargeBinary, nullable=False, comment="The tag of the current term."),
    sa.Column(
        "epoch",
        sa.Integer,
        nullable=False,
        server_default="1",
        comment="The epoch: how often the log is known to have lost its end, and 1.",
    ),
    sa.Column("home", OID, nullable=False, comment="The table in which the current term was opened."),
    sa.Column("last_told_at", sa.BigInteger, comment="The time last given to a packet, as it is told."),
    sa.Column("latest_told_at", sa.BigInteger, comment="The latest time ever given to a packet."),
    sa.Column(
        "most_ahead",
        sa.BigInteger,
        nullable=False,
        server_default="0",
        comment="The most by which the log's own time was ahead of the time told.",
    ),
    comment="One row: the last sequence given out, and the lock of the log.",
)

LOG_TERMS = sa.Table(
    "log_terms",
    METADATA,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("tag", sa.LargeBinary, nullable=False, unique=True),
    sa.Column("begins_after", sa.BigInteger, nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False),
    sa.Column("good_to", sa.BigInteger, comment="For a term of a lost log: where it parted from this one."),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("opened_at", sa.BigInteger, nullable=False),
    sa.Column("system_identifier", sa.BigInteger),
    sa.Column("timeline", sa.Integer),
    comment="Who wrote which part of the log: a place is a sequence and a tag.",
)

RELAY_SECRETS = sa.Table(
    "relay_secrets",
    METADATA,
    sa.Column("only_row", sa.Boolean, primary_key=True, server_default=sa.true()),
    sa.Column("identity_seed", sa.LargeBinary, nullable=False),
    sa.Column("cursor_key", sa.LargeBinary, nullable=False),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    comment="One row: what all processes on this database share, and nobody else sees.",
)

PACKETS = sa.Table(
    "packets",
    METADATA,
    sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("received_at", sa.BigInteger, nullable=False),
    sa.Column("timestamp", sa.BigInteger, nullable=False),
    sa.Column("expires_at", sa.BigInteger),
    sa.Column("packet_id", sa.LargeBinary, nullable=False),
    sa.Column("author_id", sa.LargeBinary, nullable=False),
    sa.Column("content_type", sa.LargeBinary, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column(
        "annotation",
        sa.LargeBinary,
        comment="What the relay found about the provenance, where it matters.",
    ),
    sa.Column(
        "witnessed_at",
        sa.BigInteger,
        comment="When the first relay received it, by the word of the peer.",
    ),
    sa.Column(
        "ingest_peer",
        sa.Integer,
        comment="The peer that delivered it; NULL for what was published here.",
    ),
    sa.Index("packets_author", "author_id", "sequence"),
    sa.Index("packets_type", "content_type", "sequence"),
    sa.Index("packets_timestamp", "timestamp", postgresql_using="brin"),
    sa.Index(
        "packets_identity",
        "author_id",
        "sequence",
        postgresql_where=sa.text(INDEXED),
    ),
    comment="The log. body is the record; the other columns are derived from it (A-006).",
)

PACKET_IDS = sa.Table(
    "packet_ids",
    METADATA,
    sa.Column("packet_id", sa.LargeBinary, nullable=False),
    sa.Column("sequence", sa.BigInteger, nullable=False),
    sa.Column("received_at", sa.BigInteger, nullable=False),
    comment="The duplicate index: every id once stored; it outlives the packet (R-310).",
)

ABUSE = sa.Table(
    "abuse",
    METADATA,
    sa.Column("author_id", sa.Text, primary_key=True),
    sa.Column("verdict", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("expires_at", sa.BigInteger),
    sa.Column(
        "created_at",
        sa.BigInteger,
        nullable=False,
        server_default=sa.text("(EXTRACT(epoch FROM now()))::bigint"),
    ),
    comment="Authors that policy blocks or slows down; filled by the pipeline or by hand.",
)

MODERATION = sa.Table(
    "moderation",
    METADATA,
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("subject", sa.Text, primary_key=True),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("expires_at", sa.BigInteger),
    sa.Column("created_at", sa.BigInteger, nullable=False),
    comment="What operators have banned; relayd ban and relayd remove write it.",
)

MODERATION_LOG = sa.Table(
    "moderation_log",
    METADATA,
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.Column("actor", sa.Text, nullable=False),
    sa.Column("via", sa.Text, nullable=False),
    sa.Column("act", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("before", JSONB),
    sa.Column("after", JSONB),
    comment="Who ruled what, when and why. It only grows.",
)

TOMBSTONES = sa.Table(
    "tombstones",
    METADATA,
    sa.Column("packet_id", sa.LargeBinary, primary_key=True),
    sa.Column("sequence", sa.BigInteger, nullable=False),
    sa.Column("erased_at", sa.BigInteger, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Index("tombstones_sequence", "sequence"),
    comment="What was erased: a statement for each packet, signed by the relay.",
)

PEERS = sa.Table(
    "peers",
    METADATA,
    sa.Column("peer_id", sa.Integer, sa.Identity(always=True), primary_key=True),
    sa.Column("relay_id", sa.Text, nullable=False, unique=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("paused", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column(
        "fence",
        sa.BigInteger,
        nullable=False,
        server_default="0",
        comment="Counts the processes that have held the link: only the last may write.",
    ),
    sa.Column("offences", sa.Integer, nullable=False, server_default="0"),
    sa.Column("bars", sa.Integer, nullable=False, server_default="0"),
    sa.Column("barred_until", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("state", sa.Text, nullable=False, server_default="new"),
    sa.Column("state_at", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("problem", sa.Text),
    sa.Column("conduct", JSONB, comment="What the peer has done within a week, by the hour."),
    comment="The relays that this one reads from.",
)

PEER_CURSORS = sa.Table(
    "peer_cursors",
    METADATA,
    sa.Column("peer_id", sa.ForeignKey("peers.peer_id", ondelete="CASCADE"), primary_key=True),
    sa.Column(
        "stream", sa.Text, primary_key=True, comment="What was asked for; another selection begins anew."
    ),
    sa.Column("cursor", sa.Text),
    sa.Column("last_witness", sa.BigInteger),
    comment="How far each peer was read: all up to the cursor is stored or refused.",
)

PEER_SKIPS = sa.Table(
    "peer_skips",
    METADATA,
    sa.Column("peer_id", sa.ForeignKey("peers.peer_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("packet_id", sa.LargeBinary, primary_key=True),
    sa.Column("timestamp", sa.BigInteger, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Index("peer_skips_timestamp", "peer_id", "timestamp"),
    comment="What a peer serves and this relay would not take, and why.",
)


PEER_COMPARISONS = sa.Table(
    "peer_comparisons",
    METADATA,
    sa.Column("peer_id", sa.ForeignKey("peers.peer_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("asked", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("done", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("asked_since", sa.BigInteger, comment="From which time on an operator wants to compare."),
    sa.Column("is_running", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("found", JSONB),
    sa.Column("equal_at", sa.BigInteger, comment="When last nothing of the peer's was missing here."),
    comment="The last comparison of sets with each peer, and requests for one.",
)


def is_ours(item: object, name: str | None, kind: str, reflected: bool, compare_to: object) -> bool:
    """Whether Alembic should compare this object: partitions come and go, and other tables are not ours."""
    table = item if kind == "table" else getattr(item, "table", None)
    return not isinstance(table, sa.Table) or table.name in METADATA.tables
