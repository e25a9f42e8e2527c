"""Bring a database's schema up to this program's revision (R-308).

A database that is up to date costs one query; Alembic is loaded only for one that is not (see `upgrade`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import asyncpg

from relayd.store.connection import connected
from relayd.store.safety import check_safety
from relayd.store.types import SERVES, UnsafeDatabase

__all__ = [
    "REVISION",
    "check_revision",
    "current_revision",
    "is_served",
    "latest_revision",
    "migrate",
    "read_revision",
    "serves_us",
]

REVISION = "schema1"
"""The schema's revision that this program reads and writes; a test holds it to the newest migration."""

_CONNECT_TIMEOUT = 10.0
_ELSEWHERE = """
SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE relname = 'log_head' AND relkind = 'r' AND to_regclass('log_head') IS NULL LIMIT 1
"""
"""The schema of a log that the search path does not lead to."""


def latest_revision() -> str:
    """The revision this program needs."""
    return REVISION


async def current_revision(url: str) -> str | None:
    """The database's revision, None for one that was never migrated. Raises `StoreUnavailable`."""
    async with connected(url, "relayd migrate", _CONNECT_TIMEOUT) as connection:
        return await read_revision(connection)


async def migrate(url: str) -> str:
    """Upgrade the schema, all or nothing, and return the revision; does nothing if it is up to date.

    A newer program's schema that also serves this one is left as it is. Processes that start together take
    turns. Raises `StoreUnavailable`, `StoreError`, and `UnsafeDatabase` for a database that a newer program
    has migrated, that no program of ours can use (`check_safety`), or whose log is not in the search path: a
    second log beside it would begin empty. Cancelling does not stop an upgrade
    that has begun; it is one transaction.
    """
    async with connected(url, "relayd migrate", _CONNECT_TIMEOUT) as connection:
        if await read_revision(connection) == REVISION or await serves_us(connection):
            return REVISION
        # Create nothing in a database that cannot be used afterwards. Durability depends on a setting that is
        # only known when the store is opened.
        await check_safety(connection, allow_unsafe=True)
        elsewhere = await connection.fetchval(_ELSEWHERE)
        if elsewhere is not None:
            raise UnsafeDatabase(
                f"the relay's log is in the schema {elsewhere}, which is not in the search_path: add it"
                " (ALTER ROLE … or ALTER DATABASE … SET search_path), or use another database for another log"
            )
    # Alembic is synchronous and slow to load: keep the loop running meanwhile.
    upgrade = await asyncio.to_thread(_load_upgrade)
    await asyncio.to_thread(upgrade, url)
    return REVISION


async def is_served(url: str) -> bool:
    """Whether a newer program's schema also serves this program. Raises `StoreUnavailable`."""
    async with connected(url, "relayd migrate", _CONNECT_TIMEOUT) as connection:
        return await serves_us(connection)


def _load_upgrade() -> Callable[[str], None]:
    from relayd.store.upgrade import upgrade

    return upgrade


async def read_revision(connection: asyncpg.Connection) -> str | None:
    """The revision of a connection's database."""
    if not await connection.fetchval("SELECT to_regclass('alembic_version') IS NOT NULL"):
        return None
    revision: str | None = await connection.fetchval("SELECT version_num FROM alembic_version")
    return revision


async def serves_us(connection: asyncpg.Connection) -> bool:
    """Whether a newer program has migrated this database and left it fit for this program.

    A migration that keeps older programs working says so, and the schema then names all their revisions, with
    its own first: a list that another revision has written does not count.
    """
    revision = await read_revision(connection)
    said = await connection.fetchval("SELECT obj_description(to_regclass('alembic_version'), 'pg_class')")
    served = (said or "").removeprefix(SERVES).split()
    return served[:1] == [revision] and REVISION in served


async def check_revision(connection: asyncpg.Connection) -> None:
    """Raise `UnsafeDatabase` unless the schema is at `REVISION`, or at a later one that serves us."""
    revision = await read_revision(connection)
    if revision != REVISION and not await serves_us(connection):
        found = f"at revision {revision}" if revision else "not there"
        raise UnsafeDatabase(
            f"the database's schema is {found} and this program needs {REVISION}: run `relayd migrate`"
        )
