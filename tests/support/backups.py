"""A database that is restored: copies inside one server, so that only its content differs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from relayd.store import migrate

__all__ = ["Copied"]

_NUMBERS = itertools.count()


class Copied:
    """A database of a server that can be copied, and replaced by its copy, while relays use it."""

    def __init__(self, server_url: str) -> None:
        self._name = f"copied_{next(_NUMBERS)}"
        self._server_url = server_url
        self.url = urlunsplit(urlsplit(server_url)._replace(path="/" + self._name))

    async def make(self, *, migrated: bool = True) -> Copied:
        """Create it, empty; without a schema if another program is to migrate it."""
        await self._execute(f"CREATE DATABASE {self._name}")
        if migrated:
            await migrate(self.url)
        return self

    async def copy(self) -> None:
        """Copy it as it is now; every open connection is lost."""
        await self._alone(
            f"DROP DATABASE IF EXISTS {self._name}_copy",
            f"CREATE DATABASE {self._name}_copy TEMPLATE {self._name}",
        )

    async def put_back(self) -> None:
        """Replace it by the copy."""
        await self._alone(
            f"ALTER DATABASE {self._name} RENAME TO {self._name}_lost",
            f"CREATE DATABASE {self._name} TEMPLATE {self._name}_copy",
        )
        await self._execute(f"DROP DATABASE {self._name}_lost WITH (FORCE)")

    @contextlib.asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        """While this lasts, nobody can connect and nobody is connected."""
        await self._execute(
            f"ALTER DATABASE {self._name} ALLOW_CONNECTIONS false",
            f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = '{self._name}'",
        )
        try:
            yield
        finally:
            await self._execute(f"ALTER DATABASE {self._name} ALLOW_CONNECTIONS true")

    async def _alone(self, *statements: str) -> None:
        # Afterwards the name may belong to another database, which accepts connections.
        async with self.away():
            for statement in statements:
                await self._once_free(statement)

    async def _once_free(self, statement: str) -> None:
        """Run a statement, and retry while connections accepted just before the ban are still closing."""
        async with asyncio.timeout(60):
            while True:
                try:
                    return await self._execute(statement)
                except asyncpg.ObjectInUseError:
                    await asyncio.sleep(0.1)

    async def _execute(self, *statements: str) -> None:
        connection = await self._connected()
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    async def _connected(self) -> asyncpg.Connection:
        async with asyncio.timeout(20):
            return await asyncpg.connect(self._server_url)
