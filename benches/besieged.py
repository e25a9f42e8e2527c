"""What an attack costs the attacker, the relay and the honest clients: each attack alone, then all together.

In one run, the relay is measured first with only the honest clients, and then beside the attack. The cost of
an attack is what the relay used in addition, until it has finished all work that the attack left. The
attackers come from one address and from many; none of their addresses is exempt from a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import psutil
from rich.console import Console
from rich.table import Table

from benches.attacks import ATTACKS, PROXIES, TLS_ATTACKS
from benches.crowds import MANY, ONE, Crowd, CrowdReport, hostile_crowd
from benches.daemon import RelayProcess
from benches.honest import PUBLISHERS, Honest, Service
from benches.load import make_load
from benches.measures import Progress
from benches.peer import BenchError, Publisher, connect_peers

__all__ = [
    "ALL",
    "MOST_RATIO",
    "Cost",
    "Summary",
    "as_json",
    "besiege",
    "calmest",
    "dearest",
    "print_costs",
    "summary",
]

ALL: Final = "all together"
MOST_RATIO: Final = 2.0
"""The largest allowed p99 of the honest clients beside an attack, as a multiple of their p99 alone."""
_SETTINGS: Final[Mapping[str, object]] = {
    "unlimited_addresses": "127.0.0.1/32",
    "trusted_proxies": PROXIES,
    "forwarded_header": "forwarded",
    "metrics_listen": "127.0.0.1:0",
}
_CONNECTIONS: Final = 20
_DEEDS_PER_SECOND: Final = 100
"""By all attackers together, as far as the relay lets them."""
_START_TIMEOUT: Final = 20.0
_SETTLE_TIMEOUT: Final = 3.0
_QUIET_TIMEOUT: Final = 15.0
_SAMPLE_SECONDS: Final = 0.5
"""The interval between samples; each takes this process, which measures, some milliseconds."""
_DEAREST: Final = 5
_CONNECTION_BYTES: Final = 200
"""The least that opening and closing a connection sends, in IP and TCP headers."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One attack: what it took, what it cost, and how the honest clients were served meanwhile."""

    attack: str
    addresses: int
    deeds: int
    answers: int
    sent_bytes: int
    attacker_cpu: float
    """In seconds, like all CPU times here."""
    relay_cpu: float
    postgres_cpu: float
    memory: tuple[int, int, int]
    """Resident bytes of the relay: before, the maximum, afterwards."""
    alone: Service
    beside: Service
    recovered: bool
    """Whether the relay had nothing left to do a while after the attack."""

    @property
    def cpu(self) -> float:
        """CPU seconds of relay and database."""
        return self.relay_cpu + self.postgres_cpu

    @property
    def cpu_for_cpu(self) -> float:
        """CPU seconds of relay and database per CPU second of the attacker."""
        return self.cpu / self.attacker_cpu if self.attacker_cpu else 0.0

    @property
    def cpu_for_megabyte(self) -> float:
        """CPU seconds of relay and database per megabyte that the attacker sent."""
        return self.cpu / self.sent_bytes * 1e6 if self.sent_bytes else 0.0

    @property
    def kept_bytes(self) -> int:
        """The largest growth of the relay's memory."""
        return max(0, self.memory[1] - self.memory[0])

    @property
    def kept_for_byte(self) -> float:
        """The largest growth of the relay's memory per byte that the attacker sent."""
        return self.kept_bytes / self.sent_bytes if self.sent_bytes else 0.0


async def besiege(
    names: Sequence[str],
    seconds: float,
    progress: Progress,
    *,
    serve: str | None,
    stored: int,
    rounds: int = 1,
) -> list[Cost]:
    """Make these attacks on a relay whose log holds `stored` packets; by default each, then all together.

    Each is made `rounds` times, and the calmest of these rounds counts.
    """
    plain = [name for name in names or [*ATTACKS, ALL] if name not in TLS_ATTACKS]
    tls = [name for name in names or TLS_ATTACKS if name in TLS_ATTACKS]
    costs: list[Cost] = []
    if plain:
        with RelayProcess(serve, _SETTINGS) as relay:
            await _fill(relay, stored, progress)
            costs += await _each(relay, plain, seconds, rounds, progress)
    if tls:
        with tempfile.TemporaryDirectory() as folder, RelayProcess(serve, _with_tls(Path(folder))) as relay:
            costs += await _each(relay, tls, seconds, rounds, progress)
    return costs


