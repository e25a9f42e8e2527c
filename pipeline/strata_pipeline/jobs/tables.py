"""Shared parts of the jobs that report on a lake: the days to read, and the tables to write."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from strata.protocol.sequences import day_text

from strata_pipeline.datasets import Dataset, Packets
from strata_pipeline.errors import UsageError
from strata_pipeline.globs import for_spark
from strata_pipeline.lake import files
from strata_pipeline.lake.places import AnyLake
from strata_pipeline.reports.page import LakeNote
from strata_pipeline.schemas import schema

__all__ = [
    "DayWindow",
    "Tables",
    "check_output",
    "keep",
    "portions",
    "put",
    "rows_and_totals",
    "rows_of",
    "tables_of",
    "writable",
    "write_frames",
    "write_page",
    "writing",
]

_DRAFTS: Final = "_writing."
_PORTION: Final = 31
_D = TypeVar("_D", bound=Dataset)


class DayWindow:
    """The last days of a lake; batches that are added while a job runs are not seen.

    `days` is a number of calendar days back from the last day of the lake; None takes all. Raises
    `UsageError` for a lake without packets.
    """

    def __init__(self, lake: AnyLake, days: int | None = None) -> None:
        if not lake.chain.end.number:
            raise UsageError(
                f"{lake.place} holds no lake yet: begin with strata-pipeline archive --lake {lake.place}"
            )
        if days is not None and days < 1:
            raise UsageError("a job looks at one day or more")
        self.lake = lake
        there = lake.days()
        self.first = there[0] if days is None else max(there[0], there[-1] - days + 1)
        self.days = [day for day in there if day >= self.first]
        self.rows = sum(map(lake.chain.rows_of, self.days))
        self.earlier = [day for day in there if day < self.first]
        self.note = LakeNote(lake.tip, day_text(self.days[0]), day_text(self.days[-1]), len(self.days))

    def packets(self, spark: SparkSession, *kinds: str, days: list[int] | None = None) -> Packets:
        """The packets of these days, or of other `days` of the lake; all, or only those of some `kinds`."""
        wanted = self.days if days is None else days
        frame = Packets.of(spark, self.lake, wanted, kinds=kinds or None).frame
        return Packets(frame.where(F.col("sequence") <= self.lake.reached))


def portions(days: list[int], progress: Callable[[str], None]) -> Iterator[list[int]]:
    """The days to be read, in portions that are each kept once read, so that a stopped job can continue."""
    for start in range(0, len(days), _PORTION):
        portion = days[start : start + _PORTION]
        progress(f"reading {day_text(portion[0])} to {day_text(portion[-1])}")
        yield portion


@contextlib.contextmanager
def keep(*datasets: Dataset) -> Iterator[None]:
    """Compute these datasets once, and keep them in memory or on disk until the end of the block."""
    kept = [dataset.frame.persist() for dataset in datasets]
    try:
        yield
    finally:
        for frame in kept:
            frame.unpersist()


def rows_of(frame: DataFrame, most: int) -> list[dict[str, Any]]:
    """The first rows of a sorted frame, as mappings."""
    return [row.asDict(recursive=True) for row in frame.limit(most).collect()]


def rows_and_totals(
    frame: DataFrame, most: int, *order: Column | str, totals: Sequence[Column]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The first rows of a frame in some order, and aggregates over all its rows, from a single job."""
    # Only a sort follows. What counts below a join or an aggregate is dropped where nothing is left to join.
    seen = Observation()
    rows = rows_of(frame.observe(seen, *totals).orderBy(*order), most)
    return rows, seen.get


def check_output(output: str | Path | None, lake: AnyLake) -> Path | None:
    """The folder for results. Raises `UsageError` for one inside the lake, where readers would find it."""
    if output is None:
        return None
    folder = Path(output).absolute()
    if lake.contains(folder):
        raise UsageError(f"{folder} lies in the lake: name another folder for results")
    return folder


class Tables:
    """The tables of a job, each of which is computed once. `tables_of` makes it."""

    def __init__(self, spark: SparkSession, draft: Path | None) -> None:
        self._spark = spark
        self._draft = draft
        self.names: list[str] = []
        """The tables that were written, in order."""
        self.kept = contextlib.ExitStack()

    def once(self, name: str, table: _D) -> _D:
        """A table, computed once for everything that reads the result."""
        if self._draft is None:
            self.kept.enter_context(keep(table))
            return table
        folder = self._draft / name
        table.frame.write.mode("overwrite").parquet(str(folder))
        self.names.append(name)
        wanted = schema(table.schema_name)
        return type(table)(self._spark.read.schema(wanted).parquet(for_spark(folder)))


@contextlib.contextmanager
def tables_of(spark: SparkSession, output: Path | None) -> Iterator[Tables]:
    """Tables that replace those of the same names in `output`, once the block has ended without an error: a
    job that fails or is killed leaves the older ones.

    What a table has is read from its files, so no later query plans again how it was computed. Without
    `output`, tables are kept until the end of the block. Raises `UsageError`.
    """
    if output is None:
        tables = Tables(spark, None)
        with tables.kept:
            yield tables
        return
    with writing(output) as draft:
        tables = Tables(spark, draft)
        yield tables
        for name in tables.names:
            put(draft / name, output / name)


def write_frames(output: Path, frames: Mapping[str, DataFrame]) -> None:
    """Write each frame as Parquet to a folder with its name, replacing any older one.

    All are written before the first is put in place: a job that fails or is killed leaves the older ones.
    Raises `UsageError`.
    """
    with writing(output) as draft:
        for name, frame in frames.items():
            frame.write.mode("overwrite").parquet(str(draft / name))
        for name in frames:
            put(draft / name, output / name)


@contextlib.contextmanager
def writing(output: Path) -> Iterator[Path]:
    """A folder for drafts of folders of `output`, removed after the block. Raises `UsageError`.

    Drafts that killed jobs have left there are removed too.
    """
    draft = output / f"{_DRAFTS}{os.getpid()}"
    with writable(output):
        files.make_folder(draft)
        try:
            with files.occupied(draft):
                _remove_abandoned(output)
                yield draft
        finally:
            files.remove(draft)


def _remove_abandoned(output: Path) -> None:
    for folder in output.glob(f"{_DRAFTS}*"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it too
            if files.is_abandoned(folder):
                files.remove(folder)


def put(draft: Path, target: Path) -> None:
    """Put a folder in the place of another, which becomes the draft, or where there is none yet."""
    if target.exists():
        files.exchange(target, draft)
    else:
        files.place(draft, target)


def write_page(path: Path, text: str) -> None:
    """Replace a file as a whole, and remove drafts of it that killed jobs have left. Raises `UsageError`."""
    with writable(path.parent):
        files.remove_drafts(path.parent, lambda name: name == path.name)
        files.replace(path, text.encode())


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Report errors with files in this folder to the user. Raises `UsageError`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from None
