"""The real client over the real relay, through kill -9: each packet once and in order, each publish kept."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
import strata
from strata.protocol import packets

from tests.support.ports import free_port
from tests.support.relay_process import RelayProcess

CUTS = 8


@pytest.mark.timeout(400)
@pytest.mark.req("R-116", "R-189", "R-193", "R-194", "R-336", "R-339")
async def test_across_any_cuts_each_packet_comes_once_and_in_order(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    process = RelayProcess(tmp_path / "relay", port=free_port())
    process.start()
    try:
        options = strata.Options(publish_timeout=120.0, ack_timeout=5.0, backoff_cap=0.5)
        me = strata.Identity.generate()
        acknowledged: list[str] = []
        received: list[str] = []
        publishing = asyncio.Event()
        enough = asyncio.Event()
        arrived = asyncio.Event()

        async def publish(relay: strata.Relay, lane: int) -> None:
            number = 0
            while not enough.is_set():
                content = {"type": "POST", "text": f"{lane}:{number}"}
                packet = packets.build(me, content, timestamp=int(time.time()))
                assert (await relay.publish(packet)).packet_id == packet.packet_id
                acknowledged.append(packet.packet_id)
                publishing.set()
                number += 1

        async def read(relay: strata.Relay) -> None:
            async for delivery in relay.subscribe(authors=[me.did]):
                received.append(delivery.packet.packet_id)
                arrived.set()

        async with (
            strata.connect(process.ws, options=options) as writing,
            strata.connect(process.ws, options=options) as reading,
        ):
            reader = asyncio.create_task(read(reading))
            writers = [asyncio.create_task(publish(writing, lane)) for lane in range(8)]
            for _ in range(CUTS):
                # Both connections are back before the next kill; otherwise it would cut nothing.
                publishing.clear()
                await publishing.wait()
                arrived.clear()
                await arrived.wait()
                await asyncio.sleep(chance.uniform(0.0, 0.3))  # how far it gets; not a wait
                await asyncio.to_thread(process.kill)
                await asyncio.to_thread(process.start)
            publishing.clear()
            await publishing.wait()
            enough.set()
            await asyncio.gather(*writers)
            async with asyncio.timeout(60):
                while len(received) < len(acknowledged):
                    arrived.clear()
                    await arrived.wait()
            reader.cancel()
            assert len(received) == len(set(received)), "nothing twice"
            assert set(acknowledged) <= set(received), "nothing acknowledged is lost"
            log = [d.packet.packet_id async for d in reading.fetch(authors=[me.did])]
            assert received == log, "in the order of the log"
            assert reading.statistics.connections >= CUTS
            print(f"{CUTS} kills, {len(acknowledged)} acknowledged, {len(received)} received")
    finally:
        process.kill()
