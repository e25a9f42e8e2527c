"""How long the event loop keeps all peers waiting, and for what."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Final

from relayd.metrics import Metrics

__all__ = ["LoopWatch"]

_IDLE_INTERVAL: Final = 0.01
_BUSY_INTERVAL: Final = 0.005
_BUSY: Final = 0.25
"""If the loop has worked for this part of the time between two looks, it is looked at more often."""
_LATE: Final = 0.0005
"""A timer that is later than this many seconds has waited for something."""


class LoopWatch:
    """Looks at the loop it runs on a hundred times a second, and twice as often while the loop is busy.

    `relayd_loop_lag_seconds` is what a peer feels. Most of it may be due to the machine, if other programs
    use its processors, or to another thread of this process that holds the interpreter lock.
    `relayd_loop_longest_step_seconds` is what peers cause: if a timer was late, the processor time that the
    loop's thread has used since the previous look. A step longer than the time between two looks is always
    seen, and is overstated by less than that time. `relayd_loop_longest_pause_seconds` holds what peers do
    not cause: the cycle collector, and a reload.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._longest_step = 0.0
        self._longest_pauses: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        """The pauses among them that are not in a metric yet."""
        self._apart = 0.0
        self._thread = 0
        self._collects_since = 0.0

    async def run(self) -> None:
        """Look at the loop until cancelled."""
        self._thread = threading.get_ident()
        gc.callbacks.append(self._collecting)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._used = time.thread_time()
        self._look_in(_IDLE_INTERVAL)
        try:
            await self._ended
        finally:
            self._timer.cancel()
            gc.callbacks.remove(self._collecting)

    def _look_in(self, interval: float) -> None:
        # A timer and not a task: an idle relay spends most of its time looking at itself.
        self._interval, self._due, self._apart = interval, time.monotonic() + interval, 0.0
        self._timer = self._loop.call_later(interval, self._look)

    def _look(self) -> None:
        try:
            before, self._used = self._used, time.thread_time()
            lag, work = max(0.0, time.monotonic() - self._due), self._used - before
            self._metrics.loop_lag_seconds.observe(lag)
            if lag > _LATE:
                self._stepped(max(0.0, work - self._apart))
            if self._pauses:  # not set when a pause is seen, because the collector runs anywhere
                for cause, seconds in self._pauses.items():
                    self._metrics.loop_longest_pause_seconds[cause].set(seconds)
                self._pauses.clear()
            self._look_in(_BUSY_INTERVAL if work > _BUSY * self._interval else _IDLE_INTERVAL)
        except Exception as error:  # our bug: raise it from `run`
            if not self._ended.done():
                self._ended.set_exception(error)

    def _stepped(self, seconds: float) -> None:
        self._metrics.loop_step_seconds.observe(seconds)
        if seconds > self._longest_step:
            self._longest_step = seconds
            self._metrics.loop_longest_step_seconds.set(seconds)

    @contextlib.contextmanager
    def apart(self, cause: str) -> Iterator[None]:
        """Count what the loop does inside this block as caused by no peer."""
        before = time.thread_time()
        try:
            yield
        finally:
            self._pause(cause, time.thread_time() - before)

    def _collecting(self, phase: str, _: Mapping[str, int]) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collects_since = time.thread_time()
        else:
            self._pause("collection", time.thread_time() - self._collects_since)

    def _pause(self, cause: str, seconds: float) -> None:
        self._apart += seconds
        if seconds > self._longest_pauses.get(cause, 0.0):
            self._longest_pauses[cause] = self._pauses[cause] = seconds
