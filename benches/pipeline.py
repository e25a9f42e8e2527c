"""`make bench-pipeline`: the source beside JDBC and COPY, the archive, the audit beside a plain process pool,
one worker of a cluster beside two, what memory does from 10⁵ to 10⁷ rows, and a whole synthetic day. Needs
Java, and about 12 GB of disk for the largest log. Only where they are named, for they take long:

readers     plain readers and a continuous archive beside a compaction
since       audits since a tip, of `--rows` new packets at most, behind an old lake that is small or `--old`
traffic     what a report on traffic shuffles, for `--rows` packets at most
channel     what a report on reliability holds, for a channel of `--rows` packets at most
follow      the same for its one dear task alone, without Spark
delta       publishing a Delta log, `--commits` times
finished    the files of a finished day of `--rows`
executors   the jobs with one executor and with two
copies      copying and restoring a lake of `--batches` small batches

    python -m benches.pipeline [--json] [--rows 1000000] [--most 10000000] [--folder DIR] [source archive …]
    python -m benches.pipeline day --rows 100000000 --folder DIR

Every figure is taken beside its peer in the same run, on the same log. JDBC needs PostgreSQL's driver
(`--jdbc-jar`, default /usr/share/java/postgresql.jar, Debian's libpostgresql-jdbc-java); without it that line
is left out, and the output says so.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import asyncpg
import pyarrow as pa
import pyarrow.dataset as pads
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F
from strata_pipeline.jobs.archive import archive
from strata_pipeline.jobs.audit import audit
from strata_pipeline.lake.lake import Lake
from strata_pipeline.session import open_session
from strata_pipeline.transforms.signatures import SigningKeys, packet_fault

from benches import (
    pipeline_channel,
    pipeline_cluster,
    pipeline_copies,
    pipeline_day,
    pipeline_delta,
    pipeline_executors,
    pipeline_finished,
    pipeline_follow,
    pipeline_readers,
    pipeline_since,
    pipeline_traffic,
)
from benches.job_memory import run
from benches.measures import Measure, as_json, print_table
from benches.pipeline_log import empty_log, fill

__all__ = ["NAMES", "main"]

NAMES = ("source", "archive", "audit", "cluster", "memory", "day")
_Measured = Callable[[argparse.Namespace, Path], list[Measure]]
_ASKED_FOR: Mapping[str, _Measured] = {
    "readers": lambda chosen, folder: pipeline_readers.measure(chosen.rows, folder, _say),
    "since": lambda chosen, folder: pipeline_since.measure(chosen.rows, chosen.old, folder, _say),
    "traffic": lambda chosen, folder: pipeline_traffic.measure(chosen.rows, folder, _say),
    "channel": lambda chosen, folder: pipeline_channel.measure(chosen.rows, folder, _say),
    "follow": lambda chosen, folder: pipeline_follow.measure(chosen.rows, _say),
    "delta": lambda chosen, folder: pipeline_delta.measure(chosen.commits, folder, _say),
    "finished": lambda chosen, folder: pipeline_finished.measure(chosen.rows, folder, _say),
    "executors": lambda chosen, folder: pipeline_executors.measure(chosen.rows, folder, _say),
    "copies": lambda chosen, folder: pipeline_copies.measure(chosen.batches, folder, _say),
}
"""Benchmarks that run only where they are named."""

_ROUNDS = 3
_SLICE = 2000
_HEAPS = ("2g", "1g")
"""The default, and half of it."""
_JAR = Path("/usr/share/java/postgresql.jar")
_SOURCE_ONE, _SOURCE_TWO, _ARCHIVE, _AUDIT = 280_000, 400_000, 60_000, 25_000
_POOL_SHARE = 0.9


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; 1 where a target is missed."""
    parser = argparse.ArgumentParser(prog="benches.pipeline", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"{', '.join(NAMES)}, all by default; {', '.join(_ASKED_FOR)}",
    )
    parser.add_argument("--rows", type=int, default=1_000_000, help="packets in the log, or in the lake")
    parser.add_argument("--old", type=int, default=5_000_000, help="packets of the larger old lake (since)")
    parser.add_argument(
        "--archived", type=int, help="the newest rows of the day, for archive: all by default"
    )
    parser.add_argument(
        "--audited", type=int, default=pipeline_day.AUDITED_ROWS, help="the newest rows of the day, for audit"
    )
    parser.add_argument("--batches", type=int, default=8_640, help="batches of a finished day (copies)")
    parser.add_argument("--commits", type=int, default=1_000, help="how often to publish (delta)")
    parser.add_argument("--signatures", type=int, default=500_000, help="packets with signatures (audit)")
    parser.add_argument("--most", type=int, default=10_000_000, help="packets in the largest log (memory)")
    parser.add_argument(
        "--folder", type=Path, help="where logs and lakes are made; a temporary one by default"
    )
    parser.add_argument("--jdbc-jar", type=Path, default=_JAR)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    names = chosen.names or list(NAMES)
    if unknown := sorted(set(names) - {*NAMES, *_ASKED_FOR}):
        parser.error(f"no benchmark {', '.join(unknown)}")
    if "day" in names:
        pipeline_day.check_space(chosen.folder or Path(tempfile.gettempdir()), chosen.rows)
    if chosen.folder is not None:
        chosen.folder.mkdir(parents=True, exist_ok=True)
    measures: list[Measure] = []
    with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="bench-pipeline-") as temporary:
        folder = Path(temporary)
        os.chmod(folder, 0o755)
        if {"source", "archive"} & set(names):
            with _log(folder / "log", chosen.rows, signed=False) as (url, tcp_url):
                if "source" in names:
                    measures += _source(url, tcp_url, chosen.rows, chosen.jdbc_jar)
                if "archive" in names:
                    measures.append(_archive(url, chosen.rows, folder / "lake"))
        if "audit" in names:
            with _log(folder / "signed", chosen.signatures, signed=True) as (url, _):
                measures += _audit(url, chosen.signatures, folder / "audited")
        if "cluster" in names:
            measures += pipeline_cluster.measure(pipeline_cluster.PACKETS, _say)
        if "memory" in names:
            measures += _memory(chosen.most, folder)
        if "day" in names:
            measures += pipeline_day.measure(
                chosen.rows, folder, _say, archived=chosen.archived, audited=chosen.audited
            )
        for name, measure in _ASKED_FOR.items():
            if name in names:
                measures += measure(chosen, folder)
    if chosen.json:
        print(json.dumps({"measures": as_json(measures)}))
    else:
        print_table(measures)
    return int(any(measure.met is False for measure in measures))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _log(folder: Path, rows: int, *, signed: bool) -> Iterator[tuple[str, str]]:
    """A relay's database with that many packets: its URLs over the socket and over TCP."""
    _say(f"a log of {rows:,} packets")
    with empty_log(folder) as server:
        fill(server.url, rows, signed=signed)
        yield server.url, server.tcp_url
    shutil.rmtree(folder, ignore_errors=True)


