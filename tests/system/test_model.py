"""A relay against a naive model: random publishes, subscriptions, pages, pauses and restarts.

The model is a list: the packets in the order of the log. Every reader's stream must match the list, whatever
happened in between. `--model-runs N` sets the number of runs, `--seed N` the first seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.support.bare_client import BareClient, open_client
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess, running

STEPS = 60
TYPES = ("A", "B", "C")


@dataclass
class Reader:
    """A gapless subscription that follows one or all types through pauses and restarts."""

    authors: list[str]
    types: list[str]
    socket: ClientConnection | None = None
    task: asyncio.Task[None] | None = None
    got: list[str] = field(default_factory=list)
    cursor: str | None = None
    running: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self, url: str) -> None:
        # A small queue on this side too, so that the relay feels a pause.
        self.socket = await connect(url, compression=None, max_size=None, ping_interval=None, max_queue=1)
        await self.socket.recv()  # the challenge
        filters: dict[str, Any] = {"authors": self.authors, "types": self.types, "cursor": self.cursor}
        await self.socket.send(
            json.dumps({"type": "SUBSCRIBE", "subscription_id": "r", "filters": filters, "gapless": True})
        )
        self.running.set()
        self.task = asyncio.create_task(self._read(self.socket), name="model-reader")

    async def _read(self, socket: ClientConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.running.wait()
                event = json.loads(await socket.recv())
                assert event["type"] == "EVENT", event
                self.got.append(event["packet"]["packet_id"])
                self.cursor = event["cursor"]

    async def close(self) -> None:
        assert self.socket is not None and self.task is not None
        self.running.set()
        await self.socket.close()
        await self.task


class Model:
    """The relay under test, and the list it must agree with."""

    def __init__(self, relay: RelayProcess, chosen: random.Random) -> None:
        self.relay = relay
        self.chosen = chosen
        self.authors = [new_identity() for _ in range(3)]
        self.everyone = [author.did for author in self.authors]
        self.log: list[Packet] = []
        self.readers: list[Reader] = []
        self.pages = 0

    async def publish(self) -> None:
        """Publish one or more packets from one session, so that their order is known; a few are repeats."""
        packets = [
            make(self._author(), "x" * self.chosen.choice((1, 500, 20_000)), type=self.chosen.choice(TYPES))
            for _ in range(self.chosen.choice((1, 3, 40)))
        ]
        repeats = self.chosen.sample(self.log, min(2, len(self.log)))
        async with open_client(self.relay.ws) as client:
            answers = await client.publish_all([*packets, *repeats])
        assert [a.get("duplicate", False) for a in answers] == [False] * len(packets) + [True] * len(repeats)
        self.log += packets

    async def page_through(self) -> None:
        """Walk all pages of a random filter in a random order and size."""
        authors = self.chosen.sample(self.everyone, self.chosen.randint(1, 3))
        types = self.chosen.sample(TYPES, self.chosen.randint(0, 2))
        order = self.chosen.choice(("asc", "desc"))
        expected = [
            p.packet_id for p in self.log if p.author_id in authors and p.content_type in (types or TYPES)
        ]
        got: list[str] = []
        cursor, complete = None, False
        async with open_client(self.relay.ws) as client:
            while not complete:
                filters = {
                    "authors": authors,
                    "types": types,
                    "order": order,
                    "limit": self.chosen.choice((1 + len(self.log) // 5, 17 + len(self.log) // 9, 500)),
                    "cursor": cursor,
                }
                events, end = await client.subscribe("p", filters)
                got += ids_of(events)
                cursor, complete = end["cursor"], end["complete"]
                self.pages += 1
        assert got == (expected if order == "asc" else expected[::-1])

    async def add_reader(self) -> None:
        reader = Reader(self.everyone, self.chosen.sample(TYPES, self.chosen.choice((0, 1, 2))))
        await reader.open(self.relay.ws)
        self.readers.append(reader)

    async def pause_or_resume(self) -> None:
        if self.readers:
            reader = self.chosen.choice(self.readers)
            reader.running.clear() if reader.running.is_set() else reader.running.set()

    async def reconnect(self) -> None:
        if self.readers:
            reader = self.chosen.choice(self.readers)
            await reader.close()
            await reader.open(self.relay.ws)

    async def restart(self) -> None:
        end = self.relay.stop if self.chosen.random() < 0.5 else self.relay.kill
        for reader in self.readers:
            reader.running.set()
        await asyncio.to_thread(end)
        await asyncio.to_thread(self.relay.start)
        for reader in self.readers:
            await reader.close()
            await reader.open(self.relay.ws)

    async def settle(self) -> None:
        """Check that every reader has exactly the list's packets, in its order."""
        for reader in self.readers:
            expected = [p.packet_id for p in self.log if p.content_type in (reader.types or TYPES)]
            reader.running.set()
            async with asyncio.timeout(60):
                while len(reader.got) < len(expected):  # noqa: ASYNC110 - its task fills it
                    await asyncio.sleep(0.01)
            assert reader.got == expected
            await reader.close()

    def _author(self) -> Identity:
        return self.chosen.choice(self.authors)


@pytest.mark.timeout(3600)
@pytest.mark.req("R-109", "R-110", "R-152", "R-154", "R-155", "R-159", "R-167", "R-170")
async def test_the_relay_agrees_with_the_model(
    tmp_path: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
):
    runs = pytestconfig.getoption("model_runs", 6)
    seed = pytestconfig.getoption("seed", None)
    seed = int(time.time()) if seed is None else seed
    packets = pages = restarts = 0
    async with asyncio.timeout(120 + 60 * runs):
        with capsys.disabled(), running(RelayProcess(tmp_path, outbound_queue_bytes=65_536)) as relay:
            for run in range(runs):
                print(f"\nmodel: --seed {seed + run} --model-runs 1", end="", flush=True)
                model = Model(relay, random.Random(seed + run))
                steps = [
                    *[model.publish] * 10,
                    *[model.page_through] * 4,
                    *[model.add_reader] * 2,
                    *[model.pause_or_resume] * 6,
                    *[model.reconnect] * 2,
                    model.restart,
                ]
                for _ in range(STEPS):
                    step = model.chosen.choice(steps)
                    restarts += step == model.restart
                    await step()
                await model.settle()
                packets, pages = packets + len(model.log), pages + model.pages
            print(f"\nmodel: {packets} packets, {pages} pages, {restarts} restarts", flush=True)
    assert packets > 50 * runs
    assert pages > 0


async def test_the_model_has_teeth(relay: RelayProcess, client: BareClient):
    """A packet that the model does not know is noticed."""
    model = Model(relay, random.Random(1))
    stranger = make(model.authors[0], type="A")
    await client.publish(stranger)
    model.everyone = [model.authors[0].did]
    with pytest.raises(AssertionError):
        for _ in range(20):
            await model.page_through()
