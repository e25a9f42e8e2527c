"""A session on a Spark Connect server: `--master sc://host:port`. No Java is needed here.

The server plans and computes. This process also reads and writes the lake's folder: manifests, locks, and the
renames that put files in place. So both must reach the folder by the same path. Settings that are fixed when
the server starts stay as they are; this module sets only those of SQL.
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from strata_pipeline.errors import PipelineError, UsageError

__all__ = ["connected", "is_remote"]

_SCHEME = "sc://"
_PORT = 15002
_PATIENCE = 20.0
"""PySpark itself retries an absent server for about ten minutes, without any message."""
_NEEDED = ("grpc", "grpc_status", "google.rpc", "zstandard")
_OF_SQL = "spark.sql."


def is_remote(master: str) -> bool:
    """Whether a master is a Spark Connect server."""
    return master.startswith(_SCHEME)


@contextmanager
def connected(
    url: str, defaults: Mapping[str, str], asked: Mapping[str, str], archive: Callable[[Path], Path]
) -> Iterator[SparkSession]:
    """A session on the server, stopped at the end of the block; `archive` writes our code into a folder, from
    which it is sent.

    Raises `UsageError` if packages are missing or a setting is not one of SQL, and `PipelineError` if no
    server answers.
    """
    _check(url, asked)
    builder = SparkSession.builder.remote(url)
    for key, value in {**{name: each for name, each in defaults.items() if _is_ours(name)}, **asked}.items():
        builder = builder.config(key, value)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strata-pipeline-")))
        try:
            session = builder.getOrCreate()
            stack.callback(session.stop)
            session.addArtifacts(str(archive(folder)), pyfile=True)
        except PySparkException as error:
            reason = str(error).strip().splitlines()[0]
            raise PipelineError(f"{_place(url)} opens no session: {reason}") from error
        yield session


def _is_ours(name: str) -> bool:
    return name.startswith(_OF_SQL)


def _check(url: str, asked: Mapping[str, str]) -> None:
    missing = [name for name in _NEEDED if not _is_there(name)]
    if missing:
        raise UsageError(
            f"Spark Connect needs {', '.join(missing)}: pip install 'strata-pipeline[spark,spark-connect]'"
        )
    fixed = sorted(name for name in asked if not _is_ours(name))
    if fixed:
        raise UsageError(
            f"{', '.join(fixed)}: the server has its own; over Spark Connect give spark.sql.… only"
        )
    host, port = _address(url)
    try:
        socket.create_connection((host, port), _PATIENCE).close()
    except OSError as error:
        raise PipelineError(f"no Spark Connect server answers at {_place(url)}: {error}") from None


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        if parts.hostname:
            return parts.hostname, parts.port or _PORT
    except ValueError:
        pass
    raise UsageError(
        "a Spark Connect server is named sc://host:port, with ;token=… behind a / if it wants one"
    )


def _place(url: str) -> str:
    """The server's address without the secrets that may follow it."""
    host, port = _address(url)
    return f"{_SCHEME}{host}:{port}"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
