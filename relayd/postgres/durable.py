"""Durability of files, across a power cut, that PostgreSQL does not write itself."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

__all__ = ["make_durable"]


def make_durable(*paths: Path) -> None:
    """Flush files, and the names in folders, to the disk, in this order.

    A path that this process may not open, or of a file system that does not support syncing it, is skipped.
    Raises `OSError` for every other failure.
    """
    for path in paths:
        with contextlib.suppress(PermissionError):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            finally:
                os.close(fd)
