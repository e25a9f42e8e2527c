"""Processes that are killed again and again: each is a fork of one that has imported their modules."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import IO

__all__ = ["ShortLife", "short_lives"]

# No process is waited for before it is killed: until then its number is not reused.
_SERVER = """
import json, os, sys
{program}
for line in sys.stdin:
    child = os.fork()
    if not child:
        print(os.getpid(), flush=True)
        main(*json.loads(line))
        os._exit(0)
    sys.stdin.readline()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("\\nended", code, sep="\\n", flush=True)
"""


class ShortLife:
    """A process of a program, which prints a line now and then."""

    def __init__(self, asked: IO[str], said: IO[str]) -> None:
        self._asked, self._said = asked, said
        self._pid = int(said.readline())
        self.code: int | None = None
        """Its exit code, once it has been killed."""

    def line(self) -> str:
        """The next line that it prints."""
        return self._said.readline().rstrip("\n")

    def kill(self) -> list[str]:
        """Kill it with SIGKILL; returns the complete lines that it still printed."""
        os.kill(self._pid, signal.SIGKILL)
        print(file=self._asked, flush=True)
        lines: list[str] = []
        while (line := self._said.readline()) != "ended\n":
            assert line, "the process that forks has ended"
            lines.append(line.rstrip("\n"))
        self.code = int(self._said.readline())
        return lines[:-1]  # a line that was cut off, or an empty one


@contextlib.contextmanager
def short_lives(program: str) -> Iterator[Callable[..., ShortLife]]:
    """Starts processes that run `main` of a program, one at a time. Its arguments must be JSON values.

    A process has its own files, locks and threads, like any other: only the modules that the program imports
    were already loaded.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _SERVER.format(program=program)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        asked, said = server.stdin, server.stdout

        def start(*arguments: object) -> ShortLife:
            print(json.dumps(arguments), file=asked, flush=True)
            return ShortLife(asked, said)

        try:
            yield start
        finally:
            server.kill()  # processes still alive have no server left to talk to
