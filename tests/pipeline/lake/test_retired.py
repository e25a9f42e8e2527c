"""What was replaced is deleted, and what an operator has put beside it is not."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from strata.protocol.sequences import Span, day_text
from strata_pipeline.lake.erasure_commit import mark, place_erasure
from strata_pipeline.lake.generations import delete_retired
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.layout import batch_path
from strata_pipeline.lake.retired import not_retired

from tests.support.toy_lakes import DAY, newest_files, place, read, rows_in, write_batch

NAME = f"day={day_text(DAY)}"
BATCH = batch_path(Span(0, place(2)))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A lake with the replaced files of a day, and things of others with names that begin in the same way."""
    write_batch(tmp_path, [1, 2])
    write_batch(tmp_path, [1], day=DAY + 1)
    for name in ("1732200000", "1732200000.1", "1732200001"):
        shutil.copytree(tmp_path / "packets" / NAME, tmp_path / "_retired" / f"{NAME}.{name}")
    (tmp_path / "_retired" / f"{NAME}.1732200001" / "notes.txt").write_text("mine")
    (tmp_path / "_retired" / f"{NAME}.backup").mkdir()
    (tmp_path / "_retired" / f"{NAME}.1732200002").symlink_to(tmp_path / "packets")
    return Lake.open(tmp_path)


OTHERS = [f"{NAME}.{name}" for name in ("1732200001", "1732200002", "backup")]


def test_only_the_lakes_own_is_deleted_after_the_grace(lake):
    assert [one.name for one in not_retired(lake)] == OTHERS
    assert delete_retired(lake, 2**40, 0) == 2
    assert sorted(one.name for one in lake.retired.iterdir()) == OTHERS


@pytest.mark.parametrize("keep", [True, False])
def test_readers_of_a_day_that_is_erased_from_finish_within_a_grace_that_was_given(lake, keep):
    begun, at = newest_files(lake.root), 1_800_000_000
    staged = lake.staged_erasure / "packets" / NAME
    for file in (lake.packets / NAME).rglob("*.parquet"):
        new = (staged / file.relative_to(lake.packets / NAME)).with_name("new.parquet")
        new.parent.mkdir(parents=True)
        shutil.copyfile(file, new)
    record = lake.erasures.next(DAY, at, [], b"")
    mark(staged, record.number)
    place_erasure(lake, record, b"", contextlib.nullcontext(), keep=keep)
    assert all(Path(one).exists() == (keep or NAME not in one) for one in begun)
    assert delete_retired(lake, at + 99, 2**40, 100) == 0
    assert delete_retired(lake, at + 100, 2**40, 100) == (3 if keep else 0)
    assert sorted(one.name for one in lake.retired.iterdir()) == OTHERS
    assert {Path(one).exists() for one in begun if NAME in one} == {False}
    assert rows_in(newest_files(lake.root)) == read(lake.root)


def test_an_erasure_deletes_only_the_lakes_own(lake):
    staged = lake.staged_erasure / "packets" / NAME
    shutil.copytree(lake.packets / NAME, staged)
    record = lake.erasures.next(DAY, 0, [], b"")
    mark(staged, record.number)
    stray = lake.packets / NAME / "of-an-operator.parquet"
    stray.write_bytes(b"kept")
    place_erasure(lake, record, b"", contextlib.nullcontext())
    assert sorted(one.name for one in lake.retired.iterdir()) == OTHERS
    assert not stray.exists() and (lake.packets / BATCH).is_dir() and not lake.staging.exists()
    assert [one.read_bytes() for one in lake.aside.iterdir()] == [b"kept"]
