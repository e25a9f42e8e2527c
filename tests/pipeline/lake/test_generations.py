"""The files of a day replaced: concurrent readers, and what becomes of the old files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from strata_pipeline.databases import database_of
from strata_pipeline.errors import LakeBusy, LakeError
from strata_pipeline.lake.delta import publish
from strata_pipeline.lake.generations import delete_retired, replace_day, staged_day
from strata_pipeline.lake.lake import Lake

from tests.support.toy_lakes import (
    DAY,
    compacted,
    faults,
    files_below,
    newest_files,
    place,
    read,
    rows_in,
    rows_table,
    staged,
    write_batch,
)

AHEAD: dict[str, Any] = {"batch_readahead": 1, "fragment_readahead": 1, "use_threads": False}
ALL = [place(n) for n in (1, 2, 3, 4)] + [place(1, DAY + 1)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A lake of a finished day in two batches, and of another that continues."""
    write_batch(tmp_path, [1, 2])
    write_batch(tmp_path, [3, 4])
    write_batch(tmp_path, [1], day=DAY + 1)
    return tmp_path


def replace(lake: Lake, patience: float = 0) -> Path:
    target = staged_day(lake, DAY)
    compacted(lake, DAY, target)
    return replace_day(lake, DAY, target, patience)


def test_old_files_stay_for_a_while_out_of_the_tables_folder(path):
    with Lake.replace(path) as lake:
        begun = [pq.ParquetFile(file) for file in files_below(lake.day_folder(DAY))]
        retired = replace(lake)
        assert retired.parent == path / "_retired" and len(files_below(retired)) == 4
        # A reader that has them open continues.
        assert sorted(n for one in begun for n in one.read()["sequence"].to_pylist()) == ALL[:4]
        retired_at = int(retired.name.rpartition(".")[2])
        assert delete_retired(lake, retired_at + 99, 100) == 0 and retired.is_dir()
        assert delete_retired(lake, retired_at + 100, 100) == 1 and not (path / "_retired").exists()
    assert read(path) == ALL and faults(path) == []


def test_what_is_not_ours_or_still_needed_is_not_deleted(path):
    with Lake.replace(path) as lake:
        retired = replace(lake)
        for name in ("day=2024-10-04", "mine", "day=2024-10-04.x"):
            (path / "_retired" / name).mkdir()
        lake.day_folder(DAY).rename(path / "elsewhere")  # the day itself is missing: these are its last files
        assert delete_retired(lake, 2**40, 0) == 0 and retired.is_dir()
        (path / "elsewhere").rename(lake.day_folder(DAY))
        assert delete_retired(lake, 2**40, 0) == 1
        assert len(list((path / "_retired").iterdir())) == 3


def _with_pyarrow(path: Path) -> Iterator[pa.RecordBatch]:
    yield from pads.dataset(newest_files(path), partitioning="hive").to_batches(["sequence"], **AHEAD)


def _with_polars(path: Path) -> Iterator[pa.RecordBatch]:
    scan = pl.scan_parquet(newest_files(path), hive_partitioning=True).select("sequence")
    assert scan.collect_schema()
    yield pa.RecordBatch.from_pydict({"sequence": []})
    yield from scan.collect().to_arrow().to_batches()


def _with_view(path: Path) -> Iterator[pa.RecordBatch]:
    database = database_of(path)
    database.execute("SET threads = 1")
    database.execute("SET VARIABLE lake_files = (SELECT list(file) FROM files)")
    yield from database.sql("SELECT sequence FROM packets").to_arrow_reader(1)


def _with_delta(path: Path) -> Iterator[pa.RecordBatch]:
    yield from DeltaTable(path / "generations").to_pyarrow_dataset().to_batches(["sequence"], **AHEAD)


