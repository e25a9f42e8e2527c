"""Plain HTTP on the relay's port."""

from __future__ import annotations

import asyncio
import email
import email.utils
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import pytest
from websockets.datastructures import Headers

from relayd.access.memory import Pressure
from relayd.http.api import HttpApi
from relayd.http.console import WebConsole
from relayd.moderation import Ban, Bans, SubjectKind
from relayd.process.accepting import Acceptor, bind
from relayd.responses import Response, json_response
from relayd.sessions.connection import Connection
from relayd.store.types import StoredPacket
from relayd.tls import read_tls_files, write_dev_certificates
from tests.relayd.sessions.connection_rig import (
    HANDSHAKE,
    NOW,
    FakeTransport,
    Rig,
    eventually,
)

ASKING = f"GET /packets/0x{'ab' * 32} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


class SlowStore:
    """Finds a packet once `found` is set."""

    def __init__(self, body: bytes = b"{}") -> None:
        self.found = asyncio.Event()
        self.is_read = False
        self.body = body

    def connection(self, rig: Rig) -> Connection:
        api = HttpApi(readiness=lambda: None, manifest=dict, by_id=self.by_id)
        return Connection(rig.relay, api, "/strata")

    def asked(self, rig: Rig) -> tuple[Connection, FakeTransport]:
        asking, transport = self.connection(rig), FakeTransport()
        asking.socket.connection_made(cast(asyncio.Transport, transport))
        asking.socket.data_received(ASKING)
        return asking, transport

    async def by_id(self, packet_id: bytes, now: int, *_: object) -> StoredPacket:
        self.is_read = True
        try:
            await self.found.wait()
        finally:
            self.is_read = False
        return StoredPacket(1, NOW, self.body)


async def test_a_client_that_has_asked_and_says_no_more_gets_its_answer(rigs):
    """As with `nc -N` and `shutdown(SHUT_WR)`: one half of the connection is closed, not all of it."""
    rig, store = rigs(), SlowStore()
    asking = store.connection(rig)
    theirs, ours = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: asking.socket, ours)
        theirs.send(ASKING)
        theirs.shutdown(socket.SHUT_WR)
        await eventually(lambda: asking.socket._parting.has_begun)  # the end was noticed
        store.found.set()
        await eventually(lambda: asking.socket._parting.is_lingering)
        assert (await loop.sock_recv(theirs, 9)) == b"HTTP/1.1 "
        rig.sweep(2.1)
        rig.sweep(0)
        await eventually(lambda: asking.socket._transport.is_closing())


async def when_ready(act: Callable[[], Any]) -> Any:
    """The result of an act on a socket that does not block."""
    async with asyncio.timeout(10):
        while True:
            try:
                return act()
            except (ssl.SSLWantReadError, BlockingIOError):
                await asyncio.sleep(0)


@pytest.mark.parametrize("over_tls", [False, True])
async def test_a_slow_line_gets_all_of_an_answer(rigs, tmp_path, over_tls):
    rig, store = rigs(), SlowStore(b'{"x":"' + b"x" * 1_000_000 + b'"}')
    store.found.set()
    asking, made = store.connection(rig), write_dev_certificates(tmp_path)
    (listening,) = bind("127.0.0.1", 0, reuse_port=False)
    tls = read_tls_files(made.cert, made.key) if over_tls else None
    listener = Acceptor(listening, lambda: asking, tls=tls, handshake_timeout=9.0, slices=rig.relay.slices)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", listener.port))
    if over_tls:
        trusting = ssl.create_default_context(cafile=str(made.ca))
        client = trusting.wrap_socket(client, server_hostname="localhost", do_handshake_on_connect=False)
        await when_ready(client.do_handshake)
    with client:
        client.send(ASKING)
        await eventually(lambda: asking.socket._parting.is_lingering)
        size = 0
        while piece := await when_ready(lambda: client.recv(16_384)):
            size += len(piece)
            if size < 800_000:
                rig.sweep(min(0.4, len(piece) / 40_000))
        assert size > 1_000_000
    await eventually(lambda: asking.socket not in rig.relay.registry.sockets)
    listener.close()


async def test_a_client_that_has_gone_is_read_for_no_more_after_some_seconds(rigs):
    rig, store = rigs(), SlowStore()
    asking, transport = store.asked(rig)
    await eventually(lambda: store.is_read)
    assert asking.socket.eof_received()  # it may wait for its answer
    cut_off = []
    for seconds in (4, 1):
        assert asking.socket.eof_received()  # however often it is signalled
        rig.sweep(seconds)
        cut_off.append(transport.aborted)
    assert cut_off == [False, True]
    asking.socket.connection_lost(None)
    await eventually(lambda: not store.is_read)


