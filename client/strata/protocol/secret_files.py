"""Files that hold a secret: written for their owner alone, and read only if nobody else can read them."""

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
    """Other users can read the file; the message says what to do."""


def write_secret(path: str | os.PathLike[str], members: Mapping[str, str]) -> None:
    """Write a JSON object to a new file that only its owner can read.

    The file is there after a power cut, as far as the file system can promise that. Raises `FileExistsError`
    rather than replace a secret, and `OSError` as the file system does.
    """
    body = json.dumps(members, indent=2) + "\n"
    # The mode is given at creation: before a later chmod, others could open the file.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(path)  # half a secret must not block a whole one
        raise
    if os.name == "posix":  # the file is durable, and its name is once the folder is
        with contextlib.suppress(OSError):  # a folder that nobody may list, or of a system that syncs none
            folder = os.open(Path(path).parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """What a file of `write_secret` holds, at most 4096 bytes of it.

    Raises `SharedSecret` if others can read the file, and `OSError` as the file system does.
    """
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise SharedSecret(f"{Path(path)} can be read by others; run: chmod 600 {Path(path)}")
        return file.read(_MAX_BYTES)
