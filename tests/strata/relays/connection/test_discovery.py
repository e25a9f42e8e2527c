"""The manifest: a few valid answers; every invalid one means a plain relay."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from strata.relays.connection.discovery import discover
from strata.relays.connection.values import Announced

BODY = b'{"extensions":["gapless","new"],"limits":{"max_packet_bytes":1000},"x":1}'
KNOWN = Announced(frozenset({"gapless", "new"}), 1000)


@contextlib.asynccontextmanager
async def server(answer: bytes, *, hold: bool = False):
    asked = []
    release = asyncio.Event()

    async def handle(reader, writer):
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            if hold:
                await release.wait()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    serving = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with serving:
        yield f"ws://127.0.0.1:{serving.sockets[0].getsockname()[1]}/strata", asked
        release.set()


@pytest.mark.req("R-139")
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
        b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n"
        + BODY[:5]
        + b"\r\n%x;a=b\r\n" % (len(BODY) - 5)
        + BODY[5:]
        + b"\r\n0\r\n\r\n",
    ],
    ids=["length", "close", "chunked"],
)
async def test_the_manifest_is_read(answer):
    async with server(answer) as (url, asked):
        assert await discover(url, ssl=None, timeout=5) == KNOWN
    assert asked[0].startswith(b"GET /.well-known/strata-relay.json HTTP/1.1\r\nHost: 127.0.0.1:")


@pytest.mark.req("R-138", "R-004")
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 300_000 + b"{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n[]",
        b'HTTP/1.1 200 OK\r\n\r\n{"extensions":7}',
        b"HTTP/1.1 200 OK\r\n\r\n\xff",
        b"x" * 100_000,
        b"",
    ],
)
async def test_anything_else_means_a_plain_relay(answer):
    async with server(answer) as (url, _):
        assert await discover(url, ssl=None, timeout=5) == Announced()


async def test_a_relay_that_does_not_answer_is_not_waited_for():
    async with server(b"", hold=True) as (url, _):
        assert await discover(url, ssl=None, timeout=0.05) == Announced()


async def test_nothing_there_is_a_plain_relay(unused_tcp_port):
    assert await discover(f"ws://127.0.0.1:{unused_tcp_port}/", ssl=None, timeout=5) == Announced()
