"""The start of Spark's JVM, cut off: by Ctrl-C, SIGTERM, or whatever fails meanwhile.

A JVM that runs ends when its standard input does, and so with us. One that is still starting has not begun
to look: PySpark removes the folder through which the two are to meet, the JVM fails for want of it, and stays
for good.
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
    """A JVM whose start is cut off meanwhile is ended."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        with _signals_held():
            started.append(subprocess.Popen(*arguments, **options))
        return started[-1]

    gateway: Any = java_gateway  # which tells nobody what it has started, until it has
    before = gateway.Popen
    gateway.Popen = start
    try:
        yield
    except BaseException:
        if SparkContext._gateway is None:  # else the two have met
            for process in started:
                with process:  # which waits for its end
                    process.kill()
        raise
    finally:
        gateway.Popen = before


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Handlers of Ctrl-C and SIGTERM wait for the end of the block, when a process that was just made is
    known."""
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
