"""A lake from a disk into a bucket and back: the same chain, wherever it is killed, and nothing false."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import obstore
import pyarrow.parquet as pq
import pytest
from strata.protocol.sequences import Span, day_text
from strata_pipeline.cli import app
from strata_pipeline.errors import LakeBusy
from strata_pipeline.jobs.copy import copy_lake
from strata_pipeline.jobs.copy_files import BatchFolders
from strata_pipeline.jobs.copy_groups import RowGroups
from strata_pipeline.lake.chain import Chain
from strata_pipeline.lake.generations import replace_day, staged_day
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.layout import LakeLayout
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.stores.objects import ObjectStore
from strata_pipeline.lake_format import LakeError, Manifest
from typer.testing import CliRunner

from tests.support.file_faults import Killed
from tests.support.object_lakes import NO_GRACE, put_batch, requests, rows, unnamed
from tests.support.toy_lakes import DAY, compacted, faults, read, rows_table, write_batch
from tests.support.toy_lakes import place as sequence

ALL = [sequence(n) for n in range(1, 7)] + [sequence(n, DAY + 1) for n in (1, 2, 3)]


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Three batches of two days, with quarantined rows."""
    folder = tmp_path / "lake"
    write_batch(folder, [1, 2, 3], [4])
    write_batch(folder, [5], [6])
    write_batch(folder, [1, 2, 3], day=DAY + 1)
    return folder


def test_a_lake_comes_into_a_bucket_and_back_with_its_tip(lake, place, tmp_path):
    up = copy_lake(lake, place)
    assert (up.batches, up.packets, up.left, up.tip) == (3, 7, 0, Lake.open(lake).tip)
    assert rows(place) == ALL and unnamed(place) == []
    assert copy_lake(lake, place).batches == 0
    back = tmp_path / "back"
    assert copy_lake(place, back).tip == up.tip
    assert faults(back) == [] and read(back) == read(lake)
    assert read(back, "quarantine") == read(lake, "quarantine")
    # Each continues by itself, and the other catches up or reports that it cannot.
    write_batch(lake, [4], day=DAY + 1)
    assert copy_lake(lake, place).batches == 1 and rows(place) == [*ALL, sequence(4, DAY + 1)]
    write_batch(back, [5], day=DAY + 1)
    with pytest.raises(LakeError, match="is not the beginning of"):
        copy_lake(lake, back)
    with pytest.raises(LakeError, match="is not the beginning of"):
        copy_lake(back, place)


def test_the_manifests_of_a_day_at_a_time_are_read(lake, tmp_path, monkeypatch):
    def everything(chain: Chain) -> list[Manifest]:
        raise AssertionError("after years there are millions")

    with monkeypatch.context() as patch:
        patch.setattr(Chain, "all", everything)
        done = copy_lake(lake, tmp_path / "copy")
    assert (done.batches, done.packets, done.left, done.tip) == (3, 7, 0, Lake.open(lake).tip)


def test_a_copy_that_goes_on_reads_the_manifests_of_a_day_at_a_time(lake, in_memory, tmp_path, monkeypatch):
    write_batch(lake, [4], day=DAY + 1)
    write_batch(lake, [1], day=DAY + 2)
    places = [str(tmp_path / "copy"), next(in_memory)]
    for where in places:
        copy_lake(lake, where)
    write_batch(lake, [2], day=DAY + 2)
    with Lake.replace(lake) as opened:
        assert opened.chain.seal() == 2

    def everything(chain: Chain) -> list[Manifest]:
        raise AssertionError("after years there are millions")

    known: list[int] = []
    real = LakeLayout._tells

    def counted(layout: LakeLayout, span: Span, told: dict[int, Any]) -> bool:
        is_told = real(layout, span, told)
        known.append(len(told))
        return is_told

    monkeypatch.setattr(Chain, "_listed", everything)
    monkeypatch.setattr(LakeLayout, "_tells", counted)
    for where in places:
        assert copy_lake(lake, where).batches == 1
    assert max(known) == 1


