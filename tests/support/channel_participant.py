"""A program with a channel, in a separate process that a test may kill: commands come in, answers go out.

The one argument is JSON. Each line on stdin is a JSON command, each line on stdout a JSON answer. The file
`record` has a line for each message received, written on receipt. The program takes messages by iterating, by
a handler that `works` for a number of seconds, or by one that also `acks`.
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


class Record:
    """The messages that the program has received, in a file that outlives it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def note(self, message: Any, **more: Any) -> None:
        line = {
            "request": message.request_id,
            "from": message.sender_id,
            "bytes": len(message.payload),
            "sha256": hashlib.sha256(message.payload).hexdigest(),
            "text": message.payload.decode() if len(message.payload) < 1_000 else None,
        }
        self._file.write(json.dumps(line | more) + "\n")
        self._file.flush()


async def take(channel: Any, record: Record) -> None:
    async for message in channel:
        record.note(message)


def handle(channel: Any, record: Record, seconds: float, *, acks: bool) -> None:
    """Take messages with a handler that works for `seconds` on each."""

    async def work(message: Any) -> None:
        record.note(message)
        await asyncio.sleep(seconds)
        if acks:
            await message.ack()
            record.note(message, acknowledged=True)

    channel.message_events.on("message-received", work)


async def main(settings: dict[str, Any]) -> None:
    store = None if settings["store"] is None else await SqlitePersistence.open(settings["store"])
    identity = Identity.from_seed(bytes.fromhex(settings["seed"]))
    options = {"persistence": store, **settings["options"]}
    relay_options = strata.Options(backoff_cap=0.5)
    async with strata.connect(settings["url"], identity=identity, options=relay_options) as relay:
        channel = relay.channel("room", topic=settings["topic"], sender_id=settings["name"], **options)
        async with channel:
            record, taking = Record(Path(settings["record"])), None
            if settings.get("takes", "iterating") == "iterating":
                taking = asyncio.create_task(take(channel, record))
            else:
                handle(channel, record, settings["works"], acks=settings["takes"] == "acks")
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
            if taking is not None:
                taking.cancel()
                await asyncio.wait([taking])
        await relay.node.close()
    if store is not None:
        await store.close()
    answer("ended")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
