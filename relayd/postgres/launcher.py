"""Become a PostgreSQL process that cannot outlive the process that started it.

Run by path, as a separate program (`python -I -S launcher.py UID GID PARENT -- COMMAND…`), with nothing but
the standard library: between fork and exec of a process with threads none of our Python may run, while a
fresh interpreter is safe. It drops root, ties itself to its parent, and execs COMMAND.

UID and GID are -1 to keep the current user. On Linux the kernel sends SIGINT (PostgreSQL's fast shutdown)
when the thread that started us ends. Elsewhere a child of ours does: it sleeps on standard input, a pipe that
the parent never writes to, and wakes when the parent is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Exec the command after `--`; does not return."""
    border = arguments.index("--")
    uid, gid, parent = (int(argument) for argument in arguments[:border])
    command = arguments[border + 1 :]
    if uid >= 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    # Only now: a change of user clears the signal.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    else:
        _leave_watchdog()
    if os.getppid() != parent:  # the parent died before we were tied to it
        raise SystemExit(1)
    os.execv(command[0], command)


def _leave_watchdog() -> None:
    server = os.getpid()
    if os.fork():
        return
    os.setsid()  # the parent decides what a Ctrl-C in the terminal means
    while os.read(0, 1):
        pass
    if os.getppid() == server:
        os.kill(server, signal.SIGINT)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
