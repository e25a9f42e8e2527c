"""A disk that can be full, slow, or fail to sync, for the processes into which it is preloaded."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Self

__all__ = ["FaultyDisk"]

_SOURCE = Path(__file__).with_name("disk_faults.c")


class FaultyDisk:
    """The present state of the disk. `environ` is what a process needs to get its faults.

    Raises RuntimeError if there is no C compiler, or if it fails.
    """

    def __enter__(self) -> Self:
        # Not below the tests' folder, which only its owner can read: PostgreSQL may run as another user.
        self._folder = Path(tempfile.mkdtemp(prefix="relayd-disk-"))
        self._folder.chmod(0o755)
        library, page = self._folder / "disk_faults.so", self._folder / "page"
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise RuntimeError("faults of the disk need a C compiler: install gcc")
        command = [compiler, "-shared", "-fPIC", "-O2", "-w", str(_SOURCE), "-o", str(library), "-ldl"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            raise RuntimeError(f"the compiler failed: {made.stderr.strip()}")
        page.write_bytes(bytes(4096))
        page.chmod(0o666)
        fd = os.open(page, os.O_RDWR)
        self._page = mmap.mmap(fd, 4096)
        os.close(fd)
        self.environ = {"LD_PRELOAD": str(library), "DISK_FAULTS": str(page)}
        return self

    def __exit__(self, *_: object) -> None:
        self._page.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def fill(self, *, full: bool) -> None:
        """Forbid all files to grow, or allow it again."""
        self._page[0] = full

    def fail(self, *, failing: bool) -> None:
        """Make every sync fail, or none."""
        self._page[1] = failing

    def slow(self, seconds: float) -> None:
        """Make every sync take at least this long."""
        self._page[4:8] = struct.pack("=I", int(seconds * 1e6))

    @property
    def hits(self) -> int:
        """The number of calls that have failed or waited."""
        return int(struct.unpack("=Q", self._page[8:16])[0])
