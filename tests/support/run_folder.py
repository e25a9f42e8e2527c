"""What the workers of one run share: a folder, and turns for work that slows others down or is shared."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["make_run_folder", "run_folder", "turn"]

_VARIABLE = "STRATA_TESTS_FOLDER"


def make_run_folder() -> None:
    """Make the folder, for this process and those it starts; it is deleted when this process ends."""
    folder = tempfile.mkdtemp(prefix="relayd-tests-")
    os.environ[_VARIABLE] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


@functools.cache
def run_folder() -> Path:
    """The folder of the run; outside a run, a folder of this process alone."""
    if _VARIABLE not in os.environ:
        make_run_folder()
    return Path(os.environ[_VARIABLE])


@contextlib.contextmanager
def turn(name: str) -> Iterator[None]:
    """Admit one process of the run at a time; the next waits."""
    with (run_folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
