"""The folder that the processes of one relay share while it runs, gone when it ends.

Whoever is killed leaves its folder behind: the next relay of the same user removes it. A lock on a file in
it says that its owner lives, for the system gives locks back whatever ends a process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["shared_folder"]

_PREFIX: Final = "relayd-metrics-"
_OWNER: Final = "owner"


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A new folder for this process and its children, until the end of the block."""
    _remove_ownerless(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        # Locked before it has its name: nobody sees it without its lock.
        held = os.open(folder / "new", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            (folder / "new").rename(folder / _OWNER)
            yield folder
        finally:
            os.close(held)


def _remove_ownerless(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else's, or being removed by somebody else
            if folder.stat().st_uid != os.getuid() or folder.is_symlink():
                continue
            held = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(held)
