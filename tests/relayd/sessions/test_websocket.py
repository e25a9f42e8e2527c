"""The shell around one socket: pressure, deadlines and closing."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any, cast

import pytest
from strata.protocol.errors import ErrorCode, InvalidPacket

from relayd.access.memory import Pressure
from relayd.admission.verify import VerifyPool, _Checked
from relayd.feed.subscription import FeedPhase
from relayd.frames import text_frame
from relayd.http.api import HttpApi
from relayd.sessions.connection import Connection
from tests.relayd.sessions.connection_rig import (
    CLOSE,
    HANDSHAKE,
    PING,
    TEXT,
    FakeTransport,
    Rig,
    eventually,
    frame,
    publish,
    until,
)


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
    for _ in range(20):  # for ten minutes no ping could pass, but bytes do
        rig.transport.waiting -= 1000
        rig.sweep(30)
    rig.socket.resume_writing()
    for _ in range(5):  # bytes left in the kernel's buffers are still ahead of any ping
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


@pytest.mark.req("R-170")
async def test_a_live_feed_is_not_taken_while_there_is_no_room_for_it(rigs):
    rig = rigs(outbound_queue_bytes=65_536)
    rig.socket.pause_writing()
    assert not rig.socket.outbox.deliver(b"x", 1)
    rig.socket.resume_writing()
    assert rig.socket.outbox.deliver(bytes(65_537), 1)
    assert not rig.socket.outbox.deliver(b"x", 1)
    rig.transport.written.clear()


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
    assert rig.transport.said_all
    assert not rig.socket.eof_received()  # so the transport closes


@pytest.mark.req("R-128", "R-132")
async def test_what_stands_behind_the_frame_that_closed_is_neither_heard_nor_counted(rigs):
    rig = rigs(malformed_limit=2)
    sent = rig.relay.metrics.errors_sent[ErrorCode.INVALID_SCHEMA]._value.get
    rig.socket.data_received(frame("{") * 4 + frame(b"x", 0x2) * 4 + publish(1))
    assert [opcode for opcode, _ in rig.frames()] == [TEXT] * 3 + [CLOSE]
    assert (sent(), rig.relay.admission.pending) == (3, 0)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello", b"HTTP/1.1 400 "),
        (
            b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"HTTP/1.1 400 ",
        ),
        (b"GET /did/\xff HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 400 "),
        (b"\0\1\r\n\r\n", b"HTTP/1.1 400 "),
        (b"GET / HTTP/1.1\r\nX: " + bytes(9000) + b"\r\n\r\n", b"HTTP/1.1 431 "),
        (b"GET /healthz", b""),
    ],
)
async def test_a_request_that_cannot_be_read_is_answered_once_and_half_of_one_is_not(rigs, request_, status):
    rig = rigs()
    api = HttpApi(readiness=lambda: None, manifest=dict, by_id=cast(Any, None))
    socket, transport = Connection(rig.relay, api, "/strata").socket, FakeTransport()
    socket.connection_made(cast(asyncio.Transport, transport))
    socket.data_received(request_)
    socket.eof_received()
    assert bytes(transport.written).startswith(status) and bool(transport.written) is bool(status)
    assert transport.written.count(b"HTTP/1.1") == bool(status)
    socket.connection_lost(None)


async def test_who_takes_an_http_response_slowly_gets_all_of_it_and_who_takes_nothing_does_not(rigs):
    rig = rigs()
    api = HttpApi(readiness=lambda: None, manifest=dict, by_id=cast(Any, None))
    socket, transport = Connection(rig.relay, api, "/strata").socket, FakeTransport()
    socket.connection_made(cast(asyncio.Transport, transport))
    transport.waiting = 1_000_000
    socket.data_received(b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n")
    await eventually(lambda: transport.said_all)
    rig.sweep(3)
    assert transport.closing
    for _ in range(10):  # a minute and a half, on a slow line
        transport.waiting -= 60_000
        rig.sweep(9)
    assert not transport.aborted
    rig.sweep(9)
    transport.waiting -= 100  # a byte now and then is no working line
    rig.sweep(7)
    assert transport.aborted


@pytest.mark.parametrize(("what", "patience"), [("a session", 5), ("a response", 15)])
async def test_who_has_closed_its_half_and_takes_nothing_is_cut_off_as_others_are(rigs, what, patience):
    rig = rigs()
    socket, transport = rig.socket, rig.transport
    if what == "a response":
        api = HttpApi(readiness=lambda: None, manifest=dict, by_id=cast(Any, None))
        socket, transport = Connection(rig.relay, api, "/strata").socket, FakeTransport()
        socket.connection_made(cast(asyncio.Transport, transport))
        transport.waiting = 60_000
        socket.data_received(b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: transport.said_all)
    transport.waiting = 60_000
    assert not socket.eof_received()
    assert transport.closing
    rig.sweep(patience - 1)
    assert not transport.aborted
    rig.sweep(1)
    assert transport.aborted
    socket.connection_lost(None)


@pytest.mark.parametrize("closed_by", ["the peer", "the relay", "a response"])
async def test_after_the_last_word_what_comes_is_read_and_dropped(rigs, closed_by):
    """Bytes that arrive at a closed socket reset the connection, and the reset overtakes the close frame."""
    rig = rigs(max_packet_bytes=1024)
    socket, transport = rig.socket, rig.transport
    if closed_by == "a response":
        api = HttpApi(readiness=lambda: None, manifest=dict, by_id=cast(Any, None))
        socket, transport = Connection(rig.relay, api, "/strata").socket, FakeTransport()
        socket.connection_made(cast(asyncio.Transport, transport))
        socket.data_received(b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n")
        await eventually(lambda: transport.said_all)
        assert transport.written.startswith(b"HTTP/1.1 404")
    else:
        if closed_by == "the relay":
            socket.close(1001, "going away")
        socket.data_received(frame(struct.pack("!H", 1000), CLOSE))
        assert [opcode for opcode, _ in rig.frames()] == [CLOSE]
    for _ in range(6):
        assert transport.said_all and transport.reading and not transport.closing
        socket.data_received(publish(1) + b"\xff" * 100)
        rig.sweep(0.25)
    assert socket.held_bytes == rig.relay.admission.pending == 0
    rig.sweep(0.5)
    assert transport.closing and not transport.aborted
    rig.sweep(6)
    assert transport.aborted


async def test_what_is_dropped_after_the_last_word_is_bounded_in_bytes(rigs):
    rig = rigs(max_packet_bytes=1024)
    limit = 8 * rig.relay.settings.max_frame_bytes
    rig.socket.data_received(frame(struct.pack("!H", 1000), CLOSE))
    rig.socket.data_received(bytes(limit))
    assert not rig.transport.closing
    rig.socket.data_received(b"x")
    assert rig.transport.closing


async def test_where_only_both_sides_can_close_silence_is_waited_for(rigs, clock, monkeypatch):
    """TLS cannot close one half of a connection."""
    monkeypatch.setattr(FakeTransport, "can_write_eof", lambda _: False)
    rig = rigs()
    rig.socket.data_received(frame(struct.pack("!H", 1000), CLOSE))
    for _ in range(4):
        rig.socket.data_received(publish(1))
        await passes(clock, 0.25)
        assert not rig.transport.closing
    await passes(clock, 0.25)
    assert rig.transport.closing


@pytest.mark.req("R-321")
async def test_endless_empty_fragments_hold_no_memory(rigs):
    rig = rigs(control_frame_limit=2**30)
    rig.socket.data_received(frame("{", fin=False))
    for _ in range(1000):
        rig.socket.data_received(frame("", 0x0, fin=False) * 10)
    assert len(rig.socket._fragments) == 1
    rig.socket.data_received(frame('"type":"X"}', 0x0))
    (message,) = rig.messages()
    assert message["detail"] == "unknown_type"


@pytest.mark.req("R-123")
async def test_an_oversized_frame_is_answered_then_closed_with_1009(rigs, clock):
    rig = rigs(max_packet_bytes=1024)
    rig.socket.data_received(b"\x81\xff" + struct.pack("!Q", 10 * 2**20) + bytes(4))
    (first, payload), (second, code) = rig.frames()
    assert (first, json.loads(payload)["code"]) == (TEXT, "packet_too_large")
    assert (second, code[:2]) == (CLOSE, struct.pack("!H", 1009))
    # Bytes on their way are read and dropped: closing over them would reset the connection and lose both.
    for _ in range(4):
        rig.socket.data_received(bytes(1024) + publish(1))
        assert not rig.transport.closing
        rig.sweep(0.25)
    assert rig.socket.held_bytes == rig.relay.admission.pending == 0
    assert not rig.socket.eof_received()


async def test_whoever_goes_on_sending_after_such_a_frame_is_cut_off(rigs, clock):
    rig = rigs(max_packet_bytes=1024)
    rig.socket.data_received(b"\x81\xff" + struct.pack("!Q", 10 * 2**20) + bytes(4))
    for _ in range(12):
        rig.socket.data_received(bytes(1024))
        rig.sweep(0.25)
    assert rig.transport.closing


async def passes(clock, seconds):
    clock.now += seconds
    for _ in range(3):
        await asyncio.sleep(0)


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


@pytest.mark.req("R-323")
async def test_what_was_written_before_more_was_declined_leaves_in_time_or_not_at_all(rigs):
    quick, slow, idle = rigs(), rigs(), rigs()
    for rig in (quick, slow):
        rig.socket.outbox.queue(bytes(1000))
        rig.socket.outbox.flush()
        rig.transport.waiting = 600
    slow.socket.pause_writing()
    for rig in (quick, slow, idle):
        rig.relay.registry.withdraw()
    quick.sweep(0.5)
    slow.transport.waiting -= 1  # it takes some, which is not enough
    quick.socket.outbox.queue(bytes(50))
    quick.socket.outbox.flush()
    quick.transport.waiting = 50  # of the later ones
    for rig in (quick, slow, idle):
        rig.sweep(1)
    assert [rig.transport.aborted for rig in (quick, slow, idle)] == [False, True, False]


@pytest.mark.req("R-321")
async def test_who_is_closed_for_want_of_memory_gets_what_it_was_given_and_hears_why(rigs):
    quick, slow = rigs(), rigs()
    for rig in (quick, slow):
        rig.socket.data_received(b"\x81\xff" + struct.pack("!Q", 500_000) + bytes(4) + b"x" * 300_000)
        rig.socket.outbox.queue(text_frame(b"{}"))
        rig.transport.waiting = 4_000_000  # of a page, for example
        assert rig.socket.held_bytes > 4_300_000
        for pressure in (Pressure.FULL, Pressure.FULL):
            rig.relay.registry.relieve(pressure)
        assert not rig.transport.aborted and rig.socket.held_bytes == 0
        rig.socket.data_received(bytes(100_000))
        assert rig.socket.held_bytes == 0
        (_, (opcode, payload)) = rig.frames()
        assert (opcode, payload[:2]) == (CLOSE, struct.pack("!H", 1013)) and rig.transport.said_all
    quick.sweep(0.5)
    quick.transport.waiting = 0
    quick.sweep(0.6)
    slow.sweep(0.1)
    assert (quick.transport.aborted, slow.transport.aborted) == (False, True)
    quick.sweep(2)
    assert quick.transport.closing and not quick.transport.aborted


@pytest.mark.req("R-321")
@pytest.mark.parametrize(
    "flood",
    [
        frame("", PING),
        frame("", 0xA),
        frame("{", fin=False) + frame("", 0x0, fin=False) * 500,
        frame("{", fin=False) + frame("x", 0x0, fin=False) * 500,
    ],
    ids=["pings", "pongs", "empty fragments", "fragments of one byte"],
)
async def test_a_flood_of_frames_that_their_bytes_do_not_pay_for_ends_with_1008(rigs, flood):
    rig = rigs(control_frame_limit=100)
    for _ in range(200):
        rig.socket.data_received(flood)
    frames = rig.frames()
    assert frames[-1] == (CLOSE, (1008).to_bytes(2, "big") + b"too many control frames")
    assert len(frames) <= 102  # no more than the library had answered by then
    assert rig.relay.metrics.connections_closed["control_frames"]._value.get() == 0
    rig.socket.data_received(frame("", CLOSE))
    rig.socket.connection_lost(None)
    assert rig.relay.metrics.connections_closed["control_frames"]._value.get() == 1


@pytest.mark.req("R-321")
async def test_pings_now_and_then_and_large_fragments_are_fine(rigs):
    rig = rigs(control_frame_limit=10, malformed_window=60.0)
    for _ in range(100):
        rig.clock.now += 7.0
        rig.socket.data_received(frame("", PING))
    rig.socket.data_received(frame("{", fin=False))
    for _ in range(50):
        rig.socket.data_received(frame(" " * 1024, 0x0, fin=False))
    rig.socket.data_received(frame('"type":"X"}', 0x0))
    assert [opcode for opcode, _ in rig.frames()] == [0xA] * 100 + [TEXT]


@pytest.mark.req("R-321")
async def test_forty_thousand_frames_in_one_read_are_no_one_step(rigs):
    """They are all handled, a few hundred in each step, and nothing more is read until then."""
    rig, count = rigs(refused_limit=0), 2000
    rig.socket.data_received(frame('{"type":"UNSUBSCRIBE","subscription_id":"s"}') * count)
    received = rig.relay.metrics.messages_received["UNSUBSCRIBE"]._value
    assert 0 < received.get() < count / 4
    assert not rig.transport.reading
    before = received.get()
    await eventually(lambda: received.get() > before)
    assert received.get() < count / 2
    await eventually(lambda: received.get() == count)
    await eventually(lambda: rig.transport.reading)


async def one_frame_a_turn(rig: Rig) -> None:
    await asyncio.sleep(0)
    rig.relay.slices.seconds = 0.0


@pytest.mark.req("R-321")
async def test_a_crowd_that_speaks_at_once_stands_in_line_and_keeps_its_order(rigs, clock):
    rig = rigs()
    crowd = [rig, *(Rig(clock, relay=rig.relay, peer=f"192.0.2.{n}") for n in range(2, 12))]
    await one_frame_a_turn(rig)
    for each in crowd:
        each.socket.data_received(publish(1) + publish(2) + frame('{"type":"X"}'))
    assert rig.relay.admission.pending == 1
    assert not any(each.transport.reading for each in crowd)
    for each in crowd:
        (said,) = await until(each, 1)
        assert said["detail"] == "unknown_type"
    assert rig.relay.admission.pending == 2 * len(crowd)
    await eventually(lambda: all(each.transport.reading for each in crowd))
    for each in crowd[1:]:
        each.socket.connection_lost(None)


@pytest.mark.req("R-181", "R-321")
async def test_what_stands_in_line_before_a_close_frame_counts_before_it(rigs):
    rig = rigs()
    await one_frame_a_turn(rig)
    messages = frame('{"type":"X"}') * 3
    rig.socket.data_received(messages + frame(struct.pack("!H", 1000), CLOSE))
    said: list[int] = []
    for _ in range(20):
        said += [opcode for opcode, _ in rig.frames()]
        await asyncio.sleep(0)
    assert said == [TEXT, TEXT, TEXT, CLOSE]


@pytest.mark.req("R-321")
async def test_a_connection_that_goes_lets_its_subscriptions_go_a_few_at_a_time(rigs):
    rig = rigs(max_subscriptions=1000)
    relay, count = rig.relay, 200
    for n in range(count):
        filters = json.dumps({"types": [f"T{n}"], "limit": 0})
        rig.socket.data_received(
            frame(f'{{"type":"SUBSCRIBE","subscription_id":"s{n}","filters":{filters}}}')
        )
    # They are live, as after their history.
    for subscription in rig.connection._session.subscriptions.values():
        rig.connection._backlog.discard(subscription)
        subscription.phase = FeedPhase.LIVE
        relay.fanout.join(subscription, rig.connection)
    await one_frame_a_turn(rig)
    open_now = relay.metrics.subscriptions._value.get
    rig.socket.connection_lost(None)
    assert len(relay.registry) == 0
    assert count > len(relay.fanout) == open_now() > count - 50
    # A packet for all of them in between: nobody reads it, and nothing is written.
    rig.transport.aborted = True
    assert rig.connection.deliver(b"frames", 1)
    turns = 0
    async with asyncio.timeout(10):
        while len(relay.fanout):
            await asyncio.sleep(0)
            turns += 1
    assert turns > 10
    assert open_now() == 0 and relay.metrics.subscriptions_behind._value.get() == 0


@pytest.mark.req("R-321")
async def test_frames_behind_the_handshake_in_the_same_read_are_bounded_too(rigs, clock):
    rig = rigs()
    transport = rig.transport
    rig.connection = Connection(rig.relay, cast(Any, None), "/strata")
    socket = rig.socket = rig.connection.socket
    socket.connection_made(cast(Any, transport))
    for byte in HANDSHAKE[:-1]:
        socket.data_received(bytes([byte]))
    transport.written.clear()
    socket.data_received(HANDSHAKE[-1:] + frame('{"type":"X"}') * 1000)
    assert bytes(transport.written).startswith(b"HTTP/1.1 101")
    assert 100 < transport.written.count(b"unknown_type") < 400
    await eventually(lambda: transport.written.count(b"unknown_type") == 1000)


@pytest.mark.req("R-321")
async def test_an_address_that_has_used_its_share_of_the_loop_is_read_later(clock, monkeypatch):
    """Each step takes two milliseconds here, whatever the machine does meanwhile."""
    worked = Connection.worked
    monkeypatch.setattr(Connection, "worked", lambda it, seconds, now: worked(it, 0.002, now))
    rig = Rig(clock, loop_share=0.01)
    other = Rig(clock, rig.relay, peer="192.0.2.2")
    local = Rig(clock, rig.relay, peer="127.0.0.1")
    for socket in (rig.socket, local.socket):
        for _ in range(200):
            socket.data_received(frame('{"type":"UNSUBSCRIBE","subscription_id":"s"}'))
    other.socket.data_received(frame('{"type":"UNSUBSCRIBE","subscription_id":"s"}'))
    assert (rig.transport.reading, other.transport.reading, local.transport.reading) == (False, True, True)
    clock.now += 60
    await eventually(lambda: rig.transport.reading)
    for each in (rig, other, local):
        each.socket.connection_lost(None)
    await rig.relay.admission.close()


@pytest.mark.req("R-321")
async def test_an_address_pays_for_packets_that_are_dear_to_check(clock, monkeypatch):
    rig = Rig(clock, loop_share=0.01)
    other = Rig(clock, rig.relay, peer="192.0.2.2")
    monkeypatch.setattr(VerifyPool, "_checked", _seeming_dear)
    for each in (rig, other):
        each.socket.data_received(publish(1) if each is rig else frame('{"type":"X"}'))
        await eventually(lambda: not rig.relay.admission.pending)
        each.socket.data_received(frame('{"type":"UNSUBSCRIBE","subscription_id":"s"}'))
    assert (rig.transport.reading, other.transport.reading) == (False, True)
    for each in (rig, other):
        each.socket.connection_lost(None)
    await rig.relay.admission.close()


def _seeming_dear(pool: Any, jobs: Any) -> _Checked[Any]:
    refusal = InvalidPacket(ErrorCode.INVALID_SCHEMA, "dear")
    return _Checked([], [(job, refusal) for job in jobs], [(jobs[0], 5.0)], 5.0)


@pytest.mark.req("R-321")
async def test_a_socket_that_is_gone_holds_nothing_though_its_connection_is_a_cycle(rigs):
    rig = rigs()
    rig.socket.data_received(b"\x81\xfe\xff\xff" + bytes(4) + b"x" * 60_000)
    assert rig.socket.held_bytes > 60_000
    rig.socket.connection_lost(None)
    assert rig.socket.held_bytes == 0


@pytest.mark.req("R-321")
async def test_memory_is_looked_at_once_so_many_bytes_were_read(rigs):
    rig = rigs()
    registry, looks = rig.relay.registry, []
    registry.unseen_bytes, registry.look_after_bytes = 0, 20
    registry.look = lambda: looks.append(registry.unseen_bytes)
    for _ in range(4):
        rig.socket.data_received(frame("", 0xA))  # six bytes
    assert looks == [24]