def test_a_copy_has_the_witnesses_of_the_lake(lake, in_memory, tmp_path):
    write_batch(lake, [4, 5], day=DAY + 1, times={sequence(4, DAY + 1): 7})
    place, back = next(in_memory), tmp_path / "back"
    copy_lake(lake, place)
    copy_lake(place, back)
    manifest = Lake.open(back).manifests[-1]
    for copied in (ObjectLake.open(place), Lake.open(back)):
        assert copied.manifests == Lake.open(lake).manifests
        assert copied.witnesses.text_of(manifest) == Lake.open(lake).witnesses.text_of(manifest) != b""
        assert len(copied.witnesses.names()) == 1
    [path] = (lake / "_witnesses").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(LakeError, match="was changed after it was written"):
        copy_lake(lake, next(in_memory))
    path.unlink()
    short = tmp_path / "short"
    with pytest.raises(LakeError, match=r"cannot be read.*Bring it back"):
        copy_lake(lake, short)
    assert len(Lake.open(short).manifests) == 3


def test_a_compacted_day_is_copied_as_it_was_archived(lake, place):
    with Lake.replace(lake) as opened:
        target = staged_day(opened, DAY)
        compacted(opened, DAY, target)
        replace_day(opened, DAY, target, 0)
    copy_lake(lake, place)
    assert rows(place) == ALL
    copied = ObjectLake.open(place)
    assert all(len(unit.manifests) == 1 for day in copied.days() for unit in copied.units(day)[0])


@pytest.fixture
def busy_day(tmp_path: Path) -> Path:
    """A day of forty batches, and a later one."""
    folder = tmp_path / "busy"
    for first in range(1, 201, 5):
        write_batch(folder, [first, first + 1, first + 2, first + 3], [first + 4])
    write_batch(folder, [1], day=DAY + 1)
    return folder


def test_the_folders_of_a_day_are_not_all_looked_at_for_each_batch(busy_day, tmp_path, monkeypatch):
    looks: list[Span] = []
    real = Span.overlaps

    def counted(one: Span, other: Span) -> bool:
        looks.append(one)
        return real(one, other)

    monkeypatch.setattr(Span, "overlaps", counted)
    assert copy_lake(busy_day, tmp_path / "copy").batches == 41
    assert len(looks) < 200, "of 40 × 80"
    assert faults(tmp_path / "copy") == [] and read(tmp_path / "copy") == read(busy_day)


def test_folders_are_found_by_their_spans_whatever_others_there_are():
    chance = random.Random(3)
    for _ in range(300):
        spans = [
            Span(n, n + 1 + chance.randrange(9)) for n in chance.choices(range(40), k=chance.randrange(9))
        ]
        folders = BatchFolders(Path(f"day={n}", f"batch={span}") for n, span in enumerate(spans))
        for first in range(50):
            asked = Span(first, first + 1 + chance.randrange(6))
            found = [span for span, _ in folders.overlapping(asked)]
            assert found == sorted(span for span in spans if span.overlaps(asked))


@pytest.mark.parametrize("kept", [2**30, 1])
def test_of_a_compacted_day_each_row_group_is_read_once(busy_day, tmp_path, monkeypatch, kept):
    with Lake.replace(busy_day) as opened:
        target = staged_day(opened, DAY)
        compacted(opened, DAY, target)
        for path in target.rglob("*.parquet"):
            pq.write_table(pq.ParquetFile(path).read(), path, row_group_size=16)
        replace_day(opened, DAY, target, 0)
    reads: list[object] = []
    real = RowGroups._read

    def counted(groups: RowGroups, asked: Any) -> Any:
        reads.append(asked)
        return real(groups, asked)

    monkeypatch.setattr(RowGroups, "_read", counted)
    monkeypatch.setattr("strata_pipeline.jobs.copy_groups._KEPT_BYTES", kept)
    copy_lake(busy_day, tmp_path / "copy")
    assert faults(tmp_path / "copy") == [] and read(tmp_path / "copy") == read(busy_day)
    assert len(set(reads)) == 10
    # If only one stays in memory, the two kinds of a batch take turns.
    assert len(reads) == 10 if kept > 1 else 40 <= len(reads) <= 100


def test_a_torn_file_of_a_compacted_day_is_told_with_its_batch(lake, tmp_path):
    with Lake.replace(lake) as opened:
        target = staged_day(opened, DAY)
        compacted(opened, DAY, target)
        replace_day(opened, DAY, target, 0)
    path = min((lake / "packets").rglob("*.parquet"))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(LakeError, match=rf"batch .* \(manifest 0\) is damaged: {path}: it is not a Parquet"):
        copy_lake(lake, tmp_path / "copy")


