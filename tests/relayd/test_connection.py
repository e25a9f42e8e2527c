"""The shell around one socket, over a transport that only remembers: pressure, deadlines and closing."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from strata import packets
from strata.ids import Identity

from relayd import connection as connection_module
from relayd.config import Settings
from relayd.connection import Connection
from relayd.http import HttpApi
from relayd.metrics import Metrics
from relayd.relay import Relay
from relayd.store import Store
from relayd.store.types import Appended, Disposition, NewPacket, Outcome, RelaySecrets

NOW = 1_760_000_000
ALICE = Identity(bytes(range(32)))
HANDSHAKE = (
    b"GET /strata HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
TEXT, CLOSE, PING = 0x1, 0x8, 0x9


class MemoryStore:
    """The part of a store that publishing needs."""

    secrets = RelaySecrets(bytes(32), bytes(32), NOW)

    def __init__(self) -> None:
        self.rows: list[NewPacket] = []

    async def append(self, batch: Sequence[NewPacket], now: int) -> Appended:
        previous = len(self.rows)
        self.rows += batch
        return Appended(
            previous, [Disposition(Outcome.STORED, previous + n + 1, now) for n in range(len(batch))]
        )

    async def find(self, ids: Sequence[bytes]) -> dict[bytes, tuple[int, int]]:
        return {}

    async def head(self) -> int:
        return len(self.rows)


class FakeTransport:
    """Remembers what was written, and says how much of it waits."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.waiting = 0
        self.reading = True
        self.closing = False
        self.aborted = False

    def write(self, data: bytes) -> None:
        assert not self.aborted
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def set_write_buffer_limits(self, high: int) -> None: ...

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

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

    def __init__(self, clock: SimpleNamespace, **settings: Any) -> None:
        self.clock = clock
        self.store = MemoryStore()
        self.relay = Relay(
            Settings(**settings), cast(Store, self.store), Metrics(), head=0, clock=lambda: NOW
        )
        self.transport = FakeTransport()
        api = HttpApi(readiness=lambda: None, manifest=dict, by_id=cast(Any, None))
        self.connection = Connection(self.relay, api, "/strata")
        self.connection.connection_made(cast(asyncio.Transport, self.transport))
        self.connection.data_received(HANDSHAKE)
        assert self.transport.written.startswith(b"HTTP/1.1 101")
        self.transport.written.clear()

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
        self.relay.sweep(self.clock.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(connection_module.time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
async def rigs(clock: SimpleNamespace) -> Iterator[Any]:
    made: list[Rig] = []

    def make(**settings: Any) -> Rig:
        made.append(Rig(clock, **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.connection.connection_lost(None)
        await rig.relay.admission.close()


@pytest.mark.req("R-130")
async def test_pings_find_a_silent_peer(rigs):
    rig = rigs(ping_interval=30.0, ping_misses=2)
    rig.sweep(29)
    assert rig.frames() == []
    rig.sweep(2)
    assert [opcode for opcode, _ in rig.frames()] == [PING]
    rig.sweep(15)
    assert rig.frames() == []
    rig.sweep(15)
    assert [opcode for opcode, _ in rig.frames()] == [PING]
    rig.sweep(31)
    assert rig.transport.aborted


@pytest.mark.req("R-130")
async def test_a_sign_of_life_starts_the_count_again(rigs):
    rig = rigs(ping_interval=30.0, ping_misses=2)
    for _ in range(10):
        rig.sweep(31)
        rig.sweep(31)
        rig.connection.data_received(frame(b"", 0xA))
    assert not rig.transport.aborted


@pytest.mark.req("R-130", "R-170")
async def test_a_peer_that_takes_its_bytes_slowly_is_alive(rigs):
    rig = rigs(ping_interval=30.0, ping_misses=2, slow_consumer_timeout=60.0)
    rig.transport.waiting = 5_000_000
    rig.connection.pause_writing()
    for _ in range(20):  # ten minutes, no ping could pass, but bytes do
        rig.transport.waiting -= 1000
        rig.sweep(30)
    rig.connection.resume_writing()
    for _ in range(5):  # what is left in the kernel's buffers still stands before any ping
        rig.sweep(1)
    assert not rig.transport.aborted


@pytest.mark.req("R-170")
async def test_a_peer_that_takes_nothing_is_closed_with_1013_then_aborted(rigs):
    rig = rigs(slow_consumer_timeout=60.0)
    rig.transport.waiting = 5_000_000
    rig.connection.pause_writing()
    rig.sweep(59)
    assert rig.frames() == []
    rig.sweep(2)
    ((opcode, payload),) = rig.frames()
    assert (opcode, payload[:2]) == (CLOSE, struct.pack("!H", 1013))
    rig.sweep(6)
    assert rig.transport.aborted


@pytest.mark.req("R-170")
async def test_nothing_is_read_from_a_peer_that_does_not_read(rigs):
    rig = rigs()
    rig.connection.pause_writing()
    assert not rig.transport.reading
    rig.connection.resume_writing()
    assert rig.transport.reading


@pytest.mark.req("R-192", "R-321")
async def test_a_peer_with_too_many_unanswered_publishes_waits(rigs):
    rig = rigs(max_pending_publishes=4)
    rig.connection.data_received(b"".join(publish(n) for n in range(4)))
    assert not rig.transport.reading
    writer = asyncio.create_task(rig.relay.writer.run())
    got: list[dict[str, Any]] = []
    async with asyncio.timeout(10):
        while len(got) < 4:
            await asyncio.sleep(0)
            got += rig.messages()
    assert [message["client_msg_id"] for message in got] == ["0", "1", "2", "3"]
    assert rig.transport.reading
    writer.cancel()


@pytest.mark.req("R-181")
async def test_what_a_peer_sent_before_its_close_frame_counts(rigs):
    rig = rigs()
    rig.connection.data_received(publish(1) + frame(struct.pack("!H", 1000), CLOSE) + publish(2))
    assert rig.relay.admission.pending == 1
    assert [opcode for opcode, _ in rig.frames()] == [CLOSE]


async def test_what_a_peer_sends_after_our_close_does_not_count(rigs):
    rig = rigs()
    rig.connection.close(1001, "going away")
    rig.connection.data_received(publish(1) + frame(struct.pack("!H", 1001), CLOSE))
    assert rig.relay.admission.pending == 0
    assert rig.transport.closing


@pytest.mark.req("R-321")
async def test_endless_empty_fragments_hold_no_memory(rigs):
    rig = rigs()
    rig.connection.data_received(frame("{", fin=False))
    for _ in range(1000):
        rig.connection.data_received(frame("", 0x0, fin=False) * 10)
    assert len(rig.connection._fragments) == 1
    rig.connection.data_received(frame('"type":"X"}', 0x0))
    (message,) = rig.messages()
    assert message["detail"] == "unknown_type"


@pytest.mark.req("R-123")
async def test_an_oversized_frame_is_answered_then_closed_with_1009(rigs):
    rig = rigs(max_packet_bytes=1024)
    rig.connection.data_received(b"\x81\xff" + struct.pack("!Q", 10 * 2**20) + bytes(4))
    (first, payload), (second, code) = rig.frames()
    assert (first, json.loads(payload)["code"]) == (TEXT, "packet_too_large")
    assert (second, code[:2]) == (CLOSE, struct.pack("!H", 1009))
    assert rig.transport.closing


@pytest.mark.req("R-321")
async def test_a_handshake_that_never_comes_is_cut_off(clock):
    rig = Rig(clock, handshake_timeout=10.0)
    late = Connection(rig.relay, cast(Any, None), "/strata")
    transport = FakeTransport()
    late.connection_made(cast(asyncio.Transport, transport))
    rig.sweep(11)
    assert transport.aborted
    assert not rig.transport.aborted
    await rig.relay.admission.close()


@pytest.mark.req("R-321")
async def test_the_connection_beyond_the_limit_is_turned_away(rigs):
    rig = rigs(max_connections=1)
    second = Connection(rig.relay, cast(Any, None), "/strata")
    transport = FakeTransport()
    second.connection_made(cast(asyncio.Transport, transport))
    second.data_received(HANDSHAKE)
    assert transport.written.startswith(b"HTTP/1.1 503")
    assert transport.closing
    assert not rig.transport.closing
