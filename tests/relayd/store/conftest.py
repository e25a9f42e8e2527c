"""A real PostgreSQL for the run, and a fresh migrated database for each test.

Set RELAYD_TEST_DATABASE_URL to run the same tests on your own server, as a role that may create databases;
otherwise an embedded one is started in a temporary folder.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from relayd.postgres import EmbeddedPostgres
from relayd.store import Store, migrate
from tests.support.databases import copy_with_both

_COUNTER = itertools.count()


class Server:
    """The server the tests use, and the loop from which it is administered."""

    def __init__(self, runner: asyncio.Runner, url: str) -> None:
        self._runner = runner
        self._connection: asyncpg.Connection | None = None
        self.url = url
        self.template = f"relayd_template_{os.getpid()}"

    def url_of(self, database: str) -> str:
        return urlunsplit(urlsplit(self.url)._replace(path="/" + database))

    def execute(self, statement: str) -> None:
        """Run a statement over a permanent connection: each test creates a database and drops it."""

        async def run() -> None:
            if self._connection is None or self._connection.is_closed():
                self._connection = await asyncpg.connect(self.url)
            await self._connection.execute(statement)

        self._runner.run(run())

    def execute_in(self, database: str, statement: str) -> None:
        async def run() -> None:
            connection = await asyncpg.connect(self.url_of(database))
            try:
                await connection.execute(statement)
            finally:
                await connection.close()

        self._runner.run(run())

    def close(self) -> None:
        if self._connection is not None:
            self._runner.run(self._connection.close())

    def make_template(self, of: str | None) -> None:
        """A migrated database: a copy `of` another, if there is one."""
        self.execute(f"CREATE DATABASE {self.template}" + (f" TEMPLATE {of}" if of else ""))
        if of is None:
            self._runner.run(migrate(self.url_of(self.template)))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # A separate loop, never set as the current one: the tests' loops come and go.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        url = os.environ.get("RELAYD_TEST_DATABASE_URL")
        embedded = None
        if url is None:
            folder = tmp_path_factory.mktemp("postgres")
            copy_with_both(folder)
            embedded = EmbeddedPostgres(folder)
            runner.run(embedded.start())
            url = embedded.url
        server = Server(runner, url)
        try:
            server.make_template(of=urlsplit(url).path[1:] if embedded is not None else None)
            yield server
        finally:
            if embedded is None:
                server.execute(f"DROP DATABASE {server.template} WITH (FORCE)")
            server.close()
            if embedded is not None:
                runner.run(embedded.stop())


@pytest.fixture
def empty_database(server: Server) -> Iterator[str]:
    """The URL of a database with nothing in it."""
    name = f"relayd_test_{os.getpid()}_{next(_COUNTER)}"
    server.execute(f"CREATE DATABASE {name}")
    yield server.url_of(name)
    server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database(server: Server) -> Iterator[str]:
    """The URL of a migrated database without packets."""
    name = f"relayd_test_{os.getpid()}_{next(_COUNTER)}"
    server.execute(f"CREATE DATABASE {name} TEMPLATE {server.template}")
    yield server.url_of(name)
    server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
async def store(database: str) -> AsyncIterator[Store]:
    store = await Store.open(database)
    yield store
    await store.close()


@pytest.fixture
async def second_store(database: str) -> AsyncIterator[Store]:
    """A second store on the same database, which to the database is another process."""
    store = await Store.open(database)
    yield store
    await store.close()


@pytest.fixture
async def sql(database: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection that bypasses the store."""
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


@pytest.fixture
async def observer(database: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection that is never inside a transaction, in which pg_stat_activity would not change."""
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()
