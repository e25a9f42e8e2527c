"""Free TCP ports, for servers whose port is known before they start, or that restart on the same one."""

from __future__ import annotations

import contextlib
import secrets
import socket

__all__ = ["free_port"]

_FIRST, _COUNT = 12_000, 20_000
"""Below the ports that the system assigns to connections, which may take a port that was just free."""


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens now."""
    while True:
        port = _FIRST + secrets.randbelow(_COUNT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
