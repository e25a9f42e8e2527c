"""More than one process on one log: publishes by workers and relays, and the cost of following the log.

Every relay here is a real process; PostgreSQL belongs to the benchmark and is shared. CPU time is counted for
each process separately, so that the figures are valid on a busy machine too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import asyncpg
import psutil
from strata.protocol.ids import Identity
from strata.protocol.wire import Filters, Subscribe, encode

from benches.catchup import read_stream
from benches.daemon import RelayProcess
from benches.load import CONTENT_TYPE, Load, client_frame, make_load
from benches.measures import Measure, Plan, Progress
from benches.peer import Peer, connect_peers
from benches.publish import publish
from relayd.postgres import EmbeddedPostgres
from relayd.store.migrate import migrate
from relayd.store.queries import CHANNEL
from tests.support.nats import NatsServer
from tests.support.standbys import Standby

__all__ = ["Server", "measure"]

_CONNECTIONS: Final = 16
"""Enough for every worker to get some of them."""
_WINDOW: Final = 16
_WORKERS_TARGET: Final = 1.25
"""The rate that two workers on two cores must reach, as a multiple of the rate of one relay."""
_FOLLOWED_TARGET: Final = 0.9
"""The share of the publish rate at one relay that must remain when a second relay follows."""
_BUSY: Final = ("user", "nice", "system", "irq", "softirq", "steal")
_SEEDS: Final = (bytes([1]) * 32, bytes([2]) * 32)


@dataclass(frozen=True, slots=True)
class _Took:
    """The cost of one packet, in seconds."""

    wall: float
    relays: tuple[float, ...]
    """CPU time of each relay."""
    postgres: float
    load: float
    others: float
    """The share of the CPU in use that other programs had."""

    def explained(self) -> dict[str, Any]:
        """The costs, for the details of a measure."""
        return {
            "relays us": [relay * 1e6 for relay in self.relays],
            "PostgreSQL us": self.postgres * 1e6,
            "load generator us": self.load * 1e6,
            "CPU of other programs, %": 100 * self.others,
        }


class Server:
    """A PostgreSQL server with any number of empty logs."""

    def __init__(self, url: str, postmaster: psutil.Process) -> None:
        self._url = url
        self._postmaster = postmaster
        self._names = itertools.count()

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls) -> AsyncIterator[Server]:
        """A fresh server, which is removed afterwards."""
        folder = Path(tempfile.mkdtemp(prefix="relayd-bench-"))
        folder.chmod(0o755)  # noqa: ASYNC240 - a standby's server looks into it, as another user
        try:
            async with EmbeddedPostgres(folder) as server:
                await migrate(server.url)
                yield cls(server.url, _postmaster_in(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def log(self) -> str:
        """The URL of a new, empty log."""
        name = f"log_{next(self._names)}"
        session = await asyncpg.connect(self._url, database="postgres")
        await session.execute(f"CREATE DATABASE {name} TEMPLATE relayd")
        await session.close()
        return self._url.replace("/relayd?", f"/{name}?", 1)

    def cpu_seconds(self) -> float:
        """CPU used so far, including that of sessions that have ended."""
        return _cpu_of(self._postmaster)

    async def watched(
        self, relays: Sequence[RelayProcess], count: int, work: Callable[[], Awaitable[object]]
    ) -> _Took:
        """Do the work, and return the cost of each of `count` packets."""
        before = self._clocks(relays)
        await work()
        took = [after - earlier for earlier, after in zip(before, self._clocks(relays), strict=True)]
        wall, machine, load, postgres, *each = took
        ours = load + postgres + sum(each)
        others = max(0.0, machine - ours) / max(machine, ours)
        return _Took(wall / count, tuple(cpu / count for cpu in each), postgres / count, load / count, others)

    def _clocks(self, relays: Sequence[RelayProcess]) -> list[float]:
        machine = psutil.cpu_times()
        return [
            time.perf_counter(),
            sum(getattr(machine, name, 0.0) for name in _BUSY),
            time.process_time(),
            self.cpu_seconds(),
            *(relay.cpu_times().relay for relay in relays),
        ]


async def measure(plan: Plan, progress: Progress, serve: str | None) -> list[Measure]:
    """One relay alone, followed, with a bus, a standby and workers; and one that reads it by federation."""
    count = plan.scaling_packets
    load = make_load(count * (8 * plan.rounds + 3 + len(plan.workers) * (plan.rounds + 1)), progress)
    parts = [load.take(number * count, count) for number in range(len(load) // count)]
    async with Server.running() as server:
        run = _Run(server, parts, plan, progress, serve)
        machines, alone = await run.machines()
        return [
            *machines,
            await run.bus(alone),
            *await run.standby(alone),
            *[await run.workers(count) for count in plan.workers],
        ]


def _cpu_of(process: psutil.Process) -> float:
    """CPU of a server and its children, including those that have ended."""
    used = 0.0
    for each in [*process.children(), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            used += times.user + times.system + times.children_user + times.children_system
    return used


def _median(rounds: Sequence[_Took]) -> _Took:
    return sorted(rounds, key=lambda took: took.wall)[len(rounds) // 2]


def _postmaster_in(folder: Path) -> psutil.Process:
    (pidfile,) = folder.glob("postgres-*/postmaster.pid")
    return psutil.Process(int(pidfile.read_text().split("\n", 1)[0]))


class _Run:
    def __init__(
        self, server: Server, parts: list[Load], plan: Plan, progress: Progress, serve: str | None
    ) -> None:
        self._server = server
        self._parts = parts
        self._plan = plan
        self._progress = progress
        self._serve = serve
        self._alone = 0.0
        """Publishes per second at one relay."""

    async def _rounds(
        self, name: str, relays: Sequence[RelayProcess], work: Callable[[Load], Awaitable[object]]
    ) -> list[_Took]:
        rounds = []
        for _ in range(self._plan.rounds):
            part = self._parts.pop()
            rounds.append(await self._server.watched(relays, len(part), lambda part=part: work(part)))  # type: ignore[misc]
            self._progress(f"{name}: {1 / rounds[-1].wall:,.0f}/s")
        return rounds

    async def machines(self) -> tuple[list[Measure], list[_Took]]:
        """One relay, and the effect on it when others follow; and the costs of packets when it was alone."""
        url = await self._server.log()
        with RelayProcess(self._serve, {"database_url": url}) as first:

            async def at_first(part: Load) -> None:
                await _publish([first], part)

            await at_first(self._parts.pop())  # connections, plans and caches are warm
            alone = await self._rounds("one relay", [first], at_first)
            self._alone = 1 / _median(alone).wall
            sessions = [await asyncpg.connect(url) for _ in range(self._plan.listeners)]
            for session in sessions:
                await session.add_listener(CHANNEL, lambda *_: None)
            heard = await self._rounds(f"{len(sessions)} listeners", [first], at_first)
            for session in sessions:
                session.terminate()
            with RelayProcess(self._serve, {"database_url": url}) as second:
                followed, read = await self._followed("a second relay", first, second)
                both = await self._rounds(
                    "both", [first, second], lambda part: _publish([first, second], part)
                )
        federated, carried = await self._tree()
        return [
            self._rate("published at one relay", alone, None),
            self._rate(f"the same beside {len(sessions)} sessions that LISTEN", heard, None),
            self._rate("the same followed by a second relay", followed, _FOLLOWED_TARGET),
            self._rate("published at two relays", both, None),
            _cost("a relay that follows", alone, followed, read),
            _cost("a relay that reads by federation", alone, federated, carried),
        ], alone

    async def bus(self, alone: Sequence[_Took]) -> Measure:
        """A second relay follows, and both learn of commits over NATS."""
        nats = NatsServer().start()
        try:
            settings = {"database_url": await self._server.log(), "bus_url": nats.url}
            with RelayProcess(self._serve, settings) as first, RelayProcess(self._serve, settings) as second:
                await _publish([first], self._parts.pop())
                before = _cpu_of(psutil.Process(nats.pid))
                followed, read = await self._followed("over a bus", first, second)
                used = _cpu_of(psutil.Process(nats.pid)) - before
        finally:
            nats.kill()
        each = used / (self._plan.scaling_packets * len(followed))
        return _cost("a relay that follows over a bus", alone, followed, read, {"NATS us": each * 1e6})

    async def standby(self, alone: Sequence[_Took]) -> list[Measure]:
        """The cost of a streaming replica, and of reading history from the primary and from the standby."""
        url = await self._server.log()
        async with Standby(url) as standby:
            replica = psutil.Process(standby.pid)
            with RelayProcess(self._serve, {"database_url": url}) as relay:

                async def at_relay(part: Load) -> None:
                    await _publish([relay], part)

                await at_relay(self._parts.pop())
                before = _cpu_of(replica)
                replicated = await self._rounds("with a standby", [relay], at_relay)
                length = self._plan.scaling_packets * (len(replicated) + 1)
                await _caught_up(standby, length)
                replayed = (_cpu_of(replica) - before) / (length - self._plan.scaling_packets)
                at_primary = await self._read(relay, length, replica)
            with RelayProcess(self._serve, {"database_url": url, "read_database_url": standby.url}) as relay:
                at_standby = await self._read(relay, length, replica)
        more = statistics.median(each.postgres for each in replicated) - statistics.median(
            each.postgres for each in alone
        )
        publish_cost = statistics.median(took.relays[0] + took.postgres for took in alone)
        return [
            Measure(
                "scaling",
                "a standby: CPU for each packet published",
                (replayed + max(0.0, more)) * 1e6,
                "us",
                limit=publish_cost * 1e6,
                limit_name="CPU of a publish",
                details={"standby us": replayed * 1e6, "primary besides us": more * 1e6},
            ),
            _page_cost("history from the primary", at_primary, publish_cost),
            _page_cost("history from the standby", at_standby, publish_cost),
        ]

    async def _read(
        self, relay: RelayProcess, length: int, replica: psutil.Process
    ) -> tuple[float, float, float]:
        """CPU of relay, primary and standby per packet of history."""
        (warm,) = await connect_peers(relay.ws_url, 1)
        await read_stream(warm, length)
        warm.close()
        before = relay.cpu_times().relay, self._server.cpu_seconds(), _cpu_of(replica)
        for _ in range(self._plan.rounds):
            (peer,) = await connect_peers(relay.ws_url, 1)
            await read_stream(peer, length)
            peer.close()
        after = relay.cpu_times().relay, self._server.cpu_seconds(), _cpu_of(replica)
        own, primary, standby = (
            (late - early) / (length * self._plan.rounds) for early, late in zip(before, after, strict=True)
        )
        return own, primary, standby

    async def _tree(self) -> tuple[list[_Took], float]:
        """A relay that reads from another one of the same owner, each with its own log."""
        root, leaf = map(Identity.from_seed, _SEEDS)
        above = {"database_url": await self._server.log(), "identity_seed": _SEEDS[0].hex()}
        below = {"database_url": await self._server.log(), "identity_seed": _SEEDS[1].hex()}
        with (
            RelayProcess(self._serve, {**above, "replication_peers": leaf.did}) as first,
            tempfile.NamedTemporaryFile("w", suffix=".toml") as peers,
        ):
            peers.write(f'[[peer]]\nurl = "{first.ws_url}"\nrelay_id = "{root.did}"\n')
            peers.flush()
            with RelayProcess(self._serve, {**below, "peers_file": peers.name}) as second:
                return await self._followed("by federation", first, second)

    async def workers(self, count: int) -> Measure:
        """Publishes per second at a relay with this many workers."""
        settings = {"database_url": await self._server.log(), "workers": count}
        with RelayProcess(self._serve, settings) as relay:

            async def work(part: Load) -> None:
                await _publish([relay], part)

            await work(self._parts.pop())
            rounds = await self._rounds(f"{count} workers", [relay], work)
        return self._rate(f"published at {count} workers", rounds, _WORKERS_TARGET if count == 2 else None)

    async def _followed(
        self, name: str, first: RelayProcess, second: RelayProcess
    ) -> tuple[list[_Took], float]:
        """Publish at one and read everything from the other; also return the bytes it reads per packet."""
        (subscriber,) = await connect_peers(second.ws_url, 1)
        await _subscribe(subscriber)
        before = second.bytes_read()

        async def work(part: Load) -> None:
            everything = subscriber.expect(subscriber.total + len(part))
            await asyncio.gather(_publish([first], part), everything)

        rounds = await self._rounds(name, [first, second], work)
        read = second.bytes_read() - before
        subscriber.close()
        return rounds, read / (self._plan.scaling_packets * len(rounds))

    def _rate(self, name: str, rounds: Sequence[_Took], target: float | None) -> Measure:
        median = _median(rounds)
        return Measure(
            "scaling",
            name,
            1 / median.wall,
            "/s",
            None if target is None else target * self._alone,
            limit=self._alone,
            limit_name="one relay",
            details={"rounds": [1 / took.wall for took in rounds], **median.explained()},
        )


async def _caught_up(standby: Standby, length: int) -> None:
    async with asyncio.timeout(60):
        while await standby.execute("SELECT count(*) FROM packets") < length:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def _page_cost(name: str, cost: tuple[float, float, float], publish_cost: float) -> Measure:
    relay, primary, standby = (each * 1e6 for each in cost)
    return Measure(
        "scaling",
        f"{name}: CPU of PostgreSQL for each packet",
        primary + standby,
        "us",
        limit=publish_cost * 1e6,
        limit_name="CPU of a publish",
        details={"relay us": relay, "primary us": primary, "standby us": standby},
    )


def _cost(
    name: str,
    alone: Sequence[_Took],
    followed: Sequence[_Took],
    read: float,
    besides: Mapping[str, float] = MappingProxyType({}),
) -> Measure:
    """The cost of a packet because another relay gets it too, in that relay and in the database."""
    relay = statistics.median(took.relays[1] for took in followed)
    database, before = (statistics.median(took.postgres for took in rounds) for rounds in (followed, alone))
    own = statistics.median(took.relays[0] for took in followed) - statistics.median(
        took.relays[0] for took in alone
    )
    publish_cost = statistics.median(took.relays[0] + took.postgres for took in alone)
    return Measure(
        "scaling",
        f"{name}: CPU for each packet",
        (relay + max(0.0, database - before)) * 1e6,
        "us",
        limit=publish_cost * 1e6,
        limit_name="CPU of a publish",
        details={
            "that relay us": relay * 1e6,
            "PostgreSQL besides us": (database - before) * 1e6,
            "the first relay besides us": own * 1e6,
            "bytes that relay reads": read,
            **besides,
        },
    )


async def _publish(relays: Sequence[RelayProcess], part: Load) -> None:
    share = -(-len(part) // len(relays))
    await asyncio.gather(
        *(
            publish(
                relay.ws_url,
                part.take(number * share, share),
                connections=_CONNECTIONS // len(relays),
                window=_WINDOW,
            )
            for number, relay in enumerate(relays)
        )
    )


async def _subscribe(peer: Peer) -> None:
    message = Subscribe(
        subscription_id="bench", filters=Filters(types=[CONTENT_TYPE], limit=0), history_marker=True
    )
    live = peer.expect(1)
    peer.send(client_frame(encode(message)))
    await live
