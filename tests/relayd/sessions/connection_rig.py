"""One connection of a relay in memory, over a transport that only records."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

from strata.protocol import packets
from strata.protocol.ids import Identity

from relayd.config import Settings
from relayd.http.api import HttpApi
from relayd.lineage import KnownLog
from relayd.metrics import Metrics
from relayd.process.builder import build_relay
from relayd.relay import RunningRelay
from relayd.sessions.connection import Connection
from relayd.store import Store
from relayd.store.types import (
    Appended,
    AppendOutcome,
    Disposition,
    NewPacket,
    RelaySecrets,
    StoredPacket,
)

NOW = 1_760_000_000
ALICE = Identity(bytes(range(32)))
HANDSHAKE = (
    b"GET /strata HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
TEXT, CLOSE, PING = 0x1, 0x8, 0x9


class MemoryIdentities:
    """A log without identity packets."""

    async def authors(self, types: Iterable[str]) -> set[str]:
        return set()

    async def packets_of(
        self, authors: Sequence[str], types: Iterable[str], **_: object
    ) -> list[StoredPacket]:
        return []


class MemoryStore:
    """The part of a store that publishing needs."""

    secrets = RelaySecrets(bytes(32), bytes(32), NOW)

    def __init__(self) -> None:
        self.known = KnownLog()
        self.rows: list[NewPacket] = []
        self.identities = MemoryIdentities()

    def give_way(self, to_others: Callable[[], bool]) -> None: ...

    async def append(self, batch: Sequence[NewPacket], now: int, *_: int) -> Appended:
        previous = len(self.rows)
        self.rows += batch
        return Appended(
            previous, [Disposition(AppendOutcome.STORED, previous + n + 1, now) for n in range(len(batch))]
        )

    async def find(self, ids: Sequence[bytes], *_: object) -> dict[bytes, tuple[int, int]]:
        return {}

    async def findings(self, ids: Sequence[bytes], *_: object) -> dict[bytes, bytes]:
        return {}

    async def head(self, *_: object) -> int:
        return len(self.rows)


class FakeTransport:
    """Records what was written, and claims that part of it is still waiting."""

    def __init__(self, peer: str = "192.0.2.1") -> None:
        self.peer = peer
        self.written = bytearray()
        self.waiting = 0
        self.reading = True
        self.said_all = False
        self.closing = False
        self.aborted = False

    def write(self, data: bytes) -> None:
        assert not self.aborted and not self.said_all
        self.written += data

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return (self.peer, 4711) if name == "peername" else None

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def set_write_buffer_limits(self, high: int) -> None: ...

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.said_all = True

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.aborted = self.closing = True


def frame(text: str | bytes, opcode: int = TEXT, *, fin: bool = True) -> bytes:
    """A frame as a client sends it, masked with zeros."""
    data = text.encode() if isinstance(text, str) else text
    length = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack("!H", len(data))
    return bytes([(0x80 if fin else 0) | opcode]) + length + bytes(4) + data


def publish(number: int) -> bytes:
    packet = packets.build(ALICE, {"type": "POST", "n": number}, timestamp=NOW)
    return frame(f'{{"type":"PUBLISH","client_msg_id":"{number}","packet":{packet.canonical.decode()}}}')


class Rig:
    """One connection of a relay in memory, past its handshake; `now` is the connection's clock."""

    def __init__(
        self,
        clock: SimpleNamespace,
        relay: RunningRelay | None = None,
        peer: str = "192.0.2.1",
        **settings: Any,
    ) -> None:
        self.clock = clock
        self.relay = relay or build_relay(
            Settings(**settings), cast(Store, MemoryStore()), Metrics(), head=0, clock=lambda: NOW
        )
        self.relay.slices.seconds = math.inf  # a test that moves the clock gives the loop no turn
        self.transport = FakeTransport(peer)
        api = HttpApi(readiness=lambda: None, manifest=dict, by_id=cast(Any, None))
        self.connection = Connection(self.relay, api, "/strata")
        self.socket = self.connection.socket
        self.socket.connection_made(cast(asyncio.Transport, self.transport))
        self.socket.data_received(HANDSHAKE)
        response, _, frames = bytes(self.transport.written).partition(b"\r\n\r\n")
        assert response.startswith(b"HTTP/1.1 101")
        self.transport.written[:] = frames
        (self.challenge,) = self.messages()

    def frames(self) -> list[tuple[int, bytes]]:
        """Take what was written, as opcodes and payloads."""
        data, found = bytes(self.transport.written), []
        self.transport.written.clear()
        while data:
            length, start = data[1], 2
            if length == 126:
                length, start = int.from_bytes(data[2:4], "big"), 4
            found.append((data[0] & 0x0F, data[start : start + length]))
            data = data[start + length :]
        return found

    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(payload) for opcode, payload in self.frames() if opcode == TEXT]

    def sweep(self, seconds: float) -> None:
        self.clock.now += seconds
        self.relay.registry.sweep(list(self.relay.registry.sockets), self.clock.now)


def auth(challenge: dict[str, Any], *, signer: Identity = ALICE, **members: Any) -> bytes:
    signature = "0x" + signer.sign((challenge["challenge"] + challenge["server_id"]).encode()).hex()
    message = {"type": "AUTH", "author_id": ALICE.did, "challenge": challenge["challenge"]}
    return frame(json.dumps({**message, "signature": signature, "client_msg_id": "auth", **members}))


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        for _ in iter(condition, True):
            await asyncio.sleep(0)


async def until(rig: Rig, count: int) -> list[dict[str, Any]]:
    """The next `count` messages."""
    got: list[dict[str, Any]] = []
    async with asyncio.timeout(10):
        while len(got) < count:
            await asyncio.sleep(0)
            got += rig.messages()
    return got
