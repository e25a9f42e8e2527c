"""Deliveries per second to live subscribers, with many publishes in flight and with one."""

from __future__ import annotations

import asyncio
import statistics
import time

import msgspec
from strata.protocol.wire import Event, Filters, Subscribe, encode

from benches.bare import writes
from benches.daemon import RelayProcess
from benches.load import CONTENT_TYPE, Load, client_frame, make_load
from benches.measures import Measure, Plan, Progress
from benches.peer import BenchError, Peer, Publisher, connect_peers, messages
from benches.publish import CONNECTIONS, WINDOW

__all__ = ["measure"]

_TARGETS = {(100, True): 600_000, (1000, True): 1_200_000, (100, False): 140_000, (1000, False): 140_000}
_TYPICAL_BATCH = 32
"""Frames per write of the raw limit for batched publishes; the relay's own batches may be larger."""
_FRAME_BYTES = 700


async def measure(relay: RelayProcess, plan: Plan, progress: Progress) -> list[Measure]:
    """Fan-out to each number of subscribers, batched and with one publish in flight."""
    measures = [await _batched(relay, plan, progress, *shape) for shape in plan.fanout]
    return measures + [await _single(relay, plan, progress, *shape) for shape in plan.fanout_single]


async def _batched(
    relay: RelayProcess, plan: Plan, progress: Progress, subscribers: int, packets: int
) -> Measure:
    rates, cpu = await _rounds(relay, plan, progress, subscribers, packets, CONNECTIONS, WINDOW)
    alone = await writes(subscribers, _FRAME_BYTES, _TYPICAL_BATCH, plan.limit_seconds)
    return Measure(
        "fanout",
        f"{subscribers} subscribers, {CONNECTIONS} x {WINDOW} in flight",
        statistics.median(rates),
        "/s",
        _TARGETS.get((subscribers, True)),
        limit=alone,
        limit_name=f"raw writes of {_TYPICAL_BATCH} frames",
        details={"rounds": rates, **cpu},
    )


async def _single(
    relay: RelayProcess, plan: Plan, progress: Progress, subscribers: int, packets: int
) -> Measure:
    rates, cpu = await _rounds(relay, plan, progress, subscribers, packets, 1, 1)
    alone = await writes(subscribers, _FRAME_BYTES, 1, plan.limit_seconds)
    return Measure(
        "fanout",
        f"{subscribers} subscribers, 1 in flight",
        statistics.median(rates),
        "/s",
        _TARGETS.get((subscribers, False)),
        limit=alone,
        limit_name="raw writes of 1 frame",
        details={"rounds": rates, **cpu},
    )


async def _rounds(
    relay: RelayProcess,
    plan: Plan,
    progress: Progress,
    subscribers: int,
    packets: int,
    connections: int,
    window: int,
) -> tuple[list[float], dict[str, float]]:
    """The rate of each round, and the cost of one delivery over all rounds."""
    load = make_load(packets * plan.rounds, progress)
    peers = await connect_peers(relay.ws_url, subscribers)
    await _subscribe(peers)
    publishers = await connect_peers(relay.ws_url, connections, Publisher)
    rates: list[float] = []
    before = relay.cpu_times()
    for number in range(plan.rounds):
        part = load.take(number * packets, packets)
        peers[0].witness = number == 0
        seconds = await _deliver(peers, publishers, part, window)
        rates.append(subscribers * packets / seconds)
        progress(f"fan-out to {subscribers}, {connections * window} in flight: {rates[-1]:,.0f}/s")
    cost = relay.cpu_times().since(before).each(subscribers * packets * plan.rounds)
    _check_witness(peers[0], load.take(0, packets), publishers=connections)
    for peer in [*peers, *publishers]:
        peer.close()
    return rates, cost


async def _subscribe(peers: list[Peer]) -> None:
    """Open one live subscription on each, all with the same filter; wait until all are live."""
    frame = client_frame(
        encode(
            Subscribe(
                subscription_id="bench",
                filters=Filters(types=[CONTENT_TYPE], limit=0),
                history_marker=True,
            )
        )
    )
    waiting = [peer.expect(1) for peer in peers]
    for peer in peers:
        peer.send(frame)
    await asyncio.gather(*waiting)


async def _deliver(peers: list[Peer], publishers: list[Peer], part: Load, window: int) -> float:
    """Publish a part; return the seconds until every subscriber has exactly its packets."""
    waiting = [peer.expect(peer.total + len(part)) for peer in peers]
    started = time.perf_counter()
    for number, peer in enumerate(publishers):
        assert isinstance(peer, Publisher)
        waiting.append(peer.start(part.frames[number :: len(publishers)], window))
    await asyncio.gather(*waiting)
    return time.perf_counter() - started


def _check_witness(witness: Peer, part: Load, *, publishers: int) -> None:
    """Check one subscriber's EVENTs: each packet once, and the packets of one publisher in their order."""
    ids = [
        msgspec.json.decode(message.packet)["packet_id"]
        for message in messages(witness)
        if isinstance(message, Event)
    ]
    if sorted(ids) != sorted(part.ids):
        raise BenchError("a subscriber did not get each packet exactly once")
    place = {packet_id: number for number, packet_id in enumerate(ids)}
    for number in range(publishers):
        places = [place[packet_id] for packet_id in part.ids[number::publishers]]
        if places != sorted(places):
            raise BenchError("a subscriber got one session's packets out of order")
