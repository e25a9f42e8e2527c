"""Relays in memory and a virtual clock: the real pool runs over them, thousands of times, in no time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from strata.protocol import packets
from strata.protocol.errors import Closed, ConnectionFailed, InvalidPacket, RequestTimeout
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from strata.relays.connection.values import Announced, Delivery, Published, Query, Statistics
from strata.relays.pool import PacketPool, PoolOptions
from strata_testkit import sim

from tests.support.virtual_time import START, wall

ME = Identity.from_seed(bytes(range(32)))


@cache
def packet(n: int) -> Packet:
    return packets.build(ME, {"type": "POST", "text": f"packet {n}"}, timestamp=START + n % 50)


def run_virtually(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end on a virtual clock; a leftover task or a logged error fails."""
    return sim.run_virtually(lambda: work)


async def until(condition: Callable[[], object], timeout: float = 600.0, step: float = 0.02) -> float:
    """Let the world go on until this holds; returns the time then."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 -- time is simulated: nothing is waited for
            await asyncio.sleep(step)
    return loop.time()


@dataclass
class Character:
    """The behaviour of a relay. Each probability is drawn for each packet."""

    latency: float = 0.02
    forgets: float = 0.0
    """Says OK and stores nothing."""
    withholds: float = 0.0
    """Leaves it out of streams and history, though it would return it by id."""
    tampers: float = 0.0
    """Serves it with something changed; the client drops and counts it."""
    deaf: bool = False
    """Accepts publishes and never answers."""
    dies: float = 0.0
    """Is killed right after sending an OK, and is back some seconds later."""
    stalls: float = 0.0
    """Answers after every deadline has passed."""
    endless: str = ""
    """How it answers every question about what is stored: "pages", one empty page after the other, or
    "silence". It answers pings."""
    drips: float = 0.0
    """Takes this long to find each packet."""
    cuts: float = 0.0
    """Breaks its connections in the middle of an answer."""
    unmarked: float = 0.0
    """Its manifest does not arrive in time, so that silence must show where an answer ends."""


MARKED = Announced(frozenset({"history_marker", "packet_ids", "received_range"}))
UNMARKED = Announced(frozenset({"packet_ids", "received_range"}))
STALL, IDLE_TIMEOUT, HISTORY_TIMEOUT = 120.0, 3.0, 30.0
"""The duration of a stalled answer, and the silence that ends an unmarked answer."""


class SimRelay:
    """One relay of the world; any number of clients."""

    def __init__(self, url: str, chance: random.Random, character: Character | None = None) -> None:
        self.url = url
        self.chance = chance
        self.character = character or Character()
        self.log: list[tuple[Packet, int]] = []
        self.ids: set[str] = set()
        self.up = True
        self.epoch = 0
        self.changed = asyncio.Event()
        self.publishes: list[str] = []
        self.queries: list[Query] = []
        self.clients = 0
        self.visits = 0

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def kill(self) -> None:
        if self.up:
            self.up = False
            self.epoch += 1
            self._tell()

    def start(self) -> None:
        self.up = True
        self._tell()

    def cut(self) -> None:
        """Lose every connection."""
        self.epoch += 1
        self._tell()

    def happens(self, probability: float) -> bool:
        """Draw; a probability of 0 draws nothing."""
        return probability > 0 and self.chance.random() < probability

    def store(self, packet: Packet) -> bool:
        if packet.packet_id in self.ids:
            return False
        self.ids.add(packet.packet_id)
        self.log.append((packet, int(wall())))
        self._tell()
        return True

    def receive(self, packet: Packet) -> Published:
        self.publishes.append(packet.packet_id)
        at = int(wall())
        if packet.packet_id not in self.ids and self.chance.random() < self.character.forgets:
            return Published(packet.packet_id, at)
        return Published(packet.packet_id, at, duplicate=not self.store(packet))


class SimConnection:
    """A stand-in for the connection that `strata.connect` returns."""

    def __init__(self, server: SimRelay, changed: Callable[[], None]) -> None:
        self.server = server
        self.changed = changed
        self.announced = MARKED
        self.counts = Statistics()
        self._epoch: int | None = None
        self._closed = False
        self._keeper: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        return self.server.up and self._epoch == self.server.epoch and not self._closed

    @property
    def max_packet_bytes(self) -> int | None:
        return None

    @property
    def latest_time(self) -> float | None:
        return None  # it sends no challenge

    @property
    def statistics(self) -> Statistics:
        return replace(self.counts)

    async def open(self) -> None:
        await asyncio.sleep(self.server.character.latency)
        if not self.server.up:
            raise ConnectionFailed("it is down")
        self._connect()
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.server.clients -= 1
        self.server._tell()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])

    def _connect(self) -> None:
        self._epoch = self.server.epoch
        self.announced = UNMARKED if self.server.happens(self.server.character.unmarked) else MARKED
        self.counts.connections += 1
        self.server.visits += 1
        self.server.clients += self.counts.connections == 1
        self.changed()

    async def _keep(self) -> None:
        while True:
            while self.is_connected:
                await self.server.changed.wait()
            self.counts.connections_lost += 1
            self.changed()
            while not self.is_connected:
                await asyncio.sleep(self.server.chance.uniform(0.1, 1.0))
                if self.server.up:
                    self._connect()
                    self.server._tell()
                else:
                    self.counts.connections_failed += 1

    def _time_to_answer(self) -> float:
        character = self.server.character
        return STALL if self.server.happens(character.stalls) else character.latency

    async def _until_connected(self) -> int:
        while not self.is_connected:
            if self._closed:
                raise Closed("closed")
            await self.server.changed.wait()
        assert self._epoch is not None
        return self._epoch

    async def publish(self, packet: Packet, *, timeout: float | None = None) -> Published:
        try:
            async with asyncio.timeout(timeout):
                while True:
                    epoch = await self._until_connected()
                    await asyncio.sleep(self.server.character.latency / 2)
                    if self.server.epoch != epoch:
                        continue
                    if self.server.character.deaf:
                        await asyncio.Event().wait()
                    answer = self.server.receive(packet)
                    await asyncio.sleep(self._time_to_answer() / 2)
                    if self.server.epoch == epoch:
                        if self.server.happens(self.server.character.dies):
                            self.server.kill()
                            back_in = self.server.chance.uniform(0.5, 20)
                            asyncio.get_running_loop().call_later(back_in, self.server.start)
                        return answer
        except TimeoutError:
            raise RequestTimeout("PUBLISH", timeout or 0) from None

    def subscribe(
        self, *, cursor_fallback_since: int | None = None, on_log_reset: object = None, **members: Any
    ) -> SimStream:
        for name in ("authors", "types", "packet_ids"):
            value = members.get(name, ())
            members[name] = (value,) if isinstance(value, str) else tuple(value)
        query = Query(**members)
        self.server.queries.append(query)
        return SimStream(self, query)

    async def head(self) -> str | None:
        await self._until_connected()
        await asyncio.sleep(self._time_to_answer())
        return str(len(self.server.log) - 1) if self.announced is MARKED else None

    async def find(
        self, packet_ids: Iterable[str], *, types: Iterable[str] | str = (), since: int | None = None
    ) -> AsyncGenerator[Delivery, None]:
        if self.server.character.endless == "silence":
            await asyncio.sleep(HISTORY_TIMEOUT)
            raise RequestTimeout("SUBSCRIBE", HISTORY_TIMEOUT)
        if self.server.character.endless:
            await asyncio.Event().wait()
        for stored, received_at in self.server.log:
            if stored.packet_id in packet_ids:
                await asyncio.sleep(self.server.character.latency + self.server.character.drips)
                yield Delivery(stored, received_at, None, None)

    async def _is_genuine(self, packet: Packet) -> bool:
        """Check the packet against the key in the author's DID alone."""
        try:
            packet.verify()
        except InvalidPacket:
            return False
        return True


