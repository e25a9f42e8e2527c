"""Readers that stop, sockets that go silent, and what they must not cost others (R-130, R-170)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from strata.protocol.packets import Packet

from tests.support.bare_client import open_client
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess, running
from tests.support.waiting import wait_until

MIB = 2**20
SUBSCRIPTIONS = int(os.environ.get("RELAYD_TEST_SUBSCRIPTIONS", "40000"))
PICKED = 27
"""The session that receives a packet."""
HANDSHAKE = (
    "GET /strata HTTP/1.1\r\nHost: relay\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def text_frame(text: str) -> bytes:
    """A text frame as a client sends it, masked with zeros."""
    data = text.encode()
    length = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack("!H", len(data))
    return b"\x81" + length + bytes(4) + data


class SlowReader:
    """A raw socket with a small receive buffer that reads on request, and answers no ping."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, text: str) -> None:
        self.writer.write(text_frame(text))
        await self.writer.drain()

    async def frame(self) -> tuple[int, bytes]:
        """The next frame's opcode and payload. Raises `IncompleteReadError` at the end."""
        async with asyncio.timeout(20):
            first, length = await self.reader.readexactly(2)
            if length == 126:
                (length,) = struct.unpack("!H", await self.reader.readexactly(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", await self.reader.readexactly(8))
            return first & 0x0F, await self.reader.readexactly(length)

    async def event(self) -> dict[str, Any]:
        """The next message; pings are skipped."""
        while True:
            opcode, data = await self.frame()
            if opcode == 0x1:
                message: dict[str, Any] = json.loads(data)
                return message

    def hurry(self) -> None:
        """Read as quickly as others from now on."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB)

    async def close_code(self) -> int | None:
        """Read to the end; returns the code of the close frame, or None if the socket just ended."""
        with_code = None
        try:
            while True:
                opcode, data = await self.frame()
                if opcode == 0x8:
                    (with_code,) = struct.unpack("!H", data[:2])
        except (asyncio.IncompleteReadError, ConnectionError):
            return with_code


@asynccontextmanager
async def slow_reader(relay: RelayProcess) -> AsyncIterator[SlowReader]:
    host, port = relay.http.removeprefix("http://").split(":")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=raw, limit=4096)
    try:
        writer.write(HANDSHAKE.encode())
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        slow = SlowReader(reader, writer)
        _, challenge = await slow.frame()
        assert b"AUTH_CHALLENGE" in challenge
        yield slow
    finally:
        writer.transport.abort()


async def until_metric(relay: RelayProcess, name: str, value: float, timeout: float = 20.0) -> None:
    pause, found = 0.01, None
    async with asyncio.timeout(timeout):
        while found != value:
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, 0.5)  # asking does not prolong a long wait
            with contextlib.suppress(OSError):  # a busy relay may not answer in time
                found = await asyncio.to_thread(relay.metric, name)


def subscribe(author: str, **members: object) -> str:
    return json.dumps(
        {"type": "SUBSCRIBE", "subscription_id": "s", "filters": {"authors": [author]}, **members}
    )


@pytest.mark.req("R-170", "R-167")
@pytest.mark.parametrize("options", [{}, {"gapless": True}])
async def test_a_stalled_reader_costs_bounded_memory_and_gets_everything_once(tmp_path: Path, options):
    identity = new_identity()
    with running(RelayProcess(tmp_path, outbound_queue_bytes=256 * 1024)) as relay:
        async with (
            slow_reader(relay) as stalled,
            open_client(relay.ws) as client,
            open_client(relay.ws) as other,
        ):
            await stalled.send(subscribe(identity.did, **options))
            await other.subscribe("s", {"authors": [identity.did], "limit": 0})
            await client.barrier()
            await until_metric(relay, "relayd_subscriptions_behind", 0)
            packets: list[Packet] = []
            for burst in range(24):  # 48 MiB in all
                made = [make(identity, "x" * 32_000, n=burst * 64 + n) for n in range(64)]
                assert {answer["type"] for answer in await client.publish_all(made)} == {"OK"}
                packets += made
                # The other subscriber is not delayed: it has its events before the next burst.
                assert ids_of(await other.events("s", 64)) == [p.packet_id for p in made]
                if burst == 1:
                    rss = relay.rss()
            assert relay.metric("relayd_subscriptions_behind") == 1
            assert relay.rss() - rss < 20 * MIB
            stalled.hurry()
            got: list[str] = []
            while len(got) < len(packets):
                got.append((await stalled.event())["packet"]["packet_id"])
            assert got == [packet.packet_id for packet in packets]
            # Having caught up, it is live again.
            await until_metric(relay, "relayd_subscriptions_behind", 0)
            last = make(identity, "last")
            await client.publish(last)
            assert (await stalled.event())["packet"]["packet_id"] == last.packet_id
        assert not relay.complaints()


@pytest.mark.req("R-170")
async def test_a_reader_that_takes_nothing_is_closed_with_1013_and_counted(tmp_path: Path):
    identity = new_identity()
    with running(RelayProcess(tmp_path, outbound_queue_bytes=64 * 1024, slow_consumer_timeout=1)) as relay:
        async with slow_reader(relay) as stalled, open_client(relay.ws) as client:
            await stalled.send(subscribe(identity.did))
            made = [make(identity, "x" * 60_000, n=n) for n in range(120)]
            await client.publish_all(made)
            await until_metric(relay, "relayd_slow_consumers_closed_total", 1)
            assert await stalled.close_code() in (1013, None)  # None: not even the close frame fitted in time
            await until_metric(relay, "relayd_connections", 1)  # the client
            await until_metric(relay, "relayd_subscriptions", 0)
            assert relay.metric("relayd_connections_closed_total", reason="slow_consumer") == 1
            await client.barrier()


@pytest.mark.req("R-130")
async def test_a_half_open_socket_is_found_by_pings(tmp_path: Path):
    with running(RelayProcess(tmp_path, ping_interval=0.3, ping_misses=2)) as relay:
        async with slow_reader(relay) as silent, open_client(relay.ws) as alive:
            await silent.send(subscribe("did:strata:zNobody"))
            await until_metric(relay, "relayd_subscriptions", 1)
            await until_metric(relay, "relayd_subscriptions", 0)
            assert await silent.close_code() is None
            assert relay.metric("relayd_connections_closed_total", reason="ping_timeout") == 1
            await alive.barrier()  # it answered every ping


@pytest.mark.req("R-130")
async def test_a_handshake_that_never_comes_is_cut_off(tmp_path: Path):
    with running(RelayProcess(tmp_path, handshake_timeout=0.5)) as relay:
        host, port = relay.http.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /strata HTTP/1.1\r\nHost: x")
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
        wait_until(
            lambda: relay.metric("relayd_connections_closed_total", reason="handshake") == 1, "the count"
        )


@pytest.mark.timeout(900)
@pytest.mark.req("R-179")
async def test_tens_of_thousands_of_subscriptions_come_and_go(tmp_path: Path):
    each = 1000
    sessions = SUBSCRIPTIONS // each
    # No reader answers a ping, and a busy machine takes minutes.
    with running(RelayProcess(tmp_path, max_subscriptions=each, ping_interval=300)) as relay:
        before = relay.rss()
        async with AsyncExitStack() as stack:
            readers = [await stack.enter_async_context(slow_reader(relay)) for _ in range(sessions)]
            client = await stack.enter_async_context(open_client(relay.ws))
            started = asyncio.get_running_loop().time()
            for number, reader in enumerate(readers):
                reader.writer.writelines(
                    text_frame(
                        f'{{"type":"SUBSCRIBE","subscription_id":"s{index}",'
                        f'"filters":{{"types":["T{number * each + index}"],"limit":0}}}}'
                    )
                    for index in range(each)
                )
            await until_metric(relay, "relayd_subscriptions", sessions * each, timeout=300)
            await until_metric(relay, "relayd_subscriptions_behind", 0, timeout=300)
            took = asyncio.get_running_loop().time() - started
            grown = relay.rss() - before
            print(f"{sessions * each} subscriptions: {took:.1f} s, {grown / sessions / each:.0f} bytes each")
            assert grown < sessions * each * 4096
            packet = make(new_identity(), type=f"T{PICKED * each + 777}")
            assert (await client.publish(packet))["type"] == "OK"
            while (event := await readers[PICKED].event())["type"] != "EVENT":
                assert event["type"] == "CHALLENGE", "which comes again after two minutes"
            assert (event["subscription_id"], event["packet"]["packet_id"]) == ("s777", packet.packet_id)
        await until_metric(relay, "relayd_subscriptions", 0)
        await until_metric(relay, "relayd_connections", 0)
