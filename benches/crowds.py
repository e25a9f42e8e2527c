"""Connections that nobody invited, in processes of their own: idle ones, and hostile ones of seven kinds.

They come from loopback addresses of their own, which Linux alone lets anybody bind; so the relay's limits by
address hold for them, while the honest on 127.0.0.1 share no budget with them. A hostile connection acts once
in an interval; one that the relay has thrown out comes again after the same interval.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final, cast
from urllib.parse import urlsplit

import uvloop
from strata.protocol.errors import InvalidMessage
from strata.protocol.ids import Identity
from strata.protocol.wire import Auth, AuthChallenge, Filters, Subscribe, decode_relay_message, encode

from benches.load import client_frame, publish_frame, sign
from benches.peer import BenchError, connect_peers
from benches.processes import fork_context

__all__ = ["KINDS", "Crowd", "CrowdReport", "hostile_crowd", "idle_crowd"]

_READY_TIMEOUT: Final = 120.0
_STOP_TIMEOUT: Final = 30.0
_OPEN_TIMEOUT: Final = 30.0
_ADDRESSES: Final = 50
_IDLE_NETWORK, _HOSTILE_NETWORK = 1, 2
_BAD_PACKETS: Final = 64
_NOBODY: Final = Identity(b"\x5a" * 32)
_OVERSIZED_BYTES: Final = 2**27
_CHUNK_BYTES: Final = 2**16

_Message = tuple[int, float, dict[str, int]]


@dataclass(frozen=True, slots=True)
class CrowdReport:
    """What a crowd did until now: connections open, CPU seconds used, and its deeds by kind."""

    open: int
    cpu: float
    deeds: dict[str, int]


class Crowd:
    """A crowd in a process of its own. Times out with `BenchError` when that does not answer."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    async def report(self) -> CrowdReport:
        """How it stands with them."""
        self._pipe.send("report")
        return CrowdReport(*await _receive(self._pipe, _STOP_TIMEOUT))


@contextlib.asynccontextmanager
async def idle_crowd(url: str, count: int) -> AsyncIterator[Crowd]:
    """So many connections that answer pings and do nothing else; all are open when the block begins."""
    async with _crowd(functools.partial(_stand_idle, url, count)) as crowd:
        yield crowd


@contextlib.asynccontextmanager
async def hostile_crowd(url: str, count: int, interval: float) -> AsyncIterator[Crowd]:
    """So many connections of all kinds in turn, each with a deed every `interval` seconds."""
    async with _crowd(functools.partial(_be_hostile, url, count, interval)) as crowd:
        yield crowd


