"""The outbox to one peer, over a transport that only records."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import cast

import pytest

from relayd.metrics import Tally
from relayd.sessions.outbox import SocketOutbox
from relayd.tls import read_tls_files, write_dev_certificates
from tests.relayd.sessions.connection_rig import FakeTransport


class Way:
    """An outbox of 100 bytes, and the fate of what was put into it."""

    def __init__(self) -> None:
        self.wanting: list[SocketOutbox] = []
        self.tally = Tally()
        self.transport = FakeTransport()
        self.outbox = SocketOutbox(100, self.tally, self.wanting.append)
        self.outbox.attach(cast(asyncio.Transport, self.transport))


def test_what_is_queued_in_a_step_is_asked_for_once_and_leaves_in_one_write():
    way = Way()
    way.outbox.queue(b"one")
    assert way.outbox.deliver(b"two", 2)
    assert way.wanting == [way.outbox] and not way.transport.written and way.outbox.held_bytes == 6
    way.outbox.flush()
    way.outbox.flush()
    assert way.transport.written == b"onetwo"
    assert (way.tally.bytes_sent, way.outbox.events_sent, way.outbox.held_bytes) == (6, 2, 0)


def test_a_live_feed_is_taken_while_there_is_room_and_answers_always_are():
    way = Way()
    assert way.outbox.deliver(bytes(101), 1) and not way.outbox.deliver(b"x", 1)
    way.outbox.flush()
    way.outbox.pause()
    assert not way.outbox.deliver(b"x", 1)
    way.outbox.queue(b"answer")
    way.outbox.resume()
    assert way.outbox.deliver(b"x", 1) and way.outbox.events_sent == 2


def test_nothing_follows_the_last_word():
    way = Way()
    way.outbox.write(b"close")
    way.outbox.shut()
    way.outbox.queue(b"late")
    way.outbox.flush()
    assert way.transport.written == b"close" and way.tally.bytes_sent == 0


def test_what_was_withdrawn_has_a_second_to_leave_and_what_came_later_has_not():
    way = Way()
    way.outbox.withdraw(0.0)
    assert not way.outbox.is_late(9.0), "nothing was waiting"
    way.outbox.write(bytes(50))
    way.transport.waiting = 50
    way.outbox.withdraw(10.0)
    way.outbox.write(bytes(30))
    way.transport.waiting = 80
    assert not way.outbox.is_late(10.9) and way.outbox.is_late(11.0)
    way.transport.waiting = 30
    assert not way.outbox.is_late(11.0)
    way.transport.waiting = 80
    assert not way.outbox.is_late(12.0), "it has left"


def test_what_stands_in_line_to_be_written_is_withdrawn_with_what_was(monkeypatch):
    way = Way()

    def write(data: bytes) -> None:
        way.transport.waiting += len(data)

    monkeypatch.setattr(way.transport, "write", write)
    way.outbox.queue(bytes(50))
    way.outbox.withdraw(0.0)
    way.outbox.flush()
    assert way.outbox.is_late(1.0)


def test_what_was_withdrawn_has_no_longer_for_it_where_more_is_withdrawn_again_and_again():
    way = Way()
    for n in range(3):
        way.outbox.write(bytes(10))
        way.transport.waiting += 10
        way.outbox.withdraw(0.5 * n)
    assert not way.outbox.is_late(0.9) and way.outbox.is_late(1.0)
    way.transport.waiting = 20  # of the second and the third
    assert not way.outbox.is_late(1.4) and way.outbox.is_late(1.5)
    way.outbox.withdraw(1.5)  # nothing was written since
    way.transport.waiting = 10
    assert way.outbox.is_late(2.0)
    way.transport.waiting = 0
    assert not way.outbox.is_late(9.0)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_whoever_waits_for_room_goes_on_when_there_is_some(cancelled):
    outbox = Way().outbox
    await outbox.writable()
    outbox.pause()
    waiting = [asyncio.create_task(outbox.writable()) for _ in range(2)]
    await asyncio.sleep(0)
    if cancelled:
        waiting.pop().cancel()
    outbox.resume()
    await asyncio.gather(*waiting)


async def test_whoever_waits_for_room_waits_again_when_it_is_gone_again():
    outbox = Way().outbox
    for _ in range(2):
        outbox.pause()
        waiting = asyncio.create_task(outbox.writable())
        await asyncio.sleep(0)
        assert not waiting.done()
        outbox.resume()
        await waiting


def test_what_left_at_the_end_of_a_step_has_left_when_it_is_withdrawn():
    way = Way()
    way.outbox.queue(bytes(50))
    way.outbox.flush()
    way.transport.waiting = 50
    way.outbox.withdraw(0.0)
    way.outbox.queue(bytes(30))
    way.outbox.flush()
    way.transport.waiting = 30  # of the later ones
    assert not way.outbox.is_late(9.0)


def test_a_socket_that_is_gone_is_written_to_no_more():
    way = Way()
    way.outbox.queue(b"before")
    way.outbox.end()
    way.outbox.queue(b"late")
    way.outbox.flush()
    assert not way.transport.written


@pytest.mark.req("R-323")
@pytest.mark.parametrize("is_queued", [False, True])
async def test_what_a_reader_over_tls_does_not_take_is_known_to_wait(tmp_path, is_queued):
    """The transport of TLS passes each write on as a whole, to a transport that nobody can ask."""
    made = write_dev_certificates(Path(tmp_path))
    trusting = ssl.create_default_context(cafile=str(made.ca))
    theirs, ours = socket.socketpair()
    accepting = asyncio.get_running_loop().connect_accepted_socket(
        asyncio.Protocol, ours, ssl=read_tls_files(made.cert, made.key)
    )
    reading = asyncio.open_connection(sock=theirs, ssl=trusting, server_hostname="localhost")
    (transport, _), (_, writer) = await asyncio.gather(accepting, reading)
    way = Way()
    way.outbox.attach(transport)
    try:
        if is_queued:
            way.outbox.queue(bytes(2**20))
            way.outbox.flush()
        else:
            way.outbox.write(bytes(2**20))
        assert way.outbox.held_bytes > 2**19
        way.outbox.withdraw(0.0)
        assert way.outbox.is_late(1.0)
    finally:
        for each in (transport, writer.transport):
            each.abort()
        for _ in range(3):
            await asyncio.sleep(0)
