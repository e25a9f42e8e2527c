"""The limits of this machine, each alone: signature checks, the log, socket writes, an echo, open sockets.

The socket limits are servers in their own process that do the least a relay could do: one writes prepared
pieces to every connection, one answers a PUBLISH with as many bytes as an OK has.
The load generator is the same `Peer` that is used against the relay.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final, cast

import psutil
import uvloop
from strata.protocol.ids import public_key_from_did
from strata.protocol.packets import Packet, verify_signature

from benches.load import client_frame, sign
from benches.peer import Peer, Publisher, connect_peers
from benches.processes import fork_context
from relayd.postgres import EmbeddedPostgres
from relayd.store import Store
from relayd.store.migrate import migrate
from relayd.store.types import LogQuery, NewPacket

__all__ = [
    "BareServer",
    "SignatureCost",
    "StoreCost",
    "bare_server",
    "bytes_per_socket",
    "echo_seconds",
    "round_trips",
    "signature_cost",
    "store_cost",
    "writes",
]

_ACCEPT: Final = b"HTTP/1.1 101 Switching Protocols\r\n\r\n"
_SIGNATURES: Final = 200
_SLICES: Final = 10
_APPEND_BATCH: Final = 100
_PAGE_ROWS: Final = 500
_HIGH_WATER: Final = 1 << 20
_OK_BYTES: Final = 190
"""About the size of an OK frame."""


@dataclass(frozen=True, slots=True)
class SignatureCost:
    """The cost of checking signatures when nothing else runs."""

    seconds: float
    """CPU seconds for one check, on one thread."""
    one_thread: float
    """Checks per second."""
    two_threads: float


def signature_cost(seconds: float) -> SignatureCost:
    """Check the signatures of packets of the usual size."""
    packets = sign(0, _SIGNATURES)
    keys = [cast(bytes, public_key_from_did(packet.author_id)) for packet in packets]
    _check_for(seconds / 10, packets, keys)
    # The cheapest slice: other work on the machine makes checks more expensive and would flatter the relay.
    slices = [_one_slice(seconds / _SLICES, packets, keys) for _ in range(_SLICES)]
    cost, one_rate = min(cost for cost, _ in slices), max(rate for _, rate in slices)
    counts: list[int] = []
    threads = [
        threading.Thread(target=lambda: counts.append(_check_for(seconds, packets, keys))) for _ in range(2)
    ]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return SignatureCost(cost, one_rate, sum(counts) / (time.perf_counter() - started))


def _one_slice(seconds: float, packets: list[Packet], keys: list[bytes]) -> tuple[float, float]:
    """CPU seconds of one check, and checks per second."""
    cpu, started = time.thread_time(), time.perf_counter()
    count = _check_for(seconds, packets, keys)
    return (time.thread_time() - cpu) / count, count / (time.perf_counter() - started)


def _check_for(seconds: float, packets: list[Packet], keys: list[bytes]) -> int:
    count = 0
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for packet, key in zip(packets, keys, strict=True):
            assert verify_signature(packet, key)
        count += len(packets)
    return count


@dataclass(frozen=True, slots=True)
class StoreCost:
    """The rates of the log when nothing else runs, in rows per second."""

    append: float
    """Batches of 100 over one connection, each committed."""
    page: float
    """Pages of 500 rows over one connection."""


async def store_cost(rows: int) -> StoreCost:
    """Append and read through the relay's own store, on a fresh embedded PostgreSQL."""
    folder = tempfile.mkdtemp(prefix="relayd-bench-")
    try:
        async with EmbeddedPostgres(folder) as server:
            await migrate(server.url)
            store = await Store.open(server.url, read_connections=1)
            try:
                await store.maintain(int(time.time()))
                return StoreCost(await _append(store, rows), await _pages(store, rows))
            finally:
                await store.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _append(store: Store, rows: int) -> float:
    model = sign(0, 1)[0]
    batches = [
        [
            NewPacket(
                packet_id=number.to_bytes(32, "little"),
                author_id=model.author_id,
                content_type=model.content_type,
                timestamp=model.timestamp,
                expires_at=None,
                body=model.canonical,
            )
            for number in range(first, first + _APPEND_BATCH)
        ]
        for first in range(0, rows, _APPEND_BATCH)
    ]
    now = int(time.time())
    started = time.perf_counter()
    for batch in batches:
        await store.append(batch, now)
    return sum(map(len, batches)) / (time.perf_counter() - started)


async def _pages(store: Store, rows: int) -> float:
    after = read = 0
    now = int(time.time())
    started = time.perf_counter()
    while read < rows:
        page = await store.page(LogQuery(after=after), _PAGE_ROWS, now)
        read += len(page.rows)
        after = page.rows[-1].sequence
    return read / (time.perf_counter() - started)


