"""Bring a database's schema up to this program's (R-308).

A database that is up to date costs one query; only one that is not loads Alembic (see `upgrade`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg

from relayd.store.connection import close_quietly, connect, translate_errors
from relayd.store.types import UnsafeDatabase

__all__ = ["REVISION", "check_revision", "current_revision", "latest_revision", "migrate", "read_revision"]

REVISION = "0004"
"""The schema's revision that this program reads and writes; a test holds it to the newest migration."""

_CONNECT_TIMEOUT = 10.0


def latest_revision() -> str:
    """The revision this program needs."""
    return REVISION


async def current_revision(url: str) -> str | None:
    """The database's revision, None for one that was never migrated. Raises `StoreUnavailable`."""
    connection = await connect(url, name="relayd migrate", connect_timeout=_CONNECT_TIMEOUT)
    try:
        with translate_errors():
            return await read_revision(connection)
    finally:
        await close_quietly(connection)


async def migrate(url: str) -> str:
    """Upgrade the schema, all of it or none, and return the revision; no work when it is up to date.

    Processes that start together take turns. Raises `StoreUnavailable`, `StoreError`, and `UnsafeDatabase`
    for a database that a newer program has migrated. Cancelling does not stop what has begun; it is one
    transaction.
    """
    if await current_revision(url) != REVISION:
        upgrade = await asyncio.to_thread(_load_upgrade)

        # Alembic is synchronous and slow to load: the loop goes on meanwhile.
        await asyncio.to_thread(upgrade, url)
    return REVISION


def _load_upgrade() -> Callable[[str], None]:
    from relayd.store.upgrade import upgrade

    return upgrade


async def read_revision(connection: asyncpg.Connection[Any]) -> str | None:
    """The revision a connection's database is at."""
    if not await connection.fetchval("SELECT to_regclass('alembic_version') IS NOT NULL"):
        return None
    revision: str | None = await connection.fetchval("SELECT version_num FROM alembic_version")
    return revision


async def check_revision(connection: asyncpg.Connection[Any]) -> None:
    """Raise `UnsafeDatabase` unless the schema is at exactly `REVISION`."""
    revision = await read_revision(connection)
    if revision != REVISION:
        found = f"at revision {revision}" if revision else "not there"
        raise UnsafeDatabase(
            f"the database's schema is {found} and this program needs {REVISION}: run `relayd migrate`"
        )
