"""A host with several addresses, of which one does not answer, as behind a network without working IPv6."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import strata
from strata import txrx
from strata.relays.connection import Options
from strata.relays.reaching import reach

HERE, SILENT, CLOSED = "127.0.0.1", "127.0.0.2", "127.0.0.3"


@pytest.fixture
def listening() -> Iterator[tuple[socket.socket, int]]:
    """A socket that listens, and its port; at another address this port never answers."""
    with ExitStack() as stack:
        here = stack.enter_context(socket.create_server((HERE, 0)))
        port = here.getsockname()[1]
        keep_silent(stack, port)
        yield here, port


def keep_silent(stack: ExitStack, port: int) -> None:
    """Fill the queue of a socket that accepts nobody: the system drops whatever comes after that."""
    silent = stack.enter_context(socket.create_server((SILENT, port), backlog=0))
    for _ in range(4):
        one = stack.enter_context(socket.socket())
        one.setblocking(False)
        one.connect_ex(silent.getsockname())


def resolve(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let `two.example` have these addresses."""
    loop = asyncio.get_running_loop()

    async def getaddrinfo(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        assert host == "two.example"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(
    "addresses", [(SILENT, HERE), (CLOSED, SILENT, CLOSED, HERE), (HERE, SILENT), (HERE, HERE)]
)
async def test_the_first_address_that_answers_counts(listening, monkeypatch, addresses):
    resolve(monkeypatch, *addresses)
    async with asyncio.timeout(10):
        one = await reach("two.example", listening[1])
    with one:
        assert one.getpeername() == (HERE, listening[1])
    assert len(asyncio.all_tasks()) == 1, "no attempt is left"


async def test_if_none_answers_the_error_is_the_hosts(monkeypatch):
    resolve(monkeypatch, "255.255.255.255", CLOSED)
    with pytest.raises(ConnectionRefusedError):
        await reach("two.example", 1)


async def test_an_address_is_reached_without_asking_for_one(listening, monkeypatch):
    resolve(monkeypatch)
    with await reach(HERE, listening[1]) as one:
        assert one.getpeername() == (HERE, listening[1])
    with pytest.raises(ConnectionRefusedError):
        await reach(CLOSED, listening[1])


async def test_whoever_gives_up_leaves_no_socket(listening, monkeypatch):
    resolve(monkeypatch, SILENT, SILENT)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.4):
            await reach("two.example", listening[1])
    assert len(asyncio.all_tasks()) == 1


async def test_a_relay_behind_two_addresses_is_reached_at_the_one_that_answers(fake, monkeypatch):
    port = int(fake.url.rpartition(":")[2].partition("/")[0])
    with ExitStack() as stack:
        keep_silent(stack, port)
        resolve(monkeypatch, SILENT, HERE)
        options = replace(Options(), handshake_timeout=5, manifest_timeout=5, connect_timeout=10)
        async with strata.connect(fake.url.replace(HERE, "two.example"), options=options) as relay:
            assert relay.is_connected


async def test_so_is_an_rx(listening, monkeypatch):
    listening[0].close()
    _, rx = await txrx.serve(f"tcp:{HERE}:{listening[1]}", bytes)
    resolve(monkeypatch, SILENT, HERE)
    tx = await txrx.dial(f"tcp:two.example:{listening[1]}", bytes)
    async with asyncio.timeout(10), rx, tx:
        await tx.send(b"hello")
        assert await rx.recv() == b"hello"
