"""Typing notices: the others see that someone is typing.

    python examples/typing_notices.py ws://127.0.0.1:7447/strata alice

A line that ends with `…` or `...` is sent as a notice that you are still typing, any other line as a message.
A notice is ephemeral: it is sent once, to those who are listening, and is neither repeated nor stored. Press
Ctrl-D to end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib

import strata
from strata.channels.reliable import ReliableChannel, ReliableMessageDelivered
from strata.tools.cli.lines import stdin_lines


async def show(room: ReliableChannel) -> None:
    """Print messages and notices."""
    async for message in room:
        what = " is typing" if message.ephemeral else f": {message.payload.decode()}"
        print(f"{message.sender_id}{what}", flush=True)


async def say(room: ReliableChannel, line: str) -> None:
    """Send a line, or a notice if the line is not finished."""
    if line.endswith(("…", "...")):
        await room.send_ephemeral(b"typing")
    elif line:
        await room.send(line.encode())


async def main(url: str, name: str, room_name: str) -> None:
    """Talk until the input ends, and leave after everything has arrived."""
    async with (
        strata.connect(url, identity=strata.Identity.generate()) as relay,
        asyncio.TaskGroup() as tasks,  # its task ends when the channel closes
        relay.channel(room_name, topic=f"/typing/1/{room_name}/proto", sender_id=name) as room,
    ):
        delivered = room.events(ReliableMessageDelivered.name)
        tasks.create_task(show(room))
        async for line in stdin_lines():
            await say(room, line.decode().strip())
        while room.sync_status().outstanding:
            await anext(delivered)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="a relay")
    parser.add_argument("name", help="your name, unlike all others'")
    parser.add_argument("--room", default="room", help="the channel (default room)")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(arguments.url, arguments.name, arguments.room))
