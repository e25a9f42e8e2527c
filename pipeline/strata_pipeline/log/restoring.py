"""Writing the log again from verified rows: many tasks stage them, and one process moves them into the log.

    restore_staging_…   UNLOGGED, filled by Spark's tasks; a row may be there twice if a task was repeated
    packets, packet_ids, log_head    changed by `move` alone: a part of a batch in a transaction,
                                     under the lock of the log

So no lower sequence becomes visible after a higher one, even to a relay that runs meanwhile, and an
interrupted restore leaves a log that ends with a complete part.

A restore creates partitions and staging tables, which only the owner of the relay's tables may do: use
relayd's own role.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from adbc_driver_postgresql import dbapi as adbc
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.sequences import Span, first_of_day

from strata_pipeline.errors import LogError, LogUnavailable
from strata_pipeline.lake.batches import BatchPart
from strata_pipeline.log.database import connect, literal, without_password

__all__ = [
    "STAGED",
    "Head",
    "begin_epoch",
    "forget_staged",
    "ids_at",
    "keep_below",
    "move",
    "read_head",
    "staging",
    "stored_rows",
    "write_staged",
    "writing",
]

STAGED = pa.schema(
    [
        ("batch", pa.int64()),
        ("sequence", pa.int64()),
        ("received_at", pa.int64()),
        ("timestamp", pa.int64()),
        ("expires_at", pa.int64()),
        ("packet_id", pa.binary()),
        ("author_id", pa.binary()),
        ("content_type", pa.binary()),
        ("body", pa.binary()),
        ("annotation", pa.binary()),
        ("equivalence_key", pa.binary()),
        ("witnessed_at", pa.int64()),
    ]
)
"""A staged row: the number of its manifest, then the columns of the log. A row without an author becomes
empty in the log; its `body` is its tombstone and its `timestamp` the time of that. If it also has an
annotation, it was not erased but damaged, and its id is not recorded."""

_LOCK = 0x726573746F7265  # "restore": the advisory lock that keeps two restores apart
_PATIENCE = "10s"
_PREFIX = "restore_staging_"
_MOVED, _MISCOUNTED = "RR001", "RR002"
_MAX_IDS = 10_000

_SESSION = (
    "SET default_transaction_read_only = off",
    # Look up a part's ids one by one, even without statistics of the partitions: joining all of packet_ids
    # with each part would take longer the longer the log is.
    "SET enable_hashjoin = off",
    "SET enable_mergejoin = off",
)

_LEFT = """
SELECT count(*) FROM pg_class WHERE relkind = 'r' AND starts_with(relname, '{prefix}')
    AND relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'log_head'::regclass)
"""

_MAKE_STAGING = """
DO $restore$
DECLARE v_name text;
BEGIN
    -- What a restore that was cut off has left. Nobody uses it: we hold the lock.
    FOR v_name IN SELECT relname FROM pg_class WHERE relkind = 'r' AND starts_with(relname, '{prefix}')
            AND relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'log_head'::regclass) LOOP
        EXECUTE format('DROP TABLE %I', v_name);
    END LOOP;
    CREATE UNLOGGED TABLE {table} (
        batch bigint NOT NULL, sequence bigint NOT NULL, received_at bigint NOT NULL,
        "timestamp" bigint NOT NULL, expires_at bigint, packet_id bytea NOT NULL, author_id bytea NOT NULL,
        content_type bytea NOT NULL, body bytea NOT NULL, annotation bytea, equivalence_key bytea,
        witnessed_at bigint);
    CREATE INDEX ON {table} (batch, sequence);
END $restore$
"""

_KEEP_BELOW = """
DO $restore$
BEGIN
    PERFORM FROM log_head FOR UPDATE;
    ALTER TABLE packets DETACH PARTITION packets_kept;
    ALTER TABLE packets ATTACH PARTITION packets_kept FOR VALUES FROM (MINVALUE) TO ({border});
    ALTER TABLE packet_ids DETACH PARTITION packet_ids_kept;
    ALTER TABLE packet_ids ATTACH PARTITION packet_ids_kept FOR VALUES FROM (MINVALUE) TO ({border});
END $restore$
"""

_MOVE = """
DO $restore$
DECLARE
    v_head bigint;
    v_rows bigint;