class SimStream:
    """A subscription at one relay: each stored packet once, in order, through any number of cuts."""

    def __init__(self, connection: SimConnection, query: Query) -> None:
        self._connection = connection
        self._server = connection.server
        self._query = query
        self._next = 0 if query.cursor is None else int(query.cursor) + 1
        self._abreast = len(self._server.log)
        self._end = None if query.live else self._abreast
        self._given = 0
        self._epoch: int | None = None
        self._closed = False

    def __aiter__(self) -> SimStream:
        return self

    async def __aenter__(self) -> SimStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self._closed = True

    async def __anext__(self) -> Delivery:
        server, query = self._server, self._query
        while not self._closed:
            epoch = await self._connection._until_connected()
            latency = server.character.latency
            if epoch != self._epoch or latency > 0.5:
                wait = self._connection._time_to_answer() if epoch != self._epoch else latency / 10
                if wait > IDLE_TIMEOUT and self._connection.announced is UNMARKED and not query.live:
                    await asyncio.sleep(IDLE_TIMEOUT)
                    break  # nothing came: for the client, that is everything
                await asyncio.sleep(wait)
                self._epoch = epoch
                if server.epoch != epoch:
                    continue
            if server.character.endless and not query.live and query.until != 0:
                await asyncio.sleep(HISTORY_TIMEOUT)
                if server.character.endless == "silence":
                    raise RequestTimeout("SUBSCRIBE", HISTORY_TIMEOUT)
                continue
            end = len(server.log) if self._end is None else self._end
            if self._next >= end or self._given == query.limit:
                if not query.live:
                    break
                await server.changed.wait()
                continue
            index, self._next = self._next, self._next + 1
            packet, received_at = server.log[index]
            if not query.matches(packet, received_at):
                continue
            draw = server.chance.random()
            if draw < server.character.tampers:
                self._connection.counts.events_tampered += 1
                self._connection.counts.events_forged += 1
                continue
            if not query.packet_ids and draw < server.character.tampers + server.character.withholds:
                continue
            self._given += 1
            self._connection.counts.events_delivered += 1
            if server.happens(server.character.cuts):
                server.cut()
            live = query.live and index >= self._abreast
            marked = self._connection.announced is MARKED
            return Delivery(packet, received_at, str(index), live if marked else None)
        raise StopAsyncIteration


class World:
    """Some relays and the pools over them."""

    def __init__(self, seed: int, *characters: Character) -> None:
        self.chance = random.Random(seed)
        self.relays = {
            f"ws://{name}": SimRelay(f"ws://{name}", random.Random(self.chance.random()), character)
            for name, character in zip("abcdefghij", characters, strict=False)
        }

    def __getitem__(self, name: str) -> SimRelay:
        return self.relays[f"ws://{name}"]

    def pool(self, options: PoolOptions | None = None, urls: list[str] | None = None) -> PacketPool:
        return PacketPool(
            urls or list(self.relays),
            identity=ME,
            options=options or PoolOptions(),
            make=lambda url, changed: SimConnection(self.relays[url], changed),
            wall=wall,
            random=self.chance.random,
        )
