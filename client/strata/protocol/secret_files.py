"""Files that hold a secret: readable only by their owner when written, and refused on reading otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from strata.protocol.errors import StrataError

__all__ = ["SharedSecret", "read_secret", "write_secret"]

_MAX_BYTES = 4096


class SharedSecret(StrataError):
    """Other users can read the file; the message says how to fix that."""


def write_secret(path: str | os.PathLike[str], members: Mapping[str, str]) -> None:
    """Write a JSON object to a new file that only its owner can read.

    The file survives a power failure, as far as the file system can guarantee that. Raises `FileExistsError`
    rather than replace a secret, and `OSError` if the file system does.
    """
    body = json.dumps(members, indent=2) + "\n"
    # The mode is set at creation: until a later chmod, others could open the file.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(path)  # a partial file must not block the next attempt
        raise
    if os.name == "posix":  # the file's content is durable; its name is too after the folder is synced
        with contextlib.suppress(OSError):  # the folder may be unreadable, or not syncable
            folder = os.open(Path(path).parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """The content of a file of `write_secret`, at most 4096 bytes.

    Raises `SharedSecret` if the file's mode gives other users any access, and `OSError` if the file system
    does.
    """
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise SharedSecret(f"{Path(path)} can be read by others; run: chmod 600 {Path(path)}")
        return file.read(_MAX_BYTES)
