"""Five participants talk over a relay that dies and a network that loses 30 % of packets; their logs agree.

    make demo
    python examples/channel_demo.py --messages 50 --loss 0.5 --svg log.svg

A relay with its own PostgreSQL runs in a temporary folder. Four participants talk from the beginning, and the
fifth joins after two thirds of the messages. Halfway through, the relay is killed with SIGKILL and started
again. Packets to the relay and live packets from it are lost at random; answers from the relay's store are
not. At the end all logs and all received messages are compared, and the causal log is drawn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import strata
from causal_svg import causal_svg
from demo import Relay
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from strata.channels.messaging.emitter import EventEmitter
from strata.channels.messaging.node import MessagingNode
from strata.channels.messaging.values import (
    MESSAGE_EVENTS,
    MessageEnvelope,
    NodeMessageError,
    NodeMessageReceived,
)
from strata.channels.reliable import ReliableChannel, create_reliable_channel

NAMES = ("ada", "bob", "cy", "dora", "eve")
TOPIC = "/demo/1/room/proto"
DEFAULT_SVG = Path(tempfile.gettempdir(), "causal-log.svg")
# Shorter than the defaults, so that lost packets are noticed sooner and the demonstration takes seconds.
SETTINGS = {
    "acknowledgement_timeout_ms": 1_000,
    "max_retransmissions": 30,
    "sync_min_interval_ms": 2_000,
    "sweep_in_buf_interval_ms": 500,
    "retrieve_frequency_ms": 1_000,
    "process_task_min_elapse_ms": 100,
    "repair_t_min_ms": 1_000,
    "repair_t_max_ms": 4_000,
}


class LossyNode:
    """A messaging node that loses some of the packets that it sends and receives."""

    def __init__(self, node: MessagingNode, loss: float, rng: random.Random) -> None:
        self.message_events = EventEmitter(MESSAGE_EVENTS)
        self.lost = 0
        self._node = node
        self._loss = loss
        self._rng = rng
        for name in MESSAGE_EVENTS:
            node.message_events.on(name, self._pass_on)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)  # everything else is passed on unchanged

    def _loses(self) -> bool:
        lost = self._rng.random() < self._loss
        self.lost += lost
        return lost

    async def send(self, envelope: MessageEnvelope, *, request_id: str | None = None) -> str:
        """Send the packet, or lose it and report later that there was no answer."""
        if not self._loses():
            return await self._node.send(envelope, request_id=request_id)
        request_id = request_id or secrets.token_hex(16)
        error = NodeMessageError(request_id, None, "no answer", "timeout")
        asyncio.get_running_loop().call_later(0.3, self._tell, error)
        return request_id

    def _tell(self, error: NodeMessageError) -> None:
        self._telling = asyncio.ensure_future(self.message_events.emit(error))

    async def _pass_on(self, event: Any) -> None:
        if not (isinstance(event, NodeMessageReceived) and self._loses()):
            await self.message_events.emit(event)


@dataclass
class Participant:
    """One of the five, with the messages that it has received."""

    name: str
    node: LossyNode
    room: ReliableChannel
    heard: list[bytes] = field(default_factory=list)

    async def listen(self) -> None:
        """Record every received message."""
        async for message in self.room:
            self.heard.append(message.payload)


class Demo:
    """The room and its participants."""

    def __init__(
        self, url: str, messages: int, loss: float, rng: random.Random, stack: AsyncExitStack
    ) -> None:
        self.people: list[Participant] = []
        self.sent: dict[str, list[bytes]] = {name: [] for name in NAMES}
        self._url = url
        self._messages = messages
        self._loss = loss
        self._rng = rng
        self._stack = stack

    async def join(self, name: str, tasks: asyncio.TaskGroup) -> None:
        """Connect one more participant."""
        options = strata.Options(backoff_cap=0.5, ack_timeout=2.0)
        me = strata.Identity.generate()
        connection = strata.connect(self._url, identity=me, options=options)
        relay = await self._stack.enter_async_context(connection)
        node = LossyNode(relay.node, self._loss, self._rng)
        room = await create_reliable_channel(node, "room", TOPIC, name, options=SETTINGS)
        self._stack.push_async_callback(room.close)
        person = Participant(name, node, room)
        self.people.append(person)
        tasks.create_task(person.listen())

    async def talk(self, relay: Relay, tasks: asyncio.TaskGroup) -> None:
        """Send all messages, kill the relay and let the fifth participant join."""
        for name in NAMES[:-1]:
            await self.join(name, tasks)
        for number in range(self._messages):
            if number == self._messages // 2:
                relay.kill()
                tasks.create_task(relay.start())
            if number == self._messages * 2 // 3:
                await self.join(NAMES[-1], tasks)
            person = self._rng.choice(self.people)
            text = f"message {number} of {person.name}".encode()
            self.sent[person.name].append(text)
            await person.room.send(text)
            await asyncio.sleep(self._rng.expovariate(12))

    def converged(self) -> tuple[int, int]:
        """The number of deliveries so far, and the final number."""
        done = sum(len(person.heard) for person in self.people)
        return done, self._messages * (len(NAMES) - 1)

    def result(self) -> dict[str, int]:
        """The counts of faults."""
        logs = [person.room.log() for person in self.people]
        lost = doubled = 0
        for person in self.people:
            wanted = Counter(text for name in NAMES if name != person.name for text in self.sent[name])
            got = Counter(person.heard)
            lost += (wanted - got).total()
            doubled += (got - wanted).total()
        return {
            "participants": len(self.people),
            "messages": self._messages,
            "dropped_by_the_network": sum(person.node.lost for person in self.people),
            "lost": lost,
            "doubled": doubled,
            "logs_that_differ": sum(log != logs[0] for log in logs),
        }


async def run(messages: int, loss: float, seed: int, svg: Path, console: Console) -> dict[str, int]:
    """Run the whole demonstration and return its counts."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="channel-demo-") as folder:
        relay = Relay(Path(folder))
        await relay.start()
        try:
            # The tasks end when the channels close, and the channels close before their relays.
            async with asyncio.timeout(300), asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
                demo = Demo(relay.url, messages, loss, rng, stack)
                with progress_bar(console) as progress:
                    await watch(demo, progress, tasks.create_task(demo.talk(relay, tasks)))
                log = demo.people[0].room.causal_log()
                title = f"{len(log)} messages of {len(demo.people)}, one log"
                await asyncio.to_thread(svg.write_text, causal_svg(log, title))
                return demo.result()
        finally:
            relay.kill()


