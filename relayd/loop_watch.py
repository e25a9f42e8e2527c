"""How long one step of the event loop keeps all others waiting."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from relayd.metrics import Metrics

__all__ = ["watch_loop"]

_INTERVAL: Final = 0.02
"""Seconds between two looks. A step that takes longer than this is always seen."""


async def watch_loop(metrics: Metrics) -> None:
    """Observe by how much a timer is late, until cancelled.

    `relayd_loop_lag_seconds` is what a peer feels. Most of it may be the machine's doing, where other
    programs use its processors, or another thread of ours holds the interpreter lock.
    `relayd_loop_longest_step_seconds` is the loop's own doing: of a delay, no more than the processor
    time that its thread has used meanwhile.
    """
    longest = 0.0
    while True:
        used, due = time.thread_time(), time.monotonic() + _INTERVAL
        await asyncio.sleep(_INTERVAL)
        lag = max(0.0, time.monotonic() - due)
        metrics.loop_lag_seconds.observe(lag)
        step = min(lag, time.thread_time() - used)
        if step > longest:
            longest = step
            metrics.loop_longest_step_seconds.set(longest)
