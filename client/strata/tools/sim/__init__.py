"""A network in one process, under a virtual clock: for the proof of this library, and for tests of yours.

`simulate` runs a scenario, `run_world` a world drawn from a seed, `run_chaos` the one with everything at
once, and the module as a program thousands of those. Real channels run on it: `node` is what they take for
their relays, `disk` for their store. `loop` is the clock, `network` the relays and paths. `checking` is the
judge of what has to hold, `bounds` of what it may cost, and `planted` tries the judge.
"""

from __future__ import annotations

from strata.tools.sim.bounds import Bounds
from strata.tools.sim.chaos import HARSH, Chaos, run_chaos
from strata.tools.sim.checking import PromiseChecks, SimulationFailed
from strata.tools.sim.faults import NO_FAULTS, FaultCounts, Faults
from strata.tools.sim.loop import Deadlock, Process, VirtualLoop, run_virtually
from strata.tools.sim.network import SimNetwork, SimRelay
from strata.tools.sim.node import SimNode
from strata.tools.sim.participant import SimParticipant
from strata.tools.sim.simulation import Report, Simulation, simulate
from strata.tools.sim.worlds import KINDS, WorldSize, kind_of, run_world

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
