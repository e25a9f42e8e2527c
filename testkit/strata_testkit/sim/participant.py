"""A simulated program with a channel: it sends, takes the messages it receives, dies, and comes back."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping

from strata.channels.messaging.emitter import NamedEvent
from strata.channels.reliable.channel import ReliableChannel
from strata.channels.reliable.client import make_channel
from strata.channels.reliable.config import ReliableChannelConfig
from strata.channels.reliable.events import MessageReceived, ReliableMessageReceived

from strata_testkit.sim.checking import Evidence
from strata_testkit.sim.disk import Disk, SimStore
from strata_testkit.sim.faults import FaultCounts
from strata_testkit.sim.loop import Process
from strata_testkit.sim.network import SimNetwork
from strata_testkit.sim.node import SimNode

__all__ = ["SimParticipant"]

_WORKS = 0.3
"""The share of messages that take the program some time to process."""
_AT_LEAST_ONCE = ("again", "at_least_once")
_WORK_SECONDS = (0.0, 5.0)


class SimParticipant:
    """One participant through all its lives.

    `received` has the messages that its program has taken, in all lives that had this disk.
    """

    def __init__(
        self,
        name: str,
        network: SimNetwork,
        rng: random.Random,
        evidence: Evidence,
        *,
        channel_id: str,
        topic: str,
        options: Mapping[str, object],
        identity: str | None = None,
    ) -> None:
        """`identity` is the author of its packets, if several devices are one author."""
        self.name = name
        self.received: list[MessageReceived] = []
        self.sent: dict[str, bytes] = {}
        self.events: Counter[str] = Counter()
        self.channel: ReliableChannel | None = None
        self.clock_offset = 0.0
        self.receipts = True
        """Whether its node reports receipts, in place of filters."""
        self.counts: FaultCounts = network.counts
        self._network = network
        self._rng = rng
        self._evidence = evidence
        self._channel_id = channel_id
        self._topic = topic
        self._options = dict(options)
        self._identity = identity
        self._disk = Disk()
        self._process: Process | None = None
        self._node: SimNode | None = None
        self._store: SimStore | None = None

    @property
    def disk(self) -> Disk:
        """The data that its store has written."""
        return self._disk

    @property
    def asleep(self) -> bool:
        """Whether it sleeps, as a laptop does."""
        return self._process is not None and self._process.asleep

    @property
    def alive(self) -> bool:
        """Whether its program is running."""
        return self._process is not None

    async def start(self) -> None:
        """Start the program: open the channel and take its messages."""
        assert self._process is None
        process = self._process = Process(self.name)
        opening = process.start(self._open(process))
        # The caller may be cancelled here; the program that starts is not. It may be killed meanwhile.
        await asyncio.wait([opening])
        if not opening.cancelled():
            opening.result()

    async def _open(self, process: Process) -> None:
        faults = self._network.faults
        node = self._node = SimNode(
            self.name,
            self._network,
            clock_offset=self.clock_offset,
            identity=self._identity,
            receipts=self.receipts,
        )
        store = self._store = SimStore(self._disk, faults, self._rng, self.counts)
        channel = make_channel(
            node,
            self._channel_id,
            self._topic,
            self.name,
            ReliableChannelConfig(persistence=store),
            options=self._options,
            rng=self._rng,
        )
        for event in channel.message_events.names:
            if event not in (MessageReceived.name, ReliableMessageReceived.name):  # a handler would take them
                channel.message_events.on(event, self._count)
        disk = self._disk
        self._evidence.watch(self.name, node, channel, disk.content.holds, lambda: disk.written_from)
        try:
            await channel.open()
        except Exception:
            if not process.killed:
                raise
            return
        self.channel = channel
        process.start(self._take(channel))

    async def _take(self, channel: ReliableChannel) -> None:
        first = True
        at_least_once = str(channel.config.hand_over) in _AT_LEAST_ONCE
        async for message in channel:
            again = first and bool(self.received) and message.request_id == self.received[-1].request_id
            first = False
            if again and at_least_once:
                self.counts["handed_over_again"] += 1  # it was processing this one when it died, as requested
                continue
            works = self._rng.random() < _WORKS and self._evidence.programs_are_busy
            if works and at_least_once:
                await asyncio.sleep(self._rng.uniform(*_WORK_SECONDS))
            self.received.append(message)
            self._evidence.took(self.name, message)
            if works and not at_least_once:
                await asyncio.sleep(self._rng.uniform(*_WORK_SECONDS))

    def _count(self, event: NamedEvent) -> None:
        self.events[event.name] += 1

    async def send(self, payload: bytes) -> str | None:
        """Send a message; None if the program died before it was accepted."""
        process, channel = self._process, self.channel
        if process is None or channel is None:
            return None
        task = process.start(channel.send(payload))
        try:
            request_id = await task
        except BaseException:
            if process.killed:
                return None
            raise
        self.sent[request_id] = payload
        self._evidence.sent(self.name, request_id, payload)
        return request_id

    def kill(self) -> None:
        """Kill the program as `kill -9` does: everything that is not on the disk is lost. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.asleep:
            self._network.rejoin(self.name)
        self.counts["crashes"] += 1
        assert self._node is not None
        if self.channel is not None:
            self._evidence.died(self.name, self.channel.at_risk())
        if self._store is not None:
            self._store.unplugged = True
        self._node.unplug()
        process.kill()
        self.channel = None

    def lose_disk(self) -> None:
        """Lose the disk too: the next life knows nothing."""
        self.counts["disk_losses"] += 1
        lost, self._disk = self._disk, Disk()
        self.received.clear()
        self._evidence.forget(self.name, lost.content.holds)

    def fall_asleep(self) -> None:
        """Close the lid: nothing runs, no message arrives, and wall time goes on. Idempotent."""
        if self._process is None or self._process.asleep:
            return
        self.counts["sleeps"] += 1
        self._process.fall_asleep()
        self._network.part(self.name)

    def wake_up(self) -> None:
        """Open the lid: the program continues, with the network. Idempotent."""
        if self._process is not None and self._process.asleep:
            self._process.wake_up()
            self._network.rejoin(self.name)

    def set_clock(self, offset: float) -> None:
        """Set the clock to `offset` seconds off the true time; a running program notices within seconds."""
        self.counts["clock_jumps"] += 1
        self.clock_offset = offset
        if self._node is not None:
            self._node.clock_offset = offset

    def heal(self) -> None:
        """Let the disk follow the network's present faults."""
        if self._store is not None:
            self._store.faults = self._network.faults

    async def stop(self) -> None:
        """Stop the program in good order."""
        process, channel = self._process, self.channel
        self._process = self.channel = None
        if process is not None and channel is not None:
            await process.start(channel.close())
            process.kill()
        if self._node is not None:
            self._node.unplug()
