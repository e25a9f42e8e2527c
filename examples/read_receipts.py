"""Read receipts: who has read which of your messages, and when.

    python examples/read_receipts.py ws://127.0.0.1:7447/strata alice

Start it several times under different names. An acknowledgement says that a program has a message, a receipt
that its user has read it. A receipt names the message by its request id, which all participants see. Receipts
are ordinary messages: an author who is away gets them later. Press Ctrl-D to end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from datetime import datetime

import strata
from strata.channels.reliable import ReliableChannel
from strata.tools.cli.lines import stdin_lines

READ = b"read:"


async def show(room: ReliableChannel, own: dict[str, str]) -> None:
    """Print each message and send a receipt for it; print the receipts for your own messages."""
    async for message in room:
        if not message.payload.startswith(READ):
            print(f"{message.sender_id}: {message.payload.decode()}", flush=True)
            await room.send(READ + message.request_id.encode())
        elif text := own.get(message.payload.removeprefix(READ).decode()):
            at = datetime.fromtimestamp((message.sent_at or message.timestamp) / 1000)
            print(f"  {message.sender_id} read at {at:%H:%M}: {text}", flush=True)


async def main(url: str, name: str, room_name: str) -> None:
    """Talk until the input ends."""
    own: dict[str, str] = {}
    async with (
        strata.connect(url, identity=strata.Identity.generate()) as relay,
        asyncio.TaskGroup() as tasks,  # its task ends when the channel closes
        relay.channel(room_name, topic=f"/receipts/1/{room_name}/proto", sender_id=name) as room,
    ):
        tasks.create_task(show(room, own))
        async for line in stdin_lines():
            if line.strip():
                own[await room.send(line)] = line.decode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="a relay")
    parser.add_argument("name", help="your name, unlike all others'")
    parser.add_argument("--room", default="room", help="the channel (default room)")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(arguments.url, arguments.name, arguments.room))
