"""Our channels as contestants: between processes, with bytes and with typed messages, and within one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import uvloop
from strata.txrx import Tx, dial, serve, serve_local

from benches.tx_rx_runs import AsyncLink, Contestant, Sent

__all__ = ["READING", "Ours", "OursTyped", "local_channel_rate", "queue_rate"]

_SCHEMES = {"tcp": "tcp:127.0.0.1:0", "tls": "metatls:127.0.0.1:0"}
_LOCAL_BATCH = 1000


class Ours(Contestant):
    """A channel of bytes. The sender posts, and drains now and then."""

    def receive(self, ready: Callable[[str], None]) -> tuple[int, int]:
        return uvloop.run(self._receive(ready))

    def send(self, where: str) -> Sent:
        return uvloop.run(self._send(where))

    @property
    def _address(self) -> str:
        return _SCHEMES.get(self.job.transport, f"unix:{self.job.socket_path}")

    async def _receive(self, ready: Callable[[str], None]) -> tuple[int, int]:
        address, rx = await serve(self._address, bytes, settings=self.job.settings)
        async with rx:
            ready(str(address))
            count = size = 0
            while message := await rx.recv():
                count += 1
                size += len(message)
            return count, size

    async def _send(self, where: str) -> Sent:
        async with await dial(where, bytes, settings=self.job.settings) as tx:
            sent = await _Link(tx, self.job.payload).carry_out(self.job)
            await tx.send(b"")
            return sent


class _Link(AsyncLink):
    def __init__(self, tx: Tx[Any], message: Any) -> None:
        self._tx = tx
        self._message = message

    async def write(self, count: int) -> None:
        tx, message = self._tx, self._message
        for _ in range(count):
            tx.post(message)

    async def drain(self, most: int) -> None:
        await self._tx.drain(most)

    async def send(self) -> None:
        await self._tx.send(self._message)


class Reading(msgspec.Struct):
    """A typed message."""

    sensor: str
    taken_at: float
    celsius: float
    number: int


READING = Reading("cellar, wall", 1.7e9, 21.5, 1)


class OursTyped(Ours):
    """A channel of a Struct that has 64 bytes on the wire and is checked at both ends."""

    async def _receive(self, ready: Callable[[str], None]) -> tuple[int, int]:
        address, rx = await serve(self._address, Reading, settings=self.job.settings)
        async with rx:
            ready(str(address))
            count = 0
            while (await rx.recv()).number:
                count += 1
            return count, count * self.job.size

    async def _send(self, where: str) -> Sent:
        async with await dial(where, Reading, settings=self.job.settings) as tx:
            sent = await _Link(tx, READING).carry_out(self.job)
            await tx.send(Reading("", 0.0, 0.0, 0))
            return sent


def local_channel_rate(size: int, seconds: float) -> float:
    """Messages per second through a local channel."""

    async def measure() -> float:
        _, rx = serve_local(bytes)
        tx = await dial(rx.addr(), bytes)
        async with rx, tx:
            return await _local_rate(tx.post, rx.recv, b"x" * size, seconds)

    return uvloop.run(measure())


def queue_rate(size: int, seconds: float) -> float:
    """Messages per second through an `asyncio.Queue`."""

    async def measure() -> float:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        return await _local_rate(queue.put_nowait, queue.get, b"x" * size, seconds)

    return uvloop.run(measure())


async def _local_rate(
    put: Callable[[bytes], None], get: Callable[[], Awaitable[bytes]], message: bytes, seconds: float
) -> float:
    """One task puts, another takes; they take turns after each batch."""

    async def take() -> int:
        count = 0
        while await get():
            count += 1
        return count

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        taking = tasks.create_task(take())
        filled = 0
        while time.perf_counter() < started + seconds:
            for _ in range(_LOCAL_BATCH):
                put(message)
            filled += _LOCAL_BATCH
            await asyncio.sleep(0)
        put(b"")
    assert taking.result() == filled
    return filled / (time.perf_counter() - started)
