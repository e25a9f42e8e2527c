"""The number of files that this process may have open, including sockets."""

from __future__ import annotations

import resource
from typing import Final

__all__ = ["SPARE_FILES", "most_files", "room_for_sockets"]

SPARE_FILES: Final = 128
"""The files that a relay needs besides its connections: database, log, certificates, listening sockets."""


def most_files() -> int:
    """The highest limit on open files that this process may set for itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if hard == resource.RLIM_INFINITY else hard


def room_for_sockets(wanted: int, connections: int = 0) -> int:
    """Raise the limit of this process as far as allowed and needed for this many sockets, besides this many
    connections to the database. Returns the number of sockets that have room, at most `wanted`."""
    others = SPARE_FILES + connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + others
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = min(needed, most_files())
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - others))
