"""A WebSocket client that counts what it gets and does nothing else.

Frames are walked by their headers in one buffer that all peers share; of a payload, only the byte that
distinguishes OK, EVENT and ERROR is read. A witness keeps its bytes, so that every message can be decoded and
compared after the clock has stopped.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Sequence
from typing import Final, cast
from urllib.parse import urlsplit

from strata.protocol.wire import (
    AuthChallenge,
    EndOfHistory,
    Error,
    Event,
    Ok,
    RelayMessage,
    decode_relay_message,
)

__all__ = ["BenchError", "Peer", "Publisher", "connect_peers", "messages"]

_BUFFER: Final = bytearray(1 << 18)
_VIEW: Final = memoryview(_BUFFER)
_KIND: Final = 10
"""Where the payloads `{"type":"OK"`, `…"EVENT"`, `…"ERROR"`, `…"END_…"` and `…"AUTH_…"` differ."""
_LEAST: Final = 4 + _KIND + 1
_OPEN_TIMEOUT: Final = 30.0
_PONG: Final = b"\x8a\x80\0\0\0\0"


class BenchError(Exception):
    """The relay did something that makes the measurement void."""


class Peer(asyncio.BufferedProtocol):
    """One connection. It counts messages, and `expect` reports when there are enough."""

    def __init__(self, path: str, host: str, *, witness: bool = False) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events = 0
        self.oks = 0
        self.markers = 0
        self.kept: list[bytes] = []
        self.witness = witness
        self.transport = cast(asyncio.Transport, None)
        self._request = (path, host)
        self._done: asyncio.Future[None] | None = None
        self._marker: asyncio.Future[None] | None = None
        self._wanted = 0
        self._handshake = b""
        self._carry = b""
        self._skip = 0

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        path, host = self._request
        key = base64.b64encode(os.urandom(16)).decode()
        self.transport.write(
            f"GET {path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )

    def get_buffer(self, sizehint: int) -> memoryview:
        carry = self._carry
        if carry:
            _BUFFER[: len(carry)] = carry
        return _VIEW[len(carry) :]

    def buffer_updated(self, nbytes: int) -> None:
        end = len(self._carry) + nbytes
        if self.witness:
            self.kept.append(bytes(_VIEW[len(self._carry) : end]))
        self._carry = b""
        if not self.opened.done():
            end = self._read_handshake(end)
        self._walk(end)
        self.counted()

    def connection_lost(self, exc: Exception | None) -> None:
        lost = BenchError(f"the relay closed a connection ({exc or 'end of stream'})")
        for future in (self.opened, self._done, self._marker):
            if future is not None and not future.done():
                future.set_exception(lost)

    # For benchmarks.

    def send(self, frame: bytes) -> None:
        """Write a frame made by `client_frame`."""
        self.transport.write(frame)

    def expect(self, count: int) -> asyncio.Future[None]:
        """A future, done when `total` is `count`; it fails if `total` exceeds it or the connection ends."""
        self._wanted = count
        self._done = asyncio.get_running_loop().create_future()
        self.counted()
        return self._done

    def next_marker(self) -> asyncio.Future[None]:
        """A future that is done at the next END_OF_HISTORY, however many events come before it."""
        self._marker = asyncio.get_running_loop().create_future()
        return self._marker

    @property
    def total(self) -> int:
        """The number that `expect` waits for."""
        return self.events + self.markers

    def counted(self) -> None:
        """Complete the future of `expect` if it is reached. Called after every read."""
        done = self._done
        if done is not None and self.total >= self._wanted and not done.done():
            if self.total > self._wanted:
                done.set_exception(BenchError(f"{self.total} messages where {self._wanted} were due"))
            else:
                done.set_result(None)

    def close(self) -> None:
        """Drop the connection."""
        self.transport.abort()

    # Frames.

    def _read_handshake(self, end: int) -> int:
        self._handshake += bytes(_VIEW[:end])
        head, mark, rest = self._handshake.partition(b"\r\n\r\n")
        if not mark:
            return 0
        if not head.startswith(b"HTTP/1.1 101"):
            self.opened.set_exception(BenchError(head.partition(b"\r\n")[0].decode("latin-1")))
            return 0
        self.opened.set_result(None)
        self.kept.clear()
        if self.witness:
            self.kept.append(rest)
        _BUFFER[: len(rest)] = rest
        return len(rest)

    def _walk(self, end: int) -> None:
        """Count the frames in the buffer; payloads are skipped as they arrive."""
        buffer, at = _BUFFER, self._skip
        while at + _LEAST <= end:
            if buffer[at] != 0x81:
                at = self._control(at)
                continue
            length = buffer[at + 1]
            start = at + 2
            if length == 126:
                start = at + 4
                length = buffer[at + 2] << 8 | buffer[at + 3]
            elif length == 127:
                start = at + 10
                length = int.from_bytes(buffer[at + 2 : start], "big")
                if start + _KIND >= end:
                    break
            kind = buffer[start + _KIND]
            if kind == 86:  # eVent
                self.events += 1
            elif kind == 75:  # oK
                self.oks += 1
            elif kind == 78:  # eNd of history
                self.markers += 1
                if self._marker is not None and not self._marker.done():
                    self._marker.set_result(None)
            elif kind != 85:  # aUth_challenge: the first frame, and this peer stays anonymous
                raise self._fail(f"unexpected message: {bytes(buffer[start : min(end, start + 300)])!r}")
            at = start + length
        if at >= end:
            self._skip = at - end
            return
        self._skip = 0
        while at < end and buffer[at] == 0x89 and end - at >= 2:
            at = self._control(at)
        self._carry = bytes(buffer[at:end])

    def _control(self, at: int) -> int:
        if _BUFFER[at] != 0x89:
            raise self._fail(f"unexpected frame: {bytes(_BUFFER[at : at + 100])!r}")
        self.transport.write(_PONG)
        return at + 2 + _BUFFER[at + 1]

    def _fail(self, what: str) -> BenchError:
        error = BenchError(what)
        for future in (self._done, self._marker):
            if future is not None and not future.done():
                future.set_exception(error)
        self.transport.abort()
        return error


class Publisher(Peer):
    """A peer that keeps `window` publishes unanswered until all its frames are sent; `total` counts OKs."""

    def start(self, frames: list[bytes], window: int) -> asyncio.Future[None]:
        """Send `frames`; the future is done when each has its OK."""
        self._frames = frames
        self._answered = self.oks
        self._sent = min(window, len(frames))
        done = self.expect(self.oks + len(frames))
        self.transport.write(b"".join(frames[: self._sent]))
        return done

    @property
    def total(self) -> int:
        return self.oks

    def counted(self) -> None:
        fresh = self.oks - self._answered
        if fresh and self._sent < len(self._frames):
            self.transport.write(b"".join(self._frames[self._sent : self._sent + fresh]))
            self._sent += fresh
        self._answered = self.oks
        super().counted()

    _frames: list[bytes] = []  # noqa: RUF012  # replaced, never changed
    _answered = 0
    _sent = 0


async def connect_peers(
    url: str,
    count: int,
    kind: type[Peer] = Peer,
    *,
    witnesses: int = 0,
    at_once: int = 100,
    sources: Sequence[str] = (),
) -> list[Peer]:
    """Open `count` connections; the first `witnesses` of them keep what they get.

    `sources` are the addresses of this machine that they come from, in turn; by default any.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    loop = asyncio.get_running_loop()
    peers: list[Peer] = []
    while len(peers) < count:
        group: list[Peer] = []
        for number in range(len(peers), min(count, len(peers) + at_once)):
            peer = kind(parts.path, parts.netloc, witness=number < witnesses)
            await loop.create_connection(
                lambda peer=peer: peer,
                parts.hostname,
                parts.port,
                local_addr=(sources[number % len(sources)], 0) if sources else None,
            )
            group.append(peer)
        async with asyncio.timeout(_OPEN_TIMEOUT):
            await asyncio.gather(*(peer.opened for peer in group))
        peers += group
    return peers


def messages(peer: Peer) -> list[RelayMessage]:
    """Every message sent to a witness, decoded. Raises `BenchError` for an ERROR or an unexpected message."""
    data = b"".join(peer.kept)
    found: list[RelayMessage] = []
    at = 0
    while at < len(data):
        length, start = data[at + 1], at + 2
        if length == 126:
            start, length = at + 4, int.from_bytes(data[at + 2 : at + 4], "big")
        elif length == 127:
            start, length = at + 10, int.from_bytes(data[at + 2 : at + 10], "big")
        if data[at] == 0x81:
            message = decode_relay_message(data[start : start + length])
            if isinstance(message, AuthChallenge):
                at = start + length
                continue
            if isinstance(message, Error) or not isinstance(message, Event | Ok | EndOfHistory):
                raise BenchError(f"unexpected message: {message}")
            found.append(message)
        at = start + length
    return found
