"""The way to the database: the one that the settings name, or an embedded server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

from relayd.config import Settings
from relayd.postgres import EmbeddedPostgres
from relayd.postgres.running import running_server
from relayd.store.migrate import migrate

__all__ = ["database", "database_beside"]


@contextlib.asynccontextmanager
async def database(settings: Settings, stop: asyncio.Event | None = None) -> AsyncIterator[str]:
    """The URL of a migrated database: the one given, or an embedded server that lives inside this context.

    Raises `StoreError` when it cannot be reached or is newer than this program. An embedded server that dies
    inside the block is brought back. An error of ours in doing so sets `stop` and is raised at the end.
    """
    if settings.database_url is not None:
        await migrate(settings.database_url)
        yield settings.database_url
        return
    async with EmbeddedPostgres(settings.data_dir) as server:
        supervisor = asyncio.create_task(server.supervise(), name="embedded-postgres")
        if stop is not None:
            supervisor.add_done_callback(lambda _: stop.set())
        try:
            await migrate(server.url)
            yield server.url
        finally:
            if supervisor.done():
                supervisor.result()
            supervisor.cancel()
            await asyncio.gather(supervisor, return_exceptions=True)


@contextlib.asynccontextmanager
async def database_beside(settings: Settings) -> AsyncIterator[str]:
    """As `database`, for a command: where a relay runs on an embedded server, the command joins it."""
    with contextlib.ExitStack() as stack:
        if settings.database_url is None:
            url = await asyncio.to_thread(stack.enter_context, running_server(settings.data_dir))
            settings = dataclasses.replace(settings, database_url=url)
        async with database(settings) as url:
            yield url