def _with_tls(folder: Path) -> dict[str, object]:
    from relayd.tls import write_dev_certificates

    made = write_dev_certificates(folder / "certs", ())
    return {**_SETTINGS, "tls_cert": made.cert, "tls_key": made.key}


async def _fill(relay: RelayProcess, count: int, progress: Progress) -> None:
    """Put `count` packets into the log, for attacks that read."""
    load = make_load(count, progress)
    [peer] = await connect_peers(relay.ws_url, 1, Publisher, sources=["127.0.0.1"])
    publisher = cast(Publisher, peer)
    await publisher.start(load.frames, 200)
    publisher.close()


async def _each(
    relay: RelayProcess, names: Sequence[str], seconds: float, rounds: int, progress: Progress
) -> list[Cost]:
    costs = []
    for name in names:
        for sources in (ONE, MANY):
            goes = []
            for _ in range(rounds):
                try:
                    goes.append(await _one(relay, name, sources, seconds))
                except (psutil.Error, BenchError, OSError, TimeoutError) as error:
                    progress(f"{name}: void, {error or type(error).__name__}; the relay is started again")
                    relay.restart()
                    continue
                _tell(goes[-1], progress)
                if not goes[-1].recovered:
                    progress(f"{name}: the relay was not quiet again; it is started again")
                    relay.restart()
            if goes:
                costs.append(calmest(goes))
    return costs


def _tell(cost: Cost, progress: Progress) -> None:
    p99 = f"{cost.alone.milliseconds(0.99):.1f} / {cost.beside.milliseconds(0.99):.1f} ms"
    progress(
        f"{cost.attack}, {cost.addresses} addresses: p99 alone / beside {p99},"
        f" CPU {cost.cpu:.2f} s for {cost.sent_bytes / 1e3:,.0f} KB"
    )


def calmest(goes: Sequence[Cost]) -> Cost:
    """The round with the smallest p99 beside the attack, with the smallest p99 alone of all rounds.

    Other work on the machine only adds to a time, with and without the attack, so the smallest of several
    comes closest to what the attack itself adds. Losses in any round are reported, and so is a relay that was
    not quiet again after one.
    """

    def p99(service: Service) -> float:
        return service.milliseconds(0.99) if service.answers else math.inf

    least = min(goes, key=lambda cost: p99(cost.beside))
    beside = dataclasses.replace(
        least.beside,
        unanswered=max(cost.beside.unanswered for cost in goes),
        refused=max(cost.beside.refused for cost in goes),
    )
    alone = min((cost.alone for cost in goes), key=p99)
    recovered = all(cost.recovered for cost in goes)
    return dataclasses.replace(least, alone=alone, beside=beside, recovered=recovered)