BEGIN
    SELECT last_sequence INTO STRICT v_head FROM log_head FOR UPDATE;
    IF v_head <> {head} THEN
        RAISE EXCEPTION 'the log ends at %', v_head USING ERRCODE = '{moved}';
    END IF;
    IF {adds_day} THEN
        PERFORM relay_add_day({day});
    END IF;
    -- A task that was repeated has staged its rows twice.
    INSERT INTO packets (sequence, received_at, "timestamp", expires_at, packet_id, author_id, content_type,
            body, annotation, witnessed_at)
        SELECT sequence, received_at, CASE author_id WHEN '' THEN 0 ELSE "timestamp" END, expires_at,
            packet_id, author_id, content_type, CASE author_id WHEN '' THEN '' ELSE body END, annotation,
            witnessed_at
        FROM {table} WHERE {those} ORDER BY sequence
        ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    IF v_rows <> {rows} THEN
        RAISE EXCEPTION '% rows', v_rows USING ERRCODE = '{miscounted}';
    END IF;
    INSERT INTO tombstones (packet_id, sequence, erased_at, body)
        SELECT packet_id, sequence, "timestamp", body
        FROM {table} WHERE {those} AND author_id = '' AND body <> ''
        ON CONFLICT DO NOTHING;
    -- An id stays with the place that it was first seen at. An equivalence key goes with the last packet that
    -- has it: the relay stored that one because the one before was gone. Of a damaged row nothing is known: a
    -- relay takes the packet again, should somebody still have it.
    DELETE FROM packet_ids WHERE packet_id = ANY (ARRAY(SELECT equivalence_key FROM {table} WHERE {those}));
    INSERT INTO packet_ids (packet_id, sequence, received_at)
        SELECT DISTINCT ON (known.id) known.id, sequence, coalesce(witnessed_at, received_at)
        FROM {table} CROSS JOIN LATERAL (VALUES (packet_id, sequence), (equivalence_key, -sequence))
            AS known (id, preferred)
        WHERE {those} AND known.id IS NOT NULL AND (author_id <> '' OR annotation IS NULL)
            AND NOT EXISTS (SELECT FROM packet_ids AS i WHERE i.packet_id = known.id)
        ORDER BY known.id, known.preferred
        ON CONFLICT DO NOTHING;
    UPDATE log_head SET
        last_sequence = {up_to},
        last_received_at = greatest(last_received_at, {last_received_at}),
        last_identity_sequence = greatest(last_identity_sequence,
            (SELECT max(sequence) FROM {table} WHERE {those} AND content_type IN ({identity_types})));
    PERFORM pg_notify('relayd_log', '{up_to}');
