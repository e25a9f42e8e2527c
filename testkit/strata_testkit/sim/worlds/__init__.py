"""Worlds, drawn from a seed: small and wild ones, long absences, crowds, sleeping laptops, forgers and more.

`run_world` runs a world of a given kind, or of the mix. A kind that no channel survives yet is not in the
mix, and says why (`WorldKind.open_because`). Every world must meet all requirements for a channel.
"""

from __future__ import annotations

import random

from strata_testkit.sim.chaos import run_chaos
from strata_testkit.sim.simulation import Report
from strata_testkit.sim.worlds.absence import absence, newcomers, short_retention
from strata_testkit.sim.worlds.clocks import clock_steps, laptops
from strata_testkit.sim.worlds.crowd import crowd
from strata_testkit.sim.worlds.departed import departed
from strata_testkit.sim.worlds.devices import devices
from strata_testkit.sim.worlds.kinds import World, WorldKind, WorldSize
from strata_testkit.sim.worlds.mixed import mixed
from strata_testkit.sim.worlds.relays import returning_relays
from strata_testkit.sim.worlds.strangers import forged

__all__ = ["KINDS", "WILD", "World", "WorldKind", "WorldSize", "kind_of", "run_world"]

WILD = "wild"
"""Everything goes wrong at once among two to five people: `run_chaos`."""

KINDS: dict[str, WorldKind] = {
    each.name: each
    for each in (
        WorldKind(
            "absence",
            "away for a long gap, which the relays have whole",
            absence,
            40,
        ),
        WorldKind(
            "retention",
            "away for longer than the relays remember",
            short_retention,
            30,
        ),
        WorldKind(
            "newcomers",
            "joining a room with a long past",
            newcomers,
            20,
        ),
        WorldKind("crowd", "many people", crowd, 16),
        WorldKind("laptops", "monotonic time stops, wall time goes on", laptops, 60),
        WorldKind("clocks", "clocks that are set while the channel is open", clock_steps, 60),
        WorldKind("forged", "a stranger makes messages up", forged, 40),
        WorldKind("devices", "devices are added and lost", devices, 60),
        WorldKind("relays", "relays return with a part of their log", returning_relays, 60),
        WorldKind("mixed", "several of these at once", mixed, 60),
        WorldKind("departed", "whoever spoke is gone, and relays have it", departed, 30),
    )
}
"""Every kind except the wild one, which is the rest of the mix."""


def kind_of(seed: int) -> str:
    """The kind of world that a seed has in the mix."""
    place = random.Random(f"kind of {seed}").randrange(1_000)
    for kind in KINDS.values():
        if kind.open_because:
            continue
        if place < kind.weight:
            return kind.name
        place -= kind.weight
    return WILD


def run_world(
    seed: int, kind: str | None = None, *, size: WorldSize | None = None, strict: bool = True
) -> Report:
    """Run the world of a seed, from the mix or of a given kind. The same arguments run it again.

    `strict` no longer has an effect: every world must meet all requirements for a channel.

    Raises `SimulationFailed`, and `KeyError` for an unknown kind.
    """
    name = kind_of(seed) if kind is None else kind
    if name == WILD:
        return run_chaos(seed)
    rng = random.Random(f"{name} world {seed}")
    return KINDS[name].make(rng, size or WorldSize()).run(seed, name)
