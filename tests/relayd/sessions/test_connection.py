"""The shell around one socket, over a transport that only remembers: pressure, deadlines and closing."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from strata.protocol import packets
from strata.protocol.ids import Identity
from strata.protocol.keys import KeyChain, KeyRules

from relayd.access.auth import Grants
from relayd.builder import build_relay
from relayd.config import Settings
from relayd.http.api import HttpApi
from relayd.metrics import Metrics
from relayd.relay import Relay
from relayd.sessions import auth_exchange
from relayd.sessions import connection as connection_module
from relayd.sessions.connection import Connection
from relayd.store import Store
from relayd.store.types import (
    Appended,
    Disposition,
    NewPacket,
    Outcome,
    RelaySecrets,
    StoredPacket,
    StoreTimeout,
    StoreUnavailable,
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

    async def packets_of(self, authors: Sequence[str], types: Iterable[str], **_: int) -> list[StoredPacket]:
        return []


class MemoryStore:
    """The part of a store that publishing needs."""

    secrets = RelaySecrets(bytes(32), bytes(32), NOW)

    def __init__(self) -> None:
        self.rows: list[NewPacket] = []
        self.identities = MemoryIdentities()

    async def append(self, batch: Sequence[NewPacket], now: int, *_: int) -> Appended:
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

    def __init__(self, peer: str = "192.0.2.1") -> None:
        self.peer = peer
        self.written = bytearray()
        self.waiting = 0
        self.reading = True
        self.closing = False
        self.aborted = False

    def write(self, data: bytes) -> None:
        assert not self.aborted
        self.written += data

    def get_extra_info(self, name: str) -> tuple[str, int]:
        assert name == "peername"
        return self.peer, 4711

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

    def __init__(
        self, clock: SimpleNamespace, relay: Relay | None = None, peer: str = "192.0.2.1", **settings: Any
    ) -> None:
        self.clock = clock
        self.relay = relay or build_relay(
            Settings(**settings), cast(Store, MemoryStore()), Metrics(), head=0, clock=lambda: NOW
        )
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
        rig.socket.connection_lost(None)
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
        rig.socket.data_received(frame(b"", 0xA))
    assert not rig.transport.aborted


@pytest.mark.req("R-130", "R-170")
async def test_a_peer_that_takes_its_bytes_slowly_is_alive(rigs):
    rig = rigs(ping_interval=30.0, ping_misses=2, slow_consumer_timeout=60.0)
    rig.transport.waiting = 5_000_000
    rig.socket.pause_writing()
    for _ in range(20):  # ten minutes, no ping could pass, but bytes do
        rig.transport.waiting -= 1000
        rig.sweep(30)
    rig.socket.resume_writing()
    for _ in range(5):  # what is left in the kernel's buffers still stands before any ping
        rig.sweep(1)
    assert not rig.transport.aborted


@pytest.mark.req("R-170")
async def test_a_peer_that_takes_nothing_is_closed_with_1013_then_aborted(rigs):
    rig = rigs(slow_consumer_timeout=60.0)
    rig.transport.waiting = 5_000_000
    rig.socket.pause_writing()
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
    rig.socket.pause_writing()
    assert not rig.transport.reading
    rig.socket.resume_writing()
    assert rig.transport.reading


@pytest.mark.req("R-192", "R-321")
async def test_a_peer_with_too_many_unanswered_publishes_waits(rigs):
    rig = rigs(max_pending_publishes=4)
    rig.socket.data_received(b"".join(publish(n) for n in range(4)))
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
    rig.socket.data_received(publish(1) + frame(struct.pack("!H", 1000), CLOSE) + publish(2))
    assert rig.relay.admission.pending == 1
    assert [opcode for opcode, _ in rig.frames()] == [CLOSE]


async def test_what_a_peer_sends_after_our_close_does_not_count(rigs):
    rig = rigs()
    rig.socket.close(1001, "going away")
    rig.socket.data_received(publish(1) + frame(struct.pack("!H", 1001), CLOSE))
    assert rig.relay.admission.pending == 0
    assert rig.transport.closing


@pytest.mark.req("R-321")
async def test_endless_empty_fragments_hold_no_memory(rigs):
    rig = rigs()
    rig.socket.data_received(frame("{", fin=False))
    for _ in range(1000):
        rig.socket.data_received(frame("", 0x0, fin=False) * 10)
    assert len(rig.socket._fragments) == 1
    rig.socket.data_received(frame('"type":"X"}', 0x0))
    (message,) = rig.messages()
    assert message["detail"] == "unknown_type"


@pytest.mark.req("R-123")
async def test_an_oversized_frame_is_answered_then_closed_with_1009(rigs):
    rig = rigs(max_packet_bytes=1024)
    rig.socket.data_received(b"\x81\xff" + struct.pack("!Q", 10 * 2**20) + bytes(4))
    (first, payload), (second, code) = rig.frames()
    assert (first, json.loads(payload)["code"]) == (TEXT, "packet_too_large")
    assert (second, code[:2]) == (CLOSE, struct.pack("!H", 1009))
    assert rig.transport.closing


@pytest.mark.req("R-321")
async def test_a_handshake_that_never_comes_is_cut_off(clock):
    rig = Rig(clock, handshake_timeout=10.0)
    late = Connection(rig.relay, cast(Any, None), "/strata").socket
    transport = FakeTransport()
    late.connection_made(cast(asyncio.Transport, transport))
    rig.sweep(11)
    assert transport.aborted
    assert not rig.transport.aborted
    await rig.relay.admission.close()


@pytest.mark.req("R-321")
async def test_the_connection_beyond_the_limit_is_turned_away(rigs):
    rig = rigs(max_connections=1)
    second = Connection(rig.relay, cast(Any, None), "/strata").socket
    transport = FakeTransport()
    second.connection_made(cast(asyncio.Transport, transport))
    second.data_received(HANDSHAKE)
    assert transport.written.startswith(b"HTTP/1.1 503")
    assert transport.closing
    assert not rig.transport.closing


# AUTH: what waits, and what an outcome changes.


class SlowIdentities:
    """Looks an identity up when the test says so."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.asked: list[str] = []

    async def resolve(self, did: str) -> Any:
        self.asked.append(did)
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return KeyChain.genesis(did, rules=KeyRules())


