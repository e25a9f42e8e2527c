"""A soak: clients come and go for a long time, and the relay must be the same at the end as in the middle.

Everything that clients could leave behind is sampled all the time; its growth is that of a line through the
latter half. When all clients have left, nothing of theirs may remain, and the reader that stayed must have
read each acknowledged packet exactly once.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import psutil
from strata.protocol.ids import Identity

from benches.churn import Chorus, Steady
from benches.daemon import RelayProcess
from benches.measures import Measure, Progress
from benches.peer import BenchError
from benches.slopes import Point, trend

__all__ = ["SETTINGS", "SoakPlan", "measure"]

SETTINGS: Final[Mapping[str, object]] = {
    # A client that vanishes is noticed within seconds, so that as many leave as come.
    "ping_interval": 2,
    "ping_misses": 2,
    "handshake_timeout": 3,
    "slow_consumer_timeout": 5,
}
_SAMPLES: Final = 240
_RELOAD_SECONDS: Final = 10.0
_SETTLE_SECONDS: Final = 60.0
_MORE_FILES: Final = 8.0
"""How many more files a relay may have open: connections to PostgreSQL, opened when first needed."""
_SHORTEST: Final = 60.0
"""The shortest soak, in seconds, that is judged for growth."""
_MIB: Final = 2**20

_GAUGES: Final = {
    "connections": "relayd_connections",
    "subscriptions": "relayd_subscriptions",
    "subscriptions behind": "relayd_subscriptions_behind",
    "publishes under way": "relayd_publish_queue",
    "tasks": "relayd_tasks",
}


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """The length of a soak, and the number of clients at a time."""

    seconds: float
    places: int = 40
    seed: int = 1

    @property
    def interval(self) -> float:
        """The seconds between two samples of the relay."""
        return max(0.2, self.seconds / _SAMPLES)


async def measure(
    plan: SoakPlan,
    progress: Progress,
    serve: str | None,
    shown: Callable[[float], None] = lambda share: None,
) -> list[Measure]:
    """Soak a new relay. `shown(share)` is called with the share of the time that has passed."""
    progress(f"soak: {plan.seconds / 60:g} minutes, {plan.places} clients at a time, --seed {plan.seed}")
    with RelayProcess(serve, SETTINGS, config="") as relay:
        return await _Soak(plan, relay, progress, shown).run()


class _Soak:
    def __init__(
        self, plan: SoakPlan, relay: RelayProcess, progress: Progress, shown: Callable[[float], None]
    ) -> None:
        self._plan = plan
        self._relay = relay
        self._progress = progress
        self._shown = shown
        self._process = psutil.Process(relay.pid)
        self._seen: dict[str, list[Point]] = {}
        self._reloads = 0
        # DIDs of no client, used repeatedly, since a relay remembers some thousand DIDs that it has read.
        self._strangers = [[Identity.generate().did for _ in range(20)] for _ in range(5)]

    async def run(self) -> list[Measure]:
        relay, plan = self._relay, self._plan
        http = relay.metrics_url.rpartition("/")[0]
        chorus, steady = Chorus(relay.ws_url, http, plan.seed, plan.places), Steady(relay.ws_url)
        stop = asyncio.Event()
        reading = asyncio.create_task(steady.read(), name="steady")
        reloading = asyncio.create_task(self._reload_now_and_then(), name="reloads")
        tasks = [reading, reloading]
        try:
            async with asyncio.timeout(_SETTLE_SECONDS):
                await steady.opened.wait()
            before = await asyncio.to_thread(self._look)
            singing = asyncio.create_task(chorus.sing(stop), name="chorus")
            tasks.append(singing)
            await self._watch(reading, singing)
            stop.set()
            await singing
            reloading.cancel()
            after = await self._settled(before, chorus, steady)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._measures(before, after, chorus, steady)

    async def _watch(self, *needed: asyncio.Task[None]) -> None:
        began = time.monotonic()
        while (passed := time.monotonic() - began) < self._plan.seconds:
            for name, value in (await asyncio.to_thread(self._look)).items():
                self._seen.setdefault(name, []).append((passed, value))
            self._shown(passed / self._plan.seconds)
            for task in needed:
                if task.done():
                    raise BenchError(f"{task.get_name()} ended: {task.exception()}")
            await asyncio.sleep(self._plan.interval)

    def _look(self) -> dict[str, float]:
        with urllib.request.urlopen(self._relay.metrics_url, timeout=30) as answer:
            text = answer.read().decode()
        seen = {
            name: sum(
                float(value) for value in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
            )
            for name, metric in _GAUGES.items()
        }
        seen["memory"] = self._process.memory_info().rss / _MIB
        seen["files"] = self._process.num_fds()
        seen["threads"] = self._process.num_threads()
        seen["PostgreSQL's sessions"] = sum(
            child.name().startswith("postgres") for child in self._process.children(recursive=True)
        )
        return seen

    async def _reload_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(min(_RELOAD_SECONDS, self._plan.seconds / 4))
            blocked = self._strangers[self._reloads % len(self._strangers)]
            self._relay.write_config(f"blocked_authors = {blocked!r}\n")
            os.kill(self._relay.pid, signal.SIGHUP)
            self._reloads += 1

    async def _settled(self, before: Mapping[str, float], chorus: Chorus, steady: Steady) -> dict[str, float]:
        """The sample after all have left: once it is no larger than at the beginning, or after a timeout."""
        until = time.monotonic() + _SETTLE_SECONDS
        while True:
            after = await asyncio.to_thread(self._look)
            names = [*_GAUGES, "files"]
            is_quiet = (
                all(after[name] <= before[name] for name in names) and chorus.acknowledged <= steady.seen
            )
            if is_quiet or time.monotonic() > until:
                return after
            await asyncio.sleep(0.5)

    def _measures(
        self, before: Mapping[str, float], after: Mapping[str, float], chorus: Chorus, steady: Steady
    ) -> list[Measure]:
        found = []
        for name, points in self._seen.items():
            line = trend(points)
            most = _most(name, line.mean) if self._plan.seconds >= _SHORTEST else None
            unit = "MiB" if name == "memory" else ""
            details: dict[str, object] = {"mean": line.mean, "by the line": line.growth, "chance": line.doubt}
            if name == "memory":
                step = max(1, len(points) // 10)
                details["MiB after so many minutes"] = {
                    f"{at / 60:.1f}": value for at, value in points[::step]
                }
            measure = Measure(
                "soak", f"{name}, growth", line.least, unit, most, at_most=True, details=details
            )
            found.append(measure)
        for name in (*_GAUGES, "files"):
            over = max(0.0, after[name] - before[name])
            found.append(
                Measure(
                    "soak", f"{name}, left behind", over, "", _MORE_FILES * (name == "files"), at_most=True
                )
            )
        missing = len(chorus.acknowledged - steady.seen)
        about = {
            "visits": chorus.visits,
            "acknowledged": len(chorus.acknowledged),
            "refused": chorus.refused,
            "reloads": self._reloads,
            "left": {name: float(count) for name, count in chorus.left.items()},
        }
        found.append(
            Measure("soak", "acknowledged and not read", missing, "packets", 0, at_most=True, details=about)
        )
        found.append(Measure("soak", "read twice", steady.twice, "packets", 0, at_most=True))
        return found


def _most(name: str, mean: float) -> float | None:
    """How much something may grow in the latter half, beyond what may be chance. None for values that vary
    with the crowd, which is larger on a busy machine: these are judged when the crowd has gone."""
    match name:
        case "memory":
            return max(8.0, 0.05 * mean)
        case "threads" | "tasks" | "PostgreSQL's sessions":
            return max(2.0, 0.2 * mean)
    return None
