"""SIGHUP: read again what may change while the relay runs, and change either everything or nothing.

Everything is read and checked first, beside the loop. It is then applied by assignments, which cannot fail.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from relayd import failpoints
from relayd.config import ConfigurationError, Reloaded, Settings, read_only_once, reloaded
from relayd.logs import get_logger, problem_of
from relayd.metrics import Metrics
from relayd.process.beside import beside
from relayd.tls import ServerTls, TlsError, ends_at, read_tls_files, tls_files

__all__ = ["RELOAD_SECONDS", "CurrentSettings", "Reloads", "Reread", "read_again", "report"]

_log = get_logger("relayd.reloading")

RELOAD_SECONDS: Final = 10.0
"""How long reading may take; then nothing changes."""


@dataclass(frozen=True, slots=True)
class Reread:
    """Settings and certificate, read again and found usable."""

    settings: Settings
    tls: ssl.SSLContext | None
    """The TLS context for new handshakes; None without TLS."""
    tls_ends_at: float
    """When the certificate ends, in Unix seconds; 0 without TLS."""
    changes: Reloaded


class Reloads:
    """Runs `reload` when asked, once at a time: what is asked for meanwhile is done afterwards."""

    def __init__(self, reload: Callable[[], Awaitable[None]]) -> None:
        self._reload = reload
        self._is_due = False
        self._task: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Reload soon. For the handler of a signal."""
        self._is_due = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="reload")

    async def _run(self) -> None:
        while self._is_due:
            self._is_due = False
            await self._reload()


class CurrentSettings:
    """The current settings of a process that may begin anew: a reload counts even while nothing is served."""

    def __init__(self, settings: Settings, tls: ServerTls | None, metrics: Metrics) -> None:
        self.settings = settings
        self.take_over: Callable[[Settings], None] = lambda settings: None
        """Applies settings to what is served."""
        self.reloads = Reloads(self._reload)
        self._tls = tls
        self._metrics = metrics

    async def _reload(self) -> None:
        """Apply the settings and certificates as they are now; if there is one fault, nothing changes."""
        try:
            if failpoints.ARMED:
                await failpoints.reached("server.reload")
            reread = await beside(read_again, self.settings, seconds=RELOAD_SECONDS)
        except (TlsError, ConfigurationError) as error:
            _log.error("not_reloaded", problem=problem_of(error))
            return
        if self._tls is not None and reread.tls is not None:
            self._tls.renew(reread.tls)
            self._metrics.tls_not_after.set(reread.tls_ends_at)
        self.settings = reread.settings
        self.take_over(reread.settings)
        report(reread)


def read_again(running: Settings) -> Reread:
    """Read the settings again, and the certificate files that they now name.

    Raises `ConfigurationError` and `TlsError`.
    """
    changes = reloaded(running)
    settings = changes.settings
    files = tls_files(settings)
    if files is None:
        return Reread(settings, None, 0.0, changes)
    for path in (files.cert, files.key):
        if problem := read_only_once(path):
            raise TlsError(problem)
    return Reread(settings, read_tls_files(files.cert, files.key), ends_at(files), changes)


def report(reread: Reread) -> None:
    """Log the names of settings that have changed or need a restart; never a value, which may be a secret."""
    changes = reread.changes
    _log.info("reloaded", changed=list(changes.changed))
    if changes.restart_needed:
        _log.warning("restart_needed", settings=list(changes.restart_needed))
    for warning in reread.settings.warnings:
        _log.warning("setting", problem=warning)
