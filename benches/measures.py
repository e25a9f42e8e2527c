"""The result of a benchmark: a value beside its target and beside the limit that it cannot pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["BRIEF", "FULL", "Measure", "Plan", "Progress", "as_json", "percentile", "print_table", "tenfold"]

Progress = Callable[[str], None]

_BAR_CHARACTERS = 30


@dataclass(frozen=True, slots=True)
class Plan:
    """How much work each benchmark does."""

    rounds: int
    publish_packets: int
    fanout: tuple[tuple[int, int], ...]
    """(subscribers, packets), many publishes in flight."""
    fanout_single: tuple[tuple[int, int], ...]
    """The same with one publish in flight."""
    latency_packets: int
    catchup_packets: int
    idle_connections: int
    identities: int
    """Authors with a key chain, and the same number without."""
    identity_rounds: int
    opening_identities: int
    """Identities in the log that a relay opens."""
    honest_publishes: int
    """Publishes by each honest connection in each round."""
    idle_crowd: int
    hostile_crowd: int
    attack_seconds: float
    """How long each attack lasts."""
    listeners: int
    """Sessions that LISTEN and do nothing else."""
    scaling_packets: int
    """Packets in each round of each shape."""
    workers: tuple[int, ...]
    """The numbers of workers of one relay to measure."""
    set_items: int
    """Items in each of the two sets that are compared."""
    limit_seconds: float
    """How long each limit is measured."""
    timeout: float
    """How long one benchmark may take before it counts as stuck."""


FULL = Plan(
    rounds=3,
    publish_packets=30_000,
    fanout=((100, 20_000), (1000, 4_000)),
    fanout_single=((100, 4_000), (1000, 400)),
    latency_packets=3_000,
    catchup_packets=30_000,
    idle_connections=2_000,
    identities=10_000,
    identity_rounds=6,
    opening_identities=1_000_000,
    honest_publishes=40,
    idle_crowd=5_000,
    hostile_crowd=500,
    attack_seconds=3.0,
    listeners=60,
    scaling_packets=10_000,
    workers=(2, 4),
    set_items=1_000_000,
    limit_seconds=1.0,
    timeout=600.0,
)
BRIEF = Plan(
    rounds=1,
    publish_packets=400,
    fanout=((10, 200),),
    fanout_single=((10, 20),),
    latency_packets=50,
    catchup_packets=1_200,
    idle_connections=50,
    identities=300,
    identity_rounds=1,
    opening_identities=2_000,
    honest_publishes=6,
    idle_crowd=100,
    hostile_crowd=56,
    attack_seconds=0.0,
    listeners=5,
    scaling_packets=400,
    workers=(),
    set_items=5_000,
    limit_seconds=0.05,
    timeout=60.0,
)
"""Enough to see that everything works; its figures mean nothing."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure. With `at_most`, `target` is an upper bound, otherwise a lower bound."""

    bench: str
    name: str
    value: float
    unit: str
    target: float | None = None
    at_most: bool = False
    limit: float | None = None
    limit_name: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    """Explanations of the value: all rounds, CPU shares, counts. A mapping holds shares, shown as bars."""

    @property
    def ratio(self) -> float | None:
        """The value as a multiple of its limit."""
        return self.value / self.limit if self.limit else None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target


def percentile(ordered: list[float], share: float) -> float:
    """The value below which `share` of an ascending list lies."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def tenfold(first: int, last: int) -> list[int]:
    """The sizes from `first` to `last`, each ten times the one before; `last` is always included."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 10
    return [*sizes, last]


def as_json(measures: Iterable[Measure]) -> list[dict[str, Any]]:
    """The measures as plain values, for `--json`."""
    return [
        {
            "bench": measure.bench,
            "name": measure.name,
            "value": measure.value,
            "unit": measure.unit,
            "target": measure.target,
            "target_is": "at most" if measure.at_most else "at least",
            "met": measure.met,
            "limit": measure.limit,
            "limit_name": measure.limit_name or None,
            "ratio": measure.ratio,
            "details": measure.details,
        }
        for measure in measures
    ]


def print_table(measures: Iterable[Measure]) -> None:
    """Print the measures as a table."""
    table = Table(title="relayd")
    for heading in ("bench", "what", "limit alone"):
        table.add_column(heading)
    for heading in ("value", "target", "limit", "ratio"):
        table.add_column(heading, justify="right")
    for measure in measures:
        sign = "≤" if measure.at_most else "≥"
        colour = {None: "default", True: "green", False: "red"}[measure.met]
        table.add_row(
            measure.bench,
            measure.name,
            measure.limit_name,
            f"[{colour}]{_number(measure.value)} {measure.unit}[/]",
            "" if measure.target is None else f"{sign} {_number(measure.target)}",
            "" if measure.limit is None else _number(measure.limit),
            "" if measure.ratio is None else f"{measure.ratio:.2f}",
        )
    console = Console()
    console.print(table)
    for measure in measures:
        if measure.details:
            bars = {name: value for name, value in measure.details.items() if isinstance(value, Mapping)}
            shown = ", ".join(
                f"{name} {_shown(value)}" for name, value in measure.details.items() if name not in bars
            )
            console.print(f"[bold]{measure.bench} {measure.name}:[/] {shown}", highlight=False)
            for name, shares in bars.items():
                console.print(f"  {name}\n{_bars(shares)}", highlight=False)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " / ".join(_shown(item) for item in value)
    return _number(value) if isinstance(value, int | float) else str(value)


def _bars(shares: Mapping[str, float]) -> str:
    """A line for each share of a whole; the largest share has the longest bar."""
    most, width = max(shares.values()) or 1, max(map(len, shares))
    lines = (
        f"    {name:<{width}}  {_number(value):>8}  {'█' * round(_BAR_CHARACTERS * value / most)}"
        for name, value in shares.items()
    )
    return "\n".join(lines)


def _number(value: float) -> str:
    if abs(value) >= 100 or isinstance(value, int):
        return f"{value:,.0f}"
    return f"{value:.2f}"
