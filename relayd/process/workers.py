"""Several relay processes on one machine, sharing a port and a database (`--workers N`).

The parent owns what exists only once: the embedded database, the migration, the port number. It holds a
bound socket that never listens, so that a port chosen by the system stays chosen. Every worker binds the
same address with SO_REUSEPORT, and the kernel spreads connections over the workers. A worker that dies is
started again, and so is one whose event loop stands still: it is killed. Its clients reconnect to another
worker and resume by cursor; the other workers go on meanwhile.

Workers are renewed one at a time: the next one makes way when the previous one accepts connections again.
SIGUSR2 requests that, and so does a SIGHUP that finds changed settings which a running process cannot apply,
or another installed version of this program. A new worker imports the version installed at that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import uvloop

from relayd import failpoints, logs
from relayd.config import ConfigurationError, Settings, SettingSources, setting_table
from relayd.database import database
from relayd.exit_codes import EXIT_INCOMPLETE
from relayd.logs import get_logger
from relayd.metrics import SupervisorMetrics, forget_process, share_between_processes
from relayd.process.beside import beside
from relayd.process.listening import PortTaken
from relayd.process.neighbours import Neighbourhood
from relayd.process.relay_tasks import Post
from relayd.process.reloading import RELOAD_SECONDS, Reloads, Reread, read_again
from relayd.process.server import serve
from relayd.process.shared_folder import shared_folder
from relayd.process.signals import stop_on_signals, stop_seconds
from relayd.references import check_references
from relayd.store.types import StoreError
from relayd.tls import TlsError
from relayd.version import VERSION, installed_version

__all__ = ["supervise"]

_log = get_logger("relayd.workers")

_POLL_INTERVAL: Final = 0.1
_DATABASE_PAUSE: Final = 1.0
"""The time between two attempts to reach a database that is gone, in seconds."""
_RESTART_PAUSE: Final = 1.0
_CLOSING_SECONDS: Final = 30.0
"""How long a worker may take to close its database connections and end, once it has drained, in seconds."""
_DATABASE_SECONDS: Final = 4.0
"""What is left for ending the database when the workers must have ended."""
_LONGEST_BEAT: Final = 1.0
_PARENTS_OWN: Final = ("host", "port", "workers", "database_url", "data_dir", "log_format", "log_level")
"""Settings that the parent has already applied: only a restart of the whole relay changes them."""


async def supervise(settings: Settings, announce: Callable[[dict[str, str]], None]) -> None:
    """Run `settings.workers` processes until SIGTERM or SIGINT; return when all have drained.

    `announce` is called once, when all of them accept connections. Raises what `serve` raises if a worker
    cannot start at first.
    """
    with shared_folder() as folder, _reserved(settings) as port:
        # Only now: a look-up of the host's name may take long, and until here a signal ends the process.
        stop = stop_on_signals(stop_seconds(settings))
        share_between_processes(folder)
        neighbours = folder / "neighbours"
        neighbours.mkdir(mode=0o700)
        async with contextlib.AsyncExitStack() as stack:
            with stop.cancels():
                url = await stack.enter_async_context(database(settings, stop))
            count = settings.workers
            places = [Neighbourhood(neighbours, number, count) for number in range(count)]
            workers: list[_Worker] = []
            try:
                for place in places:
                    workers.append(_Worker(settings, url, port, place))  # noqa: PERF401 - begun ones must end
                crew = _Crew(workers, stop)
                addresses = await _ready(workers, stop)
                if addresses is None:
                    return
                announce(addresses)
                loop = asyncio.get_running_loop()
                loop.add_signal_handler(signal.SIGUSR2, crew.renewal.set)
                loop.add_signal_handler(signal.SIGHUP, Reloads(crew.reload).ask)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
                await crew.look_after()
            finally:
                _signal_all(workers, signal.SIGTERM)
                patience = stop.left() - _DATABASE_SECONDS
                await asyncio.gather(*(each.ended(min(each.patience, patience)) for each in workers))


async def _ready(workers: list[_Worker], stop: asyncio.Event) -> dict[str, str] | None:
    """Wait until all of them accept connections; return the addresses, or None if `stop` is set before.

    Raises the exception that kept a worker from starting.
    """

    async def start() -> dict[str, str]:  # one after the other: each wait occupies a thread
        addresses = [await worker.ready() for worker in workers]
        return addresses[0]

    starting = asyncio.create_task(start(), name="starting")
    waits: list[asyncio.Task[object]] = [starting, asyncio.create_task(stop.wait(), name="stop")]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return starting.result() if starting.done() else None
    finally:
        for wait in waits:
            wait.cancel()  # a thread that still waits for a worker ends when the worker does
        await asyncio.gather(*waits, return_exceptions=True)


@contextlib.contextmanager
def _reserved(settings: Settings) -> Iterator[int]:
    """Hold the port for the workers; yields its number."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind((settings.host, settings.port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise PortTaken(f"cannot listen on {settings.host}: {error.strerror}") from None
            raise PortTaken(
                f"port {settings.port} on {settings.host} is taken; choose another with --port"
            ) from None
        yield holder.getsockname()[1]


