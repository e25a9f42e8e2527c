"""A network in one process, under a virtual clock: to test this library, and programs that use it.

`simulate` runs a scenario, `run_world` a world drawn from a seed, `run_chaos` the world in which everything
goes wrong at once, and the module as a program runs thousands of worlds. The channels are real: `node` stands
for their relays, and `disk` for their store. `loop` is the clock, `network` the relays and paths. `checking`
judges the promises, `bounds` the cost, and `planted` tests the judge.
"""

from __future__ import annotations

from strata_testkit.sim.bounds import Bounds
from strata_testkit.sim.chaos import HARSH, Chaos, run_chaos
from strata_testkit.sim.checking import PromiseChecks, SimulationFailed
from strata_testkit.sim.faults import NO_FAULTS, FaultCounts, Faults
from strata_testkit.sim.loop import Deadlock, Process, VirtualLoop, run_virtually
from strata_testkit.sim.network import SimNetwork, SimRelay
from strata_testkit.sim.node import SimNode
from strata_testkit.sim.participant import SimParticipant
from strata_testkit.sim.simulation import Report, Simulation, simulate
from strata_testkit.sim.worlds import KINDS, WorldSize, kind_of, run_world

__all__ = [
    "HARSH",
    "KINDS",
    "NO_FAULTS",
    "Bounds",
    "Chaos",
    "Deadlock",
    "FaultCounts",
    "Faults",
    "Process",
    "PromiseChecks",
    "Report",
    "SimNetwork",
    "SimNode",
    "SimParticipant",
    "SimRelay",
    "Simulation",
    "SimulationFailed",
    "VirtualLoop",
    "WorldSize",
    "kind_of",
    "run_chaos",
    "run_virtually",
    "run_world",
    "simulate",
]