async def _one(relay: RelayProcess, name: str, sources: Sequence[str], seconds: float) -> Cost:
    kinds = list(ATTACKS) if name == ALL else [name]
    connections = max(_CONNECTIONS, len(kinds))
    idle = await _gauges(relay)
    async with Honest(relay.ws_url) as honest:
        await asyncio.sleep(0.5)
        cpu, started = relay.cpu_times(), time.perf_counter()
        await asyncio.sleep(seconds)
        used, alone_seconds = relay.cpu_times().since(cpu), time.perf_counter() - started
        await honest.settled(started + alone_seconds, _SETTLE_TIMEOUT)
        alone = honest.since(started, started + alone_seconds)
        before = relay.resident_bytes()
        cpu, started = relay.cpu_times(), time.perf_counter()
        async with _highest(relay) as memory:
            async with hostile_crowd(
                relay.ws_url, kinds, connections, connections / _DEEDS_PER_SECOND, sources
            ) as crowd:
                first = await _at_work(crowd, kinds)
                attack_started = time.perf_counter()
                await asyncio.sleep(seconds)
                last, ended = await crowd.report(), time.perf_counter()
                await honest.settled(ended, _SETTLE_TIMEOUT)
                beside = honest.since(attack_started, ended)
            recovered = await _quiet_again(relay, idle)
        cost, all_seconds = relay.cpu_times().since(cpu), time.perf_counter() - started
    share = all_seconds / alone_seconds
    return Cost(
        name,
        len(sources),
        sum(last.deeds.values()),
        sum(last.answers.values()),
        last.sent_bytes + _CONNECTION_BYTES * last.opened,
        last.cpu - first.cpu,
        max(0.0, cost.relay - used.relay * share),
        max(0.0, cost.postgres - used.postgres * share),
        (before, max(before, *memory), relay.resident_bytes()),
        alone,
        beside,
        recovered,
    )


async def _at_work(crowd: Crowd, kinds: Sequence[str]) -> CrowdReport:
    """The crowd's first report, once the crowd does something. Raises `BenchError` if it does nothing."""
    first = await crowd.report()
    deadline = time.perf_counter() + _START_TIMEOUT
    while not any((await crowd.report()).deeds.values()):
        if time.perf_counter() > deadline:
            raise BenchError("the attackers do nothing")
        await asyncio.sleep(0.05)
    return first


@contextlib.asynccontextmanager
async def _highest(relay: RelayProcess) -> AsyncIterator[list[int]]:
    """Sample the relay's memory during the block; the list holds the samples."""
    seen: list[int] = [0]

    async def look() -> None:
        while True:
            with contextlib.suppress(psutil.Error):
                seen.append(await asyncio.to_thread(relay.resident_bytes))
            await asyncio.sleep(_SAMPLE_SECONDS)

    looking = asyncio.create_task(look(), name="memory")
    try:
        yield seen
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


_GAUGE: Final = re.compile(r"^relayd_(connections|publish_queue|subscriptions) (\S+)$", re.MULTILINE)