@pytest.mark.req("R-321")
async def test_an_answer_that_is_not_read_counts_after_the_close_too(rigs):
    rig, store = rigs(), SlowStore(b'{"x":"' + b"x" * 1_000_000 + b'"}')
    store.found.set()
    asking, transport = store.asked(rig)
    await eventually(lambda: transport.said_all)
    transport.waiting = 1_000_000
    rig.sweep(2.1)
    assert transport.closing and asking.socket.held_bytes == 1_000_000
    rig.relay.registry.relieve(Pressure.FULL)
    aborted = []
    for seconds in (0.9, 0.2):
        rig.sweep(seconds)
        aborted.append(transport.aborted)
        assert asking.socket.held_bytes == 0
    assert aborted == [False, True]
    asking.socket.connection_lost(None)


async def test_what_comes_behind_a_request_changes_nothing(rigs):
    rig, store = rigs(max_packet_bytes=1024), SlowStore()
    asking, transport = store.asked(rig)
    asking.socket.data_received(b"\r\n")
    asking.socket.data_received(ASKING)
    assert not transport.said_all
    store.found.set()
    await eventually(lambda: transport.said_all)
    assert transport.written.startswith(b"HTTP/1.1 200 ") and transport.written.count(b"HTTP/1.1") == 1
    assert rig.relay.metrics.faults["http"]._value.get() == 0
    asking.socket.connection_lost(None)


async def test_what_comes_behind_a_request_is_bounded(rigs):
    rig, store = rigs(max_packet_bytes=1024), SlowStore()
    asking, transport = store.asked(rig)
    closing = []
    for data in (bytes(8 * rig.relay.settings.max_frame_bytes), b"x"):
        asking.socket.data_received(data)
        closing.append(transport.closing)
    assert closing == [False, True]
    asking.socket.connection_lost(None)


@pytest.mark.req("R-288", "R-292", "R-317")
@pytest.mark.parametrize(
    ("settings", "statuses"),
    [
        ({}, [b"200", b"200"]),
        ({"require_auth": ("subscribe",)}, [b"401", b"401"]),
        ({"require_auth": ("publish",)}, [b"200", b"200"]),
        ({"anonymous_subscribe_limit": 1}, [b"200", b"429"]),
        ({"anonymous_subscribe_limit": 0, "anonymous_backfill_limit_bytes": 0}, [b"200", b"200"]),
        ({"anonymous_subscribe_limit": 1, "unlimited_addresses": ("192.0.2.1",)}, [b"200", b"200"]),
        ({"anonymous_backfill_limit_bytes": 1}, [b"200", b"429"]),
        ({"connection_limit": 2}, [b"200", b"429"]),  # the rig's own connection is the first
    ],
)
async def test_a_packet_by_its_id_is_a_read_like_any_other(rigs, settings, statuses):
    rig = rigs(**settings)

    async def by_id(packet_id: bytes, now: int, *_: object) -> StoredPacket:
        return StoredPacket(1, NOW, b"{}")

    api = HttpApi(readiness=lambda: None, manifest=dict, by_id=by_id)
    for expected in statuses:
        asking, transport = Connection(rig.relay, api, "/strata"), FakeTransport()
        asking.socket.connection_made(cast(asyncio.Transport, transport))
        asking.socket.data_received(f"GET /packets/0x{'ab' * 32} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert asking._http_task is not None
        await asking._http_task
        assert transport.said_all
        assert transport.written.split()[1] == expected
        body = json.loads(transport.written.partition(b"\r\n\r\n")[2])
        assert ("packet" in body) is (expected == b"200")
        asking.socket.connection_lost(None)
    limited = {
        sample.labels["limit"]: sample.value
        for metric in rig.relay.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "relayd_rate_limited_total" and sample.value
    }
    limits = {
        "anonymous_subscribe_limit": "subscribe",
        "anonymous_backfill_limit_bytes": "backfill",
        "connection_limit": "connect",
    }
    assert limited == ({limits[name]: 1 for name in settings} if b"429" in statuses else {})


async def nothing(packet_id: bytes, now: int, *_: object) -> None: ...


async def answered(
    rig: Rig,
    path: str,
    peer: str = "192.0.2.1",
    *,
    method: str = "GET",
    headers: Mapping[str, str] = MappingProxyType({}),
    found: bytes | None = None,
) -> tuple[bytes, bytes]:
    """The status of an answer, and all of it. `found` is the packet of the id 0xabab…; no other is there."""

    async def by_id(packet_id: bytes, now: int, *_: object) -> StoredPacket | None:
        return None if found is None or packet_id[0] != 0xAB else StoredPacket(1, NOW, found)

    api = HttpApi(readiness=lambda: None, manifest=dict, by_id=by_id)
    asking, transport = Connection(rig.relay, api, "/strata"), FakeTransport(peer)
    asking.socket.connection_made(cast(asyncio.Transport, transport))
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *(f"{name}: {value}" for name, value in headers.items())]
    asking.socket.data_received("\r\n".join([*lines, "", ""]).encode())
    assert asking._http_task is not None
    await asking._http_task
    asking.socket.connection_lost(None)
    whole = bytes(transport.written)
    return whole.split()[1], whole