def _rate(rows: int, action: Callable[[], object], rounds: int = _ROUNDS) -> tuple[float, list[float]]:
    """Rows a second, the median of some rounds after one that does not count."""
    rates = []
    for number in range(rounds + 1):
        started = time.perf_counter()
        action()
        if number:
            rates.append(rows / (time.perf_counter() - started))
    return statistics.median(rates), rates


def _source(url: str, tcp_url: str, rows: int, jar: Path) -> list[Measure]:
    copy_rate, copy_rates = _rate(rows, lambda: asyncio.run(_copy(url)))
    _say(f"source: COPY {copy_rate:,.0f} rows/s")
    conf = {"spark.driver.extraClassPath": str(jar)} if jar.exists() else {}
    measures = []
    with open_session("bench", master="local[2]", conf=conf) as spark:
        for parts, target in ((1, _SOURCE_ONE), (2, _SOURCE_TWO)):
            reader = spark.read.format("relay_log").option("url", url).option("partitions", parts)
            rate, rates = _rate(rows, partial(_load, reader))
            _say(f"source: {parts} partition(s) {rate:,.0f} rows/s")
            details: dict[str, object] = {"rounds": rates, "COPY, rounds": copy_rates}
            if conf:
                details["JDBC"], details["JDBC, rounds"] = _rate(
                    rows, partial(_load_jdbc, spark, tcp_url, parts), 1
                )
                _say(f"source: JDBC {details['JDBC']:,.0f} rows/s")
            else:
                details["JDBC"] = f"left out: {jar} is not there"
            measures.append(
                Measure(
                    "source",
                    f"read, {parts} partition{'s' * (parts > 1)}",
                    rate,
                    "rows/s",
                    target,
                    limit=copy_rate,
                    limit_name="PostgreSQL's COPY, one connection",
                    details=details,
                )
            )
    return measures