@pytest.fixture
async def slow(rigs) -> tuple[Rig, SlowIdentities]:
    rig, identities = rigs(), SlowIdentities()
    rig.relay.identities = cast(Any, identities)
    return rig, identities


def auth(challenge: dict[str, Any], *, signer: Identity = ALICE, **members: Any) -> bytes:
    signature = "0x" + signer.sign((challenge["challenge"] + challenge["server_id"]).encode()).hex()
    message = {"type": "AUTH", "author_id": ALICE.did, "challenge": challenge["challenge"]}
    return frame(json.dumps({**message, "signature": signature, "client_msg_id": "auth", **members}))


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        for _ in iter(condition, True):
            await asyncio.sleep(0)


async def until(rig: Rig, count: int) -> list[dict[str, Any]]:
    """The next so many messages."""
    got: list[dict[str, Any]] = []
    async with asyncio.timeout(10):
        while len(got) < count:
            await asyncio.sleep(0)
            got += rig.messages()
    return got


@pytest.mark.req("R-266", "R-268", "R-269", "R-354")
async def test_the_first_frame_is_a_challenge_of_its_own(rigs):
    one, other = rigs(), rigs()
    assert one.challenge["type"] == other.challenge["type"] == "AUTH_CHALLENGE"
    assert one.challenge["server_id"] == one.relay.relay_id
    assert one.challenge["expires_at"] == NOW + 120
    assert one.challenge["challenge"] != other.challenge["challenge"]


@pytest.mark.req("R-133", "R-283")
async def test_what_follows_an_auth_waits_for_its_outcome(slow):
    rig, identities = slow
    rig.relay.access.grants = Grants(require_auth=frozenset({"publish"}))
    rig.connection._session._allow(frozenset())
    rig.socket.data_received(auth(rig.challenge) + publish(1) + frame(b'{"type":"X","client_msg_id":"x"}'))
    assert not rig.transport.reading
    await asyncio.sleep(0)
    rig.socket.data_received(publish(2))  # a transport may still have had it
    assert (rig.messages(), rig.relay.admission.pending) == ([], 0)
    identities.answers.put_nowait(None)
    ok, error = await until(rig, 2)
    assert (ok["type"], ok["author_id"], error["client_msg_id"]) == ("AUTH_OK", ALICE.did, "x")
    assert rig.relay.admission.pending == 2
    assert rig.transport.reading
    assert rig.connection._lane.identity == ALICE.did