@contextlib.asynccontextmanager
async def _crowd(work: Callable[[Connection], Awaitable[None]]) -> AsyncIterator[Crowd]:
    context = fork_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(work, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        await _receive(ours, _READY_TIMEOUT)
        yield Crowd(ours)
    finally:
        with contextlib.suppress(BrokenPipeError):
            ours.send(None)
        await asyncio.to_thread(process.join, _STOP_TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
        ours.close()


async def _receive(pipe: Connection, timeout: float) -> _Message:
    try:
        if not await asyncio.to_thread(pipe.poll, timeout):
            raise BenchError("a crowd of connections does not answer")
        message: _Message = pipe.recv()
    except EOFError:
        raise BenchError("a crowd of connections has died; its last words are on stderr") from None
    return message


# In the crowd's process.


def _run(work: Callable[[Connection], Awaitable[None]], pipe: Connection) -> None:
    async def main() -> None:
        await work(pipe)

    uvloop.run(main())


async def _answer_reports(pipe: Connection, count_open: Callable[[], int], deeds: Counter[str]) -> None:
    """Say that all are there, then how it stands whenever asked, until told to stop."""
    loop = asyncio.get_running_loop()
    pipe.send((count_open(), time.process_time(), dict(deeds)))
    while await loop.run_in_executor(None, pipe.recv) is not None:
        pipe.send((count_open(), time.process_time(), dict(deeds)))


async def _stand_idle(url: str, count: int, pipe: Connection) -> None:
    peers = await connect_peers(url, count, sources=_sources(_IDLE_NETWORK))
    await _answer_reports(pipe, lambda: sum(not peer.transport.is_closing() for peer in peers), Counter())


async def _be_hostile(url: str, count: int, interval: float, pipe: Connection) -> None:
    deeds: Counter[str] = Counter()
    sources = _sources(_HOSTILE_NETWORK)
    ammunition = _Ammunition.make()
    attackers = [
        _Attacker(url, sources[number % len(sources)], interval, ammunition, deeds) for number in range(count)
    ]
    kinds = list(KINDS.items())
    tasks = [
        asyncio.create_task(attacker.run(*kinds[number % len(kinds)]), name=f"attacker-{number}")
        for number, attacker in enumerate(attackers)
    ]
    try:
        await _answer_reports(pipe, lambda: sum(attacker.is_open for attacker in attackers), deeds)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _sources(network: int) -> list[str]:
    return [f"127.0.{network}.{host}" for host in range(1, _ADDRESSES + 1)]


class _ThrownOut(Exception):
    """The relay has ended the connection."""


class _Socket(asyncio.Protocol):
    """A socket that keeps the first piece of what it gets, and throws the rest away."""

    def __init__(self) -> None:
        self.transport = cast(asyncio.Transport, None)
        self.accepted: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.accepted.done():
            return
        self._head += data
        head, mark, rest = self._head.partition(b"\r\n\r\n")
        if mark and not head.startswith(b"HTTP/1.1 101"):
            self.accepted.set_exception(_ThrownOut)
        elif mark and rest:  # the challenge comes with the handshake, in one piece
            self.accepted.set_result(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(_ThrownOut)
        if not self.accepted.cancelled():
            self.accepted.exception()  # seen, whether anybody waits or not


@dataclass(frozen=True, slots=True)
class _Ammunition:
    """Frames made beforehand."""

    garbage: bytes
    bad_signatures: list[bytes]
    oversized: bytes

    @classmethod
    def make(cls) -> _Ammunition:
        bad = []
        for packet in sign(0, _BAD_PACKETS):
            other = "1" if packet.signature[2] == "0" else "0"
            signature = f"0x{other}{packet.signature[3:]}"
            bad.append(publish_frame(packet.canonical.replace(packet.signature.encode(), signature.encode())))
        header = b"\x81\xff" + _OVERSIZED_BYTES.to_bytes(8, "big") + bytes(4)
        garbage = client_frame(b'{"type":"PUBLISH","packet":' + b"[" * 400)
        return cls(garbage, bad, header + bytes(_CHUNK_BYTES))


class _Attacker:
    """One hostile connection, again and again."""

    def __init__(
        self, url: str, source: str, interval: float, ammunition: _Ammunition, deeds: Counter[str]
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self.ammunition = ammunition
        self._address = (parts.hostname, parts.port)
        self._source = source
        self._interval = interval
        self._deeds = deeds
        self._kind = ""
        self._socket: _Socket | None = None
        self.upgrade = (
            f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            "Sec-WebSocket-Version: 13\r\n\r\n"
        ).encode()
        """A whole opening handshake."""

    @property
    def is_open(self) -> bool:
        """Whether the relay bears with it at the moment."""
        return self._socket is not None and not self._socket.transport.is_closing()

    async def run(self, kind: str, attack: _Attack) -> None:
        """Attack, and when thrown out, again. Ends by being cancelled."""
        self._kind = kind
        await asyncio.sleep(random.uniform(0, self._interval))
        while True:
            with contextlib.suppress(_ThrownOut, OSError):
                await attack(self)
            if self._socket is not None:
                self._socket.transport.abort()
            await self.rest()

    async def rest(self) -> None:
        """Wait for the next deed's time. Varied, so that crowds do not act in step."""
        await asyncio.sleep(self._interval * random.uniform(0.5, 1.5))

    async def connect(self) -> None:
        """Open a socket and say nothing."""
        self._socket = None
        _, self._socket = await asyncio.get_running_loop().create_connection(
            _Socket, *self._address, local_addr=(self._source, 0)
        )

    async def open(self) -> bytes:
        """Open a WebSocket; return what came with the handshake."""
        await self.connect()
        assert self._socket is not None
        self._socket.transport.write(self.upgrade)
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT):
                return await self._socket.accepted
        except TimeoutError:
            raise _ThrownOut from None

    def do(self, data: bytes) -> None:
        """One deed: write these bytes. Raises `_ThrownOut`."""
        if self._socket is None or self._socket.transport.is_closing():
            raise _ThrownOut
        self._socket.transport.write(data)
        self.count()

    def count(self) -> None:
        """A deed was done."""
        self._deeds[self._kind] += 1


_Attack = Callable[[_Attacker], Awaitable[None]]


async def _slow_handshake(attacker: _Attacker) -> None:
    """One byte of the handshake after another, and never the last."""
    await attacker.connect()
    for byte in attacker.upgrade[:-1]:
        attacker.do(bytes([byte]))
        await attacker.rest()


async def _garbage(attacker: _Attacker) -> None:
    await attacker.open()
    while True:
        attacker.do(attacker.ammunition.garbage)
        await attacker.rest()


async def _bad_signatures(attacker: _Attacker) -> None:
    await attacker.open()
    while True:
        attacker.do(random.choice(attacker.ammunition.bad_signatures))
        await attacker.rest()


async def _auth_flood(attacker: _Attacker) -> None:
    """The first AUTH answers the challenge with a wrong signature, the rest name it again."""
    challenge = _challenge_in(await attacker.open())
    message = Auth(author_id=_NOBODY.did, challenge=challenge, signature="0x" + "5a" * 64)
    while True:
        attacker.do(client_frame(encode(message)))
        await attacker.rest()


async def _oversized(attacker: _Attacker) -> None:
    await attacker.open()
    attacker.do(attacker.ammunition.oversized)
    await attacker.rest()


async def _subscription_flood(attacker: _Attacker) -> None:
    """A new subscription each time, with a page of history."""
    await attacker.open()
    for number in range(10_000):
        message = Subscribe(subscription_id=f"flood-{number}", filters=Filters(limit=100))
        attacker.do(client_frame(encode(message)))
        await attacker.rest()


async def _churn(attacker: _Attacker) -> None:
    await attacker.open()
    attacker.count()


KINDS: Final[dict[str, _Attack]] = {
    "slow handshakes": _slow_handshake,
    "garbage": _garbage,
    "bad signatures": _bad_signatures,
    "AUTH flood": _auth_flood,
    "oversized frames": _oversized,
    "subscription flood": _subscription_flood,
    "churn": _churn,
}
"""Every kind of hostile connection."""


def _challenge_in(frame: bytes) -> str:
    """What the first frame of a relay wants signed."""
    start = 4 if frame[1] == 126 else 2
    try:
        message = decode_relay_message(frame[start:])
    except InvalidMessage:  # it came in pieces: better luck next time
        raise _ThrownOut from None
    assert isinstance(message, AuthChallenge)
    return message.challenge
