"""Packets by id, by each way that a relay offers: its filter, HTTP, or its history (C-285)."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import pytest
import strata
from msgspec import Raw
from strata.channels.connecting import connect
from strata.channels.messaging import MessageEnvelope, RelayNode
from strata.channels.messaging.binding import build_packet
from strata.protocol import wire
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from strata.relays.connection import Options

from tests.support.relays import FakeRelay, NaiveRelay

OPTIONS = Options(
    backoff_base=0.001,
    backoff_cap=0.01,
    idle_timeout=0.4,
    manifest_timeout=5,
    connect_timeout=5,
    close_timeout=1,
)
SMALL = replace(OPTIONS, page_events=10, queue_events=10)
START = 1_760_000_000
FILTER = ("packet_ids", "history_marker")
HTTP = ("http_packets", "history_marker")
BOTH = ("packet_ids", "http_packets", "history_marker")


@pytest.fixture
def opened() -> Callable[..., Any]:
    """A running relay with these extensions; `gets` are the paths requested over HTTP."""

    class HttpRelay(FakeRelay):
        def __init__(self, model: NaiveRelay) -> None:
            super().__init__(model)
            self.gets: list[str] = []
            self.serve: Callable[[Packet, int], str] | None = None

        def _http(self, connection: Any, request: Any) -> Any:
            if not request.path.startswith("/packets/"):
                return super()._http(connection, request)
            packet_id = request.path.removeprefix("/packets/")
            self.gets.append(packet_id)
            for packet, received_at in self.model.log:
                if packet.packet_id == packet_id:
                    body = (self.serve or self.envelope)(packet, received_at)
                    return connection.respond(HTTPStatus.OK, body)
            return connection.respond(HTTPStatus.NOT_FOUND, '{"error":"not found"}')

        @staticmethod
        def envelope(packet: Packet, received_at: int) -> str:
            return f'{{"packet":{packet.canonical.decode()},"received_at":{received_at}}}'

    @asynccontextmanager
    async def open_relay(*extensions: str) -> AsyncIterator[Any]:
        async with HttpRelay(NaiveRelay(extensions)) as relay:
            yield relay

    return open_relay


async def found(relay: strata.Relay, ids: list[str], **members: Any) -> list[str]:
    async with asyncio.timeout(20):
        return [each.packet.packet_id async for each in relay.find(ids, **members)]


def subscribes(fake: Any) -> list[wire.Subscribe]:
    received = [message for session in fake.model.sessions for message in session.received]
    return [message for message in received if isinstance(message, wire.Subscribe)]


def asked_for(fake: Any, kind: str) -> list[wire.Filters]:
    """The filters of the requests for these packets, without those for keys."""
    filters = [each.filters for each in subscribes(fake)]
    return [each for each in filters if each and each.types == [kind]]


@pytest.mark.req("C-285")
@pytest.mark.parametrize("extensions", [FILTER, BOTH], ids=["filter", "filter and HTTP"])
async def test_a_relay_that_filters_by_id_is_asked_by_id(opened, make, extensions):
    async with opened(*extensions) as fake, connect(fake.url, options=OPTIONS) as relay:
        await fake.append(*(make(n) for n in range(6)))
        ids = [make(n).packet_id for n in (4, 1)]
        assert sorted(await found(relay, ids, types="POST", since=START)) == sorted(ids)
        (request,) = asked_for(fake, "POST")
        assert request.packet_ids is not None and sorted(request.packet_ids) == sorted(ids)
        assert request.since is None, "the id says it all, however old the packet is"
        assert fake.gets == []


@pytest.mark.req("C-285")
async def test_a_relay_that_serves_packets_over_http_alone_is_asked_there(opened, make):
    async with opened(*HTTP) as fake, connect(fake.url, options=OPTIONS) as relay:
        await fake.append(*(make(n) for n in range(6)))
        ids = [make(n).packet_id for n in (4, 99, 1)]
        assert await found(relay, ids, types="POST", since=START + 5) == [ids[0], ids[2]]
        assert fake.gets == ids
        assert asked_for(fake, "POST") == []


async def test_a_time_beyond_all_measure_is_bounded_over_http_too(opened, make):
    async with opened(*HTTP) as fake, connect(fake.url, options=OPTIONS) as relay:
        await fake.append(make(0))
        fake.serve = lambda packet, _: fake.envelope(packet, 2**70)
        assert [each.received_at async for each in relay.find([make(0).packet_id])] == [2**53 - 1]


@pytest.mark.req("C-285")
async def test_the_history_of_any_other_relay_is_read_newest_first_until_all_have_turned_up(opened, make):
    async with opened() as fake, connect(fake.url, options=SMALL) as relay:
        await fake.append(*(make(n) for n in range(60)))
        ids = [make(n).packet_id for n in (41, 58)]
        assert await found(relay, ids, types="POST", since=START + 3) == ids[::-1]
        requests = asked_for(fake, "POST")
        assert {each.order for each in requests} == {"desc"}
        assert {each.since for each in requests} == {START + 3}
        assert not any(each.packet_ids for each in requests), "it would not know what that is"
        assert len(requests) < 6, "it stops once both are there"
        assert fake.gets == []


@pytest.mark.slow
@pytest.mark.req("C-285")
async def test_what_lies_before_the_window_is_not_looked_for(opened, make):
    async with opened() as fake, connect(fake.url, options=OPTIONS) as relay:
        await fake.append(*(make(n) for n in range(6)))
        assert await found(relay, [make(1).packet_id], types="POST", since=START + 3) == []


@pytest.mark.slow
@pytest.mark.parametrize("extensions", [FILTER, HTTP, ()], ids=["filter", "HTTP", "history"])
async def test_what_a_relay_has_not_is_not_found_and_is_no_error(opened, make, extensions):
    async with opened(*extensions) as fake, connect(fake.url, options=OPTIONS) as relay:
        await fake.append(make(1))
        assert await found(relay, [make(2).packet_id], types="POST", since=0) == []
        assert await found(relay, []) == []


@pytest.mark.parametrize("extensions", [FILTER, HTTP, ()], ids=["filter", "HTTP", "history"])
async def test_an_id_that_is_asked_for_twice_is_found_once(opened, make, extensions):
    async with opened(*extensions) as fake, connect(fake.url, options=OPTIONS) as relay:
        await fake.append(make(1), make(2))
        ids = [make(1).packet_id, make(1).packet_id]
        assert await found(relay, ids, types="POST", since=0) == ids[:1]


def with_other_text(packet: Packet) -> bytes:
    value = json.loads(packet.canonical)
    value["content"]["text"] = "something else"
    return json.dumps(value).encode()


def signed_by_another(packet: Packet) -> bytes:
    """The packet, whole and under the requested id, but with another identity's signature."""
    value = json.loads(packet.canonical)
    value["signature"] = "0x" + Identity.from_seed(bytes(32)).sign(packet.signed_bytes).hex()
    return json.dumps(value).encode()