@pytest.mark.req("R-277", "R-281", "R-282")
async def test_a_bad_signature_is_refused_and_a_challenge_follows(rigs):
    rig = rigs()
    rig.socket.data_received(auth(rig.challenge, signer=Identity(bytes(32))))
    error, challenge = await until(rig, 2)
    assert (error["code"], error["client_msg_id"]) == ("invalid_signature", "auth")
    assert challenge["type"] == "AUTH_CHALLENGE"
    assert challenge["challenge"] != rig.challenge["challenge"]
    rig.socket.data_received(auth(challenge))
    assert [message["type"] for message in await until(rig, 1)] == ["AUTH_OK"]


@pytest.mark.req("R-282")
async def test_the_fifth_failed_auth_closes_with_1008(rigs):
    rig = rigs()
    for _ in range(5):
        rig.socket.data_received(auth(rig.challenge, author_id="did:strata:stranger"))
        await until(rig, 1)
        if rig.transport.closing:
            break
    closed = rig.relay.metrics.connections_closed
    assert rig.socket._close_reason == "auth_failures"
    assert "auth_failures" in closed


@pytest.mark.req("R-280")
@pytest.mark.parametrize("failure", [StoreUnavailable("gone"), StoreTimeout("slow"), RuntimeError("a bug")])
async def test_an_identity_that_cannot_be_looked_up_is_no_failure_of_the_peer(slow, failure):
    rig, identities = slow
    challenge = rig.challenge
    for _ in range(7):
        identities.answers.put_nowait(failure)
        rig.socket.data_received(auth(challenge))
        error, challenge = await until(rig, 2)
        assert (error["code"], error["detail"]) == ("internal_error", "store_unavailable")
    identities.answers.put_nowait(None)
    rig.socket.data_received(auth(challenge))
    assert (await until(rig, 1))[0]["type"] == "AUTH_OK"


@pytest.mark.req("R-280")
async def test_looking_up_takes_no_longer_than_a_client_waits(slow, monkeypatch):
    rig, _ = slow
    monkeypatch.setattr(auth_exchange, "_RESOLVE_TIMEOUT", 0.0)
    rig.socket.data_received(auth(rig.challenge))
    error, challenge = await until(rig, 2)
    assert (error["code"], challenge["type"]) == ("internal_error", "AUTH_CHALLENGE")


async def test_a_peer_that_leaves_meanwhile_leaves_nothing_behind(slow):
    rig, identities = slow
    rig.socket.data_received(auth(rig.challenge) + publish(1))
    await asyncio.sleep(0)
    assert identities.asked == [ALICE.did]
    rig.socket.connection_lost(None)
    identities.answers.put_nowait(None)
    await eventually(lambda: not any(task.get_name().startswith("auth-") for task in asyncio.all_tasks()))
    assert rig.relay.admission.pending == 0
    assert len(rig.relay.access.identities) == 0


@pytest.mark.req("R-282")
async def test_an_anonymous_session_gets_a_fresh_challenge_when_the_old_one_is_too_old(rigs):
    rig = rigs(ping_interval=86_400.0)
    unix = SimpleNamespace(now=NOW + 120)
    rig.relay.clock = lambda: unix.now
    rig.sweep(1)
    assert rig.messages() == []
    unix.now += 1
    rig.socket.pause_writing()
    rig.sweep(1)
    assert rig.messages() == []  # nobody would read it
    rig.socket.resume_writing()
    rig.sweep(1)
    (challenge,) = rig.messages()
    assert (challenge["type"], challenge["expires_at"]) == ("AUTH_CHALLENGE", NOW + 241)
    rig.socket.data_received(auth(rig.challenge))
    late, _ = await until(rig, 2)
    assert late["detail"] == "challenge_expired"


@pytest.mark.req("R-283", "R-316")
async def test_limits_follow_the_identity(rigs):
    rig = rigs(anonymous_publish_limit=1, publish_limit=3)
    rig.socket.data_received(publish(1) + publish(2))
    (refused,) = rig.messages()
    assert (refused["code"], refused["client_msg_id"], refused["limit"]) == ("rate_limited", "2", 1)
    rig.socket.data_received(auth(rig.challenge) + b"".join(publish(number) for number in range(3, 7)))
    ok, refused = await until(rig, 2)
    assert ok["capabilities"] == ["publish", "subscribe"]
    assert (refused["client_msg_id"], refused["limit"]) == ("6", 3)
    rig.relay.tally.count(rig.relay.metrics)
    assert rig.relay.metrics.registry.get_sample_value("relayd_rate_limited_total", {"limit": "publish"}) == 2


