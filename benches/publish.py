"""Publishes per second: verified, committed, acknowledged; 8 connections with 32 unanswered on each."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
import urllib.request

from strata.protocol.wire import Ok

from benches.bare import SignatureCost, StoreCost
from benches.daemon import CpuTimes, RelayProcess
from benches.load import Load, make_load
from benches.measures import Measure, Plan, Progress
from benches.peer import BenchError, Publisher, connect_peers, messages

__all__ = ["CONNECTIONS", "WINDOW", "measure", "publish"]

CONNECTIONS = 8
WINDOW = 32
_TARGET = 13_000
_CPU_TARGET = 1.6


async def publish(url: str, load: Load, *, connections: int = CONNECTIONS, window: int = WINDOW) -> float:
    """Publish the load over fresh connections; return the seconds from the first frame to the last OK.

    Raises `BenchError` unless every packet was answered by exactly one OK, in the order sent.
    """
    peers = await connect_peers(url, connections, Publisher, witnesses=connections)
    started = time.perf_counter()
    await asyncio.gather(
        *(
            peer.start(load.frames[number::connections], window)
            for number, peer in enumerate(peers)
            if isinstance(peer, Publisher)
        )
    )
    seconds = time.perf_counter() - started
    for number, peer in enumerate(peers):
        peer.close()
        answered = [message.packet_id for message in messages(peer) if isinstance(message, Ok)]
        if answered != load.ids[number::connections]:
            raise BenchError("the OKs are not those of the packets sent, in their order")
    return seconds


async def measure(
    relay: RelayProcess, plan: Plan, progress: Progress, signature: SignatureCost, store: StoreCost
) -> list[Measure]:
    """The rate, and the CPU of a publish as a multiple of its signature check."""
    count = plan.publish_packets
    load = make_load(count * plan.rounds + count // 10, progress)
    await publish(relay.ws_url, load.take(0, count // 10))  # connections, plans and caches are warm
    accepted = await _accepted(relay)
    rates: list[float] = []
    costs: list[CpuTimes] = []
    for number in range(plan.rounds):
        part = load.take(count // 10 + number * count, count)
        before = relay.cpu_times()
        seconds = await publish(relay.ws_url, part)
        costs.append(relay.cpu_times().since(before))
        rates.append(count / seconds)
        progress(f"publish: {rates[-1]:,.0f}/s")
    if await _accepted(relay) - accepted != count * plan.rounds:
        raise BenchError("the relay has not counted as many packets as were acknowledged")
    cost = sorted(costs, key=lambda cost: cost.relay + cost.postgres)[len(costs) // 2]
    cpu_us = (cost.relay + cost.postgres) / count * 1e6
    check_us = signature.seconds * 1e6
    return [
        Measure(
            "publish",
            f"acknowledged, {CONNECTIONS} x {WINDOW}",
            statistics.median(rates),
            "/s",
            _TARGET,
            limit=signature.two_threads,
            limit_name="signature checks, 2 threads",
            details={
                "rounds": rates,
                "checks/s, 1 thread": signature.one_thread,
                "log alone, rows/s": store.append,
            },
        ),
        Measure(
            "publish",
            "CPU of relay and PostgreSQL",
            cpu_us,
            "us",
            _CPU_TARGET * check_us,
            at_most=True,
            limit=check_us,
            limit_name="one signature check",
            details={
                "signature us": check_us,
                "relay beside it us": cost.relay / count * 1e6 - check_us,
                **cost.each(count),
            },
        ),
    ]


async def _accepted(relay: RelayProcess) -> int:
    """The number of accepted publishes that the relay has counted."""

    def fetch() -> str:
        with urllib.request.urlopen(relay.metrics_url, timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    text = await asyncio.to_thread(fetch)
    found = re.search(r'^relayd_publishes_total\{\w+="accepted"\} (\S+)$', text, re.MULTILINE)
    if found is None:
        raise BenchError("the relay's metrics do not count accepted publishes")
    return int(float(found[1]))
