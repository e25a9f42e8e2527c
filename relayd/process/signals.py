"""The signals that end a process, and those that must not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

from relayd.config import Settings
from relayd.logs import flush, get_logger

__all__ = ["Stop", "hold_reloads", "stop_on_signals", "stop_seconds"]

_log = get_logger("relayd.server")


def hold_reloads() -> None:
    """Have SIGHUP wait until it is handled; SIGUSR2 does nothing until then. For the start of a process.

    By default both end a process, and a process manager takes an end by SIGHUP for an intended one. The code
    that handles SIGHUP unblocks it. Ignoring SIGUSR2 loses nothing: processes that start now are already new.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def stop_seconds(settings: Settings) -> float:
    """The time from SIGTERM to the end, at most: a little less than the guides have process managers wait."""
    return max(30.0, settings.drain_spread + settings.drain_timeout + 10.0) - 2.0


class Stop(asyncio.Event):
    """Set when the process is to end. If it then takes longer than `seconds`, it ends at once, whatever it
    waits for: a file system, a name server, a thread."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self.set_at: float | None = None
        """When it was set, on the monotonic clock."""

    def set(self) -> None:
        if self.set_at is None:
            self.set_at = time.monotonic()
            timer = threading.Timer(self._seconds, _end_at_once, [f"it has not ended in {self._seconds:g} s"])
            timer.daemon = True
            with contextlib.suppress(RuntimeError):  # the system allows no more threads
                timer.start()
        super().set()

    def left(self) -> float:
        """The seconds until the process ends at once; infinite while nothing ends it."""
        return float("inf") if self.set_at is None else self.set_at + self._seconds - time.monotonic()

    @contextlib.contextmanager
    def cancels(self) -> Iterator[None]:
        """Cancel the task in this block when the process is to end: for a start, which may take long."""
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.create_task(self.wait(), name="stop")
        watch.add_done_callback(lambda done: None if done.cancelled() else task.cancel())
        try:
            yield
        finally:
            watch.cancel()


def stop_on_signals(seconds: float, *numbers: signal.Signals) -> Stop:
    """A `Stop` set by these signals (by default SIGTERM and SIGINT); a later one ends the process at once.

    Supervisors often signal a process and its group: signals within the first second are one request.
    """
    stop = Stop(seconds)

    def received() -> None:
        if stop.set_at is None:
            stop.set()
        elif time.monotonic() - stop.set_at > 1.0:
            _end_at_once("a second signal came")

    for number in numbers or (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, received)
    return stop


def _end_at_once(problem: str) -> None:
    _log.warning("stopping_at_once", problem=problem)
    flush()
    os._exit(1)
