"""What a folder takes on its disk, now and at most while something runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Peak", "taken", "watched"]

_LOOK_SECONDS = 1.0
_BLOCK = 512
"""In such units a file tells what it has on the disk, whatever the blocks of the disk are."""


@dataclass(slots=True)
class Peak:
    """The most that was seen, in bytes."""

    taken: int = 0


@contextmanager
def watched(folder: Path) -> Iterator[Peak]:
    """Look at a folder once a second while the block runs, and as it begins and ends."""
    peak, done = Peak(taken(folder)), threading.Event()
    watcher = threading.Thread(target=_watch, args=(folder, done, peak))
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
        peak.taken = max(peak.taken, taken(folder))


def _watch(folder: Path, done: threading.Event, peak: Peak) -> None:
    while not done.wait(_LOOK_SECONDS):
        peak.taken = max(peak.taken, taken(folder))


def taken(folder: Path) -> int:
    """What the files of a folder have on the disk, in bytes; vanished ones count for nothing."""
    return sum(_taken(Path(at, name)) for at, _, names in os.walk(folder) for name in names)


def _taken(path: Path) -> int:
    try:
        return path.lstat().st_blocks * _BLOCK
    except OSError:
        return 0
