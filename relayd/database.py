"""Access to the database: the one that the settings name, or an embedded server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from relayd.config import Settings
from relayd.postgres import EmbeddedPostgres, EmbeddedPostgresError
from relayd.postgres.embedded import is_used
from relayd.postgres.running import running_server
from relayd.process.signals import Stop
from relayd.store.migrate import migrate

__all__ = ["database", "database_beside", "require_database", "running_url"]


@contextlib.asynccontextmanager
async def database(settings: Settings, stop: Stop | None = None) -> AsyncIterator[str]:
    """The URL of a migrated database: the one given, or an embedded server that runs inside this context.

    Raises `StoreError` if the database cannot be reached or is newer than this program. An embedded server
    that dies inside the block is restarted. If restarting fails by an error of ours, `stop` is set and the
    error is raised at the end.
    """
    if settings.database_url is not None:
        await migrate(settings.database_url)
        yield settings.database_url
        return
    left = None if stop is None else stop.left
    async with EmbeddedPostgres(settings.data_dir, left=left) as server:
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
    """Raise `StoreError` if there has never been a database: for commands that deal with a relay's log.

    Otherwise the embedded server would create an empty database in the current folder, and the command would
    report that all is well with a database that no relay serves.
    """
    if settings.database_url is None and not is_used(settings.data_dir):
        raise EmbeddedPostgresError(
            f"there is no database in {settings.data_dir}: name the relay's settings with --config, or its"
            " --data-dir or --database-url"
        )


@contextlib.asynccontextmanager
async def database_beside(settings: Settings) -> AsyncIterator[str]:
    """Like `database`, for a command: if a relay runs on an embedded server, the command joins it.

    Also raises `StoreError` as `require_database` does.
    """
    require_database(settings)
    async with running_url(settings) as running, database(replace(settings, database_url=running)) as url:
        yield url


@contextlib.asynccontextmanager
async def running_url(settings: Settings) -> AsyncIterator[str | None]:
    """The URL of a server that runs already: the one given, or that of a relay that runs beside this command.

    None if there is neither. The server of such a relay can be reached only inside this context."""
    if settings.database_url is not None:
        yield settings.database_url
        return
    with contextlib.ExitStack() as stack:
        yield await asyncio.to_thread(stack.enter_context, running_server(settings.data_dir))
