"""Send a file of up to 26 MB as one message, and watch it arrive piece by piece.

    python examples/file_transfer.py ws://127.0.0.1:7447/strata receive FOLDER
    python examples/file_transfer.py ws://127.0.0.1:7447/strata send FILE

The channel splits the message into chunks and repeats lost chunks; the receiver gets the whole message. The
first line of the message is the name of the file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from pathlib import Path

import strata
from rich.progress import Progress
from strata.channels.reliable import MessageAcknowledged, ReliableChannel, ReliableMessageDelivered


async def send(room: ReliableChannel, path: Path) -> None:
    """Send the file, and return when the receiver has all of it."""
    events = room.events(MessageAcknowledged.name, ReliableMessageDelivered.name)
    body = await asyncio.to_thread(path.read_bytes)
    request_id = await room.send(path.name.encode() + b"\n" + body)
    with Progress() as progress:
        bar = progress.add_task(path.name, total=None)
        async for event in events:
            if isinstance(event, MessageAcknowledged):
                arrived = len(event.chunks_acknowledged)
                progress.update(bar, total=event.total_chunks, completed=arrived)
            elif isinstance(event, ReliableMessageDelivered) and event.request_id == request_id:
                break
    print(f"{path.name} has arrived")


async def receive(room: ReliableChannel, folder: Path) -> None:
    """Write the first file that arrives, and stay until its sender has the acknowledgement."""
    message = await anext(room)
    name, _, body = message.payload.partition(b"\n")
    path = folder / Path(name.decode()).name  # a sender must not choose the folder
    await asyncio.to_thread(path.write_bytes, body)
    print(f"{path}: {len(body)} bytes from {message.sender_id}", flush=True)
    await asyncio.sleep(4)  # acknowledgements are sent within half of `acknowledgement_timeout_ms`


async def main(url: str, role: str, path: Path, topic: str) -> None:
    """Open the channel, and send or receive."""
    async with (
        strata.connect(url, identity=strata.Identity.generate()) as relay,
        relay.channel("files", topic=topic, sender_id=role) as room,
    ):
        await (send if role == "send" else receive)(room, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="a relay")
    parser.add_argument("role", choices=("send", "receive"))
    parser.add_argument("path", type=Path, help="the file to send, or the folder to write to")
    parser.add_argument("--topic", default="/files/1/example/proto")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(arguments.url, arguments.role, arguments.path, arguments.topic))
