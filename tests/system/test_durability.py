"""Nothing acknowledged is lost and nothing is delivered twice, however and whenever processes die.

Publishers keep a relay busy while it or its PostgreSQL is killed with SIGKILL at random moments. Unanswered
packets are published again, as any client would do. One reader follows the log gaplessly by its last cursor
through all of it. `--kill-cycles N` sets the number of kills, `--seed N` repeats a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from strata.protocol.packets import Packet
from websockets.asyncio.client import ClientConnection

from tests.support.bare_client import publish_text
from tests.support.made_packets import make
from tests.support.patient_clients import GONE, Publishing, publish_over
from tests.support.relay_process import RelayProcess, running
from tests.support.sockets import connect

PUBLISHERS = 3
WINDOW = 64
LONGEST_LOAD = 0.6


class Ledger(Publishing):
    """What was promised and what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.acknowledged: dict[str, int] = {}
        """Packet id to the `received_at` of its OK."""
        self.seen: dict[str, int] = {}
        self.cursor: str | None = None

    def answered(self, message: dict[str, Any], packet: Packet) -> None:
        if message["type"] == "ERROR":
            assert message["code"] == "internal_error", message
            self.waiting.append(packet)
            return
        known = self.acknowledged.setdefault(packet.packet_id, message["received_at"])
        assert known == message["received_at"], "received_at changed"

    def read(self, event: dict[str, Any]) -> str:
        packet_id: str = event["packet"]["packet_id"]
        assert packet_id not in self.seen, "delivered twice"
        self.seen[packet_id] = event["received_at"]
        self.cursor = event["cursor"]
        return packet_id


async def publish(url: str, ledger: Ledger) -> None:
    """Publish until the connection ends; packets without an answer then go back into the ledger."""
    with contextlib.suppress(*GONE):
        async with connect(
            url, compression=None, max_size=None, ping_interval=None, close_timeout=1
        ) as socket:
            await socket.recv()  # the challenge
            await publish_over(socket, ledger, WINDOW)


def subscription(ledger: Ledger) -> str:
    filters = {"authors": [ledger.identity.did], "cursor": ledger.cursor}
    return json.dumps({"type": "SUBSCRIBE", "subscription_id": "s", "filters": filters, "gapless": True})


async def follow(url: str, ledger: Ledger) -> None:
    """Continue reading from the last cursor until the connection ends."""
    with contextlib.suppress(*GONE):
        async with connect(
            url, compression=None, max_size=None, ping_interval=None, close_timeout=1
        ) as socket:
            await socket.recv()  # the challenge
            await socket.send(subscription(ledger))
            while True:
                ledger.read(json.loads(await socket.recv()))


async def catch_up(url: str, ledger: Ledger) -> None:
    """Have all waiting packets answered, then read up to a last packet of our own."""
    async with connect(url, compression=None, max_size=None, ping_interval=None) as socket:
        await socket.recv()  # the challenge
        while ledger.waiting:
            packet = ledger.waiting.popleft()
            ledger.answered(await _publish_one(socket, packet), packet)
        last = make(ledger.identity, "last")
        ledger.answered(await _publish_one(socket, last), last)
        await socket.send(subscription(ledger))
        async with asyncio.timeout(60):
            while ledger.read(json.loads(await socket.recv())) != last.packet_id:
                pass


async def _publish_one(socket: ClientConnection, packet: Packet) -> dict[str, Any]:
    await socket.send(publish_text(packet, packet.packet_id))
    async with asyncio.timeout(60):
        message: dict[str, Any] = json.loads(await socket.recv())
    return message


async def under_load(relay: RelayProcess, ledger: Ledger, kill: str, delay: float) -> None:
    """One cycle: load, a kill at some moment, and the end of the load."""
    tasks = [asyncio.create_task(publish(relay.ws, ledger), name=f"publisher-{n}") for n in range(PUBLISHERS)]
    tasks.append(asyncio.create_task(follow(relay.ws, ledger), name="reader"))
    await asyncio.sleep(delay)
    server = relay.postgres()
    if kill != "relay":
        server.kill()
    if kill == "postgres":
        # The relay survives: it restarts its database, and the same connections continue.
        before = len(ledger.acknowledged)
        async with asyncio.timeout(60):
            while len(ledger.acknowledged) < before + WINDOW:  # noqa: ASYNC110 - two tasks fill it
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
    else:
        await asyncio.to_thread(relay.kill)
        await asyncio.to_thread(psutil.wait_procs, [server], 30)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


async def whole_log(url: str, ledger: Ledger) -> list[str]:
    """The log from its beginning, as a new reader gets it."""
    fresh = Ledger()
    fresh.identity = ledger.identity
    async with connect(url, compression=None, max_size=None) as socket:
        await socket.recv()  # the challenge
        await socket.send(subscription(fresh))
        async with asyncio.timeout(120):
            while len(fresh.seen) < len(ledger.seen):
                fresh.read(json.loads(await socket.recv()))
    return list(fresh.seen)


@pytest.mark.timeout(3600)
@pytest.mark.req("R-097", "R-108", "R-155", "R-159", "R-161", "R-167", "R-176", "R-189")
async def test_kill_9_at_random_moments_loses_and_repeats_nothing(
    tmp_path: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
):
    cycles = pytestconfig.getoption("kill_cycles", 24)
    seed = pytestconfig.getoption("seed", None)
    seed = int(time.time()) if seed is None else seed
    with capsys.disabled():
        print(f"\ndurability: --seed {seed} --kill-cycles {cycles}", flush=True)
    chosen = random.Random(seed)
    ledger = Ledger()
    kills = dict.fromkeys(("relay", "postgres", "both"), 0)
    async with asyncio.timeout(120 + 15 * cycles):
        with running(RelayProcess(tmp_path)) as relay:
            for _ in range(cycles):
                kill = chosen.choice(list(kills))
                await under_load(relay, ledger, kill, chosen.uniform(0.01, LONGEST_LOAD))
                kills[kill] += 1
                if not relay.is_running():
                    await asyncio.to_thread(relay.start)
                await catch_up(relay.ws, ledger)
                missing = ledger.acknowledged.keys() - ledger.seen.keys()
                assert not missing, f"acknowledged and lost: {len(missing)}"
            assert ledger.seen == ledger.acknowledged  # by now everything was answered, with the time shown
            assert await whole_log(relay.ws, ledger) == list(ledger.seen)
    with capsys.disabled():
        print(f"durability: {kills} kills, {len(ledger.acknowledged)} packets checked", flush=True)
    assert sum(kills.values()) == cycles > 0
    assert len(ledger.acknowledged) > 10 * cycles, "an empty run proves nothing"
