"""Refuse a database that could lose acknowledged packets (R-189, A-058)."""

from __future__ import annotations

import asyncpg

from relayd.store.types import UnsafeDatabase

__all__ = ["MIN_SERVER_VERSION", "check_safety"]

MIN_SERVER_VERSION = 150_000
"""PostgreSQL 15, in the form of `server_version_num`."""

_QUERY = """
SELECT current_setting('server_version_num')::int AS version, pg_is_in_recovery() AS standby,
       current_setting('default_transaction_read_only') AS read_only, current_setting('fsync') AS fsync,
       current_setting('full_page_writes') AS full_page_writes,
       current_setting('synchronous_commit') AS synchronous_commit,
       current_setting('server_encoding') AS encoding
"""


async def check_safety(connection: asyncpg.Connection, *, allow_unsafe: bool = False) -> None:
    """Raise `UnsafeDatabase`, naming the setting, if a commit may not survive a crash.

    `allow_unsafe` (the setting `allow_unsafe_database`) accepts unsafe durability settings, for throw-away
    data; a server that is too old, is not in UTF8 or takes no writes is still refused.
    """
    (row,) = await connection.fetch(_QUERY)
    if row["version"] < MIN_SERVER_VERSION:
        raise UnsafeDatabase(
            f"PostgreSQL 15 or newer is needed, not {row['version'] // 10_000}: upgrade the server"
        )
    if row["standby"]:
        raise UnsafeDatabase("the database is a standby and takes no writes; use its primary")
    if row["read_only"] == "on":
        raise UnsafeDatabase(
            "the database takes no writes: default_transaction_read_only is on; turn it off (ALTER ROLE … or"
            " ALTER DATABASE … RESET default_transaction_read_only, or in postgresql.conf)"
        )
    if row["encoding"] != "UTF8":
        raise UnsafeDatabase(
            f"the database's encoding is {row['encoding']}, and UTF8 is needed: make another database"
            " (CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0)"
        )
    if allow_unsafe:
        return
    # local, on, remote_write and remote_apply all wait for this server's disk; off does not.
    for setting in ("fsync", "full_page_writes", "synchronous_commit"):
        if row[setting] == "off":
            raise UnsafeDatabase(
                f"{setting} is off, so a crash can lose packets that were acknowledged; turn it on, or set "
                "allow_unsafe_database for data you can afford to lose"
            )
