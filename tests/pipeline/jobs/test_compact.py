"""Small files become large ones, and the lake's content and proofs stay the same."""

from __future__ import annotations

import shutil
from bisect import bisect_left
from pathlib import Path
from unittest.mock import Mock

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from strata.protocol.sequences import day_text
from strata_pipeline.datasets import Packets
from strata_pipeline.errors import UsageError
from strata_pipeline.jobs import compact as compacting
from strata_pipeline.jobs import rewriting
from strata_pipeline.jobs.archive import archive
from strata_pipeline.jobs.audit import audit
from strata_pipeline.jobs.compact import compact
from strata_pipeline.jobs.rewriting import write_day
from strata_pipeline.lake import checking, files
from strata_pipeline.lake.delta import publish, published_files
from strata_pipeline.lake.generations import replace_day, staged_day
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake_format import LakeError

from tests.support import relay_logs
from tests.support import toy_lakes as toys
from tests.support.footers import change, statistics
from tests.support.lakes import DAY, NOON, bodies, plain, sql
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def original(spark, new_log, tmp_path_factory):
    """Log, lake and packets: two finished days and one unfinished, in small files; one row is quarantined."""
    url, lake, packets = new_log(), tmp_path_factory.mktemp("lake"), []
    for day in range(3):
        packets += (today := relay_logs.make_many(30, first=day * 30, at=NOON + day * DAY))
        relay_logs.append(url, today, NOON + day * DAY)
    sql(url, f"UPDATE packets SET content_type = 'X' WHERE packet_id = '\\x{packets[4].digest.hex()}'")
    archive(spark, url, lake, batch_rows=16)
    return url, lake, packets


@pytest.fixture
def made(original, tmp_path):
    """The packets of a copy of that lake."""
    shutil.copytree(original[1], tmp_path, dirs_exist_ok=True)
    return original[2]


def test_a_compacted_lake_holds_the_same_and_goes_on(spark, original, tmp_path, made):
    log_url = original[0]
    before = bodies(tmp_path)
    with Lake.open(tmp_path).held():
        assert compact(spark, tmp_path, patience=0).waiting == 2
    publish(Lake.open(tmp_path))
    done = compact(spark, tmp_path)
    assert done.days == 2 and done.files_after == 4 < done.files_before
    # An existing Delta log gets each day.
    assert {one.resolve() for one in published_files(tmp_path)} == set(
        (tmp_path / "packets").rglob("*.parquet")
    )
    assert bodies(tmp_path) == before == [p.canonical for n, p in enumerate(made) if n != 4]
    assert audit(spark, tmp_path, url=log_url).holds
    for file in (tmp_path / "packets" / "day=2024-10-04").rglob("*.parquet"):
        sequences = pq.ParquetFile(file).read(["sequence"])["sequence"].to_pylist()
        assert sequences == sorted(sequences)
    again = compact(spark, tmp_path, grace=0)
    assert (again.days, again.deleted) == (0, 2) and not (tmp_path / "_retired").exists()
    relay_logs.append(log_url, more := relay_logs.make_many(5, first=500, at=NOON + 3 * DAY), NOON + 3 * DAY)
    archive(spark, log_url, tmp_path)
    assert bodies(tmp_path) == before + [packet.canonical for packet in more]
    assert compact(spark, tmp_path).days == 1
    assert audit(spark, tmp_path, url=log_url).holds


def test_of_a_large_day_only_a_stretch_is_on_the_disk_to_be_sorted(spark, tmp_path, made):
    lake, disk = Lake.open(tmp_path), Path(spark.sparkContext.getConf().get("spark.local.dir"))
    day, *_ = lake.finished_days()
    manifests, left = lake.chain.of_day(day), files.count(disk, "shuffle_*")
    ends, written = [0, *(one.up_to for one in manifests)], tmp_path / "written"
    write_day(Packets.read(spark, lake, [day]), written, manifests, sorted_bytes=1)
    wait_until(lambda: files.count(disk, "shuffle_*") == left, "what was sorted is gone")
    found = [
        pq.ParquetFile(file).read(["sequence"])["sequence"].to_pylist() for file in written.rglob("*.parquet")
    ]
    assert len(manifests) > 1
    for sequences in found:
        assert sequences == sorted(sequences)
        assert bisect_left(ends, sequences[0]) == bisect_left(ends, sequences[-1])
    held = plain(tmp_path).filter(pc.field("day") == day_text(day))
    assert sorted(one for sequences in found for one in sequences) == held["sequence"].to_pylist()
    assert not [file for file in written.rglob("*") if file.is_file() and file.suffix != ".parquet"]


