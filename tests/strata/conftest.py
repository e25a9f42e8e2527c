"""Fixtures for tests of the library: packets, and the naive relay of `tests.support.relays`."""

from __future__ import annotations

import pytest

from tests.support.relays import ALL_EXTENSIONS, AUTHOR, OTHER, FakeRelay, NaiveRelay, make_packet


@pytest.fixture(scope="session")
def make():
    return make_packet


@pytest.fixture(scope="session")
def naive_relay():
    return NaiveRelay


@pytest.fixture(scope="session")
def identities():
    return AUTHOR, OTHER


@pytest.fixture(scope="session")
def fake_relay():
    return FakeRelay


@pytest.fixture(params=[ALL_EXTENSIONS, ()], ids=["extended", "plain"])
async def fake(request):
    """A running relay, with all our additions and as RFC-0004 alone has it."""
    async with FakeRelay(NaiveRelay(request.param)) as relay:
        yield relay


@pytest.fixture
async def extended():
    async with FakeRelay(NaiveRelay(ALL_EXTENSIONS)) as relay:
        yield relay


@pytest.fixture
async def plain():
    async with FakeRelay(NaiveRelay()) as relay:
        yield relay
