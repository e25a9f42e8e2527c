"""A home for Spark on this machine, in which its Python workers find the installed PySpark.

Spark puts the archive `python/lib/pyspark.zip` of its home before everything else that a worker imports.
There is no bytecode in it: each worker, and each process that plans a read, would compile PySpark again, for
a second or more. In a home without the archive they import the package that runs the driver.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyspark

__all__ = ["quick_home", "starting_in_quick_home"]

_HOME = "SPARK_HOME"
_PARTS = ("bin", "conf", "jars", "sbin")


@functools.cache
def quick_home() -> str | None:
    """The installed Spark without its archives, for as long as this process lives; None without symlinks."""
    folder = Path(tempfile.mkdtemp(prefix="strata-pipeline-spark-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    package = Path(str(pyspark.__file__)).parent
    try:
        for name in _PARTS:
            if (package / name).is_dir():
                (folder / name).symlink_to(package / name)
    except OSError:
        return None
    return str(folder)


@contextlib.contextmanager
def starting_in_quick_home() -> Iterator[None]:
    """A JVM that is started meanwhile has this home, unless the environment names another one."""
    home = None if _HOME in os.environ else quick_home()
    if home is None:
        yield
        return
    os.environ[_HOME] = home
    try:
        yield
    finally:
        del os.environ[_HOME]
