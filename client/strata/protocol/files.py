"""Replacing a file as a whole."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: Path, body: bytes, *, mode: int | None = None) -> None:
    """Replace a file atomically and durably: at every moment the path names the whole old or new file.

    The new file is written beside the old one, flushed to disk and renamed over it. A symbolic link stays,
    and leads to the new file. Without `mode`, the new file has that of the old one. Raises `OSError`.
    """
    path = Path(os.path.realpath(path))
    beside = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.new")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666 if mode is None else mode)
        with open(descriptor, "wb") as file:
            if mode is None and path.exists():
                os.chmod(beside, stat.S_IMODE(path.stat().st_mode))
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
