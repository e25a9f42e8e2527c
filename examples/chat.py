"""A chat room: each line that you type reaches everyone in it exactly once, even on a bad network.

    python examples/chat.py ws://127.0.0.1:7447/strata alice

Start it several times under different names. One tick means that a relay has the message, two ticks that
another participant has it. `--times` shows when each message was sent, and who signed it. Press Ctrl-D to
end; the program then waits for the second tick.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from datetime import datetime

import strata
from strata.channels.reliable import ReliableChannel, ReliableMessageDelivered, ReliableMessageSent
from strata.tools.cli.lines import stdin_lines


async def show_messages(room: ReliableChannel, times: bool) -> None:
    """Print the messages of the other participants, in causal order."""
    async for message in room:
        said = f"{message.sender_id}: {message.payload.decode()}"
        if times:
            at = datetime.fromtimestamp((message.sent_at or message.timestamp) / 1000)
            said = f"{at:%Y-%m-%d %H:%M} {message.author or 'somebody'} as {said}"
        print(said, flush=True)


async def show_ticks(room: ReliableChannel, texts: dict[str, str]) -> None:
    """Print the state of your own messages."""
    async for event in room.events(ReliableMessageSent.name, ReliableMessageDelivered.name):
        match event:
            case ReliableMessageSent():
                print(f"  ✓ {texts[event.message_id]}", flush=True)
            case ReliableMessageDelivered():
                print(f"  ✓✓ {texts[event.message_id]}", flush=True)


async def main(url: str, name: str, room_name: str, times: bool) -> None:
    """Join, talk, and leave after everything has arrived."""
    texts: dict[str, str] = {}
    async with (
        strata.connect(url, identity=strata.Identity.generate()) as relay,
        asyncio.TaskGroup() as tasks,  # its tasks end when the channel closes
        relay.channel(room_name, topic=f"/chat/1/{room_name}/proto", sender_id=name) as room,
    ):
        tasks.create_task(show_messages(room, times))
        tasks.create_task(show_ticks(room, texts))
        async for line in stdin_lines():
            if payload := line.strip():
                texts[room.get_message_id(payload)] = payload.decode()
                await room.send(payload)
        delivered = room.events(ReliableMessageDelivered.name)
        while room.sync_status().outstanding:
            await anext(delivered)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="a relay")
    parser.add_argument("name", help="your name, unlike all others'")
    parser.add_argument("--room", default="room", help="the channel (default room)")
    parser.add_argument("--times", action="store_true", help="show when and by whom each message was sent")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(arguments.url, arguments.name, arguments.room, arguments.times))