# Servers in their own process.


class _Raw(asyncio.Protocol):
    """Accepts any handshake, then hands data to `after`."""

    def __init__(self, opened: Callable[[_Raw], None], after: Callable[[_Raw, bytes], None]) -> None:
        self._opened = opened
        self._after = after
        self._accepted = False
        self.writable = asyncio.Event()
        self.writable.set()
        self.transport = cast(asyncio.Transport, None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=_HIGH_WATER)

    def data_received(self, data: bytes) -> None:
        if self._accepted:
            self._after(self, data)
        else:
            self._accepted = True
            self.transport.write(_ACCEPT)
            self._opened(self)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()


async def _write_server(pipe: Connection) -> None:
    """On `(pieces, piece)` through the pipe, write `piece` to every connection `pieces` times."""
    connections: list[_Raw] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: _Raw(connections.append, lambda connection, data: None), "127.0.0.1", 0, backlog=4096
    )
    pipe.send(server.sockets[0].getsockname()[1])
    while (order := await loop.run_in_executor(None, pipe.recv)) is not None:
        pieces, piece = order
        for _ in range(pieces):
            for connection in connections:
                if not connection.writable.is_set():
                    await connection.writable.wait()
                connection.transport.write(piece)
            await asyncio.sleep(0)
    server.close()


async def _echo_server(pipe: Connection) -> None:
    answer = b"\x81\x7e" + _OK_BYTES.to_bytes(2, "big") + b'{"type":"OK",'.ljust(_OK_BYTES, b" ")
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: _Raw(lambda connection: None, lambda connection, data: connection.transport.write(answer)),
        "127.0.0.1",
        0,
        backlog=4096,
    )
    pipe.send(server.sockets[0].getsockname()[1])
    await loop.run_in_executor(None, pipe.recv)
    server.close()


def _serve(echo: bool, pipe: Connection) -> None:
    uvloop.run(_echo_server(pipe) if echo else _write_server(pipe))


@dataclass(frozen=True, slots=True)
class BareServer:
    """A bare server process: its address and the pipe to it."""

    url: str
    pipe: Connection
    process: psutil.Process


@contextlib.asynccontextmanager
async def bare_server(*, echo: bool) -> AsyncIterator[BareServer]:
    """Run a bare server for the duration of the block."""
    context = fork_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(echo, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        port = await asyncio.to_thread(ours.recv)
        yield BareServer(f"ws://127.0.0.1:{port}/", ours, psutil.Process(process.pid))
    finally:
        with contextlib.suppress(BrokenPipeError):
            ours.send(None)
        await asyncio.to_thread(process.join, 10.0)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
        ours.close()


async def writes(connections: int, frame_bytes: int, frames_in_piece: int, seconds: float) -> float:
    """Frames per second that a bare server delivers to these connections, `frames_in_piece` in each write."""
    payload = b'{"type":"EVENT",'.ljust(frame_bytes - 4, b" ")
    piece = (b"\x81\x7e" + len(payload).to_bytes(2, "big") + payload) * frames_in_piece
    async with bare_server(echo=False) as server:
        peers = await connect_peers(server.url, connections)
        rate, due, pieces = 0.0, 0, 1
        # Double the work until it takes long enough to be reliable.
        while True:
            due += pieces * frames_in_piece
            started = time.perf_counter()
            done = [peer.expect(due) for peer in peers]
            server.pipe.send((pieces, piece))
            await asyncio.gather(*done)
            took = time.perf_counter() - started
            rate = pieces * frames_in_piece * connections / took
            if took >= seconds:
                break
            pieces = max(pieces * 2, int(pieces * seconds / took))
        for peer in peers:
            peer.close()
    return rate


async def echo_seconds(count: int) -> list[float]:
    """Round trips of a PUBLISH-sized frame and an OK-sized answer, ascending."""
    frame = client_frame(b"x" * 640)
    async with bare_server(echo=True) as server:
        [peer] = await connect_peers(server.url, 1, Publisher)
        times = await round_trips(peer, [frame] * count)
        peer.close()
    return times


async def round_trips(peer: Peer, frames: list[bytes]) -> list[float]:
    """Send each frame after the answer to the one before; return the times, ascending."""
    times: list[float] = []
    for frame in frames:
        done = peer.expect(peer.total + 1)
        started = time.perf_counter()
        peer.send(frame)
        await done
        times.append(time.perf_counter() - started)
    return sorted(times)


async def bytes_per_socket(connections: int) -> float:
    """Memory of a bare server per open connection."""
    async with bare_server(echo=True) as server:
        peers = await connect_peers(server.url, 100)
        before = server.process.memory_info().rss
        peers += await connect_peers(server.url, connections)
        used: int = server.process.memory_info().rss - before
        for peer in peers:
            peer.close()
    return used / connections
