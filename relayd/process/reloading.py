"""SIGHUP: read again what may change while the relay runs, and change either everything or nothing.

Everything is read and checked here first. It is then applied by assignments, which cannot fail.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from relayd.config import Reloaded, Settings, reloaded
from relayd.logs import get_logger
from relayd.tls import ends_at, read_tls_files, tls_files

__all__ = ["Reread", "read_again", "report"]

_log = get_logger("relayd.reloading")


@dataclass(frozen=True, slots=True)
class Reread:
    """Settings and certificate, read again and found usable."""

    settings: Settings
    tls: ssl.SSLContext | None
    """The TLS context for new handshakes; None without TLS."""
    tls_ends_at: float
    """When the certificate ends, in Unix seconds; 0 without TLS."""
    changes: Reloaded


def read_again(running: Settings) -> Reread:
    """Read the settings again, and the certificate files that they now name.

    Raises `ConfigurationError` and `TlsError`.
    """
    changes = reloaded(running)
    settings = changes.settings
    files = tls_files(settings)
    tls = None if files is None else read_tls_files(files.cert, files.key)
    return Reread(settings, tls, ends_at(files), changes)


def report(reread: Reread) -> None:
    """Log the names of settings that have changed or need a restart; never a value, which may be a secret."""
    changes = reread.changes
    _log.info("reloaded", changed=list(changes.changed))
    if changes.restart_needed:
        _log.warning("restart_needed", settings=list(changes.restart_needed))
    for warning in reread.settings.warnings:
        _log.warning("setting", problem=warning)
