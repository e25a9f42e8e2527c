"""One connection: what its messages cause, and what is refused."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, cast

import pytest
from websockets.server import ServerProtocol

from relayd.access.memory import Pressure
from relayd.sessions.connection import Connection
from relayd.sessions.websocket import WebSocket
from relayd.store.types import LogPage
from tests.relayd.sessions.connection_rig import (
    ALICE,
    HANDSHAKE,
    FakeTransport,
    Rig,
    auth,
    eventually,
    frame,
    publish,
    until,
)


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


@pytest.mark.req("R-192")
async def test_a_relay_that_drains_takes_nothing_further_of_a_publisher_whose_answers_make_room(rigs):
    rig = rigs(max_pending_publishes=4)
    rig.socket.data_received(b"".join(publish(n) for n in range(4)))
    rig.relay.registry.stop_reading()
    writer = asyncio.create_task(rig.relay.writer.run())
    assert len(await until(rig, 4)) == 4
    rig.socket.pause_writing()
    rig.socket.resume_writing()
    assert not rig.transport.reading
    rig.socket.close(1001, "going away")
    assert rig.transport.reading, "for its close frame"
    writer.cancel()


@pytest.mark.req("R-321")
async def test_the_connection_beyond_the_limit_is_turned_away(rigs):
    rig = rigs(max_connections=1)
    second = Connection(rig.relay, cast(Any, None), "/strata").socket
    transport = FakeTransport()
    second.connection_made(cast(asyncio.Transport, transport))
    second.data_received(HANDSHAKE)
    assert transport.written.startswith(b"HTTP/1.1 503")
    assert transport.said_all
    assert not rig.transport.said_all


@pytest.mark.req("R-321")
@pytest.mark.parametrize("said", [b"", b"GET /stra", b"nonsense\r\n\r\n", HANDSHAKE, HANDSHAKE + b"\xff\xff"])
async def test_a_connection_that_has_ended_leaves_nothing_to_the_collector(rigs, said: bytes):
    def alive() -> int:
        kinds = (Connection, WebSocket, ServerProtocol)
        return sum(isinstance(each, kinds) for each in gc.get_objects())

    relay = rigs().relay
    gc.collect()
    gc.disable()
    try:
        before = alive()
        socket = Connection(relay, cast(Any, None), "/strata").socket
        socket.connection_made(cast(asyncio.Transport, FakeTransport()))
        if said:
            socket.data_received(said)
        socket.eof_received()
        socket.connection_lost(None)
        del socket
        await asyncio.sleep(0)
        assert alive() == before
    finally:
        gc.enable()


@pytest.mark.req("R-321")
@pytest.mark.parametrize("how", ["too many", "no handshake"])
async def test_a_socket_that_never_becomes_a_connection_leaves_nothing_to_the_collector(rigs, how: str):
    """Floods of these occur too."""

    def alive() -> int:
        kinds = (Connection, WebSocket, ServerProtocol)
        return sum(isinstance(each, kinds) for each in gc.get_objects())

    relay = rigs().relay
    relay.access.max_sockets = 0 if how == "too many" else 100
    gc.collect()
    gc.disable()
    try:
        before = alive()
        connection = Connection(relay, cast(Any, None), "/strata")
        if connection.accepted("192.0.2.2"):
            connection.handshake_begins()
            connection.handshake_ended(failed=True)
        assert relay.metrics.connections_closed["handshake"]._value.get() == (how == "no handshake")
        del connection
        assert alive() == before
    finally:
        gc.enable()


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


async def test_every_message_counts_by_its_type_whatever_becomes_of_it(rigs):
    rig = rigs(subscribe_limit=0, anonymous_subscribe_limit=3, operators=(ALICE.did,), malformed_limit=2)
    asked = [
        '{"type":"SUBSCRIBE","subscription_id":"a","filters":{"cursor":"forged"}}',
        '{"type":"SUBSCRIBE","subscription_id":"a","filters":{"types":["' + '","'.join("x" * 2000) + '"]}}',
        '{"type":"SUBSCRIBE","subscription_id":"a"}',
        '{"type":"SUBSCRIBE","subscription_id":"b"}',
        '{"type":"UNSUBSCRIBE","subscription_id":"nobody"}',
        '{"type":"MODERATE","action":"list"}',
        '{"type":"RECONCILE","message":"61"}',
        '{"type":"AUTH","author_id":"x","challenge":"x","signature":"x"}',
        '{"type":"FLY"}',
        '{"type":"SUBSCRIBE"}',
        '{"type":"PUBLISH"}',
        '{"type":"AUTH"}',
        "{",
        "{",
        "{",
    ]
    rig.socket.data_received(b"".join(map(frame, asked)))

    def counted(name: str, label: str) -> dict[str, float]:
        return {
            sample.labels[label]: sample.value
            for metric in rig.relay.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == name and sample.value
        }

    assert counted("relayd_messages_received_total", "type") == {
        "SUBSCRIBE": 4,
        "UNSUBSCRIBE": 1,
        "MODERATE": 1,
        "RECONCILE": 1,
        "AUTH": 1,
        "other": 7,  # an unknown type, three wrong shapes, and three that are not messages
    }
    assert sum(counted("relayd_auths_total", "outcome").values()) == 1, "none of a wrong shape"
    assert counted("relayd_publishes_total", "outcome") == {}


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
    monkeypatch.setattr(asyncio, "sleep", sleep)
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


@pytest.mark.req("R-321")
@pytest.mark.parametrize("why", ["it drains", "it is short of memory"])
async def test_a_relay_that_drains_or_is_short_of_memory_begins_no_session(rigs, why):
    rig = rigs()
    registry = rig.relay.registry
    if why == "it drains":
        registry.draining = True
    else:
        registry.pressure = Pressure.SHORT
    second = Connection(rig.relay, cast(Any, None), "/strata").socket
    transport = FakeTransport()
    second.connection_made(cast(asyncio.Transport, transport))
    second.data_received(HANDSHAKE)
    assert transport.written.startswith(b"HTTP/1.1 503") and b"Retry-After: " in transport.written
    second.connection_lost(None)


@pytest.mark.req("R-321")
async def test_what_was_answered_counts_no_more_among_what_is_held(rigs):
    rig = rigs()
    before = rig.socket.held_bytes
    rig.socket.data_received(publish(1) + publish(2))
    assert rig.socket.held_bytes > before + 500
    writer = asyncio.create_task(rig.relay.writer.run())
    await until(rig, 2)
    assert rig.socket.held_bytes == before
    writer.cancel()


@pytest.mark.req("R-180")
async def test_what_was_unsubscribed_gets_nothing_that_comes_then(rigs):
    rig = rigs()

    async def page(*_: object, **__: object) -> LogPage:
        return LogPage([], exhausted=True)

    cast(Any, rig.relay.store).page = page
    writer = asyncio.create_task(rig.relay.writer.run())
    for name in "st":
        rig.socket.data_received(frame(f'{{"type":"SUBSCRIBE","subscription_id":"{name}","gapless":true}}'))
    await eventually(lambda: len(rig.relay.fanout) == 2)
    rig.socket.data_received(frame('{"type":"UNSUBSCRIBE","subscription_id":"s"}') + publish(1))
    answer, event = await until(rig, 2)
    assert (answer["type"], event["type"], event["subscription_id"]) == ("OK", "EVENT", "t")
    assert len(rig.relay.fanout) == rig.relay.metrics.subscriptions._value.get() == 1
    writer.cancel()


async def test_a_connection_that_goes_gives_back_what_it_held_of_others(rigs):
    """A place among the comparisons, and one among the sessions of its address."""
    rig = rigs()
    relay, gone = rig.relay, Rig(rig.clock, relay=rig.relay, peer="198.51.100.7")
    relay.comparisons.begin(ALICE.did, gone.connection._comparer, 0.0)
    places = [len(relay.comparisons), len(relay.access.sources._sessions)]
    gone.socket.connection_lost(None)
    assert (places, len(relay.comparisons), len(relay.access.sources._sessions)) == ([1, 2], 0, 1)


@pytest.mark.req("R-321")
async def test_who_has_used_the_database_for_its_share_gets_its_history_later(rigs, monkeypatch):
    rig = rigs(read_share=0.5)
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        rig.clock.now += seconds

    rig.connection.payer.used_database(8.0, rig.clock.now)  # of the five seconds in ten
    monkeypatch.setattr(asyncio, "sleep", sleep)
    await rig.connection.writable()
    assert sum(waits) == pytest.approx(6, abs=0.1)


def reads(rig: Rig) -> bool:
    return rig.transport.reading


@pytest.mark.req("R-192", "R-321")
async def test_a_full_relay_reads_from_nobody_who_waits_for_an_answer_until_there_is_room(rigs):
    rig = rigs(publish_queue_bytes=1)
    idle = Rig(rig.clock, relay=rig.relay, peer="198.51.100.7")
    rig.socket.data_received(publish(1))
    assert not rig.transport.reading
    assert reads(idle), "a peer that waits for nothing may ask"
    idle.socket.data_received(publish(2))
    assert not reads(idle)
    writer = asyncio.create_task(rig.relay.writer.run())
    await eventually(lambda: rig.transport.reading and idle.transport.reading)
    writer.cancel()
    idle.socket.connection_lost(None)


async def test_a_connection_that_has_gone_is_not_told_of_room(rigs):
    rig = rigs(publish_queue_bytes=1)
    gone = Rig(rig.clock, relay=rig.relay, peer="198.51.100.7")
    gone.socket.data_received(publish(1))
    gone.transport.abort()
    gone.socket.connection_lost(None)
    rig.socket.data_received(publish(2))
    writer = asyncio.create_task(rig.relay.writer.run())
    await eventually(lambda: rig.transport.reading)
    assert not gone.transport.reading
    writer.cancel()
