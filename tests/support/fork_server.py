"""A process that has imported a program, and becomes that program in a fork for each one asked for.

Run by `forks.py` as `python fork_server.py SOCKET PROGRAM MODULE…`. A request on SOCKET is one JSON object
with four descriptors: standard input, output and error, and a pipe that takes the fork's process id and, when
it has ended, its exit code.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from typing import Any

__all__ = ["main"]

_REQUEST_BYTES = 2**20


def main() -> None:
    """Import, serve, and in a fork become the program; the interpreter then ends as it always does."""
    control = socket.socket(fileno=int(sys.argv[1]))
    program, *modules = sys.argv[2:]
    sys.path[0] = os.getcwd()  # as `python -m` has it, and not the folder of this file
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported stays shared with the forks
    request = _serve(control)
    if request is not None:
        sys.argv[1:] = request["arguments"]
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Returns the request in the fork, and None where nobody can ask any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for whoever asks
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    while True:
        readable, _, _ = select.select([control.fileno(), woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _tell_of_the_ended(running)
        if control.fileno() in readable:
            data, descriptors, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 4)
            if not data:
                return None
            request: dict[str, Any] = json.loads(data)
            pid = os.fork()
            if not pid:
                control.close()
                for own in (woken, wake, *running.values()):
                    os.close(own)
                _become(request, descriptors)
                return request
            *standard, running[pid] = descriptors
            for descriptor in standard:
                os.close(descriptor)
            os.write(running[pid], b"%d\n" % pid)


def _tell_of_the_ended(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        asker = running.pop(pid)
        try:
            os.write(asker, b"%d\n" % os.waitstatus_to_exitcode(status))
        except BrokenPipeError:  # nobody waits for it
            pass
        os.close(asker)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Take over what a fresh process has: signals, standard streams, environment, folder."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.unfreeze()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]


if __name__ == "__main__":
    main()
