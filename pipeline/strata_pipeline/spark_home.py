"""A home for Spark on this machine, in which its Python workers find the installed PySpark.

Spark puts the archive `python/lib/pyspark.zip` of its home before everything else that a worker imports.
There is no bytecode in it: each worker, and each process that plans a read, would compile PySpark again, for
a second or more. In a home without the archive they import the package that runs the driver.

At its start Spark also imports each installed module `pyspark_…`, in search of data sources, in a process
that stays. Our jobs need none of them.
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

__all__ = ["quick_home", "starting_quickly"]

_HOME = "SPARK_HOME"
_INTERPRETER = "PYSPARK_DRIVER_PYTHON"
_NONE = f"{os.devnull}/none"
"""Without this interpreter Spark does not look for data sources."""
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
def starting_quickly() -> Iterator[None]:
    """A JVM that is started meanwhile has this home and looks for no data sources.

    Where the environment names a home or an interpreter for drivers, that stays as it is.
    """
    with _meanwhile(_HOME, None if _HOME in os.environ else quick_home()), _meanwhile(_INTERPRETER, _NONE):
        yield


@contextlib.contextmanager
def _meanwhile(name: str, value: str | None) -> Iterator[None]:
    """A variable of the environment has this value, unless it has another one or there is none for it."""
    if value is None or name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