def _consume(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _load(reader: DataFrameReader) -> None:
    _consume(reader.load())


def _load_jdbc(spark: SparkSession, tcp_url: str, parts: int) -> None:
    _consume(_jdbc(spark, tcp_url, parts))


def _jdbc(spark: SparkSession, tcp_url: str, parts: int) -> DataFrame:
    from urllib.parse import urlsplit

    at = urlsplit(tcp_url)
    reader = (
        spark.read.format("jdbc")
        .option("url", f"jdbc:postgresql://{at.hostname}:{at.port}{at.path}")
        .option("user", at.username or "")
        .option("password", at.password or "")
        .option("driver", "org.postgresql.Driver")
        .option("fetchsize", 10_000)
        .option("dbtable", "packets")
    )
    if parts > 1:
        bounds = (
            spark.read.format("relay_log")
            .option("url", tcp_url)
            .schema("sequence long")
            .load()
            .agg(F.min("sequence"), F.max("sequence"))
            .first()
        )
        assert bounds is not None
        reader = reader.option("partitionColumn", "sequence").option("numPartitions", parts)
        reader = reader.option("lowerBound", bounds[0]).option("upperBound", bounds[1])
    return reader.load()


async def _copy(url: str) -> None:
    connection = await asyncpg.connect(url)

    async def nowhere(data: bytes) -> None:
        pass

    try:
        await connection.copy_from_query(
            "SELECT * FROM packets ORDER BY sequence", output=nowhere, format="binary"
        )
    finally:
        await connection.close()


def _archive(url: str, rows: int, lake: Path) -> Measure:
    """Steady: from the end of the first batch, in which the JVM warms up, to the end of the last."""
    marks: list[tuple[float, int]] = []
    with open_session("bench", master="local[2]") as spark:
        archive(spark, url, lake, progress=lambda done: marks.append((time.perf_counter(), done.packets)))
    (began, first), (ended, last) = marks[0], marks[-2]
    rate = (last - first) / (ended - began)
    _say(f"archive: {rate:,.0f} packets/s")
    steps = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(marks[:-1])]
    details = {"packets": rows, "batches": steps}
    shutil.rmtree(lake)
    return Measure("archive", "steady, ids recomputed", rate, "packets/s", _ARCHIVE, details=details)


def _audit(url: str, rows: int, lake: Path) -> list[Measure]:
    with open_session("bench", master="local[2]") as spark:
        archive(spark, url, lake)
        steps: list[tuple[str, float]] = []

        def look() -> None:
            steps.clear()
            audited = audit(spark, lake, progress=lambda step, _: steps.append((step, time.perf_counter())))
            assert audited.holds, audited.counts

        rates = []
        for number in range(_ROUNDS + 1):
            look()
            times = dict(steps)
            if number:
                rates.append(rows / (times["doubles"] - times["packets"]))
    rate = statistics.median(rates)
    with _pool(lake) as verify:
        pool_rate, pool_rates = _rate(rows, verify)
    _say(f"audit: {rate:,.0f} signatures/s, a process pool {pool_rate:,.0f}")
    details = {"rounds": rates, "pool, rounds": pool_rates}
    return [
        Measure(
            "audit",
            "signatures, two cores",
            rate,
            "/s",
            _AUDIT,
            limit=pool_rate,
            limit_name="two processes with the lake in memory",
            details=details,
        ),
        Measure("audit", "share of a plain process pool", rate / pool_rate, "", _POOL_SHARE),
    ]


_NAMES = ("received_at", "packet_id", "body", "author_id", "content_type", "timestamp", "expires_at")
_lake: list[pa.Table] = []
"""What the processes of the pool inherit."""


@contextmanager
def _pool(lake: Path) -> Iterator[Callable[[], None]]:
    """The same work by two processes that have the lake in memory."""
    _lake[:] = [pads.dataset(Lake.open(lake).packets, format="parquet").to_table(columns=list(_NAMES))]
    edges = range(0, _lake[0].num_rows, _SLICE)
    with get_context("fork").Pool(2) as pool:

        def run() -> None:
            assert sum(pool.map(_verify_slice, edges, chunksize=1)) == 0

        yield run
    _lake.clear()


def _verify_slice(start: int) -> int:
    keys, part = SigningKeys({}), _lake[0].slice(start, _SLICE)
    rows = zip(*(part[name].to_pylist() for name in _NAMES), strict=True)
    return sum(packet_fault(keys, *row) is not None for row in rows)


def _memory(most: int, folder: Path) -> list[Measure]:
    """The most that all processes of a job hold at once, archiving logs of ever more packets.

    A JVM takes its heap before it looks for what it could free, so the same is done with half of it too.
    """
    peaks: dict[str, dict[int, float]] = {heap: {} for heap in _HEAPS}
    rows = 100_000
    while rows <= most:
        with _log(folder / f"log{rows}", rows, signed=False) as (url, _):
            for heap in _HEAPS:
                command = [sys.executable, "-m", "strata_pipeline", "archive", "--database-url", url]
                command += ["--lake", str(folder / "lake"), "--master", "local[2]"]
                ran = run([*command, "--conf", f"spark.driver.memory={heap}"])
                peaks[heap][rows] = ran.peak_mb
                _say(f"memory: {rows:,} packets, heap {heap}: {ran.peak_mb:,.0f} MB, {ran.seconds:,.0f} s")
                shutil.rmtree(folder / "lake")
        rows *= 10
    return [
        Measure(
            "memory",
            f"archive of {rows:,} packets, heap {heap}, peak",
            peak,
            "MB",
            limit=found[min(found)],
            limit_name=f"of {min(found):,}",
        )
        for heap, found in peaks.items()
        for rows, peak in found.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
