"""The signals that end a process."""

from __future__ import annotations

import asyncio
import os
import signal

import structlog

__all__ = ["stop_on_signals"]

_log = structlog.get_logger("relayd.server")


def stop_on_signals(*numbers: signal.Signals) -> asyncio.Event:
    """An event set by these signals (SIGTERM and SIGINT); one that comes later ends the process at once.

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
