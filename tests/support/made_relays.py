"""In-memory relays for a messaging node: one log, and views of it that fail on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strata.channels.messaging import RelayNode
from strata.protocol.errors import ConnectionFailed, RequestTimeout
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet

from tests.support.virtual_time import wall

TOPIC = "/chat/1/room/proto"
ALICE, BOB, CAROL, MALLORY = (Identity.from_seed(bytes([n]) * 32) for n in range(4))
LATENCY = 0.02


async def until(condition: Callable[[], object], timeout: float = 600.0) -> float:
    """Let the world go on until this holds; returns the time then."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 -- time is simulated: nothing is waited for
            await asyncio.sleep(0.01)
    return asyncio.get_running_loop().time()


@dataclass
class Delivered:
    """What a subscription hands on."""

    packet: Packet
    cursor: str | None = None
    live: bool | None = None


class Log:
    """The log behind all views: packets in order of arrival."""

    def __init__(self) -> None:
        self.packets: list[tuple[Packet, int]] = []
        self.changed = asyncio.Event()

    def store(self, packet: Packet) -> None:
        if all(packet.packet_id != each.packet_id for each, _ in self.packets):
            self.packets.append((packet, int(wall())))
            self.tell()

    def tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def by(self, author: Identity) -> list[Packet]:
        return [packet for packet, _ in self.packets if packet.author_id == author.did]


class MadeRelays:
    """One client's relays: `strata.channels.messaging.relay_node.Relays`.

    `answers` holds the outcomes of the next publishes: an exception to raise, or a number of seconds to wait.
    `hides` removes packets from everything that this client reads. `unfiltered` ignores filters and sends
    everything.
    """

    def __init__(self, log: Log, *, connected: int = 1, wanted: int = 1) -> None:
        self.log = log
        self.connected, self.wanted = connected, wanted
        self.max_packet_bytes: int | None = None
        self.answers: list[Exception | float] = []
        self.hides: Callable[[Packet], bool] = lambda packet: False
        self.unfiltered = False
        self.failure: Exception | None = None
        """Raised by subscriptions as long as it is set."""
        self.published: list[Packet] = []
        self.queries: list[dict[str, Any]] = []
        self.found: list[tuple[str, ...]] = []
        self.reading = 0

    @property
    def is_connected(self) -> bool:
        return self.connected > 0

    @property
    def seats(self) -> tuple[int, int]:
        return self.connected, self.wanted

    def connect(self, connected: int) -> None:
        self.connected = connected
        self.log.tell()

    async def publish(
        self, packet: Packet, *, timeout: float | None = None, on_stored: Callable[[], None] | None = None
    ) -> object:
        self.published.append(packet)
        await asyncio.sleep(LATENCY)
        answer = self.answers.pop(0) if self.answers else 0.0
        if isinstance(answer, Exception):
            raise answer
        try:
            async with asyncio.timeout(30 if timeout is None else timeout):
                while not self.connected:
                    await self.log.changed.wait()
        except TimeoutError:
            raise RequestTimeout("PUBLISH", 30) from None
        self.log.store(packet)
        if on_stored is not None:
            on_stored()
        await asyncio.sleep(answer)
        return packet.packet_id

    async def subscribe(self, **query: Any) -> AsyncGenerator[Delivered, None]:
        self.queries.append(query)
        at = 0
        live = query.get("live", True)
        self.reading += live
        try:
            if not live:
                if not self.connected:
                    raise ConnectionFailed("nobody is there")
                found = [each for each in self.log.packets if self._matches(each, query)]
                for packet, _ in reversed(found) if query.get("order") == "desc" else found:
                    await asyncio.sleep(LATENCY / 100)
                    yield Delivered(packet)
                return
            while True:
                if self.failure is not None:
                    raise self.failure
                if self.connected and at < len(self.log.packets):
                    at += 1
                    if self._matches(self.log.packets[at - 1], query):
                        await asyncio.sleep(LATENCY)
                        yield Delivered(self.log.packets[at - 1][0])
                else:
                    await self.log.changed.wait()
        finally:
            self.reading -= live

    def _matches(self, stored: tuple[Packet, int], query: dict[str, Any]) -> bool:
        packet, received_at = stored
        if self.hides(packet):
            return False
        if self.unfiltered:
            return True
        return (
            packet.content_type == query["types"]
            and (not query.get("authors") or packet.author_id in query["authors"])
            and packet.timestamp >= (query.get("since") or 0)
            and received_at >= (query.get("received_since") or 0)
        )

    async def find(
        self, packet_ids: Sequence[str], *, types: str, since: int
    ) -> AsyncGenerator[Delivered, None]:
        self.found.append(tuple(packet_ids))
        if not self.connected:
            raise ConnectionFailed("nobody is there")
        await asyncio.sleep(LATENCY)
        for packet, _ in self.log.packets:
            if packet.packet_id in packet_ids and not self.hides(packet):
                yield Delivered(packet)


class MarkedRelays(MadeRelays):
    """Relays that report where their log ends, and continue from any place in it.

    `head_delay` is the time they take to report it.
    """

    head_delay = LATENCY
    url = "ws://made"

    async def head(self) -> str:
        while not self.connected:
            await self.log.changed.wait()
        await asyncio.sleep(self.head_delay)
        return str(len(self.log.packets))

    async def subscribe(self, **query: Any) -> AsyncGenerator[Delivered, None]:
        self.queries.append(query)
        live = query.get("live", True)
        at = end = len(self.log.packets)
        start = query.get("cursor")
        order = range(int(start or 0), end)
        if query.get("order") == "desc":
            order = range((end if start is None else int(start) - 1) - 1, -1, -1)
        places = [place for place in order if self._matches(self.log.packets[place], query)]
        self.reading += live
        try:
            for place in places[: query.get("limit")]:
                await asyncio.sleep(LATENCY / 100)
                yield Delivered(self.log.packets[place][0], str(place + 1), False)
            while live:
                if self.failure is not None:
                    raise self.failure
                if at == len(self.log.packets):
                    await self.log.changed.wait()
                elif self._matches(self.log.packets[at], query):
                    at += 1
                    yield Delivered(self.log.packets[at - 1][0], str(at), True)
                else:
                    at += 1
        finally:
            self.reading -= live


class Told:
    """Every event of a node, in order."""

    def __init__(self, node: RelayNode) -> None:
        self.events: list[Any] = []
        for emitter in (node.message_events, node.health_events):
            for name in emitter.names:
                emitter.on(name, self.events.append)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]
