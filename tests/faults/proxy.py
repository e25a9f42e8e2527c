"""The network in front of the relay: it partitions, trickles, resets connections or leaves them half open."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from typing import Self

__all__ = ["FaultyNetwork"]

_CHUNK = 65536
_TRICKLE_PAUSE = 0.002


class FaultyNetwork:
    """Listens on its own port and forwards every connection to the relay."""

    def __init__(self, port: int) -> None:
        self._relay_port = port
        self._links: set[_Link] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self.trickles = False
        """Whether each byte is sent alone."""
        self.admits = asyncio.Event()
        """While this is not set, new connections wait."""
        self.admits.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_CHUNK)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"ws://127.0.0.1:{port}/strata"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for link in list(self._links):
            link.reset()
        while self._links:  # noqa: ASYNC110 - each is on its way out
            await asyncio.sleep(0.01)

    @property
    def connections(self) -> int:
        """The number of clients connected now."""
        return len(self._links)

    def partition(self) -> None:
        """Let nothing pass in either direction until `heal`; the ends do not notice."""
        self._passes.clear()

    def heal(self) -> None:
        """Let everything pass again; bytes held back arrive."""
        self._passes.set()
        self.trickles = False

    def reset(self, chosen: random.Random, share: float) -> int:
        """Reset some of the connections at both ends; returns how many."""
        return sum(link.reset() for link in self._some(chosen, share))

    def half_open(self, chosen: random.Random, share: float) -> int:
        """Let one end of some connections believe that the other is still there; returns how many."""
        return sum(link.half_open(relay_stays=chosen.random() < 0.5) for link in self._some(chosen, share))

    def deceive_clients(self) -> int:
        """Let every client believe that the relay is still there; returns how many."""
        return sum(link.half_open(relay_stays=False) for link in self._links)

    def _some(self, chosen: random.Random, share: float) -> list[_Link]:
        links = sorted(self._links, key=lambda link: link.number)
        return chosen.sample(links, max(1, int(len(links) * share))) if links else []

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(reader, writer)
        self._links.add(link)
        try:
            await self._passes.wait()
            await self.admits.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self._relay_port, limit=_CHUNK)
            link.connected(there, back)
            await link.run(self)
        except OSError:
            link.reset()
        finally:
            self._links.discard(link)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward bytes until their end."""
        while chunk := await reader.read(_CHUNK):
            while chunk:
                await self._passes.wait()
                piece, chunk = (chunk[:1], chunk[1:]) if self.trickles else (chunk, b"")
                writer.write(piece)
                await writer.drain()
                if self.trickles:
                    await asyncio.sleep(_TRICKLE_PAUSE)


class _Link:
    """One connection through the network."""

    _made = 0

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _Link._made += 1
        self.number = _Link._made
        self._client = (reader, writer)
        self._relay: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._deceived: asyncio.StreamReader | None = None
        """The end that does not know that the other has gone."""

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._relay = (reader, writer)
        for _, out in (self._client, self._relay):
            out.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def run(self, network: FaultyNetwork) -> None:
        """Carry bytes both ways until one end closes or has gone."""
        assert self._relay is not None
        ways = [
            asyncio.create_task(self._carry(network, self._client[0], self._relay[1])),
            asyncio.create_task(self._carry(network, self._relay[0], self._client[1])),
        ]
        _, rest = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        if rest and self._deceived is None:  # the rest of the other end's bytes may arrive
            await asyncio.wait(rest, timeout=2.0)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        with contextlib.suppress(OSError):
            while self._deceived is not None and await self._deceived.read(_CHUNK):
                pass
        self.reset()

    async def _carry(
        self, network: FaultyNetwork, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await network.carry(reader, writer)
        if self._deceived is None:  # who is deceived must not see an end
            writer.write_eof()

    def reset(self) -> bool:
        """Abort both ends with a reset."""
        for end in (self._client, self._relay):
            if end is not None:
                _abort(end[1])
        return True

    def half_open(self, *, relay_stays: bool) -> bool:
        """Abort one end; the other may send, and receives nothing, until it closes by itself."""
        if self._relay is None or self._deceived is not None:
            return False
        gone, stays = (self._client, self._relay) if relay_stays else (self._relay, self._client)
        self._deceived = stays[0]
        _abort(gone[1])
        return True


def _abort(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        one = writer.get_extra_info("socket")
        if one is not None and one.fileno() >= 0:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
