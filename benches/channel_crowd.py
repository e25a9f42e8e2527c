"""Crowds: the cost of many participants in a channel.

`crowd`: many participants on a real relay, all in one process, each sending one message to all the others.
`pace`: a model of N participants that consists only of their delays, in virtual time: how often they sync
while nobody says anything, and how many of them acknowledge a message. Its figures are the same on every
machine.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import re
import secrets
import time
import urllib.request
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass

import strata
from strata.channels.reliable import ReliableChannel
from strata.channels.sds import SdsConfig
from strata.channels.sds.sync import Pace
from strata.protocol.ids import Identity

from benches.daemon import RelayProcess
from benches.measures import FULL, Measure, Plan, Progress
from benches.peer import BenchError

__all__ = ["Crowd", "acknowledging", "as_measures", "idle_syncs", "measure", "talk"]

_INTERVAL_MS = SdsConfig().sync_min_interval_ms
_GRACE_MS = SdsConfig().acknowledgement_timeout_ms / 2
_LATENCY_MS = (50, 300)
"""The latency from one participant to another."""
_BUCKETS = 8
"""The groups in which participants hear a sync, each after its own latency."""
_PAYLOAD = b"." * 100
_AT_ONCE = 20
_TIMEOUT = 600.0
_MINUTE_MS = 60_000

SIZES = (2, 10, 100, 1_000)


# A model.


def idle_syncs(people: int, minutes: int, seed: int) -> list[float]:
    """The times at which syncs are sent, in milliseconds, while nobody says anything; all begin at once."""
    source = random.Random(seed)
    paces = [Pace(_INTERVAL_MS, source.random) for _ in range(people)]
    rounds = [0] * people
    queue: list[tuple[float, int, int, int]] = [
        (pace.delay(1.0), 0, who, 0) for who, pace in enumerate(paces)
    ]
    heapq.heapify(queue)
    syncs: list[float] = []

    def passed(who: int, now: float, *, own: bool) -> None:
        paces[who].passed(int(now), needless=True, own=own)
        rounds[who] += 1
        heapq.heappush(queue, (now + paces[who].delay(1.0), 0, who, rounds[who]))

    while queue and queue[0][0] <= minutes * _MINUTE_MS:
        now, is_arrival, who, number = heapq.heappop(queue)
        if is_arrival:
            for other in range(number, people, _BUCKETS):
                if other != who:
                    paces[other].heard(str(who), int(now), int(now))
                    passed(other, now, own=False)
        elif number == rounds[who]:
            syncs.append(now)
            passed(who, now, own=True)
            for bucket in range(_BUCKETS):
                heapq.heappush(queue, (now + source.uniform(*_LATENCY_MS), 1, who, bucket))
    return syncs


def acknowledging(people: int, seed: int) -> int:
    """How many of these participants, who have heard each other lately, acknowledge one message by a sync."""
    source = random.Random(seed)
    pace = Pace(_INTERVAL_MS, source.random)
    for number in range(people - 1):
        pace.heard(str(number), 0, 0)
    sent: list[float] = []
    for at in sorted(pace.within(_GRACE_MS, source.random()) for _ in range(people - 1)):
        if not any(at > earlier + source.uniform(*_LATENCY_MS) for earlier in sent):
            sent.append(at)
    return len(sent)


def as_measures(plan: Plan, progress: Progress) -> list[Measure]:
    """Syncs of an idle room, and acknowledging syncs per message, by the number of people."""
    minutes, rounds = (60, 200) if plan is FULL else (10, 20)
    measures = []
    for people in SIZES if plan is FULL else SIZES[:3]:
        syncs = idle_syncs(people, minutes, seed=1)
        settled = [at for at in syncs if at > 5 * _MINUTE_MS]
        gaps = [later - earlier for earlier, later in itertools.pairwise(settled)]
        each = [acknowledging(people, seed) for seed in range(rounds)]
        progress(f"pace: {people} people")
        measures.append(
            Measure(
                "pace",
                f"idle syncs of {people} people, in all",
                len(settled) / (minutes - 5) / 60,
                "/s",
                0.1,
                at_most=True,
                limit=2 / (_INTERVAL_MS / 1000),
                limit_name="two in an interval",
                details={
                    "in the first five minutes": len(syncs) - len(settled),
                    "longest silence, s": max(gaps, default=math.nan) / 1000,
                    "acknowledging one message": sum(each) / len(each),
                    "at most": max(each),
                },
            )
        )
    return measures


# On a relay.


@dataclass(frozen=True, slots=True)
class Crowd:
    """What a crowd did, and what it cost."""

    deliveries: int
    whole_after: float
    """Seconds from the first send until everybody had everything."""
    acknowledged_after: float
    cpu_seconds: float
    """CPU time of this process, from the first send to the last acknowledgement."""
    sent_bytes: int
    """Bytes sent by the relay, in the same time."""
    syncs: int
    retransmissions: int


async def talk(ws_url: str, metrics_url: str, people: int, *, timeout: float = _TIMEOUT) -> Crowd:
    """Have people join a channel, and each send one message. Raises `BenchError` if one does not arrive."""
    topic = f"/bench/1/{secrets.token_hex(8)}/proto"
    taken: Counter[int] = Counter()
    acknowledged: list[object] = []
    whole, all_acknowledged = asyncio.Event(), asyncio.Event()
    deliveries = people * (people - 1)

    async with AsyncExitStack() as stack:

        async def join(who: int) -> ReliableChannel:
            options = strata.Options(connect_timeout=60.0)
            relay = await stack.enter_async_context(
                strata.connect(ws_url, identity=Identity.generate(), options=options)
            )
            room = await stack.enter_async_context(relay.channel("room", topic=topic))

            def took(_event: object) -> None:
                taken[who] += 1
                if taken.total() == deliveries:
                    whole.set()

            def learned(event: object) -> None:
                acknowledged.append(event)
                if len(acknowledged) == people:
                    all_acknowledged.set()

            room.message_events.on("message-received", took)
            room.message_events.on("reliable:message:delivered", learned)
            return room

        rooms: list[ReliableChannel] = []
        for first in range(0, people, _AT_ONCE):
            some = range(first, min(first + _AT_ONCE, people))
            rooms += await asyncio.gather(*map(join, some))
        bytes_before = await asyncio.to_thread(_sent_bytes, metrics_url)
        cpu, began_at = time.process_time(), time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                await asyncio.gather(*[room.send(_PAYLOAD) for room in rooms])
                await whole.wait()
                whole_after = time.monotonic() - began_at
                await all_acknowledged.wait()
        except TimeoutError:
            raise BenchError(
                f"{taken.total()} of {deliveries} deliveries, {len(acknowledged)} of {people} acknowledged"
            ) from None
        if set(taken.values()) != {people - 1}:
            raise BenchError("somebody got a message twice")
        sds = [room.statistics.sds for room in rooms]
        return Crowd(
            taken.total(),
            whole_after,
            time.monotonic() - began_at,
            time.process_time() - cpu,
            await asyncio.to_thread(_sent_bytes, metrics_url) - bytes_before,
            sum(each.syncs_sent for each in sds),
            sum(each.retransmissions for each in sds),
        )


def _sent_bytes(metrics_url: str) -> int:
    with urllib.request.urlopen(metrics_url) as answer:
        text = answer.read().decode()
    return int(sum(map(float, re.findall(r"^relayd_sent_bytes_total(?:\{.*\})? (\S+)", text, re.MULTILINE))))


async def measure(relay: RelayProcess, plan: Plan, progress: Progress) -> list[Measure]:
    """Crowds of 40 and of 200; their bounds are in the requirements for channels."""
    measures = []
    for people, seconds, megabytes in (
        ((40, 30.0, 50.0), (200, 60.0, 1_000.0)) if plan is FULL else ((5, 30.0, 5.0),)
    ):
        before = relay.cpu_times()
        crowd = await talk(relay.ws_url, relay.metrics_url, people)
        used = relay.cpu_times().since(before)
        progress(f"crowd: {people} have heard each other after {crowd.whole_after:.1f} s")
        measures.append(
            Measure(
                "crowd",
                f"{people} people say one thing each: everybody has everything",
                crowd.whole_after,
                "s",
                seconds,
                at_most=True,
                limit=crowd.cpu_seconds + used.relay + used.postgres,
                limit_name="CPU of all, s",
                details={
                    "deliveries": crowd.deliveries,
                    "all acknowledged, s": crowd.acknowledged_after,
                    "CPU of the participants, s": crowd.cpu_seconds,
                    "CPU of the relay, s": used.relay,
                    "syncs": crowd.syncs,
                    "retransmissions": crowd.retransmissions,
                },
            )
        )
        measures.append(
            Measure(
                "crowd",
                f"{people} people say one thing each: sent by the relay",
                crowd.sent_bytes / 1e6,
                "MB",
                megabytes,
                at_most=True,
                limit=people * (people - 1) * len(_PAYLOAD) / 1e6,
                limit_name="the payloads alone",
            )
        )
    return measures
