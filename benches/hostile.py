"""Honest publishers beside a crowd of idle and hostile connections: the effect on their latency.

50 connections publish at a steady, modest rate, by a timetable that does not wait for answers, so that a
stalled relay shows in every packet due meanwhile. They publish alone, beside the idle crowd, and beside the
idle and the hostile crowd, in turn. The crowds have their own processes. On a machine with few cores, the CPU
that those use is missing elsewhere, so the rate of the hostile crowd is modest, and is reported with the
share of the CPU that each part took.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import statistics
import sys
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from benches.besieged import MOST_RATIO
from benches.crowds import Crowd, CrowdReport, hostile_crowd, idle_crowd
from benches.daemon import RelayProcess
from benches.load import Load, make_load
from benches.measures import Measure, Plan, Progress, percentile
from benches.peer import BenchError, Peer, connect_peers

__all__ = ["SETTINGS", "measure"]

SETTINGS: Final[dict[str, object]] = {"unlimited_addresses": "127.0.0.1/32"}
"""The address of the honest clients; every limit by address applies to the crowds, which come from others."""

_HONEST: Final = 50
_PUBLISHES_PER_SECOND: Final = 200
"""By all honest clients together."""
_DEEDS_PER_SECOND: Final = 500
"""By all hostile connections together, as far as the relay lets them."""
_SETTLE_SECONDS: Final = 1.0
_LEAVE_TIMEOUT: Final = 60.0
_KINDS: Final = (
    "slow handshakes",
    "garbage",
    "bad signatures",
    "AUTH flood",
    "oversized frames",
    "subscription flood",
    "churn",
)
_SERIES = re.compile(r'^relayd_(errors_sent|connections_closed)_total\{\w+="(\w+)"\} (\S+)$', re.MULTILINE)
_CONNECTIONS = re.compile(r"^relayd_connections (\S+)$", re.MULTILINE)


class _Punctual(Peer):
    """A peer that notes the time from each publish to its answer."""

    def __init__(self, path: str, host: str, *, witness: bool = False) -> None:
        super().__init__(path, host, witness=witness)
        self.sent: deque[float] = deque()
        self.times: list[float] = []

    @property
    def total(self) -> int:
        return self.oks

    def counted(self) -> None:
        now = time.perf_counter()
        for _ in range(self.oks - len(self.times)):
            self.times.append(now - self.sent.popleft())
        super().counted()


@dataclass(frozen=True, slots=True)
class _Phase:
    """One round of the honest clients, alone or beside crowds."""

    times: list[float]
    """Seconds, ascending."""
    late: float
    """By how many seconds the honest clients missed their timetable, 99th percentile."""
    cpu: dict[str, float]
    """Per cent of the machine, by user."""
    deeds: dict[str, int]
    suffered: dict[str, int]
    """The relay's counts: errors sent by code, connections ended by reason."""

    @property
    def p99(self) -> float:
        return percentile(self.times, 0.99)


async def measure(relay: RelayProcess, plan: Plan, progress: Progress) -> list[Measure]:
    """The p50 and p99 beside each crowd, compared with those alone. Empty except on Linux."""
    if sys.platform != "linux":
        progress("hostile: left out, for only Linux lets a program bind any loopback address")
        return []
    count = plan.honest_publishes * _HONEST
    load = make_load(count * plan.rounds * 3 + count, progress)
    honest = cast(list[_Punctual], await connect_peers(relay.ws_url, _HONEST, _Punctual))
    parts = (load.take(start, count) for start in range(0, len(load), count))
    await _phase(relay, honest, next(parts))  # warms up
    alone, idle, hostile = [], [], []
    for _ in range(plan.rounds):
        alone.append(await _phase(relay, honest, next(parts)))
        async with idle_crowd(relay.ws_url, plan.idle_crowd) as standing:
            idle.append(await _phase(relay, honest, next(parts), standing))
            interval = plan.hostile_crowd / _DEEDS_PER_SECOND
            async with hostile_crowd(relay.ws_url, _KINDS, plan.hostile_crowd, interval) as attacking:
                await asyncio.sleep(_SETTLE_SECONDS)
                hostile.append(await _phase(relay, honest, next(parts), standing, attacking))
            if (await standing.report()).open != plan.idle_crowd:
                raise BenchError("the relay has thrown out idle connections")
        await _alone_again(relay)
        last = " / ".join(f"{phases[-1].p99 * 1e3:.1f}" for phases in (alone, idle, hostile))
        progress(f"hostile: p99 {last} ms alone / beside the idle / beside the hostile too")
    for peer in honest:
        peer.close()
    company = f"beside {plan.idle_crowd} idle"
    return _measures(company, alone, idle) + _measures(
        f"{company} and {plan.hostile_crowd} hostile", alone, hostile, MOST_RATIO
    )


