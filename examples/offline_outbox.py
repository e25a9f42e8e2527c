"""Write messages while no relay can be reached; a later run delivers them.

    python examples/offline_outbox.py ws://127.0.0.1:7447/strata write "buy milk" "feed the cat"
    python examples/offline_outbox.py ws://127.0.0.1:7447/strata deliver
    python examples/offline_outbox.py ws://127.0.0.1:7447/strata read

`send` returns when the message is in the store, a SQLite file. The next program that opens the channel with
this store continues where the last one ended, even if that one was killed. `read` is another participant.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
from pathlib import Path

import strata
from strata.channels.persistence import SqlitePersistence
from strata.channels.reliable import ReliableChannel, ReliableMessageDelivered


async def write(room: ReliableChannel, texts: list[str]) -> None:
    """Put the messages into the store, with or without a relay."""
    for text in texts:
        await room.send(text.encode())
    print(f"{len(room.sync_status().outstanding)} messages wait in the outbox")


async def deliver(room: ReliableChannel) -> None:
    """Wait until another participant has everything."""
    delivered = room.events(ReliableMessageDelivered.name)
    print(f"delivering {len(room.sync_status().outstanding)} messages", flush=True)
    while room.sync_status().outstanding:
        await anext(delivered)
    print("all delivered")


async def read(room: ReliableChannel) -> None:
    """Print received messages until Ctrl-C."""
    async for message in room:
        print(message.payload.decode(), flush=True)


async def main(url: str, action: str, texts: list[str], store: Path, topic: str) -> None:
    """Open the channel without waiting for the relay, and run the command."""
    sender, path = ("reader", store.with_suffix(".reader.db")) if action == "read" else ("writer", store)
    relay = strata.connect(
        url, identity=strata.Identity.generate(), options=strata.Options(connect_timeout=math.inf)
    )
    connecting = asyncio.create_task(relay.open())  # it tries until it succeeds
    await asyncio.sleep(0)  # let it begin
    try:
        async with (
            await SqlitePersistence.open(path) as outbox,
            relay.channel(
                "notes",
                topic=topic,
                sender_id=sender,
                persistence=outbox,
                drain_timeout_ms=1_000,  # messages not sent by then stay in the outbox
            ) as room,
        ):
            await (
                write(room, texts)
                if action == "write"
                else deliver(room)
                if action == "deliver"
                else read(room)
            )
    finally:
        connecting.cancel()
        await relay.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="a relay")
    parser.add_argument("action", choices=("write", "deliver", "read"))
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="messages to write")
    parser.add_argument("--store", type=Path, default=Path("outbox.db"))
    parser.add_argument("--topic", default="/notes/1/outbox/proto")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(arguments.url, arguments.action, arguments.texts, arguments.store, arguments.topic))