@pytest.mark.req("R-316", "R-319")
async def test_two_sockets_of_one_identity_share_its_limit_and_a_reconnect_gains_nothing(rigs):
    rig = rigs(publish_limit=3)
    rig.socket.data_received(auth(rig.challenge) + publish(1))
    await until(rig, 1)
    second = Rig(rig.clock, relay=rig.relay, peer="198.51.100.7")
    second.socket.data_received(auth(second.challenge) + publish(2) + publish(3) + publish(4))
    ok, refused = await until(second, 2)
    assert (ok["type"], refused["client_msg_id"]) == ("AUTH_OK", "4")
    second.socket.connection_lost(None)
    third = Rig(rig.clock, relay=rig.relay, peer="198.51.100.8")
    third.socket.data_received(auth(third.challenge) + publish(5))
    ok, refused = await until(third, 2)
    assert refused["code"] == "rate_limited"
    third.socket.connection_lost(None)


@pytest.mark.req("R-317")
async def test_an_open_stream_over_its_byte_budget_is_paced_and_not_cut(rigs, monkeypatch):
    rig = rigs(anonymous_backfill_limit_bytes=6000)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        rig.clock.now += seconds

    await rig.connection.writable()
    rig.connection.backfilled(7000)
    monkeypatch.setattr(connection_module.asyncio, "sleep", sleep)
    await rig.connection.writable()
    assert sum(waits) == pytest.approx(10, abs=0.1)  # a thousand bytes of debt at a hundred a second
    assert max(waits) <= 1.0


@pytest.mark.req("R-321")
@pytest.mark.parametrize(
    ("settings", "headers", "status"),
    [
        ({"allowed_origins": ("https://good.example",)}, b"Origin: https://evil.example\r\n", b"403"),
        ({"allowed_origins": ("https://good.example",)}, b"Origin: https://good.example\r\n", b"101"),
        ({"allowed_origins": ("https://good.example",)}, b"", b"101"),
        ({"max_connections_per_address": 1}, b"", b"429"),
        ({"connection_limit": 1}, b"", b"429"),
    ],
)
async def test_a_handshake_may_be_refused(rigs, settings, headers, status):
    rig = rigs(**settings)
    second = Connection(rig.relay, cast(Any, None), "/strata").socket
    transport = FakeTransport()
    second.connection_made(cast(asyncio.Transport, transport))
    second.data_received(HANDSHAKE.replace(b"\r\n\r\n", b"\r\n" + headers + b"\r\n"))
    assert transport.written.startswith(b"HTTP/1.1 " + status)
    assert (b"Retry-After: " in transport.written) is (status == b"429")
    second.connection_lost(None)


@pytest.mark.req("R-321")
async def test_a_socket_too_many_is_dropped_unheard(rigs):
    rig = rigs(max_connections_per_address=1)
    sockets = [Connection(rig.relay, cast(Any, None), "/strata").socket for _ in range(2)]
    transports = [FakeTransport() for _ in sockets]
    for connection, transport in zip(sockets, transports, strict=True):
        connection.connection_made(cast(asyncio.Transport, transport))
    assert [transport.aborted for transport in transports] == [False, True]
    for connection in sockets:
        connection.connection_lost(None)
    assert len(rig.relay.registry) == 1


@pytest.mark.req("R-288", "R-292", "R-317")
@pytest.mark.parametrize(
    ("settings", "statuses"),
    [
        ({}, [b"200", b"200"]),
        ({"require_auth": ("subscribe",)}, [b"401", b"401"]),
        ({"require_auth": ("publish",)}, [b"200", b"200"]),
        ({"anonymous_subscribe_limit": 1}, [b"200", b"429"]),
        ({"anonymous_backfill_limit_bytes": 1}, [b"200", b"429"]),
    ],
)
async def test_a_packet_by_its_id_is_a_read_like_any_other(rigs, settings, statuses):
    rig = rigs(**settings)

    async def by_id(packet_id: bytes, now: int) -> StoredPacket:
        return StoredPacket(1, NOW, b"{}")

    api = HttpApi(readiness=lambda: None, manifest=dict, by_id=by_id)
    for expected in statuses:
        asking, transport = Connection(rig.relay, api, "/strata"), FakeTransport()
        asking.socket.connection_made(cast(asyncio.Transport, transport))
        asking.socket.data_received(f"GET /packets/0x{'ab' * 32} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert asking._http_task is not None
        await asking._http_task
        assert transport.closing
        assert transport.written.split()[1] == expected
        body = json.loads(transport.written.partition(b"\r\n\r\n")[2])
        assert ("packet" in body) is (expected == b"200")
        asking.socket.connection_lost(None)
