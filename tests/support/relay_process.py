"""Real relay processes for tests: `relayd serve` on a free port, and what can be seen of it from outside."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.support.databases import copy_of_empty, copy_of_migrated
from tests.support.forks import RELAYD, ForkedProcess

__all__ = ["ROOT", "PostgresHost", "RelayFailed", "RelayProcess", "frozen", "http_get"]

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT = 60.0
LONGEST_STEP = 0.02
"""The processor seconds that one step of a relay's loop may take, whatever peers send; see `longest_step`."""
_SCALES = (2, 4, 8, 16, 32)
"""Factors by which a machine may be slower than the one for which the bound is set."""
STOP_TIMEOUT = 30.0
"""What the guides have process managers wait (operations.md)."""
_PIECE = json.dumps({str(number): [number, "x" * 10, {"a": number}] for number in range(200)})
_PIECE_SECONDS = 0.001
_STRAY_STEPS = 3
_LOOKS_PER_STRAY_STEP = 5000
"""A relay may have `_STRAY_STEPS` longer steps, or in a long life one per this many looks at the loop: a
thread's clock runs on while a host keeps a virtual machine waiting, and an idle loop may seem to work for a
tenth of a second. A long step that a peer causes happens again."""


def longest_step() -> float:
    """Processor seconds that a step may take on this machine under its present load.

    The bound of 20 ms is for a machine that does a fixed piece of work in 1 ms. The same instructions take up
    to twice as long while others use the processor's caches and its other thread, and longer on a slower
    machine.
    """
    taken = []
    for _ in range(5):
        started = time.thread_time()
        for _ in range(2):
            json.dumps(json.loads(_PIECE), sort_keys=True)
            sum(number * number for number in range(2000))
        taken.append(time.thread_time() - started)
    slowness = statistics.median(taken) / _PIECE_SECONDS
    return LONGEST_STEP * next((scale for scale in _SCALES if slowness <= scale), _SCALES[-1])


class RelayFailed(AssertionError):
    """The relay did not do what a healthy one does; the message ends with its log."""


