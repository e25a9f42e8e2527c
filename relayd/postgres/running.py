"""Access to the embedded PostgreSQL server of a running relay, for commands beside it."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from relayd.postgres.process import is_postgres

__all__ = ["fits_url", "running_server", "url_of"]

_MAX_SOCKET_BYTES = 100
_UNFIT = re.compile("[,\udc80-\udcff]")
"""A comma, at which drivers split hosts, and bytes that are not UTF-8."""
_USER = "relayd"


def fits_url(folder: Path, port: int) -> bool:
    """Whether a URL can name the socket in this folder. Clients connect through a link to it otherwise."""
    path = folder / f".s.PGSQL.{port}"
    return len(os.fsencode(path)) <= _MAX_SOCKET_BYTES and _UNFIT.search(str(path)) is None


def url_of(folder: Path, port: int) -> str:
    """The URL of the server whose socket is in this folder, which `fits_url`."""
    return f"postgresql://{_USER}@/{_USER}?host={quote(str(folder))}&port={port}"


@contextlib.contextmanager
def running_server(data_dir: Path) -> Iterator[str | None]:
    """The URL of the server that runs on this folder now; None if there is none or it is not ready.

    Only root and the server's own user can read the folder; nobody else learns of a server.
    """
    cluster = _cluster(data_dir)
    if cluster is None:
        yield None
        return
    folder, port = cluster
    with contextlib.ExitStack() as stack:
        if not fits_url(folder, port):
            link = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relayd-"))) / "pg"
            link.symlink_to(folder)
            folder = link
        yield url_of(folder, port)


def _cluster(data_dir: Path) -> tuple[Path, int] | None:
    """The folder and the port of the server, if one runs and is ready."""
    for pid_file in data_dir.resolve().glob("postgres-*/postmaster.pid"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = pid_file.read_text().split("\n")
            if is_postgres(int(lines[0]), pid_file.parent) and lines[7].strip() == "ready":
                return pid_file.parent, int(lines[3])
    return None
