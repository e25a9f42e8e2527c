"""Fixtures for tests of the library: packets, and the naive relay of `tests.support.relays`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet

from tests.support.relays import ALL_EXTENSIONS, AUTHOR, OTHER, FakeRelay, NaiveRelay, make_packet


@pytest.fixture(scope="session")
def make() -> Callable[..., Packet]:
    return make_packet


@pytest.fixture(scope="session")
def naive_relay() -> type[NaiveRelay]:
    return NaiveRelay


@pytest.fixture(scope="session")
def identities() -> tuple[Identity, Identity]:
    return AUTHOR, OTHER


@pytest.fixture(scope="session")
def fake_relay() -> type[FakeRelay]:
    return FakeRelay


@pytest.fixture(params=[ALL_EXTENSIONS, ()], ids=["extended", "plain"])
async def fake(request: pytest.FixtureRequest) -> AsyncIterator[FakeRelay]:
    """A running relay, with all our additions or with RFC-0004 alone."""
    async with FakeRelay(NaiveRelay(request.param)) as relay:
        yield relay


@pytest.fixture
async def extended() -> AsyncIterator[FakeRelay]:
    async with FakeRelay(NaiveRelay(ALL_EXTENSIONS)) as relay:
        yield relay


@pytest.fixture
async def plain() -> AsyncIterator[FakeRelay]:
    async with FakeRelay(NaiveRelay()) as relay:
        yield relay
