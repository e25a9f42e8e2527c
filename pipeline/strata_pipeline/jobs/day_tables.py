"""Rows of single days, kept beside a job's results so that the next run reads only days that have changed.

<name>/day=2026-11-21/part-….parquet      the rows, which other readers may read too
<name>/day=2026-11-21/_kept.json          from which state of the day they were read
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
from pyspark.sql import DataFrame, SparkSession
from strata.protocol.sequences import day_text

from strata_pipeline.datasets import Dataset
from strata_pipeline.globs import for_spark
from strata_pipeline.jobs.tables import portions, put, writable, writing
from strata_pipeline.lake import files
from strata_pipeline.lake.places import AnyLake
from strata_pipeline.schemas import schema

__all__ = ["DayTables", "bring_up"]

_NOTE = "_kept.json"
_D = TypeVar("_D", bound=Dataset)
_Of = Callable[[list[int]], DataFrame]
"""Returns the rows of days of a lake, with the column `day`, as 2026-11-21."""


class _Note(msgspec.Struct, frozen=True):
    """Which state of a day the kept rows are from."""

    format: int
    mark: str
    """The day's mark (`LakeState.mark_of`)."""


class DayTables(Generic[_D]):
    """The rows of days in `folder`; rows of another `format` are ignored."""

    def __init__(self, folder: Path, dataset: type[_D], format: int) -> None:
        self._folder = folder
        self._dataset = dataset
        self._format = format

    def has(self, day: str, mark: str) -> bool:
        """Whether the rows of a day with this mark are kept."""
        try:
            found = msgspec.json.decode((self._of(day) / _NOTE).read_bytes(), type=_Note)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return False
        return found == _Note(self._format, mark)

    def keep(self, rows: DataFrame, days: Mapping[str, str]) -> None:
        """Keep the rows of these days, each with its mark, in place of older ones.

        `rows` has the columns of the dataset and `day`; each task writes the days that it has. A day without
        rows is kept too. A run that is killed has kept some of the days, each completely. Raises `UsageError`
        if the folder cannot be written.
        """
        wanted = schema(self._dataset.schema_name).names
        with writing(self._folder) as draft:
            by_day = rows.select(*(name for name in wanted if name != "day"), "day")
            by_day.write.mode("overwrite").partitionBy("day").parquet(str(draft))
            for day, mark in days.items():
                folder = draft / f"day={day}"
                files.make_folder(folder)
                (folder / _NOTE).write_bytes(msgspec.json.encode(_Note(self._format, mark)))
                files.make_durable(folder)
                put(folder, self._of(day))

    def read(self, spark: SparkSession, days: Iterable[str]) -> _D:
        """The rows of days, which must all be kept."""
        reader = spark.read.schema(schema(self._dataset.schema_name)).option("basePath", str(self._folder))
        return self._dataset(reader.parquet(*(for_spark(self._of(day)) for day in days)))

    def keep_only(self, days: Iterable[str]) -> None:
        """Remove the rows of all other days. Raises `UsageError` if the folder cannot be written."""
        wanted = {self._of(day) for day in days}
        self._remove(folder for folder in self._there() if folder not in wanted)

    def forget_changed(self, mark_of: Callable[[str], str]) -> None:
        """Remove the rows of each day whose mark has changed. Raises `UsageError` as above."""
        there = ((folder.name.removeprefix("day="), folder) for folder in self._there())
        self._remove(folder for day, folder in there if not self.has(day, mark_of(day)))

    def _there(self) -> list[Path]:
        return list(self._folder.glob("day=*"))

    def _remove(self, folders: Iterable[Path]) -> None:
        with writable(self._folder):
            for folder in folders:
                files.remove(folder)

    def _of(self, day: str) -> Path:
        return self._folder / f"day={day}"


def bring_up(
    tables: Sequence[tuple[DayTables[Any], _Of]],
    lake: AnyLake,
    days: list[int],
    progress: Callable[[str], None],
) -> list[int]:
    """Read the days whose rows are not in all tables, and keep the rows; return the days that were read.

    Rows of other days of the lake stay in the tables, except those of days that have changed: something may
    have been erased from these, and a later run may never look at them.
    """
    numbers = {day_text(day): day for day in lake.days()}

    @functools.cache
    def mark_of(day: str) -> str:
        return lake.mark_of(numbers[day]) if day in numbers else ""

    for table, _ in tables:
        table.forget_changed(mark_of)
    names = {day: day_text(day) for day in days}
    missing = [
        day for day in days if not all(table.has(names[day], mark_of(names[day])) for table, _ in tables)
    ]
    for portion in portions(missing, progress):
        for table, of in tables:
            table.keep(of(portion), {names[day]: mark_of(names[day]) for day in portion})
    return missing
