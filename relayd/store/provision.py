"""The first steps on a new server of our own: a database, and a password for TCP."""

from __future__ import annotations

import asyncpg

from relayd.store.connection import close_quietly, translate_errors

__all__ = ["provision"]


async def provision(url: str, role: str, *, password: str | None, timeout: float) -> None:
    """Make the database of this role where there is none, and set the role's password if one is given.

    Both are trusted to need no quoting: `role` is an identifier, `password` URL-safe base64. Raises
    `StoreError`. Cancelling may leave the database without its password; the next call sets it.
    """
    with translate_errors():
        connection = await asyncpg.connect(url, database="postgres", timeout=timeout, command_timeout=timeout)
        try:
            if not await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", role):
                await connection.execute(f"CREATE DATABASE {role}")
            if password is not None:
                await connection.execute(f"ALTER ROLE {role} PASSWORD '{password}'")
        finally:
            await close_quietly(connection)
