"""Relays that read from each other: lag, rate, packets that come twice, and the cost of comparing sets.

Every relay is a real process with its own log; PostgreSQL belongs to the benchmark and is shared. Sets are
compared in this process, since the cost does not depend on relays.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

from strata.protocol.ids import Identity
from strata.protocol.negentropy import ItemSet, Reconciler
from strata.protocol.wire import Filters, Subscribe, encode

from benches.daemon import RelayProcess
from benches.load import CONTENT_TYPE, Load, client_frame, make_load
from benches.measures import Measure, Plan, Progress, percentile
from benches.peer import BenchError, Peer, Publisher, connect_peers
from benches.publish import publish
from benches.scaling import Server

__all__ = ["measure"]

_LAG_TARGETS: Final = {50: 5.0, 99: 50.0}
"""Milliseconds from OK at the upstream to the EVENT at the reader."""
_CATCHUP_TARGET: Final = 0.7
"""The rate at which a reader takes a backlog, as a share of the publish rate at the upstream."""
_TWICE_TARGET: Final = 1.0
"""The packets that a relay of a group gets although it has them, in per cent of those it needs."""
_DIFFERENCES: Final = 10
_SET_TARGETS: Final = {0: (400, 1), _DIFFERENCES: (25_000, 3)}
"""Bytes and rounds for a million packets, by the number of differences."""
_LINK_TIMEOUT: Final = 60.0


async def measure(plan: Plan, progress: Progress, serve: str | None) -> list[Measure]:
    """All measurements; at most three relays run at a time."""
    count, warm = plan.scaling_packets, plan.latency_packets // 10 + 1
    load = make_load(plan.latency_packets + warm + 3 * count, progress)
    single = load.take(0, plan.latency_packets + warm)
    rest = [load.take(len(single) + n * count, count) for n in range(3)]
    async with Server.running() as server:
        return [
            *await _pair(server, serve, single, warm, rest[0], progress),
            await _twice(server, serve, rest[1], "demo", progress),
            await _twice(server, serve, rest[2], "", progress),
            *_sets(plan.set_items, progress),
        ]


@contextlib.asynccontextmanager
async def _relays(
    server: Server, serve: str | None, edges: Sequence[tuple[int, int]], group: str = ""
) -> AsyncIterator[list[RelayProcess]]:
    """Relays, by number; the first of each edge reads from the second."""
    count = 1 + max(max(edge) for edge in edges)
    seeds = [bytes([number + 1]) * 32 for number in range(count)]
    dids = [Identity.from_seed(seed).did for seed in seeds]
    ports = [_free_port() for _ in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        relays = []
        for number in range(count):
            peers = folder / f"{number}.toml"
            peers.write_text(
                "".join(
                    f'[[peer]]\nurl = "ws://127.0.0.1:{ports[other]}/strata"\n'
                    f'relay_id = "{dids[other]}"\ngroup = "{group}"\n'
                    for reader, other in edges
                    if reader == number
                )
            )
            settings = {
                "database_url": await server.log(),
                "identity_seed": seeds[number].hex(),
                "replication_peers": ",".join(dids[reader] for reader, other in edges if other == number),
                "peers_file": str(peers),
                "port": ports[number],
                "reconcile_interval": 0,
            }
            relays.append(stack.enter_context(RelayProcess(serve, settings)))
        for number, relay in enumerate(relays):
            await _linked(relay, sum(reader == number for reader, _ in edges))
        yield relays


async def _pair(
    server: Server, serve: str | None, single: Load, warm: int, backlog: Load, progress: Progress
) -> list[Measure]:
    """A relay that reads from another: its lag, then another pair, in which the reader finds a backlog."""
    async with _relays(server, serve, [(1, 0)]) as (upstream, reader):
        (publisher,) = await connect_peers(upstream.ws_url, 1, Publisher)
        subscriber = await _subscribed(reader, live=True)
        await _lags(publisher, subscriber, single.frames[:warm])
        lags, oks = await _lags(publisher, subscriber, single.frames[warm:])
        publisher.close()
        subscriber.close()
        progress(f"federation: lag {percentile(lags, 0.5) * 1e3:.2f} ms")
    measures = [
        Measure(
            "federation",
            f"OK upstream to EVENT at the reader, p{share}",
            percentile(lags, share / 100) * 1e3,
            "ms",
            target,
            at_most=True,
            limit=percentile(oks, share / 100) * 1e3,
            limit_name="PUBLISH to OK upstream",
            details={"worst ms": lags[-1] * 1e3},
        )
        for share, target in _LAG_TARGETS.items()
    ]
    return [*measures, await _catchup(server, serve, backlog, progress)]


async def _lags(
    publisher: Peer, subscriber: Peer, frames: Sequence[bytes]
) -> tuple[list[float], list[float]]:
    """Publish packets one by one; return the times from OK to EVENT and from PUBLISH to OK, ascending."""
    lags, oks = [], []
    for frame in frames:
        sent_at = time.perf_counter()
        stored = publisher.expect(publisher.total + 1)
        seen = subscriber.expect(subscriber.total + 1)
        publisher.send(frame)
        await stored
        stored_at = time.perf_counter()
        oks.append(stored_at - sent_at)
        await seen
        lags.append(time.perf_counter() - stored_at)
    return sorted(lags), sorted(oks)


async def _catchup(server: Server, serve: str | None, backlog: Load, progress: Progress) -> Measure:
    upper, lower = (bytes([number]) * 32 for number in (11, 12))
    above = {"database_url": await server.log(), "identity_seed": upper.hex()}
    below = {"database_url": await server.log(), "identity_seed": lower.hex(), "reconcile_interval": 0}
    reader_did = Identity.from_seed(lower).did
    with (
        RelayProcess(serve, {**above, "replication_peers": reader_did}) as upstream,
        tempfile.NamedTemporaryFile("w", suffix=".toml") as peers,
    ):
        published = len(backlog) / await publish(upstream.ws_url, backlog)
        peers.write(f'[[peer]]\nurl = "{upstream.ws_url}"\nrelay_id = "{Identity.from_seed(upper).did}"\n')
        peers.flush()
        with RelayProcess(serve, {**below, "peers_file": peers.name}) as reader:
            began = time.perf_counter()
            subscriber = await _subscribed(reader, live=False)
            await subscriber.expect(len(backlog) + 1)
            rate = len(backlog) / (time.perf_counter() - began)
            subscriber.close()
    progress(f"federation: a backlog at {rate:,.0f}/s")
    return Measure(
        "federation",
        "a backlog read, verified and stored",
        rate,
        "/s",
        _CATCHUP_TARGET * published,
        limit=published,
        limit_name="published upstream, 8 x 32",
    )


async def _twice(server: Server, serve: str | None, load: Load, group: str, progress: Progress) -> Measure:
    """Publish at all relays of a ring of three, and count the packets that come to each."""
    edges = [(one, other) for one in range(3) for other in range(3) if one != other]
    share = len(load) // 3
    async with _relays(server, serve, edges, group) as relays:
        subscribers = [await _subscribed(relay, live=True) for relay in relays]
        everything = [each.expect(each.total + 3 * share) for each in subscribers]
        began = time.perf_counter()
        await asyncio.gather(
            *(publish(relay.ws_url, load.take(n * share, share)) for n, relay in enumerate(relays)),
            *everything,
        )
        seconds = time.perf_counter() - began
        for subscriber in subscribers:
            subscriber.close()
        needed = 2 * 3 * share
        came = await _settled(relays, needed)
    twice = 100 * (came["known"] / needed)
    name = "a ring of three" + ("" if group else " without a group")
    progress(f"federation: {name}, {twice:.2f} % twice")
    return Measure(
        "federation",
        f"{name}: packets that come twice",
        twice,
        "%",
        _TWICE_TARGET if group else None,
        at_most=True,
        limit=100.0,
        limit_name="each neighbour sends all",
        details={"packets a second in the ring": 3 * share / seconds, "stored": came["stored"]},
    )


async def _settled(relays: Sequence[RelayProcess], needed: int) -> Counter[str]:
    """The packets that came to all relays, by outcome, once no more come."""
    before: Counter[str] = Counter()
    while True:
        came: Counter[str] = Counter()
        for relay in relays:
            for labels, value in await _figures(relay, "relayd_peer_packets_total"):
                came[labels.split('outcome="')[1].split('"')[0]] += int(value)
        if came == before and came["stored"] == needed:
            return came
        if came["stored"] > needed or came["forged"] or came["skipped"]:
            raise BenchError(f"{needed} packets were to be stored, and there came {dict(came)}")
        before = came
        await asyncio.sleep(0.5)


async def _linked(relay: RelayProcess, peers: int) -> None:
    deadline = time.monotonic() + _LINK_TIMEOUT
    while sum(value for _, value in await _figures(relay, "relayd_peer_connected")) < peers:
        if time.monotonic() > deadline:
            raise BenchError("a relay does not read from its peers")
        await asyncio.sleep(0.1)


async def _figures(relay: RelayProcess, name: str) -> list[tuple[str, float]]:
    def read() -> str:
        with urllib.request.urlopen(relay.metrics_url, timeout=10) as answer:
            return str(answer.read().decode())

    lines = (await asyncio.to_thread(read)).splitlines()
    return [
        (line.rsplit(" ", 1)[0], float(line.rsplit(" ", 1)[1]))
        for line in lines
        if line.startswith(name + "{")
    ]


async def _subscribed(relay: RelayProcess, *, live: bool) -> Peer:
    (peer,) = await connect_peers(relay.ws_url, 1)
    message = Subscribe(
        subscription_id="bench",
        filters=Filters(types=[CONTENT_TYPE], limit=0 if live else None),
        gapless=None if live else True,
        history_marker=True,
    )
    marker = peer.next_marker()
    peer.send(client_frame(encode(message)))
    if live:
        await marker
    return peer


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _sets(count: int, progress: Progress) -> list[Measure]:
    """The cost of comparing two equal sets, and two sets that differ in ten packets."""
    chance = random.Random(5)
    items = [(chance.randrange(604_800), chance.randbytes(32)) for _ in range(count)]
    whole = ItemSet(items)
    measures = []
    for differences, (most_bytes, most_rounds) in _SET_TARGETS.items():
        other = ItemSet(items[differences:]) if differences else whole
        sizes, seconds, found = [], [], 0
        began = time.process_time()
        ours, theirs = Reconciler(other), Reconciler(whole)
        message: bytes | None = ours.initiate()
        while message is not None:
            answer = theirs.respond(message)
            sizes.append(len(message) + len(answer))
            compared = ours.receive(answer)
            found += len(compared.need)
            message = compared.message
        seconds.append(time.process_time() - began)
        if found != differences:
            raise BenchError(f"{found} differences were found where {differences} are")
        what = f"{count:,} packets, {differences} differences"
        progress(f"federation: {what}: {sum(sizes):,} bytes, {len(sizes)} rounds")
        details = {"CPU of both sides ms": statistics.fmean(seconds) * 1e3}
        measures += [
            Measure(
                "federation",
                f"{what}: bytes",
                sum(sizes),
                "B",
                most_bytes,
                at_most=True,
                limit=32 * count,
                limit_name="all ids listed",
                details=details,
            ),
            Measure(
                "federation",
                f"{what}: rounds",
                len(sizes),
                "rounds",
                most_rounds,
                at_most=True,
                limit=1,
                limit_name="one",
            ),
        ]
    return measures
