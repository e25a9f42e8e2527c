"""A Spark home on this machine with which its Python workers use the installed PySpark.

Spark puts the archive `python/lib/pyspark.zip` of its home first on the path of a worker. The archive has no
bytecode, so each worker, and each process that plans a read, would compile PySpark again, which takes a
second or more. With a home that lacks the archive they import the package that runs the driver.

At its start Spark also imports each installed module `pyspark_…` to find data sources, in a process that
stays alive. Our jobs need none of them.
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
    """A folder with the installed Spark without its archives, removed when this process ends; None where
    symlinks cannot be made."""
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
    """Within the block, a JVM starts with the quick home and looks for no data sources.

    A home or a driver's interpreter that the environment already names stays as it is.
    """
    with _meanwhile(_HOME, None if _HOME in os.environ else quick_home()), _meanwhile(_INTERPRETER, _NONE):
        yield


@contextlib.contextmanager
def _meanwhile(name: str, value: str | None) -> Iterator[None]:
    """Within the block, give an environment variable this value, unless it is already set or the value is
    None."""
    if value is None or name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
