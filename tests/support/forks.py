"""Our programs as processes that start at once: each is a fork of a process that has imported the program.

Only the imports are shared. A fork is a process like any other: it has its own streams, environment, folder
and signals, runs the program's `__main__`, and ends with the program's exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

__all__ = ["FUZZERS", "RELAYD", "STRATA", "Completed", "ForkedProcess", "run_fork", "start_servers"]

FUZZERS = "tests.fuzz.harnesses"
RELAYD = "relayd"
STRATA = "strata.tools.cli"

_ROOT = Path(__file__).resolve().parents[2]
_SERVER = Path(__file__).with_name("fork_server.py")
_START_TIMEOUT = 60.0
_MODULES = {
    FUZZERS: (),
    RELAYD: (
        "relayd.cli",
        "relayd.process.daemon",
        "relayd.cli.doctor",
        "relayd.federation.service",
        "relayd.store.upgrade",
        "typer._adapters",
    ),
    STRATA: (
        "strata.tools.cli.bench",
        "strata.tools.cli.channel",
        "strata.tools.cli.commands",
        "strata_testkit.conformance.command",
        "strata.tools.cli.custody",
        "strata.tools.cli.scores",
        "strata.tools.cli.status",
        "strata_testkit.conformance",
        "typer._adapters",
    ),
}
"""What each program imports when it starts, or when a command needs it."""

Completed = tuple[int, bytes, bytes]
"""Exit code, standard output, standard error."""


class ForkedProcess:
    """One process of a program, with the part of `subprocess.Popen` that tests use.

    A stream is a file or a descriptor, `subprocess.PIPE` or `subprocess.DEVNULL`. `module` is run in place of
    the program, for another program that needs the same imports.
    """

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        module: str | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] = subprocess.PIPE,
    ) -> None:
        self.returncode: int | None = None
        with contextlib.ExitStack() as theirs:

            def open_fd(descriptor: int) -> int:
                theirs.callback(os.close, descriptor)
                return descriptor

            def stream(what: int | IO[bytes], mode: str) -> tuple[int, IO[bytes] | None]:
                if what == subprocess.DEVNULL:
                    return open_fd(os.open(os.devnull, os.O_RDWR)), None
                if what == subprocess.PIPE:
                    read, write = os.pipe()
                    theirs_end, ours = (read, write) if mode == "wb" else (write, read)
                    return open_fd(theirs_end), os.fdopen(ours, mode)
                return (what if isinstance(what, int) else what.fileno()), None

            input_fd, self.stdin = stream(stdin, "wb")
            output_fd, self.stdout = stream(stdout, "rb")
            error_fd, self.stderr = stream(stderr, "rb")
            status, answer = os.pipe()
            self._status, self._said = status, b""
            request = {
                "module": module or program,
                "arguments": [str(each) for each in arguments],
                "environment": dict(env),
                "folder": str(cwd or Path.cwd()),
            }
            _server(program).ask(request, [input_fd, output_fd, error_fd, open_fd(answer)])
        self.pid = self._line(_START_TIMEOUT)

    def _line(self, timeout: float | None) -> int:
        """The next number that the server reports about this process. Raises `TimeoutError`."""
        while b"\n" not in self._said:
            if not select.select([self._status], [], [], timeout)[0]:
                raise TimeoutError
            piece = os.read(self._status, 64)
            assert piece, "the process that forks has ended"
            self._said += piece
        line, _, self._said = self._said.partition(b"\n")
        return int(line)

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        with contextlib.suppress(TimeoutError):
            self._reap(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once there is one. Raises `subprocess.TimeoutExpired`."""
        try:
            return self._reap(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None

    def _reap(self, timeout: float | None) -> int:
        if self.returncode is None:
            self.returncode = self._line(timeout)
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, data: bytes = b"", timeout: float = 60.0) -> tuple[bytes, bytes]:
        """Send its input, and collect its output until it ends; kill it if that takes too long."""
        outputs: list[bytes] = [b"", b""]

        def write() -> None:
            assert self.stdin is not None
            with contextlib.suppress(BrokenPipeError), self.stdin:
                self.stdin.write(data)

        def read(index: int, stream: IO[bytes]) -> None:
            with stream:
                outputs[index] = stream.read()

        threads = [threading.Thread(target=write)] if self.stdin is not None else []
        for index, stream in enumerate((self.stdout, self.stderr)):
            if stream is not None:
                threads.append(threading.Thread(target=read, args=(index, stream)))
        for thread in threads:
            thread.start()
        try:
            self.wait(timeout)
        finally:
            self.kill()
            for thread in threads:
                thread.join()
        return outputs[0], outputs[1]


def run_fork(
    program: str,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    module: str | None = None,
    stdin: bytes = b"",
    timeout: float = 60.0,
) -> Completed:
    """Run a program to its end."""
    process = ForkedProcess(program, arguments, env=env, module=module, stdin=subprocess.PIPE)
    out, err = process.communicate(stdin, timeout)
    assert process.returncode is not None
    return process.returncode, out, err


class _Server:
    """The process that has imported a program. It ends with the process that started it."""

    def __init__(self, program: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RELAYD_")}
        environment["PYTHONUTF8"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), str(_ROOT / "client")])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_SERVER), str(theirs.fileno()), program, *_MODULES[program]],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        atexit.register(self._close)

    def ask(self, request: Mapping[str, object], descriptors: list[int]) -> None:
        with self._lock:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)

    def _close(self) -> None:
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)


@functools.cache
def _server(program: str) -> _Server:
    return _Server(program)


def start_servers(*programs: str) -> None:
    """Start what forks these programs now, so that processes forked from this one use the same."""
    for program in programs:
        _server(program)
