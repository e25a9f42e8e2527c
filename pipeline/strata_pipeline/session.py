"""A Spark session for a job, on this machine or on a cluster.

The master is `local[*]` unless `--master`, SPARK_REMOTE, spark-submit or spark-defaults.conf says otherwise.
The code of `strata` and `strata_pipeline` is sent to a cluster or a Spark Connect server (`connect`); its
dependencies (PyArrow, PyNaCl, the database driver, …) must be installed there, or shipped as an archive
(docs/guides/pipeline.md).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import strata
from pyspark.sql import SparkSession

import strata_pipeline
from strata_pipeline.connect import connected, is_remote
from strata_pipeline.errors import UsageError
from strata_pipeline.log.source import RelayLog
from strata_pipeline.spark_defaults import configured
from strata_pipeline.spark_home import starting_quickly
from strata_pipeline.spark_start import ending_what_is_cut_off

__all__ = ["check_java", "code_archive", "java_options", "open_session"]

_MIN_JAVA = 17
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_LOG_OPTION = "-Dlog4j2.configurationFile"
_GIVE_BACK = "-XX:MinHeapFreeRatio=20 -XX:MaxHeapFreeRatio=40"
"""For jobs on this machine: Java's default fills the whole heap, and keeps it."""
_SERIAL_CORES = 2
"""With more cores, the serial collector would stop them all while it works on one."""
_LOGGING = Path(__file__).with_name("log4j2.properties").as_uri()

_DEFAULTS = {
    # Days are those of sequences: UTC.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # A batch of bodies must fit into memory several times over.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "5000",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(64 * 2**20),
    "spark.sql.parquet.compression.codec": "zstd",
    # Write folders by kind without sorting the rows first: there are few kinds.
    "spark.sql.maxConcurrentOutputFileWriters": "64",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    # Between the JVM and its Python workers: faster than TCP over loopback, which has been seen to hang
    # permanently when both directions were full.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}
_LOCAL = {
    # A job that takes minutes needs no web page, and nothing should listen on the network.
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
    "spark.python.daemon.module": "strata_pipeline.spark_daemon",
    # Shuffled data is mostly ids and hashes, and zstd makes it two fifths smaller than LZ4. Not on a cluster,
    # where blocks may be small: starting one takes longer than reading a kilobyte.
    "spark.io.compression.codec": "zstd",
}
_CLUSTER = {
    # Spark's default of 200 makes 40,000 blocks of each shuffle. A job with many rows plans more
    # (`planning.planned`).
    "spark.sql.shuffle.partitions": "32",
}


@contextmanager
def open_session(
    name: str, *, master: str | None = None, conf: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """A session with the data source `relay_log`, stopped at the end. An existing session is used and not
    stopped.

    `conf` takes precedence over Spark's own configuration, which takes precedence over our defaults. Raises
    `UsageError` if there is no suitable Java, and `PipelineError` if no Spark Connect server answers.
    """
    existing = SparkSession.getActiveSession()
    if existing is not None:
        RelayLog.register(existing)
        yield existing
        return
    remote = master or os.environ.get("SPARK_REMOTE", "")
    if is_remote(remote):
        with connected(remote, _DEFAULTS, conf or {}, code_archive) as session:
            RelayLog.register(session)
            yield session
        return
    check_java()
    if sys.flags.utf8_mode:  # the locale is C, and Java would take each name that is not ASCII for another
        os.environ["LC_ALL"] = "C.UTF-8"
    given = configured()
    target = master or given.get("spark.master") or "local[*]"
    if target.startswith("local"):
        # Local executors use this interpreter; the configuration of a cluster names its own.
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    else:
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(f"strata-pipeline {name}").master(target)
    settings = _DEFAULTS | (_LOCAL if target.startswith("local") else _CLUSTER)
    for key, value in settings.items():
        if key not in given:
            builder = builder.config(key, value)
    for key, value in (conf or {}).items():
        builder = builder.config(key, value)
    asked = (conf or {}).get(_JAVA_OPTIONS, given.get(_JAVA_OPTIONS, ""))
    options = java_options(asked, local=target.startswith("local"), cores=_cores(target))
    builder = builder.config(_JAVA_OPTIONS, options)
    quickly = starting_quickly() if target.startswith("local") else contextlib.nullcontext()
    with quickly, ending_what_is_cut_off():
        session = builder.getOrCreate()
    with contextlib.ExitStack() as stack:
        stack.callback(session.stop)
        if not target.startswith("local"):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="strata-pipeline-"))
            session.addArtifacts(str(code_archive(Path(folder))), pyfile=True)
        RelayLog.register(session)
        try:
            yield session
        except KeyboardInterrupt:
            # Java logs a page for each task that the end of the session cuts short.
            with contextlib.suppress(Exception):
                session.sparkContext.setLogLevel("OFF")
            raise


def java_options(asked: str, *, local: bool, cores: int = _SERIAL_CORES) -> str:
    """Options of the driver's JVM: the given ones, and our defaults for everything else."""
    options = [asked] if asked else []
    if local and re.search(r"-XX:\+Use\w+GC\b", asked) is None:
        options.append(f"-XX:+Use{'Serial' if cores <= _SERIAL_CORES else 'G1'}GC {_GIVE_BACK}")
    if _LOG_OPTION not in asked:
        options.append(f"{_LOG_OPTION}={_LOGGING}")
    return " ".join(options)


def _cores(master: str) -> int:
    """The number of cores that a master on this machine uses."""
    found = re.match(r"local\[(\d+)", master)
    if found is not None:
        return int(found[1])
    return (os.cpu_count() or _SERIAL_CORES) if master.startswith("local[") else 1


def code_archive(folder: Path | None = None) -> Path:
    """Write our own packages into a zip for executors, in a folder (by default a new one); return its path.

    It is a zip and not a wheel because Spark puts only `.zip` archives on an executor's path.
    """
    target = (folder or Path(tempfile.mkdtemp(prefix="strata-pipeline-"))) / "strata_pipeline.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in (strata, strata_pipeline):
            root = Path(str(package.__file__)).parent
            for path in sorted(root.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    archive.write(path, path.relative_to(root.parent))
    return target


def check_java() -> None:
    """Raise `UsageError`, with advice, unless a Java that can run Spark is installed."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    advice = (
        f"Spark needs Java {_MIN_JAVA} or newer: install it (Debian: apt-get install "
        "openjdk-17-jre-headless; macOS: brew install openjdk@17) or let JAVA_HOME point to it"
    )
    if java is None:
        raise UsageError(f"{advice}; there is no java on the path")
    try:
        told = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=60, check=True
        ).stderr
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"{advice}; {java} does not run: {error}") from None
    found = re.search(r'version "(\d+)', told)
    if found is None or int(found[1]) < _MIN_JAVA:
        raise UsageError(f"{advice}; {java} is {told.splitlines()[0] if told else 'unknown'}")
