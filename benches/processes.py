"""Processes of the benchmarks: forks of a process that has imported the benchmarks and run none.

A fork starts in some milliseconds, while a fresh interpreter takes a second to import. It inherits no event
loop, no thread and no connection.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from typing import Final

__all__ = ["fork_context"]

_IMPORTED: Final = [
    "benches.bare",
    "benches.channel_convergence",
    "benches.crowds",
    "benches.identities",
    "benches.tx_rx",
    "benches.tx_rx_floor",
    "benches.tx_rx_ours",
    "benches.tx_rx_peers",
]


def fork_context() -> ForkServerContext:
    """The context that makes processes and pools."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context
