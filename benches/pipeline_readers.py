"""Readers that know nothing of the pipeline, and a continuous archive, while a lake's days are compacted.

The log has finished days, which an archive has brought into a lake in many small batches. Then packets arrive
continuously, `archive --continuous` follows them, and readers make one query after another, each in its own
process. After this has gone on alone for a while, `compact` begins. A query must find exactly the packets of
the finished days.

This happens twice: with readers that hold the lake's lock for readers, as the guide says, and with readers
that hold no lock.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from strata.protocol.sequences import day_text, first_of_day

from benches.job_memory import job_command, run
from benches.measures import Measure
from benches.pipeline_log import append, append_rows, empty_log
from benches.pipeline_packets import Made, made_rows

__all__ = ["READERS", "measure"]

_TARGET_SECONDS = 5
_DAY = 86_400
_DAYS = 6
_BATCHES = 4
"""The batches of each finished day."""
_ARRIVING = 40
_ARRIVE_SECONDS = 0.5
_INTERVAL = 0.5
_ALONE_SECONDS = 15.0
_SETTLE_SECONDS = 3.0
"""Packets that arrive within this time before the compaction do not count: they may reach the lake late."""
_PATIENCE = 30
_PAUSE_SECONDS = 0.05
"""The pause from the end of a query to the next query of the same reader."""
_LOCK = "_readers_lock"
_FILES = "day=*/**/*.parquet"


def _with_duckdb(lake: Path, day: str) -> tuple[int, int]:
    import duckdb

    with duckdb.connect() as connection:
        files = f"read_parquet('{lake}/packets/{_FILES}', hive_types_autocast = false)"
        row = connection.execute(
            f"SELECT count(*), sum(sequence) FROM {files} WHERE day < '{day}'"
        ).fetchone()
    assert row is not None
    return int(row[0]), int(row[1])


def _with_pyarrow(lake: Path, day: str) -> tuple[int, int]:
    import pyarrow.compute as pc
    import pyarrow.dataset as pads

    parts = pads.partitioning(flavor="hive")
    found = pads.dataset(lake / "packets", format="parquet", partitioning=parts)
    rows = found.to_table(columns=["sequence"], filter=pads.field("day") < day)
    return rows.num_rows, pc.sum(rows["sequence"]).as_py()


def _with_polars(lake: Path, day: str) -> tuple[int, int]:
    import polars as pl

    rows = pl.scan_parquet(lake / "packets" / _FILES, hive_partitioning=True, try_parse_hive_dates=False)
    found = rows.filter(pl.col("day") < day).select(pl.len(), pl.col("sequence").sum()).collect()
    return found.row(0)


READERS: dict[str, Callable[[Path, str], tuple[int, int]]] = {
    "duckdb": _with_duckdb,
    "pyarrow": _with_pyarrow,
    "polars": _with_polars,
}
"""Each reader returns the number of packets before a day, and the sum of their sequences."""


@dataclass(slots=True)
class _Reads:
    """The results of one reader."""

    queries: list[float] = field(default_factory=list)
    """When each query without an error ended."""
    failed: list[tuple[float, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def measure(rows: int, folder: Path, say: Callable[[str], None]) -> list[Measure]:
    """The figures for `rows` packets of finished days."""
    today, a_day = int(time.time()) // _DAY, max(1, rows // _DAYS)
    measures: list[Measure] = []
    with empty_log(folder / "readers-log") as server:
        for number in range(_DAYS):
            at = (today - _DAYS + number) * _DAY
            append(server.url, Made(a_day, False, at, _DAY - 1, number * a_day))
        arrivals = _Arrivals(server.url, today, _DAYS * a_day)
        arrivals.put()
        lake = folder / "readers-lake"
        size = max(1, a_day // _BATCHES)
        run(job_command("archive", lake, "--database-url", server.url, "--batch-rows", str(size)))
        shutil.copytree(lake, folder / "readers-plain")
        for is_locked, place in ((True, lake), (False, folder / "readers-plain")):
            measures += _beside(is_locked, place, arrivals, a_day * _DAYS, folder, say)
            shutil.rmtree(place)
    return measures


class _Arrivals:
    """Packets of today that arrive continuously."""

    def __init__(self, url: str, day: int, first: int) -> None:
        self.url = url
        self.day = day
        self._first = first
        self._there = 0
        self.times: list[tuple[float, int]] = []
        """The sequences that had arrived, each with its time."""

    def put(self) -> None:
        """Add some packets."""
        made = Made(_ARRIVING, False, self.day * _DAY, first=self._first + self._there)
        append_rows(self.url, made_rows(range(_ARRIVING), made=made), self.day, self._there)
        self._there += _ARRIVING
        self.times.append((time.monotonic(), first_of_day(self.day) + self._there))

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Add packets continuously during the block."""
        self.times.clear()
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(_ARRIVE_SECONDS):
                self.put()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class _Archive:
    """`archive --continuous`, and the times of its batches."""

    def __init__(self, lake: Path, url: str, waits: Path) -> None:
        self.batches: list[tuple[float, int]] = []
        """The sequences reached, each with its time."""
        options = ("--database-url", url, "--continuous", "--interval", str(_INTERVAL), "--delta")
        command = [sys.executable, "-m", "benches.lock_waits", str(waits)]
        command += job_command("archive", lake, *options)[3:]
        self._program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.is_there = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        assert self._program.stdout is not None
        for line in self._program.stdout:
            told = json.loads(line)
            if told["event"] == "batch":
                self.batches.append((time.monotonic(), told["reached"]))
                self.is_there.set()
        self.is_there.set()

    def stop(self) -> None:
        """Stop the archive. Raises `SystemExit` if it has failed."""
        self._program.terminate()
        code = self._program.wait()
        self._thread.join()
        if code:
            raise SystemExit(f"the archive beside ended with {code}; see above")

    def delays(self, came: list[tuple[float, int]], began: float, ended: float) -> list[float]:
        """How long packets that arrived between two moments waited until the lake had them, sorted."""
        found = []
        for at, sequence in came:
            there = next((when for when, reached in self.batches if reached >= sequence), None)
            if began <= at <= ended and there is not None:
                found.append(there - at)
        return sorted(found)


