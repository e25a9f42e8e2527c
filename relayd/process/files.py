"""How many files this process may have open, sockets among them."""

from __future__ import annotations

import resource
from typing import Final

__all__ = ["SPARE_FILES", "most_files", "room_for_sockets"]

SPARE_FILES: Final = 128
"""Open files a relay needs besides its connections: database, log, certificates, listening sockets."""


def most_files() -> int:
    """How many files this process may allow itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if hard == resource.RLIM_INFINITY else hard


def room_for_sockets(wanted: int, connections: int = 0) -> int:
    """Raise the limit of this process as far as it may, and as far as is needed for so many sockets beside
    so many connections to the database; the number of sockets that have room, `wanted` at most."""
    others = SPARE_FILES + connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + others
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = min(needed, most_files())
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - others))
