"""A program with a channel, in a process of its own that a test may kill: commands come in, answers go out.

The one argument is JSON. Each line on stdin is a JSON command, each line on stdout a JSON answer; what the
program has received stands in the file `record`, a line for each message, written when it was received.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import strata
from strata.channels.persistence import SqlitePersistence
from strata.protocol.ids import Identity

__all__: list[str] = []


def answer(*values: Any) -> None:
    print(json.dumps(values), flush=True)


async def take(channel: Any, record: Path) -> None:
    with record.open("a") as file:
        async for message in channel:
            line = {
                "request": message.request_id,
                "from": message.sender_id,
                "bytes": len(message.payload),
                "sha256": hashlib.sha256(message.payload).hexdigest(),
                "text": message.payload.decode() if len(message.payload) < 1_000 else None,
            }
            file.write(json.dumps(line) + "\n")
            file.flush()


async def main(settings: dict[str, Any]) -> None:
    store = None if settings["store"] is None else await SqlitePersistence.open(settings["store"])
    identity = Identity.from_seed(bytes.fromhex(settings["seed"]))
    options = {"persistence": store, **settings["options"]}
    relay_options = strata.Options(backoff_cap=0.5)
    async with strata.connect(settings["url"], identity=identity, options=relay_options) as relay:
        channel = relay.channel("room", topic=settings["topic"], sender_id=settings["name"], **options)
        async with channel:
            taking = asyncio.create_task(take(channel, Path(settings["record"])))
            answer("ready")
            while line := await asyncio.to_thread(sys.stdin.readline):
                command, *rest = json.loads(line)
                if command == "send":
                    await channel.send(rest[0].encode())
                    answer("sent", rest[0])
                elif command == "synced":
                    answer("synced", channel.sync_status().is_synced)
                elif command == "end":
                    break
            taking.cancel()
            await asyncio.wait([taking])
        await relay.node.close()
    if store is not None:
        await store.close()
    answer("ended")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
