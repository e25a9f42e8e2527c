"""A process that has imported a program and built its commands, and becomes that program in forks.

Run by `forks.py` as `python fork_server.py SOCKET PROGRAM MODULE…`. A request on SOCKET is one JSON object
with four descriptors: standard input, output and error, and a pipe that receives the fork's process id and,
when it has ended, its exit code.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from typing import Any

import typer
import typer.main

__all__ = ["end_process", "main"]

_REQUEST_BYTES = 2**20
_FAILPOINTS = "RELAYD_FAILPOINTS"


def main() -> None:
    """Import and serve; in a fork, become the program."""
    control = socket.socket(fileno=int(sys.argv[1]))
    program, *modules = sys.argv[2:]
    sys.path[0] = os.getcwd()  # as with `python -m`, instead of the folder of this file
    # Typer builds a program's commands from their signatures each time it is called.
    typer.main.get_command = functools.cache(typer.main.get_command)
    for name in (program, *modules):
        app = getattr(importlib.import_module(name), "app", None)
        if isinstance(app, typer.Typer):
            typer.main.get_command(app)
    gc.collect()
    # The collector no longer looks at imported objects, here or in a fork: their memory stays shared. A relay
    # does the same once it has started.
    gc.freeze()
    request = _serve(control)
    if request is not None:
        sys.argv[1:] = request["arguments"]
        code: str | int | None = None
        try:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
        if code is None or isinstance(code, int):
            end_process(code or 0)
        sys.exit(code)


def end_process(code: int) -> None:
    """End a fork as the interpreter does, except that imported objects are not freed one by one.

    Freeing them would first copy all of the shared memory. Returns if a stream cannot be flushed: the
    interpreter reports that itself.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()  # a task or a socket that was never closed complains here
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(code)


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Returns the request in the fork, and None when no more requests can come."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the requesting process
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
        except BrokenPipeError:  # nobody is waiting for it
            pass
        os.close(asker)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Set up what a fresh process has: signals, standard streams, environment, folder."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    if _FAILPOINTS in os.environ:  # they are armed on import, and there were none then
        importlib.reload(importlib.import_module("relayd.failpoints"))
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]


if __name__ == "__main__":
    main()
