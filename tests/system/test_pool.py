"""A pool of three real relays, one slow, one lying, one killed with -9: each packet arrives exactly once."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
import strata
from strata.protocol import packets
from strata.relays.pool import PoolOptions, Standing

from tests.support.ports import free_port
from tests.support.relay_process import RelayProcess
from tests.support.websocket_proxy import LyingProxy, SlowProxy

KILLS = 4
PACKETS = 240
OPTIONS = PoolOptions(
    relay=strata.Options(backoff_cap=0.5, connect_timeout=20.0),
    connections=3,
    replace_after=0.5,
    reconnect_cap=1.0,
    publish_timeout=60.0,
    presence_delay=0.5,
    sweep_interval=2.0,
    ping_interval=2.0,
)


@pytest.mark.timeout(400)
@pytest.mark.req("C-270", "C-271", "C-272", "C-274", "C-275", "C-278", "R-342", "R-343", "R-344")
async def test_slow_lying_and_killed_relays_lose_and_double_nothing(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    killed = RelayProcess(tmp_path / "killed", port=free_port())
    behind_slow, behind_liar = RelayProcess(tmp_path / "slow"), RelayProcess(tmp_path / "liar")
    processes = [killed, behind_slow, behind_liar]
    try:
        await asyncio.gather(*(asyncio.to_thread(process.start) for process in processes))
        async with (
            SlowProxy(behind_slow.ws, delay=0.4) as slow,
            LyingProxy(behind_liar.ws, random.Random(chance.random())) as liar,
        ):
            urls = [liar.url, killed.ws, slow.url]
            me = strata.Identity.generate()
            acknowledged: list[str] = []
            received: list[str] = []
            arrived = asyncio.Event()

            async def read(relays: strata.Pool) -> None:
                async for delivery in relays.subscribe(authors=[me.did]):
                    received.append(delivery.packet.packet_id)
                    arrived.set()

            async def publish(relays: strata.Pool, lane: int) -> None:
                for number in range(lane, PACKETS, 8):
                    content = {"type": "POST", "text": f"packet {number}"}
                    packet = packets.build(me, content, timestamp=int(time.time()))
                    acknowledged.append((await relays.publish(packet)).packet_id)
                    await asyncio.sleep(chance.uniform(0.0, 0.6))  # spreads them over the kills

            async with (
                strata.connect_pool(urls, options=OPTIONS) as writing,
                strata.connect_pool(urls, options=OPTIONS) as reading,
            ):
                reader = asyncio.create_task(read(reading))
                writers = asyncio.gather(*(publish(writing, lane) for lane in range(8)))
                for _ in range(KILLS):
                    await asyncio.sleep(chance.uniform(0.2, 1.0))  # how far it gets; not a wait
                    await asyncio.to_thread(killed.kill)
                    await asyncio.to_thread(killed.start)
                await writers
                async with asyncio.timeout(90):
                    while len(received) < PACKETS:
                        arrived.clear()
                        await arrived.wait()
                    # A barrier: two more sweeps of every relay bring nothing twice.
                    swept = reading.statistics.sweeps
                    while reading.statistics.sweeps < swept + 6 or writing.unsettled:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                reader.cancel()
                assert len(acknowledged) == PACKETS
                assert len(received) == len(set(received)), "nothing twice"
                assert set(received) == set(acknowledged), "nothing acknowledged is lost"
                standings = {view.url: view.standing for view in writing.relays}
                assert standings.pop(liar.url) is Standing.BLACKLISTED
                assert Standing.BLACKLISTED not in standings.values()
                assert liar.forgotten > 0
                print(f"{KILLS} kills, {liar.forgotten} forgotten, {liar.tampered} tampered")
                print(f"{writing.statistics}\n{reading.statistics}")
    finally:
        for process in processes:
            process.kill()
