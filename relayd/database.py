"""Which PostgreSQL a command works on: the one that the settings name, or the embedded one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from relayd.config import Settings
from relayd.store import Store
from relayd.store.embedded import EmbeddedPostgres
from relayd.store.migrate import migrate

__all__ = ["open_store", "postgres_url"]


@contextlib.asynccontextmanager
async def postgres_url(settings: Settings) -> AsyncIterator[str]:
    """The URL of the database; the embedded server runs for as long as the block does.

    Raises `StoreError` when the embedded server cannot be started, for one because a relay is using it.
    """
    if settings.database_url is not None:
        yield settings.database_url
        return
    async with EmbeddedPostgres(settings.data_dir) as server:
        yield server.url


@contextlib.asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Store]:
    """The migrated store of these settings, for a command that is not the relay. Raises `StoreError`."""
    async with postgres_url(settings) as url:
        await migrate(url)
        store = await Store.open(
            url,
            read_url=settings.read_database_url,
            read_connections=1,
            read_timeout=settings.read_timeout,
            retention_days=settings.retention_days,
            dedup_window_seconds=settings.dedup_window_seconds,
            allow_unsafe=settings.allow_unsafe_database,
        )
        try:
            yield store
        finally:
            await store.close()
