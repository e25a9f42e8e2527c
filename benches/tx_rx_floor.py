"""The limit that a channel cannot beat: sockets with a length before each message, and nothing more.

They do not reconnect, number messages, or hand them over: complete messages are only counted. An
acknowledgement has the number of messages so far; there is one for each read that completes a message.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from struct import Struct
from typing import cast

import uvloop
from strata.txrx.tls import client_context, server_context

from benches.tx_rx_runs import AsyncLink, BlockingLink, Contestant, Job, Sent

__all__ = ["BUFFER_BYTES", "Asyncio", "Messages", "Raw"]

_NUMBER = Struct(">Q")
BUFFER_BYTES = 256 * 1024
_LARGE = 64 * 1024
"""From this size on, a message is not copied to join it with others."""


class Messages:
    """The bytes of a stream as messages. A message that is longer than the buffer gets its own."""

    def __init__(self) -> None:
        self.count = self.size = 0
        self.is_over = False
        """Whether an empty message has arrived."""
        self._small = bytearray(BUFFER_BYTES)
        self._use(self._small)
        self._start = self._end = 0

    def _use(self, buffer: bytearray) -> None:
        self._buffer, self._view = buffer, memoryview(buffer)

    def get_buffer(self) -> memoryview:
        return self._view[self._end :]

    def buffer_updated(self, read: int) -> bool:
        """Take the bytes read; return whether they completed a message."""
        before, buffer, view, start, end = self.count, self._buffer, self._view, self._start, self._end + read
        count = size = 0
        while end - start >= 8:
            (length,) = _NUMBER.unpack_from(buffer, start)
            stop = start + 8 + length
            if stop > end:
                break
            # A message with its own buffer is a view of that buffer.
            message = bytes(view[start + 8 : stop]) if buffer is self._small else view[start + 8 : stop]
            start = stop
            if not message:
                self.is_over = True
                break
            count += 1
            size += len(message)
        self.count += count
        self.size += size
        self._keep(start, end)
        return self.count > before

    def _keep(self, start: int, end: int) -> None:
        """Make room for the rest of an incomplete message."""
        rest = self._view[start:end]
        needed = 8 + _NUMBER.unpack_from(rest)[0] if len(rest) >= 8 else 8
        buffer = self._buffer
        if needed > len(buffer):
            buffer = bytearray(needed)
        elif needed <= BUFFER_BYTES < len(buffer):
            buffer = self._small
        elif rest and needed <= len(buffer) - start and len(buffer) - end >= _LARGE:
            self._start, self._end = start, end
            return
        buffer[: len(rest)] = rest
        self._use(buffer)
        self._start, self._end = 0, len(rest)


class _Acknowledged:
    """The highest number acknowledged."""

    def __init__(self) -> None:
        self.count = 0
        self._rest = b""

    def feed(self, data: bytes) -> None:
        data = self._rest + data
        whole = len(data) - len(data) % 8
        if whole:
            (self.count,) = _NUMBER.unpack_from(data, whole - 8)
        self._rest = data[whole:]


def _framed(payload: bytes, count: int) -> list[bytes]:
    """The pieces to write for `count` messages: small messages are joined."""
    if len(payload) >= _LARGE:
        return [piece for _ in range(count) for piece in (_NUMBER.pack(len(payload)), payload)]
    pack = _NUMBER.pack
    return [b"".join([pack(len(payload)) + payload for _ in range(count)])]


# Blocking sockets


class Raw(Contestant):
    """Blocking sockets, without an event loop."""

    def receive(self, ready: Callable[[str], None]) -> tuple[int, int]:
        with _listening(self.job) as server:
            ready("" if self.job.transport == "unix" else str(server.getsockname()[1]))
            connection, _ = server.accept()
        with connection:
            messages = Messages()
            while not messages.is_over:
                read = connection.recv_into(messages.get_buffer())
                if messages.buffer_updated(read):
                    connection.sendall(_NUMBER.pack(messages.count))
            return messages.count, messages.size

    def send(self, where: str) -> Sent:
        with _connected(self.job, where) as connection:
            sent = _RawLink(connection, self.job.payload).carry_out(self.job)
            connection.sendall(_NUMBER.pack(0))
            return sent


class _RawLink(BlockingLink):
    """The sender. The window prevents both ends from blocking in writes, since acknowledgements are few."""

    def __init__(self, connection: socket.socket, payload: bytes) -> None:
        self._connection = connection
        self._payload = payload
        self._sent = 0
        self._acknowledged = _Acknowledged()

    def write(self, count: int) -> None:
        for piece in _framed(self._payload, count):
            self._connection.sendall(piece)
        self._sent += count

    def drain(self, most: int) -> None:
        while self._sent - self._acknowledged.count > most:
            self._acknowledged.feed(self._connection.recv(BUFFER_BYTES))


def _listening(job: Job) -> socket.socket:
    if job.transport == "tcp":
        return socket.create_server(("127.0.0.1", 0))
    return socket.create_server(job.socket_path, family=socket.AF_UNIX)


def _connected(job: Job, where: str) -> socket.socket:
    if job.transport == "tcp":
        connection = socket.create_connection(("127.0.0.1", int(where)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(job.socket_path)
    return connection


# An event loop


class Asyncio(Contestant):
    """A bare `BufferedProtocol` at each end."""

    def receive(self, ready: Callable[[str], None]) -> tuple[int, int]:
        return uvloop.run(self._receive(ready))

    def send(self, where: str) -> Sent:
        return uvloop.run(self._send(where))

    async def _receive(self, ready: Callable[[str], None]) -> tuple[int, int]:
        loop, job = asyncio.get_running_loop(), self.job
        done: asyncio.Future[tuple[int, int]] = loop.create_future()
        context = server_context(job.settings) if job.transport == "tls" else None
        if job.transport == "unix":
            server = await loop.create_unix_server(lambda: _Receiver(done), job.socket_path)
            ready("")
        else:
            server = await loop.create_server(lambda: _Receiver(done), "127.0.0.1", 0, ssl=context)
            ready(str(server.sockets[0].getsockname()[1]))
        try:
            return await done
        finally:
            server.close()

    async def _send(self, where: str) -> Sent:
        loop, job = asyncio.get_running_loop(), self.job
        link = _AsyncioLink(job.payload)
        context = client_context(job.settings) if job.transport == "tls" else None
        if job.transport == "unix":
            transport, _ = await loop.create_unix_connection(lambda: _Acknowledgements(link), job.socket_path)
        else:
            transport, _ = await loop.create_connection(
                lambda: _Acknowledgements(link), "127.0.0.1", int(where), ssl=context
            )
        link.transport = transport
        sent = await link.carry_out(job)
        transport.write(_NUMBER.pack(0))
        transport.close()
        await link.closed
        return sent


class _Receiver(asyncio.BufferedProtocol):
    def __init__(self, done: asyncio.Future[tuple[int, int]]) -> None:
        self._done = done
        self._messages = Messages()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._messages.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._messages.buffer_updated(nbytes):
            self._transport.write(_NUMBER.pack(self._messages.count))

    def connection_lost(self, error: Exception | None) -> None:
        self._done.set_result((self._messages.count, self._messages.size))


class _AsyncioLink(AsyncLink):
    """The sender. The window bounds what the transport holds, so there is no need to pause."""

    def __init__(self, payload: bytes) -> None:
        self.transport = cast("asyncio.WriteTransport", None)
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._payload = payload
        self._sent = 0
        self._acknowledged = _Acknowledged()
        self._waiting: tuple[int, asyncio.Future[None]] | None = None

    def feed(self, data: bytes) -> None:
        self._acknowledged.feed(data)
        if self._waiting is not None:
            most, waiter = self._waiting
            if self._sent - self._acknowledged.count <= most:
                self._waiting = None
                waiter.set_result(None)

    async def write(self, count: int) -> None:
        for piece in _framed(self._payload, count):
            self.transport.write(piece)
        self._sent += count

    async def drain(self, most: int) -> None:
        if self._sent - self._acknowledged.count > most:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting = (most, waiter)
            await waiter


class _Acknowledgements(asyncio.Protocol):
    def __init__(self, link: _AsyncioLink) -> None:
        self._link = link

    def data_received(self, data: bytes) -> None:
        self._link.feed(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._link.closed.set_result(None)
