"""The disk space of a folder, now and at most while something runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benches.looks import looks

__all__ = ["Peak", "taken", "watched"]

_LOOK_SECONDS = 1.0
_BLOCK = 512
"""The unit of `st_blocks`, in bytes, whatever the block size of the disk is."""


@dataclass(slots=True)
class Peak:
    """The largest size seen, in bytes."""

    taken: int = 0


@contextmanager
def watched(folder: Path) -> Iterator[Peak]:
    """Measure a folder once a second while the block runs, and at its beginning and end."""
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
    for _ in looks(done, _LOOK_SECONDS):
        peak.taken = max(peak.taken, taken(folder))


def taken(folder: Path) -> int:
    """The disk space of the files of a folder, in bytes; vanished files do not count."""
    return sum(_taken(Path(at, name)) for at, _, names in os.walk(folder) for name in names)


def _taken(path: Path) -> int:
    try:
        return path.lstat().st_blocks * _BLOCK
    except OSError:
        return 0