def _beat_interval(settings: Settings) -> float:
    """The time between two signs of life of a worker, in seconds."""
    return min(_LONGEST_BEAT, settings.worker_timeout / 4)


def _signal_all(workers: list[_Worker], number: signal.Signals) -> None:
    for worker in workers:
        worker.signal(number)


class _Crew:
    """All workers, looked after until `stop`: each by a separate task, so that none waits for another."""

    def __init__(self, workers: list[_Worker], stop: asyncio.Event) -> None:
        self._workers = workers
        self._stop = stop
        self._metrics = SupervisorMetrics()
        self._version = VERSION
        """The version of the workers, which may be later than the parent's."""
        self.renewal = asyncio.Event()
        """Setting this renews all workers, one at a time."""

    async def look_after(self) -> None:
        """Restart workers that have ended or hang, and renew them when requested, until `stop`."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._keep(worker), name="worker") for worker in self._workers]
            tasks.append(group.create_task(self._renew(), name="renewal"))
            await self._stop.wait()
            for task in tasks:
                task.cancel()

    async def _keep(self, worker: _Worker) -> None:
        while True:
            self._metrics.log_lines_dropped.inc(logs.dropped_lines())
            if not worker.is_alive():
                await self._start_again(worker)
            elif worker.silence() > worker.timeout and not worker.is_hung:
                silence = f"nothing heard of it for {worker.timeout:g} s"
                _log.error("worker_hung", pid=worker.pid, problem=silence)
                worker.is_hung = True
                worker.signal(signal.SIGKILL)
            due = time.monotonic() + _POLL_INTERVAL
            await asyncio.sleep(_POLL_INTERVAL)
            if time.monotonic() - due > worker.beat_interval:
                worker.excuse()  # this process stood still, and so may have the worker, with the machine

    async def _start_again(self, worker: _Worker) -> None:
        try:
            forget_process(worker.pid)
        except Exception as error:  # a killed process may have left anything in its files: the relay goes on
            _log.warning("metrics_not_added_up", problem=logs.problem_of(error))
        if worker.makes_way:
            self._metrics.restarts["renewed"].inc()
            _log.info("worker_renewed", pid=worker.pid)
        else:
            self._metrics.restarts["hung" if worker.is_hung else "died"].inc()
            _log.error("worker_died", pid=worker.pid, exit_code=worker.exit_code, problem=worker.problem())
            await asyncio.sleep(_RESTART_PAUSE)
        while True:
            try:
                worker.start(is_revived=True)
                return
            except OSError as error:  # no memory, process or file is available just now; the others go on
                _log.error("worker_not_started", problem=logs.problem_of(error))
            await asyncio.sleep(_RESTART_PAUSE)

    async def _renew(self) -> None:
        while True:
            await self.renewal.wait()
            self.renewal.clear()
            try:
                await beside(self._check, self._workers[0].settings, seconds=RELOAD_SECONDS)
            except Exception as error:  # such as one of a package being replaced: the present workers go on
                _log.error("not_renewed", problem=logs.problem_of(error))
                continue
            for worker in self._workers:
                if worker.is_alive():
                    worker.makes_way = True
                    worker.signal(signal.SIGUSR2)
                    await self._out_of_the_way(worker)
                while worker.makes_way or not worker.is_ready():  # noqa: ASYNC110 - it is another process
                    await asyncio.sleep(_POLL_INTERVAL)
            _log.info("workers_renewed", workers=len(self._workers))

    async def _out_of_the_way(self, worker: _Worker) -> None:
        """Wait until the worker has ended. It has left the port, so it must not stay forever."""
        pid, until = worker.pid, time.monotonic() + worker.patience
        while worker.pid == pid and worker.is_alive():
            if time.monotonic() > until:
                _log.error("worker_killed", pid=pid, problem=f"it has not ended in {worker.patience:g} s")
                worker.signal(signal.SIGKILL)
                return
            await asyncio.sleep(_POLL_INTERVAL)

    def _check(self, settings: Settings) -> None:
        """Check whether workers could begin with these settings: a worker that made way for one that cannot
        would be missing until an operator looks. Raises `ConfigurationError`. For another version, only that
        version knows."""
        if installed_version() == VERSION:
            check_references(settings)

    async def reload(self) -> None:
        """SIGHUP: have every worker reload, once everything has been read and checked.

        A worker that is started later begins with the new settings.
        """
        try:
            reread, waiting = await beside(self._read_again, seconds=RELOAD_SECONDS)
        except (TlsError, ConfigurationError) as error:
            _log.error("not_reloaded", problem=logs.problem_of(error))
            return
        settings = reread.settings
        if waiting:
            settings = dataclasses.replace(
                settings, **{name: getattr(reread.changes.fresh, name) for name in sorted(waiting)}
            )
        for worker in self._workers:
            worker.settings = settings
        # A renewal takes time, and the workers whose turn is last must not serve those who are blocked until
        # then. The workers also log what has changed, and what waits for a restart of the whole relay.
        _signal_all(self._workers, signal.SIGHUP)
        installed = await beside(installed_version)
        if waiting or installed != self._version:
            self._version = installed
            _log.info("workers_make_way", version=installed, settings=sorted(waiting))
            self.renewal.set()

    def _read_again(self) -> tuple[Reread, set[str]]:
        reread = read_again(self._workers[0].settings)
        waiting = set(reread.changes.restart_needed) - set(_PARENTS_OWN)
        if waiting and reread.changes.fresh is not None:
            self._check(reread.changes.fresh)
        return reread, waiting


class _Worker:
    """One child process, which may be started again."""

    def __init__(self, settings: Settings, database_url: str, port: int, place: Neighbourhood) -> None:
        self.settings = settings
        """The settings for the next start of the process."""
        self._database_url = database_url
        self._port = port
        self._place = place
        self.start()

    def start(self, *, is_revived: bool = False) -> None:
        """Start the process. A revived one waits for a database that is away, because it was there before.

        Raises `OSError` if the system has no room for another process; the previous one counts then.
        """
        context = multiprocessing.get_context("spawn")
        self.makes_way = self.is_hung = self._is_ready = False
        self._heard_at = time.monotonic()
        self._said: Exception | None = None
        """Why it ends, if it has reported that; ending may take it a while."""
        # As of the settings it begins with: a reload changes the settings of its successor only.
        self.timeout, self.beat_interval = self.settings.worker_timeout, _beat_interval(self.settings)
        self.patience = self.settings.drain_spread + self.settings.drain_timeout + _CLOSING_SECONDS
        """How long this process may take to end once it is asked to, in seconds."""
        self._pipe, theirs = context.Pipe(duplex=False)
        # By name: the program that a new worker imports may have other settings than this one.
        values = {row: getattr(self.settings, row) for row in setting_table()}
        origin = None if self.settings.origin is None else tuple(self.settings.origin)
        process: BaseProcess = context.Process(
            target=_work,
            args=(values, origin, self._database_url, self._port, theirs, is_revived, self._place),
            name="relayd-worker",
        )
        # The process inherits that SIGHUP is blocked until it can handle it, see `server`.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._process = process

    async def ready(self) -> dict[str, str]:
        """Wait until the worker accepts connections; raise the exception that kept it from starting."""
        said = await asyncio.to_thread(self._receive)
        if isinstance(said, dict):
            self._is_ready = True
            return said
        raise said

    def _receive(self) -> dict[str, str] | Exception:
        said: dict[str, str] | Exception | None = None
        try:
            while said is None:  # a sign of life carries nothing else
                said = self._take()
        except EOFError:
            return StoreError("a worker process ended while starting")
        return said

    def _take(self) -> dict[str, str] | Exception | None:
        """Wait for the worker's next message. Raises `EOFError` and `OSError` if the worker is gone."""
        try:
            said: dict[str, str] | Exception | None = self._pipe.recv()
        except (EOFError, OSError):
            raise
        except Exception as error:  # from a worker of another release: its classes may need anything
            return StoreError(f"a worker ended, and its reason cannot be read here: {logs.problem_of(error)}")
        return said

    def problem(self) -> str | None:
        """The reason that a worker reported for its end."""
        self._listen()
        return None if self._said is None else str(self._said)

    def silence(self) -> float:
        """Seconds since its event loop gave a sign of life; 0 while it is being started."""
        self._listen()
        return time.monotonic() - self._heard_at if self._is_ready else 0.0

    def excuse(self) -> None:
        """Count its silence from now on."""
        self._heard_at = time.monotonic()

    def is_ready(self) -> bool:
        """Whether it accepts connections."""
        self._listen()
        return self._is_ready and self.is_alive()

    def _listen(self) -> None:
        """Take in what the worker has reported meanwhile."""
        with contextlib.suppress(EOFError, OSError):
            while self._pipe.poll():
                said = self._take()
                self._heard_at = time.monotonic()
                if isinstance(said, dict):
                    self._is_ready = True
                elif isinstance(said, Exception):
                    self._said = said

    async def ended(self, patience: float) -> None:
        """Wait until the process has ended; kill it after `patience` seconds."""
        await asyncio.to_thread(self._process.join, patience)
        if self._process.is_alive():
            _log.error("worker_killed", pid=self.pid, problem=f"it has not ended in {patience:g} s")
            self._process.kill()
            await asyncio.to_thread(self._process.join)

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def signal(self, number: signal.Signals) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode


