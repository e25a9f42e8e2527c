"""Several relay processes on one machine, sharing a port and a database (`--workers N`).

The parent owns the things of which there is one: the embedded database, the migration, the port number. It
holds a bound socket that never listens, so that a port chosen by the system stays chosen; every worker binds
the same address with SO_REUSEPORT and the kernel spreads connections over them. A worker that dies is started
again: its clients reconnect to another and resume by cursor.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

import structlog
import uvloop

from relayd import failpoints, logs, server
from relayd.config import ConfigurationError, Settings
from relayd.metrics import forget_process, share_between_processes
from relayd.reloading import read_again
from relayd.store.types import StoreError
from relayd.tls import TlsError

__all__ = ["supervise"]

_log = structlog.get_logger("relayd.workers")

_POLL_INTERVAL: Final = 0.1
_DATABASE_PAUSE: Final = 1.0
"""Between two attempts to reach a database that has gone, in seconds."""
_RESTART_PAUSE: Final = 1.0
_CLOSING_SECONDS: Final = 30.0
"""What a worker may take to close its database connections and to end, once it has drained."""


async def supervise(settings: Settings, announce: Callable[[dict[str, str]], None]) -> None:
    """Run `settings.workers` processes until SIGTERM or SIGINT; return when all have drained.

    `announce` is called once, when all of them accept connections. Raises what `serve` raises when one
    cannot start at first.
    """
    stop = server.stop_on_signals()
    with tempfile.TemporaryDirectory(prefix="relayd-metrics-") as folder, _reserved(settings) as port:
        share_between_processes(Path(folder))
        async with server.database(settings, stop) as url:
            workers = [_Worker(settings, url, port) for _ in range(settings.workers)]
            try:
                addresses = [await worker.ready() for worker in workers]
                announce(addresses[0])
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload, workers)
                while not stop.is_set():
                    await _revive(workers)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(stop.wait(), _POLL_INTERVAL)
            finally:
                _signal_all(workers, signal.SIGTERM)
                patience = settings.drain_timeout + _CLOSING_SECONDS
                await asyncio.gather(*(worker.ended(patience) for worker in workers))


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
                raise server.PortTaken(f"cannot listen on {settings.host}: {error.strerror}") from None
            raise server.PortTaken(
                f"port {settings.port} on {settings.host} is taken; choose another with --port"
            ) from None
        yield holder.getsockname()[1]


def _reload(workers: list[_Worker]) -> None:
    """SIGHUP: tell every worker to reload, once everything has been read and checked.

    A worker that is started later begins with the settings of now.
    """
    try:
        settings = read_again(workers[0].settings).settings
    except (TlsError, ConfigurationError) as error:
        _log.error("not_reloaded", problem=logs.problem_of(error))
        return
    for worker in workers:
        worker.settings = settings
    _signal_all(workers, signal.SIGHUP)


def _signal_all(workers: list[_Worker], number: signal.Signals) -> None:
    for worker in workers:
        worker.signal(number)


async def _revive(workers: list[_Worker]) -> None:
    for worker in workers:
        if not worker.is_alive():
            _log.error("worker_died", pid=worker.pid, exit_code=worker.exit_code, problem=worker.problem())
            forget_process(worker.pid)
            await asyncio.sleep(_RESTART_PAUSE)
            worker.start(is_revived=True)


class _Worker:
    """One child process, which may be started again."""

    def __init__(self, settings: Settings, database_url: str, port: int) -> None:
        self.settings = settings
        """The settings for the next start of the process."""
        self._database_url = database_url
        self._port = port
        self.start()

    def start(self, *, is_revived: bool = False) -> None:
        """Start the process. One that is revived waits for a database that is away: it has been there."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe(duplex=False)
        self._process: BaseProcess = context.Process(
            target=_work,
            args=(self.settings, self._database_url, self._port, theirs, is_revived),
            name="relayd-worker",
        )
        # It inherits that SIGHUP waits until it knows what to do with it, see `server`.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        theirs.close()

    async def ready(self) -> dict[str, str]:
        """Wait until the worker accepts connections; raises the exception that kept it from starting."""
        said = await asyncio.to_thread(self._receive)
        if isinstance(said, dict):
            return said
        raise said

    def _receive(self) -> dict[str, str] | Exception:
        try:
            said: dict[str, str] | Exception = self._pipe.recv()
        except EOFError:
            return StoreError("a worker process ended while starting")
        return said

    def problem(self) -> str | None:
        """What a worker that has ended said of the reason."""
        said: dict[str, str] | Exception | None = None
        with contextlib.suppress(EOFError, OSError):
            while self._pipe.poll():
                said = self._pipe.recv()
        return str(said) if isinstance(said, Exception) else None

    async def ended(self, patience: float) -> None:
        """Wait until the process has ended; after `patience` seconds it is killed."""
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


def _work(settings: Settings, database_url: str, port: int, pipe: Pipe, is_revived: bool) -> None:
    """The child process."""
    logs.configure(settings.log_format, settings.log_level)
    if failpoints.ARMED:
        failpoints.hit("workers.start")
    # Ctrl-C reaches the whole process group; the parent passes the stop on, once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def main() -> None:
        async with _parent_watched(server.stop_on_signals(signal.SIGTERM)) as stop:

            def announce(addresses: dict[str, str]) -> None:
                try:
                    pipe.send(addresses)
                except OSError:  # the parent has gone
                    stop.set()

            while not stop.is_set():
                try:
                    await server.serve(settings, database_url, announce=announce, stop=stop, shared_port=port)
                    return
                except StoreError as error:
                    if not is_revived:
                        raise
                    _log.warning("worker_waits", problem=logs.problem_of(error))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), _DATABASE_PAUSE)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except (StoreError, server.PortTaken, TlsError, ConfigurationError) as error:
        with contextlib.suppress(OSError):  # the parent has gone
            pipe.send(error)


@contextlib.asynccontextmanager
async def _parent_watched(stop: asyncio.Event) -> AsyncIterator[asyncio.Event]:
    """Stop when the parent is gone: a worker without its supervisor would hold the port for ever."""
    parent = multiprocessing.parent_process()

    async def watch() -> None:
        # Not by `os.getppid` at the start: the parent may have gone while this process was being started.
        while parent is None or os.getppid() == parent.pid:  # noqa: ASYNC110 - nothing tells a process that its parent has gone
            await asyncio.sleep(_POLL_INTERVAL * 5)
        stop.set()

    task = asyncio.create_task(watch(), name="parent-watch")
    try:
        yield stop
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