def test_a_piece_of_a_compacted_day_can_be_read_without_the_rest(spark, tmp_path, made, monkeypatch):
    monkeypatch.setattr(rewriting, "GROUP_ROWS", 4)
    assert compact(spark, tmp_path).days == 2
    for file in (tmp_path / "packets" / "day=2024-10-04").rglob("*.parquet"):
        told = pq.ParquetFile(file).metadata
        assert {told.row_group(number).num_rows for number in range(told.num_row_groups - 1)} == {4}
        assert told.row_group(told.num_row_groups - 1).num_rows <= 4 < told.num_rows
    assert audit(spark, tmp_path).holds


@pytest.mark.parametrize("step", ["make_durable", "exchange", "remove"])
def test_cut_off_at_any_step_each_day_is_whole(spark, tmp_path, made, monkeypatch, step):
    before, real, calls = bodies(tmp_path), getattr(files, step), []

    class Killed(BaseException):
        pass

    def dies(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise Killed
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(files, step, dies)
        with pytest.raises(Killed):
            compact(spark, tmp_path)
    assert bodies(tmp_path) == before
    compact(spark, tmp_path)
    assert bodies(tmp_path) == before and not (tmp_path / "_staging").exists()


def test_a_compact_day_is_rewritten_when_it_is_named_and_its_statistics_are_true_again(spark, tmp_path, made):
    before = bodies(tmp_path)
    assert compact(spark, tmp_path).days == 2
    path = next((tmp_path / "packets" / "day=2024-10-04").rglob("*.parquet"))
    change(path, lambda footer, _: statistics(footer, "timestamp").update({"5S": bytes(8)}))
    assert [one.reason for one in audit(spark, tmp_path).findings] == ["statistics"]
    assert compact(spark, tmp_path).days == 0
    first, second, last = Lake.open(tmp_path).days()
    done = compact(spark, tmp_path, again=[first])
    assert done.days == 1 and audit(spark, tmp_path).holds and bodies(tmp_path) == before
    with pytest.raises(UsageError, match="is not a finished day"):
        compact(spark, tmp_path, again=[second, last])
    assert compact(spark, tmp_path).days == 0


def test_files_that_disagree_with_the_manifests_are_left_alone(spark, tmp_path, made):
    next((tmp_path / "packets" / "day=2024-10-04").rglob("*.parquet")).unlink()
    before = bodies(tmp_path)
    with pytest.raises(LakeError, match=r"the day stays as it is\. Run audit"):
        compact(spark, tmp_path)
    assert bodies(tmp_path) == before


def test_tasks_check_the_new_files_of_a_day(spark, tmp_path, made, monkeypatch):
    def never(*_):
        raise AssertionError

    monkeypatch.setattr(checking, "places_faults", never)
    monkeypatch.setattr(checking, "batches_faults", never)
    assert compact(spark, tmp_path).days


def test_a_damaged_day_does_not_hold_up_those_after_it(tmp_path, monkeypatch):
    for day in (toys.DAY, toys.DAY + 1, toys.DAY + 2):
        toys.write_batch(tmp_path, [1, 2], day=day)
        toys.write_batch(tmp_path, [3], day=day)
    files_before = toys.files_below(tmp_path / "packets")
    files_before[0].unlink()

    def compact_day(spark: object, lake: Lake, day: int, *rest: object) -> bool:
        target = staged_day(lake, day)
        toys.compacted(lake, day, target)
        replace_day(lake, day, target, 0)
        return True

    monkeypatch.setattr(compacting, "_compact_day", compact_day)
    with pytest.raises(LakeError, match=r"^the manifests and the files of 2024-10-04 disagree"):
        compact(Mock(), tmp_path)
    lake = Lake.open(tmp_path)
    assert [len(lake.batches(day)) for day in lake.days()] == [2, 1, 2]
    assert len(lake.chain.stored_summaries()) == 2 and not (tmp_path / "_staging").exists()


def test_folders_change_places_at_once_and_in_three_steps(tmp_path, monkeypatch):
    for way in (files._exchange_at_once, lambda one, other: False):
        monkeypatch.setattr(files, "_exchange_at_once", way)
        one, other = tmp_path / "one", tmp_path / "other"
        for folder in (one, other):
            folder.mkdir(exist_ok=True)
            (folder / "name").write_text(folder.name)
        files.exchange(one, other)
        assert (one / "name").read_text() == "other" and (other / "name").read_text() == "one"