def _work(
    values: dict[str, Any],
    origin: tuple[Path | None, Mapping[str, str], Mapping[str, object]] | None,
    database_url: str,
    port: int,
    pipe: Pipe,
    is_revived: bool,
    place: Neighbourhood | None = None,
) -> None:
    """The child process. Arguments that a parent of an earlier release does not pass have a default."""
    known = {name: value for name, value in values.items() if name in setting_table()}
    settings = Settings(**known, origin=None if origin is None else SettingSources(*origin))
    logs.configure(settings.log_format, settings.log_level)
    if failpoints.ARMED:
        failpoints.hit("workers.start")
    os.set_blocking(pipe.fileno(), False)  # a parent that stands still must not hold this process up
    # Ctrl-C reaches the whole process group; the parent passes the stop on, once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    seconds = stop_seconds(settings) - _DATABASE_SECONDS

    async def main() -> None:
        async with (
            _parent_watched(stop_on_signals(seconds, signal.SIGTERM)) as stop,
            _beating(pipe, _beat_interval(settings)),
        ):
            way = asyncio.Event()

            def make_way() -> None:
                way.set()
                stop.set()

            def announce(addresses: dict[str, str]) -> None:
                try:
                    pipe.send(addresses)
                except OSError:  # the parent is gone
                    stop.set()

            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, make_way)
            while not stop.is_set():
                try:
                    await serve(
                        settings,
                        database_url,
                        announce=announce,
                        stop=stop,
                        post=Post(port, way.is_set, place),
                    )
                    return
                except StoreError as error:
                    if not is_revived:
                        raise
                    _log.warning("worker_waits", problem=logs.problem_of(error))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_DATABASE_PAUSE):
                        await stop.wait()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except (StoreError, PortTaken, TlsError, ConfigurationError) as error:
        with contextlib.suppress(OSError):  # the parent is gone
            pipe.send(error)
    except Exception:  # our bug; the interpreter's own traceback would wait for the log's reader
        _log.exception("crashed")
        raise SystemExit(EXIT_INCOMPLETE) from None


@contextlib.asynccontextmanager
async def _beating(pipe: Pipe, interval: float) -> AsyncIterator[None]:
    """Give the parent a sign of life from the event loop at each interval."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(interval)
            with contextlib.suppress(OSError):  # the parent is gone, or does not read: others notice that
                pipe.send(None)

    task = asyncio.create_task(beat(), name="beat")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def _parent_watched(stop: asyncio.Event) -> AsyncIterator[asyncio.Event]:
    """Stop when the parent is gone: a worker without its supervisor would hold the port forever."""
    parent = multiprocessing.parent_process()

    async def watch() -> None:
        # Not by `os.getppid` at the start: the parent may have ended while this process was starting.
        while parent is None or os.getppid() == parent.pid:  # noqa: ASYNC110 - no event reports its end
            await asyncio.sleep(_POLL_INTERVAL * 5)
        stop.set()

    task = asyncio.create_task(watch(), name="parent-watch")
    try:
        yield stop
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
