"""One PostgreSQL for all tests of the pipeline, with a fresh log for each test."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from obstore.store import MemoryStore
from pyspark.sql.classic.dataframe import DataFrame
from strata_pipeline.lake import chain
from strata_pipeline.lake.stores.objects import ObjectStore

from relayd.postgres import EmbeddedPostgres
from tests.support.databases import copy_with_both
from tests.support.object_stores import BUCKET, ObjectServer, serving

_PREFIXES = map("lake-{}".format, itertools.count(1))


@pytest.fixture(scope="session", autouse=True)
def short_chains() -> Iterator[None]:
    """No test makes a chain that continues long after a hole, and looking for 10,000 manifests after the end
    of one takes a tenth of a second each time a lake on a disk is opened."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "_LOOK_AHEAD", 100)
        yield


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server, and of a database on it that is not a relay's."""
    with asyncio.Runner() as runner:
        folder = tmp_path_factory.mktemp("postgres")
        copy_with_both(folder)
        server = EmbeddedPostgres(folder)
        runner.run(server.__aenter__())
        try:
            yield urlunsplit(urlsplit(server.url)._replace(path="/postgres"))
        finally:
            runner.run(server.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def new_log(postgres: str) -> Callable[..., str]:
    """Creates relay databases and returns their URLs: a copy `of` another, or of a migrated, empty one."""

    def url_of(name: str) -> str:
        return urlunsplit(urlsplit(postgres)._replace(path=f"/{name}"))

    async def create(statement: str) -> None:
        connection = await asyncpg.connect(postgres)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    def make(of: str = "/relayd") -> str:
        name = f"log_{next(numbers)}"
        asyncio.run(create(f"CREATE DATABASE {name} TEMPLATE {urlsplit(of).path[1:]}"))
        return url_of(name)

    numbers = itertools.count(1)
    return make


@pytest.fixture
def log_url(new_log: Callable[..., str]) -> str:
    """The URL of an empty, migrated relay database."""
    return new_log()


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the calls that have brought rows, or a number of rows, out of Spark; writing is no such
    call."""
    made: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        real = getattr(DataFrame, name)

        def call(frame: DataFrame, *arguments: Any) -> Any:
            made.append(name)
            return real(frame, *arguments)

        return call

    for name in ("collect", "count", "isEmpty", "toLocalIterator", "toArrow", "toPandas"):
        monkeypatch.setattr(DataFrame, name, counted(name))
    return made


@pytest.fixture(scope="session")
def object_server() -> Iterator[ObjectServer]:
    """An S3 server for all tests of a worker."""
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def object_places(object_server: ObjectServer) -> Iterator[Callable[[], str]]:
    """Returns new places for lakes on the server; the environment names it meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in object_server.environment.items():
            patch.setenv(name, value)
        yield lambda: f"s3://{BUCKET}/{next(_PREFIXES)}"


@pytest.fixture
def place(object_server: ObjectServer, object_places: Callable[[], str]) -> Iterator[str]:
    """A new place for a lake, on a server that behaves normally again afterwards."""
    yield object_places()
    object_server.behave()


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Places of buckets in this process, for tests that make thousands of requests."""
    buckets: dict[str, MemoryStore] = defaultdict(MemoryStore)
    monkeypatch.setattr(ObjectStore, "_store", lambda store: buckets[store.prefix])
    return map("s3://memory/{}".format, itertools.count())
