"""The process from which Spark forks its Python workers on this machine: PySpark's, with calmer workers.

After each task a worker collects garbage, and in doing so scans everything that it has ever imported. With
PyArrow and NumPy that takes a twentieth of a second, longer than most tasks of a small lake. Imported modules
stay until the worker ends, so here the collector leaves them out.

Spark ends workers that have been idle for a minute by closing their sockets. PySpark's worker takes that for
a truncated task and reports it to Spark. On a Unix socket the report fails at once, and a traceback appears
on the user's terminal. Here a worker begins only when there is a task.
"""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Callable

from pyspark import daemon

__all__ = ["Calm", "calm_planning", "main"]

_ENDED = 1
"""Any code but 0 ends a worker; the code is shown nowhere."""


class Calm:
    """Runs tasks one at a time, and hides what they import from the garbage collector."""

    def __init__(self, run: Callable[[socket.socket, bool], int]) -> None:
        self._run = run
        self._imported = 0

    def __call__(self, sock: socket.socket, authenticated: bool) -> int:
        """Wait for one task and run it; return its exit code."""
        try:
            if not sock.recv(1, socket.MSG_PEEK):
                return _ENDED
            code = self._run(sock, authenticated)
        except ConnectionError:  # closed during a task: its result is no longer wanted
            return _ENDED
        if len(sys.modules) > self._imported:
            self._imported = len(sys.modules)
            gc.collect()  # else garbage of this moment would be frozen too, and stay for ever
            gc.freeze()
        return code


def calm_planning() -> None:
    """In a process that plans a read, make `Calm` run the tasks that follow.

    Spark forks such processes from PySpark's own daemon, regardless of its settings.
    """
    running = sys.modules["__main__"]
    if getattr(running.__spec__, "name", None) == daemon.__name__:
        running.__dict__["worker"] = Calm(running.__dict__["worker"])


def main() -> None:
    """Serve until Spark closes standard input. Import modules that start threads only after a fork."""
    daemon.worker = Calm(daemon.worker)
    daemon.manager()


if __name__ == "__main__":
    main()
