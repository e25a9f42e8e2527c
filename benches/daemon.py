"""A relay process: started on a fresh folder, measured from outside, stopped."""

from __future__ import annotations

import json
import os
import selectors
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

from benches.peer import BenchError

__all__ = ["CpuTimes", "RelayProcess", "spawn"]

_START_TIMEOUT = 120.0
_STOP_TIMEOUT = 30.0
_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds of the relay itself, its PostgreSQL, this load generator, and everything else."""

    relay: float
    postgres: float
    load: float
    others: float

    def since(self, before: CpuTimes) -> CpuTimes:
        """The CPU used between two readings."""
        return CpuTimes(
            self.relay - before.relay,
            self.postgres - before.postgres,
            self.load - before.load,
            self.others - before.others,
        )

    def each(self, count: int) -> dict[str, float]:
        """Microseconds for each of `count` things, and the share of the CPU that other programs used."""
        ours = self.relay + self.postgres + self.load
        foreign = max(0.0, self.others)
        return {
            "relay us": self.relay / count * 1e6,
            "PostgreSQL us": self.postgres / count * 1e6,
            "load generator us": self.load / count * 1e6,
            "CPU of other programs, %": 100 * foreign / (ours + foreign) if ours + foreign else 0.0,
        }


class RelayProcess:
    """`relayd serve` with its embedded PostgreSQL, as a context manager.

    `command` replaces `python -m relayd`, for a profiler or another build. `settings` are those that differ
    from the defaults, by name; without `port` it takes any free port. `config` is the text of its settings
    file. Raises `BenchError` with the end of its log if it does not start.
    """

    def __init__(
        self,
        command: str | None = None,
        settings: Mapping[str, object] | None = None,
        *,
        config: str | None = None,
    ) -> None:
        self._command = shlex.split(command) if command else [sys.executable, "-m", "relayd"]
        self._settings = dict(settings or {})
        self._port = self._settings.pop("port", 0)
        self._folder = Path(tempfile.mkdtemp(prefix="relayd-bench-"))
        if config is not None:
            self.write_config(config)
        self._process: subprocess.Popen[str] | None = None
        self.ws_url = ""
        self.metrics_url = ""

    def __enter__(self) -> RelayProcess:
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def pid(self) -> int:
        """The id of its process."""
        assert self._process is not None
        return self._process.pid

    def write_config(self, text: str) -> None:
        """Write its settings file; SIGHUP makes it read the file again, if it was started with one."""
        config = self._folder / "relayd.toml"
        config.write_text(text)
        self._settings["config"] = config

    def restart(self) -> None:
        """Stop the relay and start it again on the same folder, which may give it another address."""
        self._stop()
        self._start()

    def cpu_times(self) -> CpuTimes:
        """CPU used so far, including that of processes that have ended."""
        machine = psutil.cpu_times()
        busy = sum(getattr(machine, name, 0.0) for name in _BUSY)
        load = time.process_time()
        relay = postgres = 0.0
        for process in self._processes():
            try:
                times = process.cpu_times()
                used = times.user + times.system + times.children_user + times.children_system
                if process.name().startswith("postgres"):
                    postgres += used
                else:
                    relay += used
            except psutil.NoSuchProcess:
                continue  # its parent has inherited its times, and is read after it or next time
        return CpuTimes(relay, postgres, load, busy - load - relay - postgres)

    def bytes_read(self) -> int:
        """Bytes that the relay has read so far, from sockets and files. Linux only; 0 elsewhere."""
        return sum(
            _read_characters(process.pid)
            for process in self._processes()
            if not process.name().startswith("postgres")
        )

    def has_logged(self, event: str) -> bool:
        """Whether it has logged this event on stderr."""
        return event in (self._folder / "stderr.log").read_text(errors="replace")

    def resident_bytes(self) -> int:
        """Memory of the relay without PostgreSQL."""
        return sum(
            process.memory_info().rss
            for process in self._processes()
            if not process.name().startswith("postgres")
        )

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RELAYD_")}
        environment |= {f"RELAYD_{name.upper()}": str(value) for name, value in self._settings.items()}
        folder = ["--data-dir", str(self._folder / "data")]
        if "database_url" in self._settings:  # a folder on the command line would override it
            environment["RELAYD_DATA_DIR"], folder = folder[1], []
        command = [*self._command, "serve", "--port", str(self._port), *folder]
        with (self._folder / "stderr.log").open("w") as log:
            self._process = spawn(command, environment, log)
        ready = json.loads(self._first_line())
        self.ws_url, self.metrics_url = ready["ws"], ready["metrics"]

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def _first_line(self) -> str:
        assert self._process is not None and self._process.stdout is not None
        deadline = time.monotonic() + _START_TIMEOUT
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if selector.select(deadline - time.monotonic()):
                line = self._process.stdout.readline()
                if line.startswith("{"):
                    return line
        log = (self._folder / "stderr.log").read_text(errors="replace")[-2000:]
        raise BenchError(f"the relay did not start\n{log}")

    def _processes(self) -> list[psutil.Process]:
        assert self._process is not None
        root = psutil.Process(self._process.pid)
        return [*root.children(recursive=True), root]


def spawn(command: Sequence[str], environment: Mapping[str, str], log: IO[str]) -> subprocess.Popen[str]:
    """Start a relay, which reports on standard output when it is ready."""
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)


def _read_characters(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return int(next(line.split()[1] for line in lines if line.startswith("rchar:")))
