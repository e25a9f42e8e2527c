"""The folder that the processes of one relay share while it runs; it is removed when the relay ends.

A relay that is killed leaves its folder behind, and the next relay of the same user removes it. A lock on a
file in the folder shows that its owner lives, because the system releases locks however a process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from relayd.left_folders import is_held, remove_left

__all__ = ["shared_folder"]

_PREFIX: Final = "relayd-metrics-"
_OWNER: Final = "owner"


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A new folder for this process and its children, until the end of the block."""
    remove_left(_PREFIX, lambda folder: not is_held(folder / _OWNER))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        # Locked before it has its final name, so that nobody sees the file without its lock.
        held = os.open(folder / "new", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            (folder / "new").rename(folder / _OWNER)
            yield folder
        finally:
            os.close(held)