def _beside(
    is_locked: bool, lake: Path, arrivals: _Arrivals, rows: int, folder: Path, say: Callable[[str], None]
) -> list[Measure]:
    context, waits = get_context("spawn"), folder / "lock-waits.json"
    stopped, told = context.Event(), context.Queue()
    day = day_text(arrivals.day)
    asked = partial(_read, lake=lake, day=day, rows=rows, is_locked=is_locked, stopped=stopped, told=told)
    readers = [context.Process(target=asked, args=(name,)) for name in READERS]
    with arrivals.coming():
        archive = _Archive(lake, arrivals.url, waits)
        try:
            for reader in readers:
                reader.start()
            archive.is_there.wait()
            began = time.monotonic()
            time.sleep(_ALONE_SECONDS)
            compacting = time.monotonic()
            ran = run(job_command("compact", lake, "--patience", str(_PATIENCE)))
            compacted = time.monotonic()
            time.sleep(_ALONE_SECONDS / 4)
        finally:
            stopped.set()
            reads: dict[str, _Reads] = dict(told.get() for reader in readers if reader.pid)
            for reader in readers:
                reader.join()
            archive.stop()
    done = json.loads(ran.told.splitlines()[-1])
    how = "that hold the lock" if is_locked else "that hold nothing"
    queries = [at for one in reads.values() for at in one.queries]
    failed = [one for some in reads.values() for one in some.failed]
    wrong = [one for some in reads.values() for one in some.wrong]
    during = sum(compacting <= at <= compacted for at in queries)
    say(f"readers {how}: {len(queries):,} queries, {len(failed)} failed, {len(wrong)} wrong; {done}")
    alone = archive.delays(arrivals.times, began, compacting - _SETTLE_SECONDS)
    beside = archive.delays(arrivals.times, compacting, compacted)
    if not (alone and beside):
        raise SystemExit("no packet came while the compaction was at work, or none before it")
    longest = json.loads(waits.read_text())["longest"]
    return [
        Measure(
            "readers",
            f"readers {how}: failed queries in 1000, of {during:,} during the compaction",
            1000 * len(failed) / max(1, during),
            "",
            0,
            at_most=True,
            details={
                "queries in all": len(queries),
                "by reader": {name: len(one.queries) for name, one in reads.items()},
                "wrong answers": len(wrong),
                "failures": sorted({text for _, text in failed})[:5],
                "days compacted, left waiting": [done["days"], done["waiting"]],
                "compaction, s": compacted - compacting,
            },
        ),
        Measure("readers", f"readers {how}: wrong answers", len(wrong), "", 0, at_most=True),
        Measure(
            "readers",
            f"readers {how}: the archive's longest wait for a lock",
            longest,
            "s",
            _TARGET_SECONDS,
            at_most=True,
        ),
        Measure(
            "readers",
            f"readers {how}: from arrival to the lake beside the compaction, longest",
            beside[-1],
            "s",
            limit=alone[-1],
            limit_name="before it began",
            details={"median beside": beside[len(beside) // 2], "median before": alone[len(alone) // 2]},
        ),
    ]


def _read(name: str, *, lake: Path, day: str, rows: int, is_locked: bool, stopped: Event, told: Any) -> None:
    reads, ask, first = _Reads(), READERS[name], None
    while not stopped.is_set():
        with (lake / _LOCK).open("rb") as file:
            if is_locked:
                fcntl.flock(file, fcntl.LOCK_SH)
            try:
                found = ask(lake, day)
            except Exception as error:
                reads.failed.append((time.monotonic(), f"{name}: {type(error).__name__}: {str(error)[:160]}"))
                continue
        first = first or found
        if found != first or found[0] != rows:
            reads.wrong.append(f"{found} and not {first}")
        reads.queries.append(time.monotonic())
        stopped.wait(_PAUSE_SECONDS)
    told.put((name, reads))