def environment(settings: Mapping[str, object], *, python_path: str | None = None) -> dict[str, str]:
    """This process's environment with exactly these relay settings, by name."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RELAYD_")}
    paths = [str(ROOT), str(ROOT / "client")]
    clean["PYTHONPATH"] = os.pathsep.join(paths if python_path is None else [python_path, *paths])
    return clean | {f"RELAYD_{name.upper()}": _text(value) for name, value in settings.items()}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class RelayProcess:
    """One `relayd serve`. Start it with `start`; its stderr is kept in `log`."""

    def __init__(
        self,
        folder: Path,
        *,
        arguments: tuple[str, ...] = (),
        port: int = 0,
        from_scratch: bool = False,
        environ: Mapping[str, str] | None = None,
        python_path: str | None = None,
        **settings: object,
    ) -> None:
        """`from_scratch`: the relay creates its data folder itself, as on its first day, and is not a fork.

        `environ` is added to the environment of the process, `python_path` comes before all other paths; with
        either the relay is not a fork.
        """
        self.folder = folder
        self.log = folder / "relay.log"
        self.port = port
        self.arguments = arguments
        self.environ = dict(environ or {})
        self.python_path = python_path
        self.settings: dict[str, object] = {"log_format": "json", **settings}
        self.prepared: Path | None = None
        """The data folder that is copied before the first start."""
        if "database_url" not in settings:
            data_dir = Path(str(self.settings.setdefault("data_dir", folder / "data")))
            self.prepared = None if from_scratch else data_dir
        # A fork has already evaluated what is read on import; only failpoints are read again.
        self._is_fork = not (from_scratch or environ or python_path)
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.ready: dict[str, str] = {}
        self.start_timeout, self.stop_timeout = START_TIMEOUT, STOP_TIMEOUT
        self._longest_step = 0.0

    def spawn(self) -> subprocess.Popen[bytes] | ForkedProcess:
        """Start the process without waiting for it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.prepared is not None:
            copy_of_migrated(self.prepared)
        arguments = ["serve", "--port", str(self.port), *self.arguments]
        environ = self._environment()
        with self.log.open("ab") as log:
            if self._is_fork:
                self.process = ForkedProcess(RELAYD, arguments, env=environ, cwd=self.folder, stderr=log)
            else:
                command = [sys.executable, "-m", "relayd", *arguments]
                self.process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=log, env=environ, cwd=self.folder
                )
        return self.process

    def _environment(self) -> dict[str, str]:
        return environment(self.settings, python_path=self.python_path) | self.environ

    def start(self) -> RelayProcess:
        """Start, and wait for the ready line."""
        process = self.spawn()
        self.ready = self.await_ready()
        assert process.poll() is None
        self.look_at_machine()
        return self

    def await_ready(self) -> dict[str, str]:
        """Read the one JSON line on stdout."""
        assert self.process is not None and self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], self.start_timeout)
        line = self.process.stdout.readline() if readable else b""
        if not line:
            self.kill()
            raise RelayFailed(f"no ready line; the log ends:\n{self.last_words()}")
        said: dict[str, str] = json.loads(line)
        assert said.pop("event") == "ready"
        return said

    @property
    def ws(self) -> str:
        return self.ready["ws"]

    @property
    def http(self) -> str:
        return self.ready["http"]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def terminate(self) -> None:
        """Request a clean stop, without waiting."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for the end; returns the exit code."""
        assert self.process is not None
        code = self.process.wait(self.stop_timeout)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def stop(self) -> int:
        """Stop cleanly; returns the exit code."""
        self.check_loop()
        if self.is_running():
            self.terminate()
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.kill()
            raise RelayFailed(f"SIGTERM did not end the relay; the log ends:\n{self.last_words()}") from None

    def kill(self) -> None:
        """Kill the relay with SIGKILL, and wait for its children to end."""
        if self.process is None:
            return
        children = self.children()
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        psutil.wait_procs(children, timeout=STOP_TIMEOUT)  # the next start ends those that are left

    def children(self) -> list[psutil.Process]:
        """Every process below the relay: PostgreSQL and its backends, workers."""
        found = _children(self.pid)
        for process in found:  # the list grows
            found += _children(process.pid)
        return found

    def workers(self) -> list[psutil.Process]:
        """The worker processes running now."""
        found = []
        for child in _children(self.pid):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                if "spawn_main" in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def postgres(self) -> psutil.Process:
        """The embedded PostgreSQL server."""
        return psutil.Process(self.postgres_pid())

    def postgres_pid(self) -> int:
        """The process id of the embedded PostgreSQL; OSError or ValueError while there is none."""
        return int((self.cluster() / "postmaster.pid").read_text().split("\n", 1)[0])

    def cluster(self) -> Path:
        """The folder of the embedded database."""
        return next(Path(str(self.settings["data_dir"])).glob("postgres-??"))

    def rss(self) -> int:
        """Resident bytes of the relay process itself."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """A plain GET: status, headers (lower case), body."""
        return http_get(self.http + path)

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics, summed over the labels that are not given."""
        _, _, body = http_get(self.ready["metrics"])
        found = [
            float(match[2])
            for match in re.finditer(rf"^{name}(?:{{(.*)}})? (\S+)$", body.decode(), re.M)
            if all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items())
        ]
        if not found:
            raise KeyError(name)
        return sum(found)

    def look_at_machine(self) -> None:
        """Remember how slow this machine is now: the relay's work at this time is judged by that, even if the
        machine is calm at the end."""
        self._longest_step = max(self._longest_step, longest_step())

    def check_loop(self) -> None:
        """Fail if steps have blocked this relay's loop for too long, whatever its peers have sent.

        A relay that does not answer or is stopped is not checked.
        """
        with contextlib.suppress(OSError, KeyError, psutil.Error, http.client.HTTPException):
            if self.is_running() and psutil.Process(self.pid).status() != psutil.STATUS_STOPPED:
                looks, steps = self.steps()
                strays = max(_STRAY_STEPS, looks / _LOOKS_PER_STRAY_STEP)

                def longer(bound: float) -> float:
                    return steps["+Inf"] - steps[f"{bound:g}"]

                if longer(LONGEST_STEP * _SCALES[0]) <= strays:
                    return  # good enough for the fastest machine: no need to measure this one
                self.look_at_machine()
                bound = self._longest_step
                if longer(bound) > strays:
                    raise RelayFailed(
                        f"{longer(bound):.0f} steps kept the loop for more than {bound:g} s: {steps}"
                    )

    def steps(self) -> tuple[float, dict[str, float]]:
        """The number of looks at the loop, and the number of steps within each bound in processor seconds."""
        text = http_get(self.ready["metrics"])[2].decode()
        (looks,) = re.findall(r"^relayd_loop_lag_seconds_count (\S+)$", text, re.M) or ["0"]
        found = re.findall(r'^relayd_loop_step_seconds_bucket{le="(.*)"} (\S+)$', text, re.M)
        return float(looks), {bound: float(count) for bound, count in found}

    def logged(self, event: str) -> int:
        """How often the log has this event."""
        return self.log.read_text().count(f'"{event}"')

    def last_words(self, lines: int = 30) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return "(no log)"

    def complaints(self) -> list[str]:
        """Log lines of level error, and tracebacks: each is a bug of ours, or a fault that the test made."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return [line for line in lines if '"level":"error"' in line.replace(" ", "") or "Traceback" in line]


@contextlib.contextmanager
def frozen(relay: RelayProcess) -> Iterator[None]:
    """Suspend PostgreSQL: connections stay open and nothing answers."""
    server = relay.postgres()
    server.suspend()  # first, so that it starts no process that is not suspended
    processes = [server, *server.children(recursive=True)]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def _children(pid: int) -> list[psutil.Process]:
    """The children of a process; none if it has ended.

    Linux lists them by thread. psutil looks at every process of the machine, which takes milliseconds.
    """
    found: list[psutil.Process] = []
    if sys.platform != "linux":
        with contextlib.suppress(psutil.NoSuchProcess):
            found += psutil.Process(pid).children()
        return found
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            for child in listed.read_text().split():
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(int(child)))
    return found


def http_get(
    url: str, method: str = "GET", headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(url, method=method, headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, _lower(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _lower(error.headers), error.read()


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


class PostgresHost:
    """A PostgreSQL server in a separate process, for several relays to share."""

    def __init__(self, folder: Path) -> None:
        copy_of_empty(folder)
        self._process = ForkedProcess(
            RELAYD,
            [str(folder)],
            env=environment({}),
            module="tests.support.postgres_program",
            stdin=subprocess.PIPE,
            stderr=2,
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().decode().strip()
        assert self.url, "PostgreSQL did not start"

    def close(self) -> None:
        """Stop the server."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(STOP_TIMEOUT)
        self._process.stdout.close()


@contextlib.contextmanager
def running(relay: RelayProcess) -> Iterator[RelayProcess]:
    """A started relay, killed at the end, however the block ends."""
    try:
        yield relay.start()
        relay.check_loop()
    finally:
        if relay.process is not None:
            relay.kill()
