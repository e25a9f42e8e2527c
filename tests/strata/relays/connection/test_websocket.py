"""A connection that ends in the middle of a large message can still be closed, and another one follows."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import strata
from strata.relays.connection.dialing import hang_up
from strata.relays.connection.websocket import open_websocket
from websockets.exceptions import ConnectionClosed

from tests.support.made_packets import new_identity, sized
from tests.support.waiting import until

GOODBYE = bytes([0x88, 2]) + struct.pack("!H", 1001)
LARGE = 8 << 20
"""More than the socket buffers of both ends hold, in bytes."""


def accepted(head: bytes) -> bytes:
    """The answer to a handshake."""
    (key,) = [
        line[19:].strip() for line in head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key:")
    ]
    token = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + token + b"\r\n\r\n"
    )


class Closing:
    """A relay that sends a close frame as soon as a peer sends, and only then reads on, to the end."""

    def __init__(self) -> None:
        self.served = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"pgrade" not in head:
                writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            writer.write(accepted(head))
            self.served += 1
            await reader.read(1)
            await asyncio.sleep(0.1)  # until the sender holds what the socket does not accept
            writer.write(GOODBYE)
            writer.write_eof()
            await asyncio.sleep(0.1)
            while await reader.read(1 << 20):
                pass
        finally:
            writer.close()


@asynccontextmanager
async def closing() -> AsyncIterator[tuple[Closing, str]]:
    relay, listener = Closing(), socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    listener.bind(("127.0.0.1", 0))
    server = await asyncio.start_server(relay.serve, sock=listener, limit=1 << 16)
    async with server:
        yield relay, f"ws://127.0.0.1:{listener.getsockname()[1]}/strata"


async def test_a_connection_that_ended_amid_a_message_is_closed_as_any_other() -> None:
    async with closing() as (_, url):
        ended = await open_websocket(url, compression=None)
        sending = asyncio.create_task(ended.send(bytes(LARGE)))
        await ended.wait_closed()
        await asyncio.gather(sending, return_exceptions=True)
        assert sending.exception() is None or isinstance(sending.exception(), ConnectionClosed)
        with pytest.raises(ConnectionClosed):
            await ended.send(b"x")
        await ended.close()
        ended.transport.abort()
        ended.transport.close()
        assert ended.transport.is_closing() and ended.close_code == 1001
        await hang_up(ended, 1)


@pytest.mark.slow
@pytest.mark.req("R-339")
async def test_after_a_goodbye_amid_large_publishes_the_client_connects_again() -> None:
    options = strata.Options(backoff_base=0.01, backoff_cap=0.05, publish_timeout=60)
    packets = [sized(new_identity(), 250_000) for _ in range(LARGE // 250_000)]
    async with closing() as (relay, url), strata.connect(url, options=options) as client:
        publishing = [asyncio.create_task(client.publish(packet)) for packet in packets]
        await until(lambda: relay.served >= 4)
        assert not any(each.done() for each in publishing), "each waits for a relay that stays"
        for each in publishing:
            each.cancel()
        await asyncio.wait(publishing)
