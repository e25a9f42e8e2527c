"""The signals that end a process, and those that must not."""

from __future__ import annotations

import asyncio
import os
import signal

from relayd.logs import get_logger

__all__ = ["hold_reloads", "stop_on_signals"]

_log = get_logger("relayd.server")


def hold_reloads() -> None:
    """Have SIGHUP wait until it is handled; SIGUSR2 does nothing until then. For the start of a process.

    By default both end a process, and a process manager takes an end by SIGHUP for an intended one. The code
    that handles SIGHUP unblocks it. Ignoring SIGUSR2 loses nothing: processes that start now are already new.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def stop_on_signals(*numbers: signal.Signals) -> asyncio.Event:
    """An event set by these signals (by default SIGTERM and SIGINT); a later one ends the process at once.

    Supervisors often signal a process and its group: signals within the first second are one request.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    stopped_at = 0.0

    def received() -> None:
        nonlocal stopped_at
        if not stop.is_set():
            stopped_at = loop.time()
            stop.set()
        elif loop.time() - stopped_at > 1.0:
            _log.warning("stopping_at_once")
            os._exit(1)

    for number in numbers or (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received)
    return stop
