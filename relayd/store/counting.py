"""Count a log from end to end: does every place have a row, and does every packet match its id?

It reads every row, and is meant for a copy of a database that nobody else uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import asyncpg
from strata.protocol.errors import InvalidPacket
from strata.protocol.packets import Packet

from relayd.store.connection import connected

__all__ = [
    "Counted",
    "LogEnd",
    "count_log",
    "log_end",
    "packets_beyond",
    "reload_server",
    "system_identifier",
]

_PAGE: Final = 2000
_NAME: Final = "relayd backup"
_CONNECT_TIMEOUT: Final = 10.0

_HEAD: Final = "SELECT last_sequence, last_received_at, epoch FROM log_head"
_MISSING: Final = r"""
WITH kept AS (
    SELECT coalesce(substring(pg_get_expr(relpartbound, oid) FROM 'TO \(''?([0-9]+)')::bigint, 0) AS up_to
    FROM pg_class WHERE oid = 'packets_kept'::regclass),
found AS (
    SELECT sequence >> 32 AS day, count(*) AS places, max(sequence) AS last
    FROM packets WHERE tableoid <> 'packets_kept'::regclass GROUP BY 1
    UNION ALL SELECT sequence >> 32, 0, max(sequence) FROM packet_ids, kept WHERE sequence >= up_to GROUP BY 1
    UNION ALL SELECT last_sequence >> 32, 0, last_sequence FROM log_head, kept WHERE last_sequence >= up_to),
days AS (SELECT sum(places) AS places, max(last & 4294967295) AS last FROM found GROUP BY day)
SELECT coalesce(sum(last - places), 0)::bigint FROM days
"""
# A day begins with 1 and leaves no place out. Packets of older days that retention spared are left out. Rows
# alone do not show where a day ends: the duplicate index also counts and, for the last day, the head.
_ROWS: Final = "SELECT sequence, packet_id, body FROM packets WHERE sequence > $1 ORDER BY sequence LIMIT $2"
_BURIED: Final = (
    "SELECT count(*) FROM unnest($1::bytea[]) AS one (packet_id)"
    " WHERE EXISTS (SELECT FROM tombstones AS t WHERE t.packet_id = one.packet_id)"
)
"""Of the rows, of which two may have one id: an id has one tombstone."""
_MAY_ASK: Final = "SELECT has_function_privilege('pg_control_system()', 'EXECUTE')"
_SYSTEM: Final = "SELECT system_identifier FROM pg_control_system()"
_BEYOND: Final = "SELECT count(*) FROM packets WHERE sequence > $1"


class LogEnd(NamedTuple):
    """The end of a log, and the version of its server."""

    head: int
    epoch: int
    major: int
    """The major version of PostgreSQL."""


class Counted(NamedTuple):
    """The contents of a log, as counted."""

    head: int
    last_received_at: int
    packets: int
    erased: int
    missing: int
    """Places without a row."""
    damaged: int
    """Packets whose bytes do not hash to their id, or are missing without a tombstone."""


async def log_end(url: str) -> LogEnd:
    """The current end of the log. Raises `StoreUnavailable`, and `StoreError` if there is no log."""
    async with connected(url, _NAME, _CONNECT_TIMEOUT) as connection:
        head, _, epoch = await connection.fetchrow(_HEAD)
        return LogEnd(head, epoch, connection.get_server_version().major)


async def count_log(url: str) -> Counted:
    """Count the whole log. Raises as `log_end` does."""
    async with connected(url, _NAME, _CONNECT_TIMEOUT) as connection:
        head, last_received_at, _ = await connection.fetchrow(_HEAD)
        missing = await connection.fetchval(_MISSING)
        packets = erased = damaged = after = 0
        while rows := await connection.fetch(_ROWS, after, _PAGE):
            after = rows[-1][0]
            empty, bad = await asyncio.to_thread(_examine, rows)
            buried = await _buried(connection, empty) if empty else 0
            packets += len(rows) - buried
            erased += buried
            damaged += bad + len(empty) - buried
    return Counted(head, last_received_at, packets, erased, missing, damaged)


async def packets_beyond(url: str, sequence: int) -> int:
    """How many packets the log has after this place. Raises as `log_end` does."""
    async with connected(url, _NAME, _CONNECT_TIMEOUT) as connection:
        found: int = await connection.fetchval(_BEYOND, sequence)
        return found


async def reload_server(url: str) -> None:
    """Make the server reload its configuration files. Raises `StoreUnavailable`."""
    async with connected(url, _NAME, _CONNECT_TIMEOUT) as connection:
        await connection.execute("SELECT pg_reload_conf()")


async def system_identifier(url: str) -> int | None:
    """The number that `initdb` gave the server's cluster; None if the role may not ask. Raises
    `StoreUnavailable`."""
    async with connected(url, _NAME, _CONNECT_TIMEOUT) as connection:
        if not await connection.fetchval(_MAY_ASK):
            return None
        found: int = await connection.fetchval(_SYSTEM)
        return found


async def _buried(connection: asyncpg.Connection, ids: list[bytes]) -> int:
    """How many of these have a tombstone: an empty row without one is damage."""
    if not await connection.fetchval("SELECT to_regclass('tombstones') IS NOT NULL"):
        return 0  # the schema of a version that erased nothing
    found: int = await connection.fetchval(_BURIED, ids)
    return found


def _examine(rows: Sequence[asyncpg.Record]) -> tuple[list[bytes], int]:
    """The ids of rows without a body, and how many other rows do not match their id."""
    empty, damaged = [], 0
    for _, packet_id, body in rows:
        if not body:
            empty.append(packet_id)
            continue
        try:
            damaged += Packet.read(body).digest != packet_id
        except InvalidPacket:
            damaged += 1
    return empty, damaged