async def watch(demo: Demo, progress: Progress, talking: asyncio.Task[None]) -> None:
    """Move the bar until all logs are complete and equal, or until nothing has happened for a minute."""
    bar = progress.add_task("delivered", total=demo.converged()[1])
    best, since = -1, time.monotonic()
    while True:
        done, total = demo.converged()
        progress.update(bar, completed=done)
        logs = [person.room.log() for person in demo.people]
        if talking.done() and done >= total and all(log == logs[0] for log in logs):
            return
        if done != best:
            best, since = done, time.monotonic()
        if time.monotonic() - since > 60:
            return
        await asyncio.sleep(0.1)


def progress_bar(console: Console) -> Progress:
    """The progress bar."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=console)


def main() -> int:
    """Return the exit code: 0 if nothing was lost or duplicated and all logs are equal, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--messages", type=int, default=100, help="how many in all (default 100)")
    parser.add_argument("--loss", type=float, default=0.3, help="the part that gets lost (default 0.3)")
    parser.add_argument("--seed", type=int, default=None, help="repeats who speaks and what is lost")
    parser.add_argument("--svg", type=Path, default=DEFAULT_SVG, help=f"the picture (default {DEFAULT_SVG})")
    parser.add_argument("--json", action="store_true", help="print the counts as one line of JSON")
    arguments = parser.parse_args()
    if arguments.messages < 3 or not 0 <= arguments.loss < 1:
        parser.error("--messages must be at least 3, and --loss from 0 to below 1")
    seed = secrets.randbelow(2**32) if arguments.seed is None else arguments.seed
    console = Console(stderr=True)
    counts = asyncio.run(run(arguments.messages, arguments.loss, seed, arguments.svg, console))
    if arguments.json:
        print(json.dumps(counts))
    else:
        print(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()))
        print(f"the log as a picture: {arguments.svg}")
    return 1 if counts["lost"] or counts["doubled"] or counts["logs_that_differ"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
