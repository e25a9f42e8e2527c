"""Ending Spark's JVM when its start is interrupted by Ctrl-C, SIGTERM or an error.

A running JVM ends when its standard input does, and therefore with this process. One that is still starting
does not watch its input yet: PySpark removes the folder through which the two are to connect, and the JVM
fails for lack of it but never exits.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

from pyspark import SparkContext, java_gateway

__all__ = ["ending_what_is_cut_off"]


@contextlib.contextmanager
def ending_what_is_cut_off() -> Iterator[None]:
    """Kill a JVM whose start is interrupted within the block."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        with _signals_held():
            started.append(subprocess.Popen(*arguments, **options))
        return started[-1]

    gateway: Any = java_gateway  # it does not give out the process that it starts until the start is complete
    before = gateway.Popen
    gateway.Popen = start
    try:
        yield
    except BaseException:
        if SparkContext._gateway is None:  # else the two are connected
            for process in started:
                with process:  # leaving the block waits for its end
                    process.kill()
        raise
    finally:
        gateway.Popen = before


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Delay the handlers of Ctrl-C and SIGTERM until the end of the block, by when a process that was just
    started is known."""
    held: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    ours = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in ours:
        signal.signal(number, lambda told, _: held.append(told))
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        for told in held:
            signal.raise_signal(told)
