"""`python -m benches.pipeline_cluster`: how much a second worker of a real standalone cluster adds.

The same log is archived, and its signatures verified, by a cluster of one worker and by a cluster of two. A
worker has one core. The database, the driver and the master use the same machine, so on two cores the second
worker shares its core with them. It can add little to archive, which reads from that database and waits for
the driver to check what was written, and more to verifying, which needs neither.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession
from strata.protocol.packets import Packet
from strata.protocol.sequences import Span
from strata_pipeline.datasets import Packets
from strata_pipeline.jobs.archive import Archived, archive
from strata_pipeline.lake.lake import Lake
from strata_pipeline.session import open_session
from strata_pipeline.transforms.signatures import AuthorShare, SigningKeys
from strata_pipeline.transforms.verifying import verify_packets

from benches.load import sign
from benches.measures import Measure, Progress, as_json, print_table
from benches.peer import BenchError
from benches.spark_cluster import DRIVER_CONF, standalone_cluster
from relayd.admission.checks import to_store
from relayd.postgres import EmbeddedPostgres
from relayd.store import Store
from relayd.store.migrate import migrate

__all__ = ["PACKETS", "main", "measure"]

PACKETS = 240_000
_BATCHES = 4
"""The first batch warms up the executors and does not count."""
_ROUNDS = 3
_SIGNED_AT_ONCE = 2_500
_APPENDED_AT_ONCE = 1_000
_PARTS = 2
"""Both clusters do the same work, cut into the same parts."""


@dataclass(frozen=True, slots=True)
class _Rates:
    """Packets per second, for each round."""

    archived: list[float]
    verified: list[float]


def measure(packets: int, progress: Progress) -> list[Measure]:
    """Make a log of this many packets, and let both clusters work on it.

    Raises `BenchError` if a total is not exact.
    """
    return asyncio.run(_measure(packets, progress))


async def _measure(packets: int, progress: Progress) -> list[Measure]:
    with tempfile.TemporaryDirectory(prefix="pipeline-cluster-") as name:
        folder = Path(name)
        async with _log(folder / "postgres", packets, progress) as url:
            rates = {}
            for workers in (1, 2):
                progress(f"{packets:,} packets on {workers} of a cluster's workers")
                rates[workers] = await asyncio.to_thread(_on_cluster, folder, workers, url, packets)
    one, two = rates[1], rates[2]
    return [
        *_compared("archive", one.archived, two.archived),
        *_compared("verify", one.verified, two.verified),
    ]


def _compared(what: str, one: list[float], two: list[float]) -> list[Measure]:
    return [
        Measure("cluster", f"{what}, one worker", max(one), "packets/s", details={"rounds": one}),
        Measure("cluster", f"{what}, two workers", max(two), "packets/s", details={"rounds": two}),
        Measure(
            "cluster",
            f"{what}, two beside one",
            max(two) / max(one),
            "×",
            limit=2.0,
            limit_name="twice the workers",
        ),
    ]


def _on_cluster(folder: Path, workers: int, url: str, packets: int) -> _Rates:
    # Executors are processes of this machine: they may use our interpreter, and are sent the code anyway.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    lake = folder / f"lake-{workers}"
    with (
        standalone_cluster(folder / f"cluster-{workers}", workers=workers, memory="1536m") as cluster,
        open_session("cluster bench", master=cluster.master, conf=DRIVER_CONF) as spark,
    ):
        return _Rates(_archive(spark, url, lake, packets), _verify(spark, lake, packets))


def _archive(spark: SparkSession, url: str, lake: Path, packets: int) -> list[float]:
    moments = [time.perf_counter()]
    rows = -(-packets // _BATCHES)

    def progress(done: Archived) -> None:
        moments.append(time.perf_counter())

    done = archive(spark, url, lake, batch_rows=rows, partitions=_PARTS, progress=progress)
    if (done.packets, done.quarantined, done.batches) != (packets, 0, _BATCHES):
        raise BenchError(f"{done.packets} of {packets} packets were archived in {done.batches} batches")
    # Only the end of the first batch counts; the last moment is the check of the head after the last batch.
    return [rows / (after - before) for before, after in itertools.pairwise(moments[1:-1])]


def _verify(spark: SparkSession, path: Path, packets: int) -> list[float]:
    lake = Lake.open(path)
    units = [unit for day in lake.days() for unit in lake.units(day)[0]]
    keys = SigningKeys.of(Packets.of(spark, lake))
    rates = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        found = verify_packets(spark, lake.shelf, units, Span(0, lake.reached), AuthorShare(), keys)
        rates.append(packets / (time.perf_counter() - started))
        if found.counts or found.packets != packets:
            raise BenchError(f"{found.packets} packets were verified, {found.counts} of them do not hold")
    return rates


@contextlib.asynccontextmanager
async def _log(folder: Path, packets: int, progress: Progress) -> AsyncIterator[str]:
    """The URL of a database with a log of this many packets, for the duration of the block."""
    async with EmbeddedPostgres(folder) as server:
        await migrate(server.url)
        async with await Store.open(server.url, retention_days=0) as store:
            stored = 0
            for made in _signed(packets):
                rows = [to_store(packet, None) for packet in made]
                for start in range(0, len(rows), _APPENDED_AT_ONCE):
                    await store.append(rows[start : start + _APPENDED_AT_ONCE], int(time.time()))
                stored += len(made)
                progress(f"{stored:,} of {packets:,} packets in the log")
        yield server.url


def _signed(packets: int) -> Iterator[list[Packet]]:
    starts = range(0, packets, _SIGNED_AT_ONCE)
    sizes = [min(_SIGNED_AT_ONCE, packets - start) for start in starts]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, len(starts)), mp_context=context) as pool:
        yield from pool.map(sign, starts, sizes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run, print. 0: done, 1: a measurement was void."""
    parser = argparse.ArgumentParser(prog="python -m benches.pipeline_cluster", description=__doc__)
    parser.add_argument("--packets", type=int, default=PACKETS)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    try:
        measures = measure(options.packets, lambda text: print(f"  {text}", file=sys.stderr))
    except BenchError as error:
        print(f"void: {error}", file=sys.stderr)
        return 1
    print(json.dumps(as_json(measures))) if options.json else print_table(measures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