@pytest.mark.req("R-186")
async def test_a_banned_address_is_told_nothing_by_http_either(rigs):
    rig = rigs()
    ban = Ban(SubjectKind.NETWORK, "192.0.2.0/24", "", "did:strata:op", None, 0)
    rig.relay.access.ban(frozenset(), Bans.at(1, [ban]))
    for path in ("/healthz", "/", "/.well-known/strata-relay.json", f"/packets/0x{'ab' * 32}"):
        assert (await answered(rig, path))[0] == b"403"
    assert (await answered(rig, "/healthz", "198.51.100.1"))[0] == b"200"


@pytest.mark.req("R-317", "R-319")
async def test_who_connects_too_often_hears_by_http_when_to_come_back(rigs):
    rig = rigs(connection_limit=2, limit_window_seconds=60)  # the rig's own socket was the first
    for status in (b"200", b"429"):
        found, whole = await answered(rig, "/healthz")
        assert found == status
    assert b"Retry-After: 30\r\n" in whole
    rig.clock.now += 30
    assert (await answered(rig, "/healthz"))[0] == b"200"


@pytest.mark.req("R-321")
async def test_who_has_used_its_share_of_the_loop_reads_later_by_http_too(rigs):
    rig, path = rigs(), f"/packets/0x{'ab' * 32}"
    found = [(await answered(rig, path))[0]]
    rig.connection.checked_for(5.0)
    for seconds in (0.0, 39.0, 2.0):
        rig.clock.now += seconds
        status, whole = await answered(rig, path)
        found.append(status)
        if not seconds:
            assert b"Retry-After: 41\r\n" in whole
    assert found == [b"404", b"429", b"429", b"404"]
    assert (await answered(rig, "/healthz"))[0] == b"200"


