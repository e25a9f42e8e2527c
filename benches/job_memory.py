"""A job of the pipeline as a program of its own: what it and all its children hold in memory, at most."""

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

__all__ = ["Ran", "job_command", "run", "together"]

_LOOK_SECONDS = 0.25


@dataclass(slots=True)
class Ran:
    """A command that has ended well."""

    told: str = ""
    """Its standard output."""
    seconds: float = 0.0
    peak_mb: float = 0.0
    """The most that all processes held together for themselves: what forks share counts for none of them."""
    java_mb: float = 0.0
    """The most that the JVM held, at whatever time."""
    python_mb: float = 0.0
    """The most that all others held."""
    cpu_seconds: float = 0.0
    """What all processes together took of the processor, as far as was seen: what they do in their last
    quarter of a second is not. On a machine that others use too it tells more than the clock."""

    @property
    def details(self) -> dict[str, object]:
        """For a measure: who held it, and what it took of the processor."""
        return {
            "JVM, MB": self.java_mb,
            "Python, MB": self.python_mb,
            "seconds of the processor": self.cpu_seconds,
        }


def job_command(job: str, lake: Path, *options: str, master: str = "local[2]") -> list[str]:
    """The command of a job on a lake, which tells its results as JSON."""
    command = [sys.executable, "-m", "strata_pipeline", job, "--lake", str(lake)]
    return [*command, "--master", master, "--json", *options]


def together(runs: Sequence[Ran]) -> Ran:
    """Commands that have run one after the other, as if they were one: what the last one told, the time of
    all, and the most that any of them held."""
    return Ran(
        runs[-1].told,
        seconds=sum(one.seconds for one in runs),
        peak_mb=max(one.peak_mb for one in runs),
        java_mb=max(one.java_mb for one in runs),
        python_mb=max(one.python_mb for one in runs),
        cpu_seconds=sum(one.cpu_seconds for one in runs),
    )


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Ran:
    """Run a command to its end, with more in its environment. Raises `SystemExit` where it fails; it has said
    why on standard error."""
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
        while not done.wait(_LOOK_SECONDS):
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
        return  # it has ended between two looks


def _private(process: psutil.Process) -> tuple[str, float]:
    """The name of a process and what it has for itself, in MB."""
    try:
        return process.name(), process.memory_full_info().uss / 2**20
    except psutil.Error:
        return "", 0.0


def _computed(process: psutil.Process) -> dict[tuple[int, float], float]:
    """The processor time of a process so far, by its number and its start."""
    try:
        times = process.cpu_times()
        return {(process.pid, process.create_time()): times.user + times.system}
    except psutil.Error:
        return {}
