"""The sockets of a server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest
from strata.txrx import AddressInUse, TcpAddress, TxRxIOError, serve

FIRST, SECOND = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host with two addresses where, this many times, the free port is in use at the second address."""
    times = [0]
    with contextlib.ExitStack() as stack:

        class Crowded(socket.socket):
            def bind(self, where: Any) -> None:
                super().bind(where)
                if where == (FIRST, 0) and times[0]:
                    times[0] -= 1
                    other = stack.enter_context(socket.socket())
                    other.bind((SECOND, self.getsockname()[1]))
                    other.listen()

        async def two_addresses(*_: object, **__: object) -> list[Any]:
            kind = socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, ""
            return [(*kind, (FIRST, 0)), (*kind, (SECOND, 0))]

        def of(count: int) -> None:
            times[0] = count
            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", two_addresses)
            monkeypatch.setattr(socket, "socket", Crowded)

        yield of


@pytest.mark.req("T-088")
async def test_a_free_port_is_free_at_all_addresses_of_the_host(taken: Any) -> None:
    taken(2)
    address, rx = await serve("tcp:host.example:0", bytes)
    async with rx:
        assert isinstance(address, TcpAddress) and address.port
        for host in (FIRST, SECOND):
            _, writer = await asyncio.open_connection(host, address.port)
            writer.close()


@pytest.mark.req("T-088")
async def test_where_no_port_is_free_everywhere_a_server_says_so(taken: Any) -> None:
    taken(1000)
    with pytest.raises(AddressInUse):
        await serve("tcp:host.example:0", bytes)


@pytest.mark.req("T-088")
async def test_an_address_that_this_machine_lacks_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `localhost` has one of IPv6 in a container that has no IPv6."""
    kind = socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, ""
    found: list[Any] = [(*kind, (address, 0)) for address in ("192.0.2.1", FIRST)]

    async def addresses(*_: object, **__: object) -> list[Any]:
        return found

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", addresses)
    address, rx = await serve("tcp:host.example:0", bytes)
    async with rx:
        assert isinstance(address, TcpAddress)
        _, writer = await asyncio.open_connection(FIRST, address.port)
        writer.close()
    assert "host.example is served without its address 192.0.2.1" in caplog.text
    del found[1]
    with pytest.raises(TxRxIOError, match="Cannot assign requested address"):
        await serve("tcp:host.example:0", bytes)