@pytest.mark.parametrize("read_with", [_with_pyarrow, _with_polars, _with_view, _with_delta])
def test_who_has_begun_finishes_within_the_grace_and_who_begins_meanwhile_reads_each_row_once(
    tmp_path, read_with
):
    for number in range(40):  # more files than any reader opens ahead
        write_batch(tmp_path, [2 * number + 1, 2 * number + 2])
    write_batch(tmp_path, [1], day=DAY + 1)
    expected = read(tmp_path)
    publish(Lake.open(tmp_path))
    begun = read_with(tmp_path)
    found = [next(begun)]
    with Lake.replace(tmp_path) as lake:
        retired = replace(lake)
    assert len(lake.batches(DAY)) == 1
    publish(Lake.open(tmp_path), days=[DAY])
    meanwhile = [batch for batch in read_with(tmp_path)]
    with Lake.replace(tmp_path) as lake:  # again: three generations
        replace(lake)
    found += begun
    for batches in (found, meanwhile):
        assert sorted(n for one in batches for n in one["sequence"].to_pylist()) == expected
    with Lake.replace(tmp_path) as lake:
        assert delete_retired(lake, 2**40, 0) == 2
    assert not retired.exists() and len(list((tmp_path / "generations" / "day=2024-10-04").iterdir())) == 1
    assert rows_in(newest_files(tmp_path)) == expected == read(tmp_path) and faults(tmp_path) == []


def test_links_are_made_again_where_a_copy_lacks_them_or_has_files_in_their_place(path, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copies") / "copy"
    with Lake.replace(path) as lake:
        replace(lake)
    for given in (path, shutil.copytree(path, copy)):  # which follows links
        with Lake.replace(given):
            pass
        links = list((given / "generations").glob("day=*/*"))
        assert all(one.is_symlink() for one in links) and rows_in(newest_files(given)) == ALL
        shutil.rmtree(given / "generations")
        with Lake.write(given):
            pass
        assert rows_in(newest_files(given)) == ALL


@pytest.mark.parametrize("name", ["README", "more.parquet", f"batch={place(1, DAY + 1)}-{place(2, DAY + 1)}"])
@pytest.mark.parametrize("root", ["packets", "quarantine"])
def test_a_day_with_something_that_is_not_ours_is_not_written_anew(path, root, name):
    stranger = path / root / "day=2024-10-04" / name
    stranger.mkdir(parents=True)
    with Lake.replace(path) as lake, pytest.raises(LakeError, match=f"{name} is not of the lake"):
        replace(lake)
    assert stranger.exists() and not (path / "_retired").exists()


def test_a_day_waits_while_jobs_read_and_jobs_do_not_wait_for_each_other(path):
    with Lake.replace(path) as lake, Lake.open(path).held(), Lake.open(path).held():
        before = files_below(path)
        with pytest.raises(LakeBusy, match="jobs are reading"):
            replace(lake, patience=0.01)
        assert [file for file in files_below(path) if "lock" not in file.name] == [
            file for file in before if "lock" not in file.name
        ]
        assert read(path) == ALL
    with Lake.replace(path) as lake:
        replace(lake)
    assert len(lake.batches(DAY)) == 1 and read(path) == ALL


def test_readers_of_a_lake_that_they_cannot_write_go_without_the_lock(path, monkeypatch):
    def refused(*_: object) -> int:
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        with Lake.open(path).held():
            pass


def test_an_archive_adds_batches_while_a_day_is_replaced(path):
    with Lake.replace(path) as days:
        target = staged_day(days, DAY)
        compacted(days, DAY, target)
        write_batch(path, [2, 3], day=DAY + 1)
        with Lake.write(path) as batches:
            made = staged(batches, [4], day=DAY + 1)
            replace_day(days, DAY, target, 0)
            batches.commit(*made)
            with pytest.raises(LakeBusy), Lake.write(path):
                pass
        with pytest.raises(LakeBusy), Lake.replace(path):
            pass
    assert read(path) == ALL + [place(n, DAY + 1) for n in (2, 3, 4)] and faults(path) == []
    assert not (path / "_staging").exists()


@pytest.mark.parametrize("harm", ["a row too few", "a row too many", "an annotation"])
def test_new_files_that_do_not_hold_what_they_must_stay_out_of_sight(path, harm):
    with Lake.replace(path) as lake:
        target = staged_day(lake, DAY)
        compacted(lake, DAY, target)
        file = files_below(target)[0]
        table = pq.ParquetFile(file).read()
        if harm == "an annotation":
            table = table.set_column(9, table.schema.field(9), [[b"{}"] * table.num_rows])
        elif harm == "a row too few":
            table = table.slice(1)
        else:
            kind = table["content_type"][0].as_py()
            table = type(table).from_batches(
                [*table.to_batches(), *rows_table([place(9, DAY + 1)], kind=kind).to_batches()]
            )
        pq.write_table(table, file)
        with pytest.raises(LakeError, match=r"the day stays as it is\. Run audit"):
            replace_day(lake, DAY, target, 0)
    assert read(path) == ALL and len(lake.batches(DAY)) == 2
