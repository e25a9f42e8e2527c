"""One relay process for each module, and the options of the long runs."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.support.bare_client import open_client
from tests.support.browsers import browser
from tests.support.relay_process import PostgresHost, RelayProcess, running

if TYPE_CHECKING:
    from playwright.async_api import Browser


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("relayd system tests")
    group.addoption("--kill-cycles", type=int, default=24, help="kills in the durability test")
    group.addoption("--model-runs", type=int, default=6, help="runs of the model test")
    group.addoption("--seed", type=int, default=None, help="seed of the first random run")


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    """A relay with default settings; it must have logged no complaint by the end of the module."""
    with running(RelayProcess(tmp_path_factory.mktemp("relay"))) as process:
        yield process
        assert process.is_running(), process.last_words()
        assert not process.complaints()
        assert process.stop() == 0


@pytest.fixture
async def client(relay: RelayProcess):
    async with open_client(relay.ws) as bare:
        yield bare


@pytest.fixture
def topic() -> str:
    """A topic for the test alone: the relay is shared."""
    return f"/test/1/{secrets.token_hex(8)}/proto"


@pytest.fixture(scope="module")
def shared_database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a PostgreSQL server that belongs to no relay."""
    host = PostgresHost(tmp_path_factory.mktemp("postgres"))
    yield host.url
    host.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium() -> AsyncIterator[Browser]:
    """One Chromium for all tests of a worker; each test opens pages with its own profile."""
    # A name that leads here but is not a name of this machine: pages under it have no secure context.
    async with browser("--host-resolver-rules=MAP relay.test 127.0.0.1") as opened:
        yield opened