END $restore$
"""

_STATE = r"""
SELECT h.last_sequence, coalesce((
    SELECT max(substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''?([0-9]+)')::bigint)
    FROM pg_class AS c WHERE c.oid = 'packets_kept'::regclass), 0)
FROM log_head AS h
"""


@dataclass(frozen=True, slots=True)
class Head:
    """Where the log ends."""

    sequence: int
    removed_to: int
    """The border below which the log holds only packets that retention spares."""


@contextlib.contextmanager
def writing(url: str) -> Iterator[adbc.Connection]:
    """A connection for writing, of which there can be only one at a time. Raises `LogUnavailable`,
    `LogError`."""
    with contextlib.closing(connect(url, "strata-pipeline-restore")) as connection:
        for statement in _SESSION:
            _execute(connection, statement)
        # Wait for a while: the server is slow to notice that a restore was killed, and keeps its lock until
        # then.
        _execute(connection, f"SET lock_timeout = '{_PATIENCE}'")
        _execute(connection, f"DO $restore$ BEGIN PERFORM pg_advisory_lock({_LOCK}); END $restore$")
        _execute(connection, "SET lock_timeout = 0")
        yield connection


@contextlib.contextmanager
def staging(connection: adbc.Connection) -> Iterator[tuple[str, bool]]:
    """The name of a new staging table, which is dropped at the end, and whether an earlier restore was
    killed; the table that it left is dropped first."""
    table = _PREFIX + secrets.token_hex(8)
    was_killed = bool(_fetch(connection, _LEFT.format(prefix=_PREFIX))[0][0])
    _execute(connection, _MAKE_STAGING.format(prefix=_PREFIX, table=table))
    try:
        yield table, was_killed
    finally:
        # If the connection is lost, the next restore drops the table.
        with contextlib.suppress(LogUnavailable):
            _execute(connection, f"DROP TABLE IF EXISTS {table}")


def write_staged(url: str, table: str, batches: Iterator[pa.RecordBatch]) -> None:
    """Add rows of `STAGED` to a staging table in one COPY, all or none. For tasks."""
    with contextlib.closing(connect(url, "strata-pipeline-restore")) as connection:
        _execute(connection, _SESSION[0])
        with _translated(), connection.cursor() as cursor:
            cursor.adbc_ingest(table, pa.RecordBatchReader.from_batches(STAGED, batches), mode="append")


def read_head(connection: adbc.Connection) -> Head:
    """Where the log ends now. Raises `LogError` for a database that holds none."""
    rows = _fetch(connection, _STATE)
    if not rows:
        raise LogError("the database holds no log: log_head is empty")
    return Head(*rows[0])


def stored_rows(connection: adbc.Connection, span: Span) -> int:
    """The number of packets of the log in a span."""
    where = f"sequence > {span.after} AND sequence <= {span.up_to}"
    return int(_fetch(connection, f"SELECT count(*) FROM packets WHERE {where}")[0][0])


def ids_at(connection: adbc.Connection, sequences: Sequence[int]) -> dict[int, bytes]:
    """The ids of the packets at these sequences, for those that exist."""
    found: dict[int, bytes] = {}
    for start in range(0, len(sequences), _MAX_IDS):
        listed = ", ".join(map(str, sequences[start : start + _MAX_IDS]))
        found.update(
            _fetch(connection, f"SELECT sequence, packet_id FROM packets WHERE sequence IN ({listed})")
        )
    return found


def keep_below(connection: adbc.Connection, border: int) -> None:
    """Make an empty log keep all rows below a border in the partition of spared packets."""
    _execute(connection, _KEEP_BELOW.format(border=border))


def move(
    connection: adbc.Connection, table: str, batch: int, part: BatchPart, empty: int, head: Head
) -> Head:
    """Move a staged part into the log, which ends at `head`, in one transaction; return the new head.

    `empty` is the number of rows for erased and damaged packets that are moved beside the part's packets.

    Raises `LogError`, and changes nothing, if the log now ends elsewhere or if the number of staged rows
    differs from that of the part.
    """
    after, up_to = part.span
    day = part.span.day
    _execute(
        connection,
        _MOVE.format(
            table=table,
            those=f"batch = {batch} AND sequence > {after} AND sequence <= {up_to}",
            head=head.sequence,
            day=day,
            adds_day=first_of_day(day) >= head.removed_to,
            rows=part.packets + empty,
            up_to=up_to,
            last_received_at=part.last_received_at,
            identity_types=", ".join(literal(name.encode()) for name in sorted(IDENTITY_TYPES)),
            moved=_MOVED,
            miscounted=_MISCOUNTED,
        ),
    )
    # Retention never removes the day of the head, so the border is still below the next part.
    return Head(up_to, head.removed_to)


def begin_epoch(connection: adbc.Connection, now: int) -> int:
    """Record that the log may have lost its end, namely rows that the lake lacked; return the new epoch.

    Places up to the end of the log stay valid; cursors beyond it are answered with a notice of the loss.
    """
    _execute(
        connection,
        f"DO $restore$ BEGIN PERFORM relay_open_term('restore', {int(now)}, true, 1); END $restore$",
    )
    return int(_fetch(connection, "SELECT epoch FROM log_head")[0][0])


def forget_staged(connection: adbc.Connection, table: str) -> None:
    """Empty a staging table."""
    _execute(connection, f"TRUNCATE {table}")


def _execute(connection: adbc.Connection, statement: str) -> None:
    with _translated(), connection.cursor() as cursor:
        cursor.execute(statement)


def _fetch(connection: adbc.Connection, query: str) -> list[tuple[Any, ...]]:
    with _translated(), connection.cursor() as cursor:
        cursor.execute(query)
        return list(cursor.fetchall())


_SAID = {
    _MOVED: "{0} now, and a moment ago it ended elsewhere: something else writes into it. Stop it, "
    "and restore into an empty database",
    _MISCOUNTED: "{0} were staged and it must be others: was the database restarted? Run restore again",
    "55P03": "another restore into this database is running: wait for it, or stop it",
    "25006": "the database accepts no writes: it is a replica, or read-only. Name the primary",
    "42501": "the role may not do what a restore needs; use relayd's own, which owns the tables ({0})",
    "42P01": "the database holds no log; run relayd migrate on it first ({0})",
    "42703": "the database is of an earlier version; run relayd migrate on it first ({0})",
    "42883": "the database is of an earlier version; run relayd migrate on it first ({0})",
}


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (adbc.Error, pa.ArrowException, OSError) as error:
        text = without_password(str(error))
        said = _SAID.get(getattr(error, "sqlstate", None) or "")
        if said is not None:
            reason = text.partition("ERROR:")[2].partition("\n")[0].strip() or text
            raise LogError(said.format(reason)) from error
        raise LogUnavailable(f"the relay's database: {text}") from error
