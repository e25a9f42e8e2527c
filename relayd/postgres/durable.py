"""What has to be there after a power cut, beside what PostgreSQL itself writes."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

__all__ = ["make_durable"]


def make_durable(*paths: Path) -> None:
    """Have files, and the names in folders, on the disk, in this order.

    A folder that this process may not list, or of a file system that syncs none, is left as it is. Raises
    `OSError` for everything else.
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
