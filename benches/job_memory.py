"""A job of the pipeline as a separate program: the peak memory of the program and all its children."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benches.looks import looks

__all__ = ["Ran", "job_command", "run", "together"]

_LOOK_SECONDS = 0.25


@dataclass(slots=True)
class Ran:
    """A command that has succeeded."""

    told: str = ""
    """Its standard output."""
    seconds: float = 0.0
    peak_mb: float = 0.0
    """The peak of the private memory of all processes together; memory that forks share does not count."""
    java_mb: float = 0.0
    """The peak of the JVM alone."""
    python_mb: float = 0.0
    """The peak of all other processes."""
    cpu_seconds: float = 0.0
    """The CPU time of all processes together, except their last quarter of a second, which is not seen. On a
    machine that other programs use too, this says more than the clock."""

    @property
    def details(self) -> dict[str, object]:
        """The details of a measure: memory by kind of process, and the CPU time."""
        return {
            "JVM, MB": self.java_mb,
            "Python, MB": self.python_mb,
            "seconds of the processor": self.cpu_seconds,
        }


def job_command(job: str, lake: Path, *options: str, master: str = "local[2]") -> list[str]:
    """The command of a job on a lake, which prints its results as JSON."""
    command = [sys.executable, "-m", "strata_pipeline", job, "--lake", str(lake)]
    return [*command, "--master", master, "--json", *options]


def together(runs: Sequence[Ran]) -> Ran:
    """Commands that ran one after another, as if they were one: the output of the last, the time of all, and
    the peak memory of any."""
    return Ran(
        runs[-1].told,
        seconds=sum(one.seconds for one in runs),
        peak_mb=max(one.peak_mb for one in runs),
        java_mb=max(one.java_mb for one in runs),
        python_mb=max(one.python_mb for one in runs),
        cpu_seconds=sum(one.cpu_seconds for one in runs),
    )


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Ran:
    """Run a command to its end, with additional environment variables. Raises `SystemExit` if it fails; its
    standard error says why."""
    ran, done = Ran(), threading.Event()
    started = time.perf_counter()
    variables = {**os.environ, **(environment or {})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
    watcher = threading.Thread(target=_watch, args=(process.pid, done, ran))
    watcher.start()
    try:
        ran.told, _ = process.communicate()
    finally:
        done.set()
        watcher.join()
    ran.seconds = time.perf_counter() - started
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed; see above")
    return ran


def _watch(pid: int, done: threading.Event, ran: Ran) -> None:
    try:
        root = psutil.Process(pid)
        computed: dict[tuple[int, float], float] = {}
        for _ in looks(done, _LOOK_SECONDS):
            java = python = 0.0
            for one in (root, *root.children(recursive=True)):
                name, size = _private(one)
                computed |= _computed(one)
                if name == "java":
                    java += size
                else:
                    python += size
            ran.peak_mb = max(ran.peak_mb, java + python)
            ran.cpu_seconds = sum(computed.values())
            ran.java_mb, ran.python_mb = max(ran.java_mb, java), max(ran.python_mb, python)
    except psutil.NoSuchProcess:
        return  # it has ended between two samples


def _private(process: psutil.Process) -> tuple[str, float]:
    """The name of a process and its private memory, in MB."""
    try:
        return process.name(), process.memory_full_info().uss / 2**20
    except psutil.Error:
        return "", 0.0


def _computed(process: psutil.Process) -> dict[tuple[int, float], float]:
    """The CPU time of a process so far, by its id and start time."""
    try:
        times = process.cpu_times()
        return {(process.pid, process.create_time()): times.user + times.system}
    except psutil.Error:
        return {}
