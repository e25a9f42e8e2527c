"""The process that Spark forks its Python workers from, on this machine: PySpark's, with a calmer collector.

After each task a worker looks for garbage, and through everything that it has ever imported: with PyArrow
and NumPy for a twentieth of a second, which is more than most tasks of a small lake take. What was imported
stays to the worker's end, so here the collector leaves it out.
"""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Callable

from pyspark import daemon

__all__ = ["Calm", "main"]


class Calm:
    """Runs tasks, and takes what they have newly imported out of the collector's sight."""

    def __init__(self, run: Callable[[socket.socket, bool], int]) -> None:
        self._run = run
        self._imported = 0

    def __call__(self, sock: socket.socket, authenticated: bool) -> int:
        """Run one task; its exit code."""
        code = self._run(sock, authenticated)
        if len(sys.modules) > self._imported:
            self._imported = len(sys.modules)
            gc.collect()  # what is garbage now would stay for ever
            gc.freeze()
        return code


def main() -> None:
    """Serve until Spark closes standard input. What starts threads may only be imported after a fork."""
    daemon.worker = Calm(daemon.worker)
    daemon.manager()


if __name__ == "__main__":
    main()
