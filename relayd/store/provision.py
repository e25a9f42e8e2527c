"""The first steps on a new server of our own: a database, and a password for TCP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import asyncpg

from relayd.store.connection import close_quietly, translate_errors

__all__ = ["provision"]

_OTHER = "postgres"
"""The database that `initdb` makes for whoever has none yet."""


async def provision(url: str, role: str, *, is_new: bool, password: str | None, timeout: float) -> None:
    """Make the database of this role where there is none, and set the role's password if one is given.

    Both are trusted to need no quoting: `role` is an identifier, `password` URL-safe base64. `is_new` says
    that the server has just been made. Raises `StoreError`. Cancelling may leave the database without its
    password; the next call sets it.
    """

    @contextlib.asynccontextmanager
    async def connected(database: str) -> AsyncIterator[asyncpg.Connection[Any]]:
        connection = await asyncpg.connect(url, database=database, timeout=timeout, command_timeout=timeout)
        try:
            yield connection
        finally:
            await close_quietly(connection)

    async def set_password(connection: asyncpg.Connection[Any]) -> None:
        if password is not None:
            await connection.execute(f"ALTER ROLE {role} PASSWORD '{password}'")

    with translate_errors():
        if not is_new:
            # Whoever comes first to a database after a start reads all of its catalog, and leaves that to
            # those who follow. So nobody goes to another one without need.
            with contextlib.suppress(asyncpg.InvalidCatalogNameError):
                async with connected(role) as connection:
                    await set_password(connection)
                    return
        async with connected(_OTHER) as connection:
            if not await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", role):
                await connection.execute(f"CREATE DATABASE {role}")
            await set_password(connection)
