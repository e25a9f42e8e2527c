"""The process that Spark forks its Python workers from, on this machine: PySpark's, with calmer workers.

After each task a worker looks for garbage, and through everything that it has ever imported: with PyArrow
and NumPy for a twentieth of a second, which is more than most tasks of a small lake take. What was imported
stays to the worker's end, so here the collector leaves it out.

Spark ends workers that were idle for a minute by closing their sockets. PySpark's worker takes that for a
task without a beginning and tells Spark so. On a Unix socket this fails at once, and a traceback goes to the
user's terminal. Here a worker begins only when there is a task.
"""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Callable

from pyspark import daemon

__all__ = ["Calm", "calm_planning", "main"]

_ENDED = 1
"""Any code but 0 ends a worker; nobody sees it."""


class Calm:
    """Runs tasks until there are no more, and takes what they import out of the collector's sight."""

    def __init__(self, run: Callable[[socket.socket, bool], int]) -> None:
        self._run = run
        self._imported = 0

    def __call__(self, sock: socket.socket, authenticated: bool) -> int:
        """Wait for one task and run it; its exit code."""
        try:
            if not sock.recv(1, socket.MSG_PEEK):
                return _ENDED
            code = self._run(sock, authenticated)
        except ConnectionError:  # closed in the midst of a task: its result is not wanted any more
            return _ENDED
        if len(sys.modules) > self._imported:
            self._imported = len(sys.modules)
            gc.collect()  # what is garbage now would stay for ever
            gc.freeze()
        return code


def calm_planning() -> None:
    """In a process that plans a read, let the following tasks be run calmly.

    Spark forks these from PySpark's own daemon, whatever its settings say.
    """
    running = sys.modules["__main__"]
    if getattr(running.__spec__, "name", None) == daemon.__name__:
        running.__dict__["worker"] = Calm(running.__dict__["worker"])


def main() -> None:
    """Serve until Spark closes standard input. What starts threads may only be imported after a fork."""
    daemon.worker = Calm(daemon.worker)
    daemon.manager()


if __name__ == "__main__":
    main()
