"""One Spark session for all tests of the pipeline, and one PostgreSQL with a fresh log for each test."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from pyspark.sql import SparkSession
from strata_pipeline.session import open_session

from relayd.store.embedded import EmbeddedPostgres
from relayd.store.migrate import migrate

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside this file, in every import mode

_names = (f"log_{number}" for number in itertools.count(1))

# Starts in a few seconds; for tests, not for work.
_QUICK = {
    "spark.default.parallelism": "2",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session."""
    with open_session("tests", master="local[2]", conf=_QUICK) as session:
        yield session


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server."""
    with asyncio.Runner() as runner:
        server = EmbeddedPostgres(tmp_path_factory.mktemp("postgres"))
        runner.run(server.__aenter__())
        try:
            yield server.url
        finally:
            runner.run(server.__aexit__(None, None, None))


@pytest.fixture
def log_url(postgres: str) -> str:
    """The URL of an empty, migrated relay database on it."""
    name = next(_names)

    async def create() -> str:
        connection = await asyncpg.connect(postgres)
        try:
            await connection.execute(f'CREATE DATABASE "{name}"')
        finally:
            await connection.close()
        url = urlunsplit(urlsplit(postgres)._replace(path=f"/{name}"))
        await migrate(url)
        return url

    return asyncio.run(create())
