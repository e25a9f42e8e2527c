"""The state of the database: its size, its connections, its indexes, a pooler in between, and a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from relayd.store.connection import connected

__all__ = ["Limit", "Replica", "Server", "Sizes", "read_replica", "read_server", "read_sizes"]

# A role without pg_read_all_stats sees the users of other roles' sessions, but not their backend types;
# sessions without a user or a database are the server's own.
_SIZES = """
SELECT pg_database_size(current_database()) AS database_bytes,
       (SELECT coalesce(sum(pg_total_relation_size(relid)), 0)::bigint
            FROM pg_partition_tree('packets')) AS log_bytes,
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'
            OR backend_type IS NULL AND usesysid IS NOT NULL AND datid IS NOT NULL) AS connections,
       current_setting('max_connections')::int
           - current_setting('superuser_reserved_connections')::int
           - coalesce(current_setting('reserved_connections', true), '0')::int AS max_connections
"""


_LIMITS = """
SELECT 'role', rolconnlimit,
       (SELECT count(*) FROM pg_stat_activity WHERE usesysid = r.oid) AS used
    FROM pg_roles r WHERE rolname = current_user AND rolconnlimit >= 0 AND NOT rolsuper
UNION ALL
SELECT 'database', datconnlimit, (SELECT count(*) FROM pg_stat_activity WHERE datid = d.oid)
    FROM pg_database d, pg_roles r
    WHERE datname = current_database() AND datconnlimit >= 0 AND rolname = current_user AND NOT rolsuper
"""

_INVALID = """
SELECT indexrelid::regclass::text FROM pg_index WHERE NOT (indisvalid AND indisready) ORDER BY 1
"""

_REPLICA = """
SELECT pg_is_in_recovery() AS is_replica,
       coalesce(extract(epoch FROM now() - pg_last_xact_replay_timestamp()), 0)::float AS lag_seconds,
       (SELECT last_sequence FROM log_head) AS head
"""


_LONGEST_LOOK: Final = 60.0
"""Seconds: adding up the sizes of thousands of tables takes a while."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes found in one look at the database."""

    database_bytes: int
    log_bytes: int
    """The packets with their indexes."""
    connections: int
    """Those of all programs, including the one for this look."""
    max_connections: int
    """The number that the server allows to roles that are not superusers."""


async def read_sizes(url: str, *, connect_timeout: float = 5.0) -> Sizes:
    """Look at the database behind `url`. Raises `StoreError`."""
    async with connected(url, "relayd sizes", connect_timeout, longest=_LONGEST_LOOK) as connection:
        return Sizes(**await connection.fetchrow(_SIZES))


class Limit(NamedTuple):
    """A limit on connections, and how many of them are in use."""

    of: str
    """`role` or `database`; superusers have neither."""
    most: int
    used: int


@dataclass(frozen=True, slots=True)
class Server:
    """What `relayd doctor` reads from a database server."""

    sizes: Sizes
    limits: tuple[Limit, ...]
    """Limits on connections besides the server's own."""
    invalid_indexes: tuple[str, ...]
    is_pooled: bool
    """Whether a pooler may give each transaction another session of the server."""


async def read_server(url: str, *, connect_timeout: float = 5.0) -> Server:
    """Look at the server behind `url`. Raises `StoreError`."""
    async with connected(url, "relayd doctor", connect_timeout, longest=_LONGEST_LOOK) as connection:
        sizes = Sizes(**await connection.fetchrow(_SIZES))
        limits = tuple(Limit(*row) for row in await connection.fetch(_LIMITS))
        invalid = tuple(row[0] for row in await connection.fetch(_INVALID))
        # A setting of the session must still hold in the next transaction, and the backend be the same.
        told = await connection.fetchval("SELECT pg_backend_pid()")
        await connection.execute("SET relayd.session = 'ours'")
        ours = await connection.fetchval("SELECT current_setting('relayd.session', true)")
        is_same = told == await connection.fetchval("SELECT pg_backend_pid()")
        is_direct = told == connection.get_server_pid()
        return Server(sizes, limits, invalid, is_pooled=ours != "ours" or not is_same or not is_direct)


@dataclass(frozen=True, slots=True)
class Replica:
    """How far a replica has come."""

    is_replica: bool
    lag_seconds: float
    """Seconds since the last transaction that it replayed; this also grows while nothing is written."""
    head: int


async def read_replica(url: str, *, connect_timeout: float = 5.0) -> Replica:
    """Look at the server behind `read_database_url`. Raises `StoreError`."""
    async with connected(url, "relayd doctor", connect_timeout, longest=_LONGEST_LOOK) as connection:
        return Replica(**await connection.fetchrow(_REPLICA))
