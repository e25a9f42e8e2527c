"""Queries on the relay's database over ADBC, all of which only read.

The driver is imported with the first connection, because it imports pandas, and Spark plans each read of the
log in Python processes most of which never connect.

    GRANT SELECT ON packets, packet_ids, log_head TO reader

is sufficient; `erase` also needs `tombstones`. A replica works too: log_head is replicated together with the
rows below it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import adbc_driver_postgresql
import pyarrow as pa
from strata.protocol.sequences import Span

from strata_pipeline.errors import LogError, LogUnavailable
from strata_pipeline.log.spans import LogState

if TYPE_CHECKING:
    from adbc_driver_postgresql import dbapi as adbc

__all__ = [
    "LogTombstone",
    "connect",
    "id_at",
    "last_of",
    "literal",
    "log_state",
    "read_span",
    "read_tombstones",
    "sequence_of",
    "translate_errors",
    "without_password",
]

_BATCH_BYTES = 4 * 2**20

_STATE = r"""
WITH head AS MATERIALIZED (SELECT last_sequence FROM log_head),
children AS (
    SELECT c.relname, pg_get_expr(c.relpartbound, c.oid) AS bound
    FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid WHERE i.inhparent = 'packets'::regclass),
kept AS MATERIALIZED (
    SELECT coalesce(max(substring(bound FROM 'TO \(''?([0-9]+)')::bigint), 0) AS removed_to
    FROM children WHERE relname = 'packets_kept'),
days AS (
    SELECT substring(relname FROM '^packets_d([0-9]+)$')::bigint AS day FROM children
    WHERE relname ~ '^packets_d[0-9]+$')
SELECT head.last_sequence, kept.removed_to, ends.day, ends.last FROM head CROSS JOIN kept LEFT JOIN LATERAL (
    SELECT day, (SELECT max(sequence) FROM packets
                 WHERE sequence > day << 32 AND sequence < (day + 1) << 32) AS last FROM days
    UNION ALL
    SELECT sequence >> 32, max(sequence) FROM packets WHERE sequence < kept.removed_to GROUP BY 1
) AS ends ON ends.last IS NOT NULL
"""

_PASSWORD = re.compile(r"(//[^/@:]*:)[^@]*@|(password=)[^&\s]+", re.IGNORECASE)


def connect(url: str, application: str = "strata-pipeline") -> adbc.Connection:
    """A read-only connection. Raises `LogUnavailable`."""
    from adbc_driver_postgresql import dbapi as adbc

    extras = [
        f"{name}={value}"
        for name, value in (("application_name", application), ("connect_timeout", "10"))
        if f"{name}=" not in url
    ]
    with translate_errors():
        connection = adbc.connect(url + ("&" if "?" in url else "?") + "&".join(extras), autocommit=True)
        try:
            with connection.cursor() as cursor:
                cursor.execute("SET default_transaction_read_only = on")
                # One statement reads much of the log: the server's usual deadline would be too short.
                cursor.execute("SET statement_timeout = 0")
        except BaseException:
            connection.close()
            raise
        return connection


def log_state(connection: adbc.Connection) -> LogState:
    """The present extent of the log. Raises `LogUnavailable`, `LogError`."""
    with translate_errors(), connection.cursor() as cursor:
        cursor.execute(_STATE)
        rows = cursor.fetchall()
    if not rows:
        raise LogError("the database holds no log: log_head is empty")
    head, removed_to = rows[0][0], rows[0][1]
    return LogState(head, removed_to, {day: last for _, _, day, last in rows if day is not None})


def sequence_of(connection: adbc.Connection, packet_id: bytes) -> int | None:
    """The sequence of a packet, even of a removed one; None for an unknown id."""
    with translate_errors(), connection.cursor() as cursor:
        cursor.execute(f"SELECT sequence FROM packet_ids WHERE packet_id = {literal(packet_id)}")
        row = cursor.fetchone()
    return None if row is None else int(row[0])


def id_at(connection: adbc.Connection, sequence: int) -> bytes | None:
    """The id of the row at a place of the log, unchecked; None if the log has no row there."""
    with translate_errors(), connection.cursor() as cursor:
        cursor.execute(f"SELECT packet_id FROM packets WHERE sequence = {literal(sequence)}")
        row = cursor.fetchone()
    return None if row is None else bytes(row[0])


def last_of(connection: adbc.Connection, span: Span, rows: int) -> int:
    """The sequence of the last of the first `rows` rows of a span, or of all if it has fewer; the end of the
    span if it has none."""
    most = min(rows, span.up_to - span.after)  # a caller may ask for all with a number too large for SQL
    first = f"sequence > {span.after} AND sequence <= {span.up_to} ORDER BY sequence LIMIT {most}"
    with translate_errors(), connection.cursor() as cursor:
        cursor.execute(f"SELECT max(sequence) FROM (SELECT sequence FROM packets WHERE {first}) AS r")
        row = cursor.fetchone()
    return span.up_to if row is None or row[0] is None else int(row[0])


def read_span(
    connection: adbc.Connection, span: Span, columns: str, conditions: list[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a span in order of sequence, some megabytes at a time.

    `columns` and `conditions` are SQL. Without parameters the driver reads by COPY in binary form.
    """
    where = " AND ".join([f"sequence > {span.after} AND sequence <= {span.up_to}", *(conditions or [])])
    with translate_errors(), connection.cursor() as cursor:
        cursor.adbc_statement.set_options(
            **{adbc_driver_postgresql.StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)}
        )
        cursor.execute(f"SELECT {columns} FROM packets WHERE {where} ORDER BY sequence")
        with cursor.fetch_record_batch() as batches:
            yield from batches


class LogTombstone(NamedTuple):
    """A tombstone in the log."""

    sequence: int
    packet_id: bytes
    """The id as the row has it; the tombstone of a damaged row states another one."""
    text: bytes


def read_tombstones(connection: adbc.Connection) -> list[LogTombstone]:
    """All tombstones, in order of sequence. Raises `LogUnavailable`, `LogError`."""
    with translate_errors(), connection.cursor() as cursor:
        cursor.execute("SELECT sequence, packet_id, body FROM tombstones ORDER BY sequence")
        return [LogTombstone(int(at), bytes(name), bytes(text)) for at, name, text in cursor.fetchall()]


def literal(value: int | bytes) -> str:
    """A value as an SQL literal: a number, or a bytea in hex."""
    return str(value) if isinstance(value, int) else f"'\\x{value.hex()}'::bytea"


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Turn the driver's errors into errors with advice and without the password."""
    from adbc_driver_postgresql import dbapi as adbc

    try:
        yield
    except (adbc.Error, pa.ArrowException, OSError) as error:
        if isinstance(error, adbc.ProgrammingError) and getattr(error, "sqlstate", None) == "42P01":
            raise LogError("the database holds no log: is it a relay's, and migrated?") from error
        raise LogUnavailable(f"the relay's database: {without_password(str(error))}") from error


def without_password(text: str) -> str:
    """A text without the passwords of the URLs in it."""
    return _PASSWORD.sub(lambda match: f"{match[1] or match[2]}***{'@' if match[1] else ''}", text)
