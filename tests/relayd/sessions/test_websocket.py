"""The shell around one socket: pressure, deadlines and closing."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any, cast

import pytest

from relayd.sessions.connection import Connection
from tests.relayd.sessions.connection_rig import (
    CLOSE,
    PING,
    TEXT,
    FakeTransport,
    Rig,
    frame,
    publish,
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


@pytest.mark.req("R-323")
async def test_what_was_written_before_more_was_declined_leaves_in_time_or_not_at_all(rigs):
    quick, slow, idle = rigs(), rigs(), rigs()
    for rig in (quick, slow):
        rig.socket.queue(bytes(1000))
        rig.socket.flush()
        rig.transport.waiting = 600
    slow.socket.pause_writing()
    for rig in (quick, slow, idle):
        rig.relay.registry.withdraw()
    quick.sweep(0.5)
    slow.transport.waiting -= 1  # it takes some, and that is not enough
    quick.socket.queue(bytes(50))
    quick.socket.flush()
    quick.transport.waiting = 50  # of what came later
    for rig in (quick, slow, idle):
        rig.sweep(1)
    assert [rig.transport.aborted for rig in (quick, slow, idle)] == [False, True, False]
