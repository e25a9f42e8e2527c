"""The first steps on a new embedded server: a database, and a password for TCP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import asyncpg

from relayd.store.connection import close_quietly, translate_errors

__all__ = ["provision"]

_OTHER = "postgres"
"""The database that `initdb` makes, to connect to before there is another."""


async def provision(url: str, role: str, *, is_new: bool, password: str | None, timeout: float) -> None:
    """Make the database of this role if there is none, and set the role's password if one is given.

    Both must need no quoting: `role` is an identifier, `password` URL-safe base64. `is_new` says that the
    server has just been made. Raises `StoreError`. Cancelling may leave the role without its password; the
    next call sets it.
    """

    @contextlib.asynccontextmanager
    async def connected(database: str) -> AsyncIterator[asyncpg.Connection]:
        connection = await asyncpg.connect(url, database=database, timeout=timeout, command_timeout=timeout)
        try:
            yield connection
        finally:
            await close_quietly(connection)

    async def set_password(connection: asyncpg.Connection) -> None:
        if password is not None:
            await connection.execute(f"ALTER ROLE {role} PASSWORD '{password}'")

    with translate_errors():
        if not is_new:
            # The first connection to a database after a start reads its whole catalog, and later ones benefit
            # from that. So do not connect to another database without need.
            with contextlib.suppress(asyncpg.InvalidCatalogNameError):
                async with connected(role) as connection:
                    await set_password(connection)
                    return
        async with connected(_OTHER) as connection:
            if not await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", role):
                await connection.execute(f"CREATE DATABASE {role}")
            await set_password(connection)