@pytest.mark.slow
@pytest.mark.req("C-286")
@pytest.mark.parametrize("touch", [with_other_text, signed_by_another])
@pytest.mark.parametrize("extensions", [FILTER, HTTP, ()], ids=["filter", "HTTP", "history"])
async def test_a_packet_that_the_relay_has_touched_is_not_found(opened, make, extensions, touch):
    async with opened(*extensions) as fake, connect(fake.url, options=OPTIONS) as relay:
        await fake.append(make(1))
        fake.model.disguise = lambda event: wire.Event(
            packet=Raw(touch(make(1))),
            received_at=event.received_at,
            subscription_id=event.subscription_id,
            cursor=event.cursor,
        )
        fake.serve = lambda packet, at: f'{{"packet":{touch(packet).decode()},"received_at":{at}}}'
        assert await found(relay, [make(1).packet_id], types="POST", since=0) == []
        assert relay.statistics.events_delivered == 0
        assert relay.statistics.events_tampered + relay.statistics.events_invalid == 1


@pytest.mark.req("C-285", "C-286")
async def test_another_packet_than_the_one_asked_for_is_not_taken_over_http(opened, make):
    async with opened(*HTTP) as fake, connect(fake.url, options=OPTIONS) as relay:
        await fake.append(make(1))
        fake.serve = lambda packet, at: fake.envelope(make(2), at)
        assert await found(relay, [make(1).packet_id]) == []


@pytest.mark.parametrize(
    "body",
    ["", "[]", "{}", '{"packet":{}}', '{"packet":7,"received_at":1}', "\x00", '{"packet":' + "[" * 90_000],
    ids=lambda body: repr(body)[:24],
)
async def test_an_answer_over_http_that_is_no_packet_counts_as_none(opened, make, body):
    async with opened(*HTTP) as fake, connect(fake.url, options=OPTIONS) as relay:
        await fake.append(make(1), make(2))
        fake.serve = lambda packet, at: body if packet == make(1) else fake.envelope(packet, at)
        ids = [make(1).packet_id, make(2).packet_id]
        assert await found(relay, ids) == ids[1:]


async def test_an_answer_over_http_larger_than_any_packet_is_not_read_to_its_end(opened, make):
    async with opened(*HTTP) as fake, connect(fake.url, options=OPTIONS) as relay:
        await fake.append(make(1))
        fake.serve = lambda packet, at: fake.envelope(packet, at)[:-1] + ',"x":"' + "x" * (4 << 20) + '"}'
        assert await found(relay, [make(1).packet_id]) == []


@pytest.mark.req("R-139")
async def test_a_manifest_that_is_nested_too_deep_means_a_plain_relay(opened, make):
    async with opened() as fake:
        fake.manifest_body = b'{"x":' + b"[" * 90_000
        async with connect(fake.url, options=OPTIONS) as relay:
            assert (await relay.publish(make(1))).packet_id == make(1).packet_id


@pytest.mark.req("C-286")
async def test_a_node_hears_nothing_that_a_relay_has_touched(extended, identities):
    alice, bob = identities
    topic = "/chat/1/room/proto"
    said = base64.b64encode(b"true").decode().encode()

    def disguise(event: wire.Event) -> wire.Event:
        changed = bytes(event.packet).replace(said, base64.b64encode(b"lies"))
        return wire.Event(
            packet=Raw(changed),
            received_at=event.received_at,
            subscription_id=event.subscription_id,
            cursor=event.cursor,
        )

    extended.model.disguise = disguise
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    async with (
        connect(extended.url, identity=bob, options=OPTIONS) as relay,
        RelayNode(relay, identity=bob, wall=lambda: START) as node,
    ):
        node.message_events.on("message_received", lambda event: heard.put_nowait(event.message.payload))
        await node.subscribe([topic])
        for number, payload in enumerate((b"true", b"last")):
            envelope = MessageEnvelope(content_topic=topic, payload=payload)
            await extended.append(build_packet(alice, envelope, now=START, nonce=f"0x{number:032x}"))
        assert await asyncio.wait_for(heard.get(), 20) == b"last"
        assert heard.empty() and relay.statistics.events_tampered == 1
