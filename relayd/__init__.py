"""relayd: a WebSocket relay daemon for Strata RFC-0004 on PostgreSQL."""

from __future__ import annotations

import contextlib
import sys

_UNUSED = ("rich", "greenlet", "twisted")
"""What structlog loads where it is installed: a quarter of a start, for tracebacks in colour that show the
values of variables, and for other kinds of threads."""


def _load_structlog() -> None:
    hidden = [name for name in _UNUSED if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it fails, which structlog allows for
    try:
        with contextlib.suppress(ImportError):  # of whoever has the client library alone
            import structlog  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]


_load_structlog()
