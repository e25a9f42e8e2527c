"""A wall clock that can be stepped, for Python processes that are started with its `environ`."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Self

__all__ = ["SteppedClock"]

# Python imports a module of this name before any of ours, in each process and its workers.
_SITECUSTOMIZE = """
import mmap, os, struct, time
_fd = os.open(os.environ["STEPPED_CLOCK"], os.O_RDONLY)
_page = mmap.mmap(_fd, 8, prot=mmap.PROT_READ)
os.close(_fd)
_true, _true_ns = time.time, time.time_ns
def _offset():
    return struct.unpack("=d", _page[:8])[0]
time.time = lambda: _true() + _offset()
time.time_ns = lambda: _true_ns() + int(_offset() * 1e9)
"""


class SteppedClock:
    """The clock of a relay: the true one, plus `step` seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        (self._folder / "sitecustomize.py").write_text(_SITECUSTOMIZE)
        page = self._folder / "offset"
        page.write_bytes(bytes(8))
        fd = os.open(page, os.O_RDWR)
        self._page = mmap.mmap(fd, 8)
        os.close(fd)
        self.environ = {"STEPPED_CLOCK": str(page)}
        self.python_path = str(self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        self._page.close()

    def step(self, seconds: float) -> None:
        """Set the clock this far from the true one; 0 corrects it."""
        self._page[:] = struct.pack("=d", seconds)