def _measures(
    company: str, alone: Sequence[_Phase], beside: Sequence[_Phase], most: float | None = None
) -> list[Measure]:
    measures = []
    for share in (50, 99):
        limit, value = (
            [percentile(phase.times, share / 100) * 1e3 for phase in phases] for phases in (alone, beside)
        )
        middle = statistics.median(limit)
        measures.append(
            Measure(
                "hostile",
                f"p{share} {company}",
                statistics.median(value),
                "ms",
                None if most is None or share == 50 else most * middle,
                at_most=True,
                limit=middle,
                limit_name=f"p{share} alone",
                details={"rounds": value, "alone": limit} | (_explained(beside) if share == 99 else {}),
            )
        )
    return measures


def _explained(beside: Sequence[_Phase]) -> dict[str, object]:
    """What happened meanwhile: sums over the rounds, the mean for the CPU, the maximum for times."""
    cpu = {name: statistics.fmean(phase.cpu[name] for phase in beside) for name in beside[0].cpu}
    details: dict[str, object] = {
        "worst ms": max(phase.times[-1] for phase in beside) * 1e3,
        "sent late, p99 ms": max(phase.late for phase in beside) * 1e3,
        "CPU, % of the machine": cpu,
    }
    for name, counts in (
        ("deeds", [phase.deeds for phase in beside]),
        ("errors sent and connections ended", [phase.suffered for phase in beside]),
    ):
        total: Counter[str] = sum(map(Counter, counts), Counter())
        if total:
            details[name] = dict(total.most_common())
    return details


async def _phase(relay: RelayProcess, honest: list[_Punctual], load: Load, *crowds: Crowd) -> _Phase:
    """Let the honest clients publish their part. Unless its OK answers each packet, the run is void."""
    suffered, reports = await _suffered(relay), [await crowd.report() for crowd in crowds]
    cpu, started = relay.cpu_times(), time.perf_counter()
    times, late = await _publish(honest, load)
    used, seconds = relay.cpu_times().since(cpu), time.perf_counter() - started
    later = [await crowd.report() for crowd in crowds]
    crowd_cpu = [after.cpu - before.cpu for before, after in zip(reports, later, strict=True)]
    idle, hostile = [*crowd_cpu, 0.0, 0.0][:2]
    deeds = _since(reports[1], later[1]) if len(crowds) == 2 else {}
    if len(crowds) == 2 and any(not deeds.get(kind) for kind in _KINDS):
        raise BenchError("some of the hostile did nothing")
    shares = {
        "relay": used.relay,
        "PostgreSQL": used.postgres,
        "honest": used.load,
        "idle": idle,
        "hostile": hostile,
        "other programs": max(0.0, used.others - idle - hostile),
    }
    machine = seconds * (os.cpu_count() or 1) / 100
    return _Phase(
        times,
        late,
        {name: share / machine for name, share in shares.items()},
        deeds,
        {name: count for name, count in (await _suffered(relay) - suffered).items() if count},
    )


def _since(before: CrowdReport, after: CrowdReport) -> dict[str, int]:
    return {kind: after.deeds.get(kind, 0) - before.deeds.get(kind, 0) for kind in _KINDS}


async def _publish(honest: list[_Punctual], load: Load) -> tuple[list[float], float]:
    """Publish by the timetable, in turn. Returns the times, ascending, and how late packets were (p99)."""
    waiting = []
    for number, peer in enumerate(honest):
        peer.times.clear()
        peer.oks = 0
        waiting.append(peer.expect(len(load.frames[number :: len(honest)])))
    late: list[float] = []
    started = time.perf_counter()
    for number, frame in enumerate(load.frames):
        due = started + number / _PUBLISHES_PER_SECOND
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        peer, now = honest[number % len(honest)], time.perf_counter()
        peer.sent.append(now)
        peer.send(frame)
        late.append(now - due)
    await asyncio.gather(*waiting)
    return sorted(took for peer in honest for took in peer.times), percentile(sorted(late), 0.99)


async def _alone_again(relay: RelayProcess) -> None:
    """Wait until the relay has noticed that the crowds are gone. Raises `BenchError` if it does not."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LEAVE_TIMEOUT):
            while True:
                found = _CONNECTIONS.search(await _metrics(relay))
                if found is not None and float(found[1]) <= _HONEST:
                    return
                await asyncio.sleep(_SETTLE_SECONDS)
    raise BenchError("the relay keeps connections that are gone")


async def _suffered(relay: RelayProcess) -> Counter[str]:
    counts: Counter[str] = Counter()
    for kind, name, value in _SERIES.findall(await _metrics(relay)):
        counts[f"{name} sent" if kind == "errors_sent" else f"ended: {name}"] += int(float(value))
    return counts


async def _metrics(relay: RelayProcess) -> str:
    def fetch() -> str:
        with urllib.request.urlopen(relay.metrics_url, timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    return await asyncio.to_thread(fetch)
