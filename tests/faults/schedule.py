"""Which fault happens when: drawn from a seed, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["KINDS", "Fault", "Kind", "draw"]


@dataclass(frozen=True)
class Kind:
    """One kind of fault: how long it lasts, in seconds, and what it needs exclusively meanwhile."""

    shortest: float
    longest: float
    needs: str


KINDS = {
    "kill_relay": Kind(0.0, 1.0, "processes"),
    "kill_worker": Kind(0.0, 0.0, "processes"),
    "kill_database": Kind(0.0, 0.0, "processes"),
    "stop_relay": Kind(0.0, 1.0, "processes"),
    "freeze_worker": Kind(0.5, 4.0, "processes"),
    "freeze_database": Kind(0.5, 4.0, "processes"),
    "restart_database": Kind(0.0, 0.0, "processes"),
    "end_backends": Kind(0.0, 0.0, "processes"),
    "take_connections": Kind(1.0, 3.0, "processes"),
    "restored_backup": Kind(1.0, 4.0, "processes"),
    "reload": Kind(0.0, 0.0, "reload"),
    "partition": Kind(0.5, 5.0, "network"),
    "half_open": Kind(0.0, 0.0, "network"),
    "trickle": Kind(1.0, 4.0, "network"),
    "reset": Kind(0.0, 0.0, "network"),
    "full_disk": Kind(0.5, 4.0, "disk"),
    "slow_disk": Kind(0.5, 4.0, "disk"),
    "failing_fsync": Kind(0.1, 2.0, "disk"),
    "clock_step": Kind(0.5, 3.0, "clock"),
    "clock_jump": Kind(0.5, 3.0, "clock"),
}
"""All kinds of faults. Two faults that need the same thing follow one another; others may overlap."""


@dataclass(frozen=True)
class Fault:
    """One fault of a track: the seconds after the previous fault, and the seconds for which it lasts."""

    kind: str
    pause: float
    lasts: float
    chance: float
    """From 0 to 1: it decides all other choices of the fault."""


def draw(seed: int, seconds: float, kinds: Iterable[str] = KINDS) -> dict[str, list[Fault]]:
    """The faults of one run: for each thing that faults need, a track about `seconds` long.

    The tracks run in parallel, so faults of different tracks overlap. Every kind occurs at least once,
    however short the run is.
    """
    chosen = random.Random(seed)
    tracks: dict[str, list[str]] = {}
    for name in kinds:
        tracks.setdefault(KINDS[name].needs, []).append(name)
    return {needs: list(_track(chosen, names, seconds)) for needs, names in tracks.items()}


def _track(chosen: random.Random, names: list[str], seconds: float) -> Iterator[Fault]:
    waiting = chosen.sample(names, len(names))
    mean_pause = min(8.0, seconds / len(names))
    passed = 0.0
    while waiting or passed < seconds:
        name = waiting.pop() if waiting else chosen.choice(names)
        kind = KINDS[name]
        pause, lasts = chosen.uniform(0.0, 2.0 * mean_pause), chosen.uniform(kind.shortest, kind.longest)
        passed += pause + lasts
        yield Fault(name, pause, lasts, chosen.random())
