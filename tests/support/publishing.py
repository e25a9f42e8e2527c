"""Publish many packets to a relay."""

from __future__ import annotations

import asyncio
import time

import strata
from strata.protocol import packets
from strata.protocol.ids import Identity

__all__ = ["TYPES", "publish"]

TYPES = ("POST", "NOTE", "/chat/1/room/proto")


async def publish(url: str, count: int) -> list[str]:
    """Publish `count` packets over one connection, as fast as acknowledged; return their ids in order."""
    author = Identity.generate()
    acknowledged: list[str] = []
    async with strata.connect(url) as relay:
        waiting: set[asyncio.Task[strata.Published]] = set()
        for number in range(count):
            content = {"type": TYPES[number % 3], "text": f"packet {number}"}
            packet = packets.build(author, content, timestamp=int(time.time()), nonce=str(number))
            waiting.add(asyncio.create_task(relay.publish(packet)))
            if len(waiting) >= 256:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                acknowledged += [task.result().packet_id for task in done]
        acknowledged += [result.packet_id for result in await asyncio.gather(*waiting)]
    return acknowledged
