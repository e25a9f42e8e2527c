"""Replacing a file as a whole."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: Path, body: bytes, *, mode: int = 0o666) -> None:
    """Replace a file atomically and durably: at every moment the path names the whole old or new file.

    The new file is written beside the old one, flushed to disk and renamed over it. Raises `OSError`.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the rename is durable once the folder is flushed
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
