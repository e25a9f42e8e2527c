"""The process of the embedded server, and the thread that it depends on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from relayd.logs import get_logger

__all__ = ["ServerProcess", "is_postgres"]

_log = get_logger("relayd.postgres")

_FAST_SECONDS: Final = 60.0
_AT_ONCE_SECONDS: Final = 2.0
_KILL_SECONDS: Final = 1.0
_LINUX: bool = sys.platform == "linux"
_RECOVERS = "postgres: startup"
_WRITES = "postgres: walwriter"


class ServerProcess:
    """The server's process and the thread that started it and waits for it.

    For the kernel, "parent death" means the death of the thread that forked, so that thread must live as long
    as the server; it does nothing else.
    """

    def __init__(self) -> None:
        self.exited = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def start(self, command: list[str], log: Path, fds: tuple[int, ...]) -> None:
        """Start the process. Raises `OSError` if the launcher itself cannot run."""
        started: list[Exception | None] = []
        ready = threading.Event()

        def keep() -> None:
            try:
                read_fd, write_fd = os.pipe()
                try:
                    with log.open("ab") as output:
                        # A separate session, so that we decide what a Ctrl-C in the terminal means.
                        process = subprocess.Popen(
                            command,
                            stdin=read_fd,
                            stdout=output,
                            stderr=output,
                            pass_fds=fds,
                            start_new_session=True,
                        )
                except BaseException:
                    os.close(write_fd)
                    raise
                finally:
                    os.close(read_fd)
            except Exception as error:  # whatever it is, the loop is waiting for the outcome
                started.append(error)
                ready.set()
                return
            self._process = process
            started.append(None)
            ready.set()
            process.wait()
            os.close(write_fd)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.exited.set)

        threading.Thread(target=keep, name="embedded-postgres", daemon=True).start()
        ready.wait()
        if started[0] is not None:
            raise started[0]

    def has_given_up(self) -> bool:
        """Whether the server runs without the process that would recover it, or write its log.

        PostgreSQL 18 stays in this state, and refuses everybody permanently, after a recovery that failed to
        sync. Only Linux shows this; elsewhere the result is False.
        """
        titles = self._children()
        return titles is not None and not any(title.startswith((_RECOVERS, _WRITES)) for title in titles)

    def _is_at_work(self) -> bool:
        """Whether the server has recovered and writes its log; True if that cannot be determined."""
        titles = self._children()
        return titles is None or (
            any(title.startswith(_WRITES) for title in titles)
            and not any(title.startswith(_RECOVERS) for title in titles)
        )

    def _children(self) -> list[str] | None:
        """The titles of the server's processes; None if they cannot be read, as on any system but Linux."""
        try:
            return [Path(f"/proc/{child}/cmdline").read_text() for child in self._child_pids()]
        except OSError:
            return None

    def _child_pids(self) -> list[int]:
        """Raises `OSError` if they cannot be read, as on any system but Linux."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    async def stop(self, left: Callable[[], float] = lambda: float("inf")) -> None:
        """Fast shutdown; immediate shutdown after a minute (the log is replayed at the next start), or before
        the time that is `left` ends. A server that does not answer to that either is killed.

        For a server that is recovering or has given up, the shutdown is immediate at once: PostgreSQL 18
        ignores a fast shutdown then, and has nothing in memory that the log lacks.
        """
        if self.is_alive() and self._is_at_work():
            await self._end(signal.SIGINT, min(_FAST_SECONDS, left() - _AT_ONCE_SECONDS - _KILL_SECONDS))
        if self.is_alive():
            await self._end(signal.SIGQUIT, _AT_ONCE_SECONDS)
        if self.is_alive():
            _log.warning("embedded_postgres_killed", problem="it did not shut down in time")
            children = []
            with contextlib.suppress(OSError):
                children = self._child_pids()
            await self._end(signal.SIGKILL, 5.0)
            for child in children:  # stopped ones would not notice that, and keep the next server away
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)

    async def _end(self, sign: signal.Signals, patience: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, sign)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self.exited.wait()


def is_postgres(pid: int, folder: Path) -> bool:
    """Whether a live process belongs to a PostgreSQL server on this folder, as far as the system shows."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # a stale file may have a number that no process can have
        return False
    except PermissionError:
        pass
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "postgres" and _is_at_home(pid, folder)
    except OSError:
        if _LINUX:
            return False
    answer = subprocess.run(
        ["ps", "-o", "comm=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return "postgres" in answer.stdout


def _is_at_home(pid: int, folder: Path) -> bool:
    """Whether a PostgreSQL process belongs to the server on this folder: all of them have it as their `cwd`.

    Its number may have been reused by another server's process. Raises `OSError`.
    """
    try:
        return os.path.samefile(f"/proc/{pid}/cwd", folder)
    except (PermissionError, FileNotFoundError):
        # Another user's process, or root may not look, as in most containers; or an ended, unreaped process.
        return os.stat(f"/proc/{pid}").st_uid == folder.stat().st_uid