async def _gauges(relay: RelayProcess) -> dict[str, float]:
    def fetch() -> str:
        with urllib.request.urlopen(relay.metrics_url, timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    return {name: float(value) for name, value in _GAUGE.findall(await asyncio.to_thread(fetch))}


_HONEST: Final = {"connections": PUBLISHERS + 1, "subscriptions": 1, "publish_queue": PUBLISHERS}
"""What the relay may hold for the honest clients."""


async def _quiet_again(relay: RelayProcess, idle: Mapping[str, float]) -> bool:
    """Whether the relay comes to hold no more than before, apart from what the honest clients need."""
    deadline = time.perf_counter() + _QUIET_TIMEOUT
    while time.perf_counter() < deadline:
        with contextlib.suppress(OSError):  # it may be too busy to answer
            now = await _gauges(relay)
            if all(now[name] <= idle[name] + of_the_honest for name, of_the_honest in _HONEST.items()):
                return True
        await asyncio.sleep(0.1)
    return False


def dearest(costs: Iterable[Cost]) -> list[str]:
    """The attacks that cost relay and database most per megabyte sent, the most expensive first."""
    ratios: dict[str, float] = {}
    for cost in costs:
        if cost.attack != ALL:
            ratios[cost.attack] = max(ratios.get(cost.attack, 0.0), cost.cpu_for_megabyte)
    return sorted(ratios, key=lambda name: -ratios[name])[:_DEAREST]


@dataclass(frozen=True, slots=True)
class Summary:
    """How the honest clients fared beside all attacks; p99 in milliseconds."""

    alone: float
    """The median of all runs, since a single one may meet a hiccup of the machine."""
    beside: float
    worst: float
    kinds: int
    held: int
    """Kinds beside which p99 stayed within `MOST_RATIO` times that alone, from one address and from many."""


def summary(costs: Sequence[Cost]) -> Summary:
    """The summary. The p99 beside an attack is compared with the median of those alone."""
    alone = statistics.median(cost.alone.milliseconds(0.99) for cost in costs)
    beside: dict[str, float] = {}
    for cost in costs:
        beside[cost.attack] = max(beside.get(cost.attack, 0.0), cost.beside.milliseconds(0.99))
    every = [cost.beside.milliseconds(0.99) for cost in costs]
    held = sum(p99 <= MOST_RATIO * alone for p99 in beside.values())
    return Summary(alone, statistics.median(every), max(every), len(beside), held)


def as_json(costs: Sequence[Cost]) -> dict[str, Any]:
    """The costs as plain values, for `--json`."""
    return {
        "attacks": [
            {
                **{
                    field.name: getattr(cost, field.name)
                    for field in dataclasses.fields(cost)
                    if field.name not in ("alone", "beside")
                },
                "cpu_for_cpu": cost.cpu_for_cpu,
                "cpu_for_megabyte": cost.cpu_for_megabyte,
                "kept_for_byte": cost.kept_for_byte,
                "alone": _service(cost.alone),
                "beside": _service(cost.beside),
            }
            for cost in costs
        ],
        "dearest": dearest(costs),
        "summary": dataclasses.asdict(summary(costs)),
    }


def _service(service: Service) -> dict[str, float | int | None]:
    times = {
        f"{what}_p{share}_ms": service.milliseconds(share / 100, deliveries=what == "delivered")
        for what in ("answered", "delivered")
        for share in (50, 99)
    }
    known = {name: None if value != value else value for name, value in times.items()}
    return {**known, "unanswered": service.unanswered, "refused": service.refused}


def print_costs(costs: Sequence[Cost]) -> None:
    """Print the costs as a table: the most expensive first, per megabyte sent."""
    table = Table(title="attacks: what they cost, and how the honest fared")
    for heading, justify in (
        ("attack", "left"),
        ("addresses", "right"),
        ("sent KB", "right"),
        ("its CPU s", "right"),
        ("relay CPU s", "right"),
        ("CPU / CPU", "right"),
        ("CPU s / MB", "right"),
        ("memory MB", "right"),
        ("kept / byte", "right"),
        ("OK p50, p99 ms: alone", "right"),
        ("beside", "right"),
        ("read p99: alone", "right"),
        ("beside", "right"),
        ("lost", "right"),
    ):
        table.add_column(heading, justify="left" if justify == "left" else "right")
    for cost in sorted(costs, key=lambda cost: -cost.cpu_for_megabyte):
        beside, alone = cost.beside, cost.alone
        table.add_row(
            cost.attack + ("" if cost.recovered else " (not quiet again)"),
            str(cost.addresses),
            f"{cost.sent_bytes / 1e3:,.0f}",
            f"{cost.attacker_cpu:.2f}",
            f"{cost.cpu:.2f}",
            f"{cost.cpu_for_cpu:.1f}",
            f"{cost.cpu_for_megabyte:.2f}",
            " ".join(f"{size / 1e6:.0f}" for size in cost.memory),
            f"{cost.kept_for_byte:.1f}",
            *(
                f"{service.milliseconds(0.5):.1f}, {service.milliseconds(0.99):.1f}"
                for service in (alone, beside)
            ),
            *(f"{service.milliseconds(0.99, deliveries=True):.1f}" for service in (alone, beside)),
            str(beside.unanswered + beside.refused),
        )
    console = Console(width=200)
    console.print(table)
    console.print(f"The dearest five for each byte sent: {', '.join(dearest(costs))}.", highlight=False)
    found = summary(costs)
    console.print(
        f"p99 of the honest: {found.alone:.1f} ms alone, {found.beside:.1f} beside an attack (medians)"
        f" and {found.worst:.1f} ms at the most;"
        f" within {MOST_RATIO:g} x for {found.held} of {found.kinds} kinds.",
        highlight=False,
    )
