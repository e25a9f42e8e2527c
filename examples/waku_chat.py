"""A chat room over Waku that js-waku's reliable channels can join: each line reaches everyone exactly once.

    python examples/waku_chat.py http://127.0.0.1:8645 alice

The URL is that of a Waku node's REST interface (`wakunode2 --rest=true --relay=true --store=true …`). Each
program needs its own node. Press Ctrl-D to end; the program then waits until each of its messages has reached
another participant.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib

from strata.channels.reliable import ReliableChannel, ReliableMessageDelivered, create_reliable_channel
from strata.channels.waku import WakuNode
from strata.tools.cli.lines import stdin_lines


async def show_messages(room: ReliableChannel) -> None:
    """Print the messages of the other participants, in causal order."""
    async for message in room:
        print(f"{message.sender_id}: {message.payload.decode()}", flush=True)


async def main(url: str, name: str, room_name: str) -> None:
    """Join, talk, and leave after everything has arrived."""
    topic = f"/chat/1/{room_name}/proto"
    async with WakuNode(url) as node, asyncio.TaskGroup() as tasks:
        room = await create_reliable_channel(node, room_name, topic, name, segmentation="auto")
        delivered = room.events(ReliableMessageDelivered.name)
        tasks.create_task(show_messages(room))  # it ends when the channel closes
        async for line in stdin_lines():
            if payload := line.strip():
                await room.send(payload)
        while room.sync_status().outstanding:
            await anext(delivered)
        await room.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="the REST interface of a Waku node")
    parser.add_argument("name", help="your name, unlike all others'")
    parser.add_argument("--room", default="room", help="the channel (default room)")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(arguments.url, arguments.name, arguments.room))