def test_killed_anywhere_the_copy_is_a_beginning_and_the_next_run_goes_on(lake, place):
    copy_lake(lake, place)
    with requests() as sent:
        copy_lake(lake, f"{place}-whole")
    commits = [n for n, one in enumerate(sent) if "_manifests" in one]
    for last in (commits[0] - 1, commits[0], commits[1], commits[1] + 1):
        with requests(last), pytest.raises(Killed):
            copy_lake(lake, f"{place}-{last}")
        if last > commits[0]:
            assert rows(f"{place}-{last}") == ALL[: 4 if last <= commits[1] else 6]
        copy_lake(lake, f"{place}-{last}")
        assert rows(f"{place}-{last}") == ALL
        now = ObjectLake.open(f"{place}-{last}")
        assert now.unexpected(now.days())[0] == []


@pytest.mark.parametrize("left", ["nothing", "a listing", "a listing of damage"])
@pytest.mark.parametrize("before", ["_objects/", "_manifests/"])
def test_of_two_copies_at_once_nothing_is_left_that_no_listing_names(
    lake, in_memory, monkeypatch, before, left
):
    place, begun, real = next(in_memory), list[str](), obstore.put
    if left != "nothing":  # by a killed writer: it does not count yet
        with requests() as sent:
            copy_lake(lake, next(in_memory))
        with requests(next(n for n, one in enumerate(sent) if "_manifests/" in one)), pytest.raises(Killed):
            copy_lake(lake, place)
        store = ObjectStore.at(place)
        if left == "a listing of damage":
            store.put(next(store.keys("packets")), b"")

    def beside_another(store: Any, path: str, *arguments: Any, **options: Any) -> Any:
        if path.startswith(before) and not begun:
            begun.append(path)
            copy_lake(lake, place)
        return real(store, path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", beside_another)
        with pytest.raises(LakeBusy, match="nothing is lost or there twice"):
            copy_lake(lake, place)
    assert rows(place) == ALL
    now = ObjectLake.open(place)
    assert now.unexpected(now.days())[0] == []
    with ObjectLake.write(place, NO_GRACE):
        pass
    assert unnamed(place) == []


def test_what_does_not_hold_is_not_copied(lake, place, tmp_path):
    put_batch(place, [1, 2])
    put_batch(place, [3, 4])
    store = ObjectLake.open(place).store
    [last, *_] = [name for name in store.keys("packets") if f"batch={sequence(3)}" in name]
    content = store.get(last)
    store.put(last, content[:-1] + b"x")
    with pytest.raises(LakeError, match="has other bytes than were written"):
        copy_lake(place, tmp_path / "back")
    store.put(last, content)
    one, other = list(lake.glob("packets/day=2024-10-05/batch=*/kind=*/*.parquet"))
    one.write_bytes(other.read_bytes())
    with pytest.raises(LakeError, match=r"is damaged: .* the batches before it are copied"):
        copy_lake(lake, f"{place}-other")
    assert rows(f"{place}-other") == ALL[:6]


@pytest.mark.parametrize("name", ["more.parquet", "_more.parquet"])
@pytest.mark.parametrize("day", [DAY, DAY + 1])
def test_rows_that_are_of_no_batch_are_not_copied(lake, in_memory, tmp_path, name, day):
    batch = min(lake.glob(f"packets/day={day_text(day)}/batch=*"))
    pq.write_table(rows_table([sequence(99, day)]), batch / "kind=POST" / name)
    for where in (tmp_path / "copy", next(in_memory)):
        with pytest.raises(LakeError, match="has 1 rows that are not its own"):
            copy_lake(lake, where)


def test_the_command_says_what_it_did(lake, place):
    done = CliRunner().invoke(app, ["copy", "--lake", str(lake), "--to", place, "--json"])
    assert done.exit_code == 0 and '"batches": 3' in done.stdout
    refused = CliRunner().invoke(app, ["copy", "--lake", str(lake), "--to", "s3://no"])
    assert refused.exit_code == 2
