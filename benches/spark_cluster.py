"""A standalone Spark cluster on this machine: a master and workers, each in its own process.

It is for tests and measurements of a real cluster: code reaches executors over the network, tasks never run
in the driver's process, and everything that a job needs must be sent to it or be present.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyspark

__all__ = ["DRIVER_CONF", "Cluster", "ClusterError", "standalone_cluster"]

_HOST = "127.0.0.1"
DRIVER_CONF: Mapping[str, str] = {
    "spark.driver.host": _HOST,
    "spark.driver.bindAddress": _HOST,
    "spark.ui.enabled": "false",
    "spark.executor.memory": "768m",
    # No task before all executors are registered: otherwise the first one might do all of a small job.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
}
"""Settings of a driver that uses such a cluster."""
_START_TIMEOUT = 60.0
_STOP_TIMEOUT = 10.0
_POLL_INTERVAL = 0.05
_SPARK_CLASS = Path(str(pyspark.__file__)).parent / "bin" / "spark-class"

# Has the kernel kill this process when its parent ends, for whatever reason, and becomes Spark.
_TIED = """
import ctypes, os, signal, sys
if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("who started this has gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class ClusterError(Exception):
    """The cluster does not start; the message ends with the end of its logs."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster."""

    master: str
    """The value for `--master`."""
    folder: Path
    """`worker-<n>/` is the work folder of worker n; the logs are beside it."""
    workers: int

    def worker_of(self, executor: str) -> int:
        """The number of the worker that runs, or ran, an executor of the only application so far."""
        [work] = self.folder.glob(f"worker-*/app-*/{executor}")
        return int(work.parts[-3].removeprefix("worker-"))


@contextlib.contextmanager
def standalone_cluster(
    folder: Path, *, workers: int = 2, memory: str = "1g", environment: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """A master, and workers of one core and `memory` each, on free ports; they end with the block.

    Executors get `environment` but none of this process's Python paths, so they find only what their
    interpreter has and what a driver sends. Raises `ClusterError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, page = _free_port(), _free_port()
    master = f"spark://{_HOST}:{port}"
    with contextlib.ExitStack() as stack:

        def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
            return stack.enter_context(_process(folder / f"{name}.log", arguments, environment or {}))

        address = ["--host", _HOST, "--port", str(port), "--webui-port", str(page)]
        started = [start("master", "org.apache.spark.deploy.master.Master", *address)]
        _until(lambda: _state(page) is not None, started, folder)
        options = ["--host", _HOST, "--port", "0", "--webui-port", "0", "--cores", "1", "--memory", memory]
        for number in range(workers):
            name = f"worker-{number}"
            work = ["--work-dir", str(folder / name), master]
            started.append(start(name, "org.apache.spark.deploy.worker.Worker", *options, *work))
        _until(lambda: _state(page) == workers, started, folder)
        yield Cluster(master, folder, workers)


@contextlib.contextmanager
def _process(
    log: Path, arguments: tuple[str, ...], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """One of Spark's daemons in its own process group, with the executors that it starts."""
    command = [sys.executable, "-c", _TIED, str(os.getpid()), str(_SPARK_CLASS), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=_environment(environment), start_new_session=True
        )
    try:
        yield process
    finally:
        # A worker that is terminated ends its executors; the group's remaining processes are killed.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    ours = {
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "PYSPARK_PYTHON",
        "PYSPARK_DRIVER_PYTHON",
        "SPARK_HOME",
    }
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    # Daemons have little to do, and should start quickly. Executors have a JVM with its defaults.
    quick = {
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    return {**kept, **quick, "SPARK_LOCAL_IP": _HOST, "SPARK_NO_DAEMONIZE": "1", **more}


def _state(page: int) -> int | None:
    """The number of workers that a master knows to be alive; None while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{_HOST}:{page}/json/", timeout=5) as answer:
            return int(json.load(answer)["aliveworkers"])
    except (OSError, ValueError, KeyError):
        return None


def _until(condition: Callable[[], bool], processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT
    while not condition():
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            said = "\n".join(log.read_text(errors="replace")[-1500:] for log in sorted(folder.glob("*.log")))
            raise ClusterError(f"the cluster does not start:\n{said}")
        time.sleep(_POLL_INTERVAL)


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as server:
        return int(server.getsockname()[1])
