"""A hostile connection that returns whenever it is thrown out, and a gang of them on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import random
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast
from urllib.parse import urlsplit

import msgspec
from strata.protocol.errors import InvalidMessage
from strata.protocol.ids import Identity
from strata.protocol.wire import AuthChallenge, decode_relay_message

from benches.load import client_frame

__all__ = ["Attack", "Attacker", "Gang", "Ledger", "ThrownOut", "frame", "stranger"]

_OPEN_TIMEOUT: Final = 30.0
_ANSWER_TIMEOUT: Final = 5.0


class ThrownOut(Exception):
    """The relay has ended the connection, or has not answered."""


@dataclass(slots=True)
class Ledger:
    """What a gang has done so far, by kind of attack."""

    deeds: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    """Pieces of data that the relay sent after the handshake, and connections that it ended."""
    sent_bytes: int = 0
    opened: int = 0
    """Connections opened, or attempted."""


def frame(message: Mapping[str, Any]) -> bytes:
    """The frame that carries a message."""
    return client_frame(msgspec.json.encode(message))


def stranger() -> Identity:
    """A new identity."""
    return Identity(os.urandom(32))


class _Socket(asyncio.Protocol):
    """A socket that keeps the first piece of data that it gets, and counts the rest."""

    def __init__(self, answered: Callable[[], None]) -> None:
        self.transport = cast(asyncio.Transport, None)
        self.accepted: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.heard = asyncio.Event()
        self._answered = answered
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.accepted.done():
            self._hear()
            return
        self._head += data
        head, mark, rest = self._head.partition(b"\r\n\r\n")
        if mark and not head.startswith(b"HTTP/1.1 101"):
            self._hear()
            self.accepted.set_exception(ThrownOut)
        elif mark and rest:  # the challenge comes with the handshake, in one piece
            self.accepted.set_result(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._hear()
        if not self.accepted.done():
            self.accepted.set_exception(ThrownOut)
        if not self.accepted.cancelled():
            self.accepted.exception()  # marks it as retrieved, whether or not anybody waits

    def _hear(self) -> None:
        self._answered()
        self.heard.set()


class Attacker:
    """One hostile connection that is opened again and again."""

    def __init__(self, url: str, source: str | None, interval: float, ledger: Ledger) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None
        self.path = parts.path
        self._tls = parts.scheme == "wss"
        self._host = parts.netloc
        self._address = (parts.hostname, parts.port)
        self.source = source
        """The address of this machine that it comes from; None for any."""
        self._interval = interval
        self._ledger = ledger
        self._kind = ""
        self._socket: _Socket | None = None
        self._leaving = False
        self.memory: dict[str, Any] = {}
        """Whatever it needs to know when it returns."""
        self.server_id = ""
        """The id that the relay gave when the last WebSocket was opened."""

    @property
    def is_open(self) -> bool:
        """Whether the connection is open at the moment."""
        return self._socket is not None and not self._socket.transport.is_closing()

    async def run(self, kind: str, attack: Attack) -> None:
        """Attack, and again whenever the attack ends. Ends when cancelled."""
        self._kind = kind
        await asyncio.sleep(random.uniform(0, self._interval))
        while True:
            try:
                with contextlib.suppress(ThrownOut, OSError):
                    await attack(self)
            finally:
                self._leave()
            await self.rest()

    async def rest(self) -> None:
        """Wait until the next deed is due. The time varies, so that crowds do not act in step."""
        await asyncio.sleep(self._interval * random.uniform(0.5, 1.5))

    async def connect(self, *, tls: bool = True) -> None:
        """Open a socket and send nothing; with `tls`, make the TLS handshake if the relay has TLS."""
        self._leave()
        self._leaving = False
        self._ledger.opened += 1
        _, self._socket = await asyncio.get_running_loop().create_connection(
            lambda: _Socket(self._heard),
            *self._address,
            ssl=_trusting() if self._tls and tls else None,
            local_addr=None if self.source is None else (self.source, 0),
        )

    def request(self, path: str | None = None, *headers: str) -> bytes:
        """A complete GET; without a path, the opening handshake of a WebSocket."""
        if path is None:
            path, headers = self.path, (*_UPGRADE, *headers)
        lines = (f"GET {path} HTTP/1.1", f"Host: {self._host}", *headers, "", "")
        return "\r\n".join(lines).encode()

    async def open(self, *headers: str) -> str:
        """Open a WebSocket; return the challenge that comes with the handshake."""
        await self.connect()
        assert self._socket is not None
        self._write(self.request(None, *headers))
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT):
                challenge = _challenge_in(await self._socket.accepted)
        except TimeoutError:
            raise ThrownOut from None
        self.server_id = challenge.server_id
        return challenge.challenge

    async def get(self, path: str, *headers: str) -> None:
        """Do one deed: a GET on a new socket. Returns with the first piece of the answer."""
        await self.connect()
        self.do(self.request(path, *headers))
        await self.hear()

    def do(self, data: bytes) -> None:
        """Do one deed: write these bytes. Raises `ThrownOut`."""
        self._write(data)
        self.count()

    def prepare(self, data: bytes) -> None:
        """Write bytes that prepare deeds and do not count as one. Raises `ThrownOut`."""
        self._write(data)

    def count(self) -> None:
        """Count a deed."""
        self._ledger.deeds[self._kind] += 1

    async def hear(self) -> None:
        """Wait a short time until the relay sends something. Raises `ThrownOut` if it does not."""
        assert self._socket is not None
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT):
                await self._socket.heard.wait()
        except TimeoutError:
            raise ThrownOut from None
        self._socket.heard.clear()

    def turn_deaf(self) -> None:
        """Stop reading from this socket."""
        assert self._socket is not None
        self._socket.transport.pause_reading()

    def _write(self, data: bytes) -> None:
        if not self.is_open:
            raise ThrownOut
        assert self._socket is not None
        self._socket.transport.write(data)
        self._ledger.sent_bytes += len(data)

    def _heard(self) -> None:
        if not self._leaving:
            self._ledger.answers[self._kind] += 1

    def _leave(self) -> None:
        self._leaving = True
        if self._socket is not None:
            self._socket.transport.abort()
            self._socket = None


Attack = Callable[[Attacker], Awaitable[None]]
"""The behaviour of a connection from its opening to its end. It ends early with `ThrownOut` or `OSError`."""


class Gang:
    """Attackers of several kinds on this event loop, as a context manager that ends them."""

    def __init__(
        self,
        url: str,
        attacks: Mapping[str, Attack],
        count: int,
        interval: float,
        sources: Sequence[str | None] = (None,),
    ) -> None:
        self.ledger = Ledger()
        self._attackers = [
            Attacker(url, sources[number % len(sources)], interval, self.ledger) for number in range(count)
        ]
        self._kinds: Iterator[tuple[str, Attack]] = itertools.cycle(attacks.items())
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def open(self) -> int:
        """The number of connections that are open at the moment."""
        return sum(attacker.is_open for attacker in self._attackers)

    async def __aenter__(self) -> Gang:
        for number, attacker in enumerate(self._attackers):
            run = attacker.run(*next(self._kinds))
            self._tasks.append(asyncio.create_task(run, name=f"attacker-{number}"))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


_UPGRADE: Final = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
)


@functools.cache
def _trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _challenge_in(data: bytes) -> AuthChallenge:
    """The AUTH_CHALLENGE in the first frame of a relay. Raises `ThrownOut` if it is incomplete."""
    start = 4 if data[1] == 126 else 2
    try:
        message = decode_relay_message(data[start:])
    except InvalidMessage:  # it came in pieces: try again with the next connection
        raise ThrownOut from None
    assert isinstance(message, AuthChallenge)
    return message
