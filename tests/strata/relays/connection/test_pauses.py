"""A program that pauses, and a link that dies without a word, over real sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import strata
from strata.channels.connecting import connect
from strata.protocol import wire
from strata.relays.connection import Options

from tests.support.relays import take

SOURCES = str(Path(strata.__file__).parent.parent)
IMPATIENT = Options(
    backoff_base=0.05,
    backoff_cap=20.0,
    manifest_timeout=5,
    history_timeout=2.0,
    ack_timeout=2.0,
    publish_timeout=2.0,
    page_events=50,
    queue_events=100,
)
PAUSE = 3.5
"""Longer than each of those timeouts."""


def block(seconds):
    """Stop the whole program, the loop included."""
    time.sleep(seconds)


class Link:
    """A TCP proxy. `cut` leaves its present connections open, and lets nothing through them any more. While
    `lets_answers` is not set, the relay's answers are kept."""

    def __init__(self, port):
        self._upstream = port
        self._tasks = set()
        self._writers = []
        self.lets_answers = asyncio.Event()
        self.lets_answers.set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"ws://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/strata"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        self.cut()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    def cut(self):
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    async def _accept(self, reader, writer):
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        self._writers += [writer, up_writer]
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            self._tasks.add(asyncio.create_task(self._pass(source, sink, is_answer=sink is writer)))

    async def _pass(self, source, sink, is_answer):
        while piece := await source.read(65_536):
            if is_answer:
                await self.lets_answers.wait()
            sink.write(piece)
        sink.transport.abort()


async def test_a_program_that_was_busy_still_gets_the_answers_to_its_questions(extended, make):
    """It is busy for longer than its timeouts, while a page of history and publishes have no answer yet."""
    await extended.append(*map(make, range(100)))
    async with Link(extended.port) as link, connect(link.url, options=IMPATIENT) as relay:
        link.lets_answers.clear()
        found = asyncio.create_task(take(relay.fetch(), 100))
        publishes = [asyncio.create_task(relay.publish(make(n))) for n in range(100, 120)]
        await extended.next(wire.Publish)
        block(PAUSE)
        link.lets_answers.set()
        assert len(await asyncio.gather(*publishes)) == 20
        assert len(await found) == 100
        assert relay.statistics.connections == 1
    assert len(extended.model.log) == 120


STOPPED = """
import asyncio, sys
from strata import connect
from strata.relays.connection import Options

async def main():
    options = Options(history_timeout=2.0, page_events=50, queue_events=100)
    async with connect(sys.argv[1], options=options) as relay:
        print("connected", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        async for delivery in relay.subscribe(live=False):
            print(delivery.packet.packet_id, flush=True)

asyncio.run(main())
"""


async def test_a_program_that_is_stopped_and_continued_gets_every_page(extended, make):
    await extended.append(*map(make, range(600)))
    async with Link(extended.port) as link:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STOPPED, link.url,
            env={**os.environ, "PYTHONPATH": SOURCES},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        assert await process.stdout.readline() == b"connected\n"
        link.lets_answers.clear()
        process.stdin.write(b"go on\n")
        await extended.next(wire.Subscribe)
        process.send_signal(signal.SIGSTOP)
        link.lets_answers.set()
        await asyncio.sleep(PAUSE)
        process.send_signal(signal.SIGCONT)
        found = (await process.stdout.read()).splitlines()
        assert (await process.wait(), await process.stderr.read()) == (0, b"")
    assert [line.decode().strip() for line in found] == [packet.packet_id for packet, _ in extended.model.log]


async def test_a_publish_into_a_dead_link_arrives_over_the_next_one(extended, make):
    """Without a probe the ping of the thirtieth second finds it after ninety seconds."""
    options = replace(IMPATIENT, publish_timeout=30.0, ack_timeout=15.0, backoff_cap=0.1)
    async with Link(extended.port) as link, connect(link.url, options=options) as relay:
        await relay.publish(make(0))
        link.cut()
        publishes = [relay.publish(make(n)) for n in range(1, 5)]
        published = await asyncio.gather(*publishes)
        assert not any(each.duplicate for each in published)
        assert relay.statistics.connections == 2
    assert len(extended.model.log) == 5


async def test_a_link_that_died_during_a_pause_is_left_at_once(extended, make):
    """Nothing is published: the pause alone is the reason, and the subscription goes on."""
    async with Link(extended.port) as link, connect(link.url, options=IMPATIENT) as relay:
        live = relay.subscribe()
        await extended.append(make(0))
        assert len(await take(live, 1)) == 1
        link.cut()
        block(7)
        await extended.append(make(1))
        (packet,) = await asyncio.wait_for(take(live, 1), 20)
        assert packet.packet_id == make(1).packet_id
        assert relay.statistics.connections == 2


async def test_a_silent_relay_is_given_up_on_time_by_a_program_that_looks(extended, make):
    extended.model.answer = lambda message: "silence"
    async with connect(extended.url, options=IMPATIENT) as relay:
        with pytest.raises(strata.RequestTimeout):
            await asyncio.wait_for(relay.publish(make(0)), 20)
        assert relay.statistics.connections_lost == 0