@pytest.mark.req("R-321")
async def test_few_chains_are_read_at_a_time_for_one_address(rigs):
    """How long a chain takes is charged only when it has been read: all at once would be read for nothing."""
    rig, gate, asked = rigs(), asyncio.Event(), []

    class Chains:
        async def respond(self, path: str, *_: object) -> Response | None:
            if not path.startswith("/did/"):
                return None
            asked.append(path)
            await gate.wait()
            return json_response(200, {})

    api = HttpApi(readiness=lambda: None, manifest=dict, by_id=nothing, identities=cast(Any, Chains()))

    def asks(path: str, peer: str = "192.0.2.1") -> tuple[Connection, FakeTransport]:
        asking, transport = Connection(rig.relay, api, "/strata"), FakeTransport(peer)
        asking.socket.connection_made(cast(asyncio.Transport, transport))
        asking.socket.data_received(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return asking, transport

    many = [asks(f"/did/{n}") for n in range(10)]
    await eventually(lambda: len(asked) == 8 and all(each.said_all for _, each in many[8:]))
    others = [asks("/healthz"), asks("/did/x", "198.51.100.1")]
    await eventually(lambda: others[0][1].said_all and len(asked) == 9)
    many[0][0].socket.connection_lost(None)  # one that goes makes room
    answering = many[0][0]._http_task
    await eventually(lambda: answering is not None and answering.done())
    others.append(asks("/did/y"))
    await eventually(lambda: "/did/y" in asked)
    gate.set()
    await eventually(lambda: all(each.said_all for _, each in many[1:] + others))
    statuses = [bytes(each.written).split()[1] for _, each in many[1:] + others]
    assert statuses == [b"200"] * 7 + [b"429"] * 2 + [b"200"] * 3
    for asking, _ in many[1:] + others:
        asking.socket.connection_lost(None)


@pytest.mark.req("R-321")
async def test_what_is_worked_for_a_client_that_has_gone_is_charged_to_its_address(rigs):
    rig, store = rigs(), SlowStore()
    asking, _ = store.asked(rig)
    asking.socket.connection_lost(None)
    asking.checked_for(5.0)
    status, _ = await answered(rig, f"/packets/0x{'ab' * 32}")
    assert status == b"429"


@pytest.mark.req("R-321")
async def test_whoever_owes_the_database_time_gets_nothing_more_read_for_now(rigs):
    rig, path = rigs(), f"/packets/0x{'ab' * 32}"
    rig.connection.payer.used_database(30.0, rig.clock.now)
    status, whole = await answered(rig, path)
    assert status == b"429"
    assert b"Retry-After: " in whole
    assert (await answered(rig, path, "198.51.100.1"))[0] == b"404"
    rig.clock.now += 30
    assert (await answered(rig, path))[0] == b"404"


@pytest.mark.parametrize(
    ("request_line", "status", "has_body"),
    [
        ("GET /", b"200", True),
        ("HEAD /", b"200", False),
        ("HEAD /healthz", b"200", False),
        ("HEAD /nowhere", b"404", False),
        ("HEAD /strata", b"426", False),
        ("POST /", b"405", True),
        ("OPTIONS /healthz", b"405", True),
        ("GET /nowhere", b"404", True),
        ("GET /" + "x" * 9000, b"414", True),
        ("GET /strata", b"426", True),
    ],
)
async def test_every_path_answers_head_as_well_and_no_answer_is_sniffed(rigs, request_line, status, has_body):
    console = WebConsole({"index.html": b"<p>console</p>"}, public_url=None, websocket_path="/strata")
    api = HttpApi(readiness=lambda: None, manifest=dict, by_id=cast(Any, None), console=console)
    asking, transport = Connection(rigs().relay, api, "/strata"), FakeTransport()
    asking.socket.connection_made(cast(asyncio.Transport, transport))
    asking.socket.data_received(f"{request_line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    if asking._http_task is not None:
        await asking._http_task
    head, _, body = bytes(transport.written).partition(b"\r\n\r\n")
    assert head.split()[1] == status
    assert bool(body) is has_body
    assert b"X-Content-Type-Options: nosniff" in head
    if request_line.endswith(" /") and status == b"200":
        assert b"Content-Length: 14" in head
    if status == b"405":
        assert b"Allow: GET, HEAD\r\n" in head
        assert json.loads(body)["error"] == "method_not_allowed"
    asking.socket.connection_lost(None)


@pytest.mark.parametrize(
    "path", [f"/packets/0x{'ab' * 32}", f"/packets/0x{'cd' * 32}", "/healthz", "/readyz"]
)
async def test_head_says_what_get_says_without_the_body(rigs, path):
    whole = [(await answered(rigs(), path, method=method, found=b"{}"))[1] for method in ("GET", "HEAD")]
    got, head = [re.sub(rb"\r\nDate: [^\r]+", b"", each) for each in whole]
    assert head == got.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


async def test_every_answer_is_dated(rigs):
    """RFC 9110 section 6.6.1. A cache counts the age of an answer from then on."""
    for path in ("/healthz", "/nowhere", f"/packets/0x{'ab' * 32}"):
        before = int(time.time())
        _, whole = await answered(rigs(), path, found=b"{}")
        head = email.message_from_bytes(whole.partition(b"\r\n")[2])
        assert before <= email.utils.parsedate_to_datetime(head["Date"]).timestamp() <= time.time()


@pytest.mark.parametrize(
    ("named", "status"),
    [
        ('"0x{id}"', b"304"),
        ('W/"0x{id}"', b"304"),
        ('"x", "0x{id}"', b"304"),
        ("*", b"304"),
        ('"0x"', b"200"),
        ("0x{id}", b"200"),
        ("", b"200"),
    ],
)
async def test_a_packet_that_is_known_already_is_not_sent_again(rigs, named, status):
    packet_id = "ab" * 32
    headers = {"If-None-Match": named.replace("{id}", packet_id)}
    found, whole = await answered(rigs(), f"/packets/0x{packet_id}", headers=headers, found=b"{}")
    head, _, body = whole.partition(b"\r\n\r\n")
    assert found == status
    assert bool(body) is (b"Content-Length" in head) is (status == b"200")
    assert f'ETag: "0x{packet_id}"'.encode() in head
    absent = await answered(rigs(), "/packets/0x" + "cd" * 32, headers={"If-None-Match": "*"})
    assert absent[0] == b"404"


@pytest.mark.req("R-317")
@pytest.mark.parametrize(
    ("settings", "path", "status"),
    [
        ({}, "/packets/zz", b"400"),
        ({}, f"/packets/0x{'ab' * 32}", b"404"),
        ({"require_auth": ("subscribe",)}, f"/packets/0x{'ab' * 32}", b"401"),
        ({"connection_limit": 1}, f"/packets/0x{'ab' * 32}", b"429"),
    ],
)
async def test_a_page_elsewhere_can_read_a_refusal(rigs, settings, path, status):
    """A browser shows a page no answer without this header: a packet that is not there would look like a
    relay that is not there."""
    found, whole = await answered(rigs(**settings), path, headers={"Origin": "https://elsewhere.example"})
    assert found == status
    assert b"Access-Control-Allow-Origin: *\r\n" in whole
    assert (b"Access-Control-Expose-Headers: Retry-After\r\n" in whole) is (b"\r\nRetry-After: " in whole)
    assert (b"\r\nRetry-After: " in whole) is (status == b"429")


@pytest.mark.req("R-321")
@pytest.mark.parametrize("path", [f"/packets/0x{'ab' * 32}", "/did/did:strata:x", "/did-docs/zx"])
async def test_pages_of_other_origins_read_no_packets_by_http_either(rigs, path):
    rig, found = rigs(allowed_origins=("https://good.example",)), []
    for origin in ("https://good.example", "https://evil.example", "null", None):
        headers = {} if origin is None else {"Origin": origin}
        status, whole = await answered(rig, path, headers=headers, found=b"{}")
        found.append(status == b"403")
        assert b"\r\nVary: Origin\r\n" in whole  # a cache must not give one page the answer to another
    assert found == [False, True, True, False]
    for public in ("/healthz", "/.well-known/strata-relay.json"):
        status, _ = await answered(rig, public, headers={"Origin": "https://evil.example"})
        assert status == b"200"
    status, whole = await answered(rigs(), path, headers={"Origin": "https://evil.example"}, found=b"{}")
    assert status != b"403" and b"Vary" not in whole


async def test_a_page_that_is_known_already_is_no_page_of_no_length(rigs):
    console = WebConsole({"index.html": b"<p>console</p>"}, public_url=None, websocket_path="/strata")
    api = HttpApi(readiness=lambda: None, manifest=dict, by_id=cast(Any, None), console=console)
    heads: list[bytes] = []
    for tag in ("", console.page("/", Headers()).headers["ETag"]):  # type: ignore[union-attr]
        asking, transport = Connection(rigs().relay, api, "/strata"), FakeTransport()
        asking.socket.connection_made(cast(asyncio.Transport, transport))
        request = f"GET / HTTP/1.1\r\nHost: x\r\nIf-None-Match: {tag}\r\n\r\n"
        asking.socket.data_received(request.encode())
        assert asking._http_task is not None
        await asking._http_task
        heads.append(bytes(transport.written))
        asking.socket.connection_lost(None)
    assert heads[0].startswith(b"HTTP/1.1 200 ") and b"Content-Length: 14\r\n" in heads[0]
    assert heads[1].startswith(b"HTTP/1.1 304 ") and b"Content-Length" not in heads[1]


async def test_a_page_at_the_path_of_the_websocket_gives_way_to_an_upgrade(rigs):
    rig = rigs()
    console = WebConsole({"index.html": b"<p>console</p>"}, public_url=None, websocket_path="/")
    api = HttpApi(readiness=lambda: None, manifest=dict, by_id=cast(Any, None), console=console)
    for handshake, status in (
        (HANDSHAKE.replace(b"/strata", b"/"), b"101"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
    ):
        asking, transport = Connection(rig.relay, api, "/"), FakeTransport()
        asking.socket.connection_made(cast(asyncio.Transport, transport))
        asking.socket.data_received(handshake)
        if asking._http_task is not None:
            await asking._http_task
        assert transport.written.split()[1] == status
        asking.socket.connection_lost(None)


@pytest.mark.parametrize("version", ["12", "14", "13, 8", ""])
async def test_a_client_of_another_version_of_websocket_hears_which_is_spoken(rigs, version):
    """RFC 6455 section 4.4: a client that speaks several versions then tries another."""
    asking, transport = SlowStore().connection(rigs()), FakeTransport()
    asking.socket.connection_made(cast(asyncio.Transport, transport))
    asking.socket.data_received(HANDSHAKE.replace(b"Version: 13", f"Version: {version}".encode()))
    head = transport.written.partition(b"\r\n\r\n")[0]
    assert head.split()[1] == b"400"
    assert b"\r\nSec-WebSocket-Version: 13" in head
    asking.socket.connection_lost(None)
