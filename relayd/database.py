"""The way to the database: the one that the settings name, or an embedded server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from relayd.config import Settings
from relayd.postgres import EmbeddedPostgres, EmbeddedPostgresError
from relayd.postgres.embedded import is_used
from relayd.postgres.running import running_server
from relayd.store.migrate import migrate

__all__ = ["database", "database_beside", "require_database", "running_url"]


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


def require_database(settings: Settings) -> None:
    """For a command that is about a relay's log: raises `StoreError` where there has never been one.

    The embedded server would make an empty one in whatever folder the command was given in, and the command
    would say that all is well, of a database that no relay serves.
    """
    if settings.database_url is None and not is_used(settings.data_dir):
        raise EmbeddedPostgresError(
            f"there is no database in {settings.data_dir}: name the relay's settings with --config, or its"
            " --data-dir or --database-url"
        )


@contextlib.asynccontextmanager
async def database_beside(settings: Settings) -> AsyncIterator[str]:
    """As `database`, for a command: where a relay runs on an embedded server, the command joins it.

    Raises `StoreError` as `require_database` does, too.
    """
    require_database(settings)
    async with running_url(settings) as running, database(replace(settings, database_url=running)) as url:
        yield url


@contextlib.asynccontextmanager
async def running_url(settings: Settings) -> AsyncIterator[str | None]:
    """The URL of the server that is there by itself: the one given, or that of a relay which runs beside this
    command. None where neither is; such a relay's can be reached inside this context alone."""
    if settings.database_url is not None:
        yield settings.database_url
        return
    with contextlib.ExitStack() as stack:
        yield await asyncio.to_thread(stack.enter_context, running_server(settings.data_dir))
