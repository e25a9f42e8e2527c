"""A proxy between the ends of a channel: it cuts, stalls, delays and drops; and helpers for tests of
channels.

As a program it stands between two other processes: `python -m tests.support.tx_rx_proxy LISTEN UPSTREAM
SECONDS` prints the address it listens on, cuts all connections every SECONDS seconds, and ends at the end of
its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Self, cast

from strata.txrx import TcpAddress, UnixAddress, parse_address

from tests.support.waiting import until

__all__ = ["ProxyLink", "TxRxProxy", "listening", "open_sockets"]


def open_sockets() -> int:
    """The number of sockets of this process."""
    count = 0
    for descriptor in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):
            count += stat.S_ISSOCK(os.stat(int(descriptor)).st_mode)
    return count


def listening(address: str) -> tuple[str, socket.socket]:
    """A listening socket, and its actual address."""
    where = parse_address(address)
    if isinstance(where, UnixAddress):
        one = socket.socket(socket.AF_UNIX)
        one.bind(where.socket_path)
    else:
        assert isinstance(where, TcpAddress)
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((where.host, where.port))
        address = f"tcp:{where.host}:{one.getsockname()[1]}"
    one.listen(100)
    one.setblocking(False)
    return address, one


class ProxyLink:
    """One connection through the proxy, and both of its ends."""

    def __init__(self, proxy: TxRxProxy) -> None:
        self.proxy = proxy
        self.forwards = bytearray()
        """What the dialler sent, if the proxy records."""
        self.backwards = bytearray()
        self.is_stalled = False
        self.dialler = _Side(self, self.forwards)
        self.server = _Side(self, self.backwards)
        self.dialler.other, self.server.other = self.server, self.dialler
        self._connecting: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        try:
            await _connect(self.proxy.upstream, lambda: self.server)
        except OSError:
            self.cut()

    @property
    def is_open(self) -> bool:
        """Whether either end is still connected to the proxy."""
        return any(side.transport and not side.is_lost for side in (self.dialler, self.server))

    def cut(self) -> None:
        """End both connections at once; bytes under way are lost."""
        if self._connecting is not None:
            self._connecting.cancel()
        for side in (self.dialler, self.server):
            if side.transport is not None:
                side.transport.abort()

    def stall(self) -> None:
        """Half-open: nothing passes any more, and neither end learns that the other has gone."""
        self.is_stalled = True
        for side in (self.dialler, self.server):
            if side.transport is not None:
                side.transport.pause_reading()


class _Side(asyncio.Protocol):
    """One end of a link: all bytes it receives are sent at the other end."""

    def __init__(self, link: ProxyLink, record: bytearray) -> None:
        self.link = link
        self.proxy = link.proxy
        self.record = record
        self.other: _Side
        self.transport: asyncio.Transport | None = None
        self.is_lost = False
        self._late: deque[bytes] = deque()
        self._early: list[bytes] = []
        """Bytes that the dialler sent before there was a connection to the server."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self is self.link.dialler:
            self.proxy.accept(self.link)
        elif self.link.dialler.is_lost:
            self.transport.abort()
        else:
            self.transport.write(b"".join(self.other._early))

    def data_received(self, data: bytes) -> None:
        if self.proxy.records:
            self.record += data
        if self is self.link.server and self.proxy.drops_backwards:
            self.proxy.dropped += len(data)
            return
        if self.proxy.delay:
            self._late.append(data)
            asyncio.get_running_loop().call_later(self.proxy.delay, self._pass_late)
        else:
            self._pass(data)

    def _pass_late(self) -> None:
        self._pass(self._late.popleft())

    def _pass(self, data: bytes) -> None:
        other = self.other.transport
        if other is None:
            self._early.append(data)
        elif not other.is_closing() and not self.link.is_stalled:
            other.write(data)

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None and not self.link.is_stalled:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        if not self.link.is_stalled and self.other.transport is not None:
            # What was on its way still arrives, as it would without a proxy.
            self.other.transport.close()


class TxRxProxy:
    """Listens at `listen`, and forwards all bytes to `upstream` until told otherwise."""

    def __init__(self, upstream: str, listen: str = "tcp:127.0.0.1:0", *, records: bool = False) -> None:
        self.upstream = upstream
        self.address = listen
        self.links: list[ProxyLink] = []
        """All links so far, in order."""
        self.records = records
        self.drops_backwards = False
        """Whether bytes from the server are lost."""
        self.dropped = 0
        """The number of bytes lost."""
        self.refuses = False
        """Whether new connections are ended at once."""
        self.delay = 0.0
        """The delay of everything, in seconds."""

    async def __aenter__(self) -> Self:
        self.address, one = listening(self.address)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: ProxyLink(self).dialler, sock=one
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await until(lambda: not any(link.is_open for link in self.links))

    def accept(self, link: ProxyLink) -> None:
        """Take in a new connection."""
        self.links.append(link)
        if self.refuses:
            link.cut()
        else:
            link.begin()

    def cut(self) -> None:
        """End every open connection."""
        for link in self.links:
            if link.is_open:
                link.cut()

    def stall(self) -> None:
        """Pass nothing more on present connections; later ones work."""
        for link in self.links:
            link.stall()


async def _connect(address: str, protocol: Callable[[], asyncio.Protocol]) -> None:
    loop = asyncio.get_running_loop()
    where = parse_address(address)
    if isinstance(where, UnixAddress):
        with contextlib.ExitStack() as stack:
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.setblocking(False)
            await loop.sock_connect(one, where.socket_path)
            await loop.create_unix_connection(protocol, sock=one)
            stack.pop_all()
    else:
        assert isinstance(where, TcpAddress)
        await loop.create_connection(protocol, where.host, where.port)


async def _ticks(seconds: float, enough: asyncio.Event) -> AsyncIterator[None]:
    while not enough.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await enough.wait()
        yield


async def _main(listen: str, upstream: str, seconds: float) -> None:
    enough = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, enough.set)
    async with TxRxProxy(upstream, listen) as proxy:
        print(proxy.address, flush=True)
        async for _ in _ticks(seconds, enough):
            proxy.cut()
        print(len(proxy.links), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
