"""How large the database is, and how many connections it has left."""

from __future__ import annotations

from dataclasses import dataclass

from relayd.store.connection import close_quietly, connect, translate_errors

__all__ = ["Sizes", "read_sizes"]

_SIZES = """
SELECT pg_database_size(current_database()) AS database_bytes,
       (SELECT coalesce(sum(pg_total_relation_size(relid)), 0)::bigint
            FROM pg_partition_tree('packets')) AS log_bytes,
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS connections,
       current_setting('max_connections')::int
           - current_setting('superuser_reserved_connections')::int AS max_connections
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one look at the database found."""

    database_bytes: int
    log_bytes: int
    """The packets with their indexes."""
    connections: int
    """Those of everybody, this look's own among them."""
    max_connections: int
    """What the server gives out to programs that are no superusers."""


async def read_sizes(url: str, *, connect_timeout: float = 5.0) -> Sizes:
    """Look at the database behind `url`. Raises `StoreError`."""
    connection = await connect(url, name="relayd sizes", connect_timeout=connect_timeout)
    try:
        with translate_errors():
            return Sizes(**await connection.fetchrow(_SIZES))
    finally:
        await close_quietly(connection)
