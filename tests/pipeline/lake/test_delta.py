"""The Delta log: readers agree with the manifests at every version, wherever and whenever it is killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction
from strata.protocol.sequences import first_of_day
from strata_pipeline.cli import app
from strata_pipeline.errors import LakeError, ObjectStoreError, UsageError
from strata_pipeline.jobs import compact as compacting
from strata_pipeline.jobs import erase as erasing
from strata_pipeline.lake import delta
from strata_pipeline.lake.delta import (
    APP,
    DeltaPublished,
    delta_log,
    is_published,
    publish,
    published_files,
)
from strata_pipeline.lake.delta_places import place_of
from strata_pipeline.lake.generations import replace_day, staged_day
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.object_lake import ObjectLake
from strata_pipeline.lake.places import open_lake
from strata_pipeline.lake.rows import cut, digest_of
from strata_pipeline.views import statements
from typer.testing import CliRunner

from tests.support.footers import change
from tests.support.object_lakes import NO_GRACE, put_batch
from tests.support.object_lakes import compacted as object_compacted
from tests.support.object_stores import Asked
from tests.support.short_lives import ShortLife, short_lives
from tests.support.toy_lakes import DAY, compacted, faults, read, staged, write_batch
from tests.support.toy_lakes import place as sequence

COMMITS = int(os.environ.get("STRATA_DELTA_COMMITS", "6"))
"""Commits between kills: a thousand take some minutes."""
GUIDE = Path(__file__).parents[3] / "docs/guides/pipeline.md"
COLUMNS = ["sequence", "received_at", "packet_id", "size"]

Reader = Callable[[Path, int], pa.Table]


def with_pyarrow(lake: Path, version: int) -> pa.Table:
    return DeltaTable(lake / "generations", version=version).to_pyarrow_dataset().to_table(columns=COLUMNS)


def with_duckdb(lake: Path, version: int) -> pa.Table:
    # DuckDB's own Delta reader is an extension from the network; its scan of the table's files is not.
    rows = DeltaTable(lake / "generations", version=version).to_pyarrow_dataset()
    return duckdb.from_arrow(rows).project(", ".join(COLUMNS)).to_arrow_table()


def with_polars(lake: Path, version: int) -> pa.Table:
    found = pl.scan_delta(str(lake / "generations"), version=version).select(COLUMNS).collect().to_arrow()
    return found.cast(with_pyarrow(lake, version).schema)


def with_files(lake: Path, version: int) -> pa.Table:
    paths = [str(path) for path in published_files(lake, version)]
    return duckdb.read_parquet(paths).project(", ".join(COLUMNS)).to_arrow_table()


READERS: list[Reader] = [with_pyarrow, with_duckdb, with_polars, with_files]


def digest(table: pa.Table) -> tuple[int, str]:
    table = table.combine_chunks().sort_by("sequence")
    return table.num_rows, digest_of(table)


def compact(path: Path, day: int) -> None:
    lake = Lake.open(path)
    target = staged_day(lake, day)
    compacted(lake, day, target)
    replace_day(lake, day, target, 0)


def test_every_reader_agrees_at_every_version_and_a_run_too_many_changes_nothing(tmp_path):
    path = tmp_path / "lake"
    for number in range(3):
        write_batch(path, [3 * number + n for n in (1, 2, 3)])
        done = publish(Lake.open(path), days=())
        assert (done.version, done.manifest, done.removed) == (number, number, 0)
        assert publish(Lake.open(path)).version == number
    write_batch(path, [1], [2], day=DAY + 1)
    assert publish(Lake.open(path), days=()).rows == 1
    expected = [3, 6, 9, 10]
    for version in range(4):
        found = {digest(reader(path, version)) for reader in READERS}
        assert len(found) == 1 and found.pop()[0] == expected[version]
    [summary] = (
        pl.scan_delta(str(path / "generations")).group_by("kind").len().sort("kind").collect().rows()[:1]
    )
    assert summary == ("NOTE", 3)

    # A compaction changes the files of a future version, but no row.
    before = digest(with_pyarrow(path, 3))
    compact(path, DAY)
    assert {digest(reader(path, 3)) for reader in READERS} == {before}  # by the links to the old files
    done = publish(Lake.open(path), days=[DAY])
    assert (done.version, done.added, done.removed, done.rows) == (4, 2, 6, 9)
    assert {digest(reader(path, 4)) for reader in READERS} == {before}
    assert faults(path) == []  # an audit does not mind the log


def test_what_is_gained_is_published_without_a_look_at_older_files(tmp_path, monkeypatch):
    path = tmp_path / "lake"

    def no_look(*_: object) -> list[Path]:
        raise AssertionError("a whole day was listed")

    write_batch(path, [1, 2, 3])
    publish(Lake.open(path))
    for number in (4, 6):
        write_batch(path, [number, number + 1])
    with monkeypatch.context() as patch:
        patch.setattr(Lake, "folders_of_day", no_look)
        done = publish(Lake.open(path), days=())
        assert (done.version, done.added, done.removed, done.rows) == (1, 4, 0, 7)
        with pytest.raises(AssertionError):
            publish(Lake.open(path), days=[DAY])
    # A compaction or an erasure may include unpublished batches: the day is compared as a whole.
    write_batch(path, [8])
    write_batch(path, [1], day=DAY + 1)
    compact(path, DAY)
    done = publish(Lake.open(path), days=())
    assert (done.version, done.rows) == (2, 9)
    assert digest(with_pyarrow(path, 2)) == digest(with_files(path, 2)) and len(read(path)) == 9
    # A batch without the rows of its manifest is not published.
    write_batch(path, [2, 3], day=DAY + 1)
    [last] = (path / "packets").glob(f"day=*/batch=*{sequence(3, DAY + 1)}/kind=POST/*.parquet")
    shutil.copy(last, last.with_name("again.parquet"))
    with pytest.raises(LakeError, match=r"have 3 rows, and its manifest tells of 2: nothing was published"):
        publish(Lake.open(path), days=())
    assert DeltaTable(path / "generations").version() == 2


def test_of_a_log_that_is_its_own_only_the_end_is_read(tmp_path, monkeypatch):
    path = tmp_path / "lake"
    write_batch(path, [1])
    publish(Lake.open(path), days=())
    made: list[str] = []

    def noted(table: str, **options: Any) -> DeltaTable:
        made.append(table)
        return DeltaTable(table, **options)

    monkeypatch.setattr(delta, "DeltaTable", noted)
    for number in (2, 3, 4):
        write_batch(path, [number])
        assert publish(Lake.open(path), days=()).version == number - 1
    assert not made
    # Delta's own commits are read as ours are.
    write_batch(path, [5])
    publish(Lake.open(path))
    made.clear()
    write_batch(path, [6])
    assert publish(Lake.open(path), days=()).version == 5 and not made
    assert publish(Lake.open(path), days=()).version == 5 and not made
    # Another program's commit, which names no manifest, is not the end of ours.
    DeltaTable(path / "generations").alter.set_table_name("another")
    write_batch(path, [7])
    assert publish(Lake.open(path), days=()).version == 7 and made
    # Another log, and none.
    publish(Lake.open(path), rebuild=True)
    write_batch(path, [8])
    assert publish(Lake.open(path), days=()).version == 1
    shutil.rmtree(path / "generations" / "_delta_log")
    write_batch(path, [9])
    assert publish(Lake.open(path), days=()).version == 0
    assert digest(with_pyarrow(path, 0)) == digest(with_files(path, 0)) and len(read(path)) == 9


def test_a_commit_of_what_is_new_is_as_deltas_own(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for path, days in ((ours, ()), (theirs, None)):
        for number in (1, 3):
            write_batch(path, [number, number + 1])
            publish(Lake.open(path), days=days)
    commits = [
        list(map(json.loads, (path / f"generations/_delta_log/{1:020}.json").read_text().splitlines()))
        for path in (ours, theirs)
    ]
    [our_info, *our_rest], [their_info, *their_rest] = commits
    for said in their_rest:
        for absent in ("tags", "baseRowId", "defaultRowCommitVersion", "clusteringProvider"):
            assert said.get("add", {}).pop(absent, None) is None
    assert without_times(our_rest) == without_times(their_rest)
    for name in ("operation", "operationParameters"):
        assert our_info["commitInfo"][name] == their_info["commitInfo"][name]


def without_times(actions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Actions without what two lakes do not share: when files were written, and their names."""
    for told in (told for action in actions for told in action.values()):
        for name in ("modificationTime", "lastUpdated"):
            told.pop(name, None)
        if "path" in told:
            told["path"] = str(Path(told["path"]).parent)
    return actions


def test_each_hundredth_commit_makes_a_checkpoint_and_cleans_up(tmp_path, monkeypatch):
    monkeypatch.setattr(delta, "_CHECKPOINT_EVERY", 3)
    path = tmp_path / "lake"
    for number in range(8):
        write_batch(path, [number + 1])
        publish(Lake.open(path), days=())
    log = path / "generations" / "_delta_log"
    assert [int(one.name[:20]) for one in sorted(log.glob("*.checkpoint.parquet"))] == [3, 6]
    assert {digest(reader(path, 7)) for reader in READERS} == {digest(with_pyarrow(path, 7))}
    assert len(read(path)) == 8


def test_a_last_commit_that_is_damaged_is_told_of(tmp_path):
    path = tmp_path / "lake"
    for number in (1, 2):
        write_batch(path, [number])
        publish(Lake.open(path), days=())
    [*_, last] = sorted((path / "generations" / "_delta_log").glob("*.json"))
    write_batch(path, [3])
    for text in (b"{", b"\xff", b'{"txn":{"appId":"strata-lake","version":"x"}}'):
        last.write_bytes(text)
        for days in ((), None):
            with pytest.raises(
                LakeError, match=r"cannot be used: .*\. publish-delta --rebuild makes another log"
            ):
                publish(Lake.open(path), days=days)


def test_who_read_the_chain_before_another_published_more_of_it_goes_on_behind(tmp_path):
    path = tmp_path / "lake"
    write_batch(path, [1, 2])
    write_batch(path, [3])
    write_batch(path, [1], day=DAY + 1)
    publish(Lake.open(path))
    compact(path, DAY)
    begun = Lake.open(path)
    write_batch(path, [2], day=DAY + 1)
    publish(Lake.open(path), days=())  # by an archive
    done = publish(begun, days=[DAY])
    assert (done.version, done.manifest, done.added, done.removed) == (2, 3, 2, 3)
    assert digest(with_pyarrow(path, 2)) == digest(with_files(path, 2)) and len(read(path)) == 5


@pytest.mark.parametrize("job", ["compact", "erase"])
def test_a_day_that_was_written_anew_by_a_run_that_was_killed_is_published_by_the_next(
    tmp_path, place, monkeypatch, job
):
    path = tmp_path / "lake"
    for write, where in ((write_batch, path), (put_batch, place)):
        for ordinals, day in (([1, 2], DAY), ([3], DAY), ([1], DAY + 1)):
            write(where, ordinals, day=day)
        publish(open_lake(where))
    compact(path, DAY)
    assert object_compacted(place)  # and each was killed at this point
    if job == "compact":
        run: Callable[[Any], Any] = partial(compacting.compact, Mock())
    else:
        monkeypatch.setattr(erasing, "connect", Mock())
        monkeypatch.setattr(erasing, "read_tombstones", lambda connection: [])
        run = partial(erasing.erase, Mock(), "postgresql://")
    run(path)
    assert {one.resolve() for one in published_files(path)} == set((path / "packets").rglob("*.parquet"))
    run(place)
    with ObjectLake.replace(place, NO_GRACE):
        pass
    assert digest(rows_in_bucket(place)) == digest(with_pyarrow(path, 1))


@pytest.mark.parametrize("days", [(), None], ids=["what is new", "all of it"])
def test_who_read_a_day_of_a_bucket_before_it_was_written_anew_names_its_new_objects(
    object_server, place, days
):
    put_batch(place, [1, 2])
    publish(open_lake(place))
    put_batch(place, [3, 4])
    put_batch(place, [1], day=DAY + 1)

    def overtake(asked: Asked) -> None:
        if asked.is_conditional and "_delta_log" in asked.key:
            object_server.behave()
            assert object_compacted(place)
            publish(open_lake(place))

    lake = open_lake(place)
    object_server.before = overtake
    publish(lake, days=days)
    with ObjectLake.replace(place, NO_GRACE):
        pass
    assert rows_in_bucket(place).num_rows == 5


def test_a_log_that_is_removed_or_foreign_is_made_again(tmp_path):
    path = tmp_path / "lake"
    with pytest.raises(UsageError, match="holds no lake yet"), Lake.write(path) as lake:
        publish(lake)
    write_batch(path, [1, 2])
    write_batch(path, [3])
    publish(Lake.open(path))
    shutil.rmtree(delta_log(Lake.open(path)))
    assert publish(Lake.open(path)).version == 0

    # Any doubt about the log leads to refusal until the caller decides otherwise.
    other = tmp_path / "other"
    write_batch(other, [1])
    shutil.copytree(path / "generations" / "_delta_log", other / "generations" / "_delta_log")
    with pytest.raises(LakeError, match="not of this chain"):
        publish(Lake.open(other))
    assert publish(Lake.open(other), rebuild=True).rows == 1
    assert (other / "_aside" / "delta_log" / "00000000000000000000.json").exists()
    (path / "generations" / "_delta_log" / "00000000000000000000.json").write_text("{nonsense")
    with pytest.raises(LakeError, match="--rebuild"):
        publish(Lake.open(path))
    done = CliRunner().invoke(app, ["publish-delta", "--lake", str(path), "--rebuild", "--json"])
    assert done.exit_code == 0 and '"rows": 3' in done.stdout
    again = CliRunner().invoke(app, ["publish-delta", "--lake", str(path)])
    assert "0 files added, 0 taken out, 3 rows" in again.stdout


def test_a_checkpoint_of_the_log_is_no_file_of_the_table_to_plain_readers_as_the_guide_has_them(tmp_path):
    path = tmp_path / "lake"
    write_batch(path, [1, 2, 3])
    publish(Lake.open(path))
    DeltaTable(path / "generations").create_checkpoint()
    assert list((path / "generations" / "_delta_log").glob("*.parquet"))
    [line] = [
        text for text in GUIDE.read_text().splitlines() if text.strip().startswith("duckdb:  SELECT kind")
    ]
    query = line.partition("duckdb:")[2].replace("/srv/lake", str(path))
    assert sorted(duckdb.execute(query).fetchall()) == [("NOTE", 1), ("POST", 2)]
    with duckdb.connect() as connection:
        for text in statements(path):
            connection.execute(text)
        assert connection.execute("SELECT count(*) FROM packets").fetchall() == [(3,)]


def test_files_that_another_program_has_added_to_a_log_are_told_of(tmp_path):
    path = tmp_path / "lake"
    write_batch(path, [1, 2])
    publish(Lake.open(path))
    table = DeltaTable(path / "generations")
    [found, *_] = (path / "packets").rglob("*.parquet")
    values: dict[str, str | None] = {"day": "2024-10-04", "batch": "x", "kind": "POST"}
    added = AddAction(f"x/{found.name}", 1, values, 0, True, "{}")
    table.create_write_transaction([added], "append", table.schema(), list(values))
    with pytest.raises(
        LakeError, match=r"how many rows they have\. publish-delta --rebuild makes another log"
    ):
        publish(Lake.open(path))
    assert publish(Lake.open(path), rebuild=True).rows == 2


def test_what_the_files_have_too_much_or_too_little_is_not_published(tmp_path):
    path = tmp_path / "lake"
    write_batch(path, [1, 2, 3, 4])
    [first, *_] = published = sorted((path / "packets").rglob("*.parquet"))
    shutil.copy(first, first.with_name("again.parquet"))
    with pytest.raises(LakeError, match=r"have 6 rows, and its manifests tell of 4.*Run audit"):
        publish(Lake.open(path))
    first.with_name("again.parquet").write_bytes(b"no parquet")
    with pytest.raises(LakeError, match=r"again\.parquet cannot be read"):
        publish(Lake.open(path))
    first.with_name("again.parquet").unlink()
    whole = first.read_bytes()
    change(first, lambda footer, _: footer["4A"][0].update({"6L": 2**40}))  # pyarrow ends for some of these
    with pytest.raises(LakeError, match=f"{first} cannot be read: .*another size than its columns"):
        publish(Lake.open(path))
    first.write_bytes(whole)
    assert not is_published(Lake.open(path))
    assert publish(Lake.open(path)).added == len(published)


def test_a_batch_in_the_making_is_not_in_the_table_and_rows_cannot_be_deleted_through_it(tmp_path):
    path = tmp_path / "lake"
    write_batch(path, [1, 2])
    lake = Lake.open(path)
    manifest, packets, _ = staged(lake, [3, 4])
    assert packets is not None
    batch = next((path / "packets").glob("day=*")) / f"batch={manifest.span}"
    shutil.copytree(packets, batch)  # visible, and its manifest not written yet
    assert publish(Lake.open(path)).rows == 2
    with pytest.raises(DeltaError, match="append-only"):
        DeltaTable(path / "generations").delete(f"sequence > {first_of_day(DAY)}")
    assert len(read(path)) == 4


WRITER = """
from pathlib import Path
from strata_pipeline.lake.delta import publish
from strata_pipeline.lake.lake import Lake
from tests.support.toy_lakes import write_batch

def main(place, count):
    path = Path(place)
    begun = Lake.open(path).chain.end.number
    print("ready", flush=True)
    for number in range(begun, count):
        write_batch(path, [2 * number + 1, 2 * number + 2])
        publish(Lake.open(path), days=())
"""


def test_killed_at_any_time_the_next_publisher_completes_the_log(tmp_path):
    path = tmp_path / "lake"
    write_batch(path, [1, 2])
    drawn, kills = random.Random(7), 0
    with short_lives(WRITER) as start:
        while Lake.open(path).chain.end.number < COMMITS:
            publish_and_kill(start, path, drawn.uniform(0.01, 0.2) * max(1, COMMITS / 60))
            kills += 1
    assert kills
    check_versions(path)


def publish_and_kill(start: Callable[..., ShortLife], path: Path, seconds: float) -> None:
    """Kill a writer after some seconds; the next one completes the log."""
    writer = start(str(path), COMMITS)
    assert writer.line() == "ready"
    time.sleep(seconds)
    writer.kill()
    with Lake.write(path):  # as the next archive does
        pass
    publish(Lake.open(path))
    lake = Lake.open(path)
    table = DeltaTable(path / "generations")
    assert table.transaction_version(APP) == lake.chain.end.number - 1
    rows = table.to_pyarrow_dataset().to_table(columns=["sequence"])["sequence"].to_pylist()
    assert sorted(rows) == read(path) == [sequence(n + 1) for n in range(len(rows))]


def check_versions(path: Path) -> None:
    """Check that each version is a beginning of the chain, to the row, and that readers agree on it; of many,
    check each hundredth and the last."""
    manifests = Lake.open(path).manifests
    last = DeltaTable(path / "generations").version()
    seen: set[Path] = set()
    rows = pa.table({name: [] for name in COLUMNS})
    for version in range(last + 1):
        table = DeltaTable(path / "generations", version=version)
        last_told = table.transaction_version(APP)
        assert last_told is not None
        told = manifests[: last_told + 1]
        files = set(published_files(path, version))
        assert seen < files
        new = [pq.ParquetFile(file).read(COLUMNS) for file in sorted(files - seen)]
        seen = files
        rows = pa.concat_tables([rows, *new], promote_options="permissive").combine_chunks()
        assert rows.num_rows == sum(manifest.packets for manifest in told)
        found = digest(rows)
        for manifest, some in zip(told[-1:], cut(rows.sort_by("sequence"), [told[-1].span]), strict=True):
            assert digest_of(some) == manifest.rows
        if last < 100 or version % 100 == 0 or version == last:
            assert {digest(reader(path, version)) for reader in READERS} == {found}


def in_bucket(where: str) -> dict[str, str]:
    return place_of(ObjectLake.open(where)).options or {}


def rows_in_bucket(where: str, version: int | None = None) -> pa.Table:
    """The rows at a version, or the last, after checking that all readers agree on them."""
    table, options = f"{where}/packets", in_bucket(where)
    dataset = DeltaTable(table, version=version, storage_options=options).to_pyarrow_dataset()
    found = dataset.to_table(columns=COLUMNS)
    others = [
        pl.scan_delta(table, version=version, storage_options=options).select(COLUMNS).collect().to_arrow(),
        duckdb.from_arrow(dataset).project(", ".join(COLUMNS)).to_arrow_table(),
    ]
    assert {digest(other.cast(found.schema)) for other in others} == {digest(found)}
    return found


def test_a_bucket_is_published_and_each_version_is_read_as_long_as_its_objects_are_there(place):
    put_batch(place, [1, 2, 3])
    assert publish(open_lake(place)).version == 0
    put_batch(place, [4, 5], [6])
    put_batch(place, [1], day=DAY + 1)
    done = publish(open_lake(place), days=())
    assert (done.version, done.manifest, done.added, done.rows) == (1, 2, 3, 6)
    assert publish(open_lake(place)).version == 1
    assert [rows_in_bucket(place, version).num_rows for version in (0, 1)] == [3, 6]
    before = digest(rows_in_bucket(place))
    assert object_compacted(place)
    assert digest(rows_in_bucket(place)) == before  # replaced, and still there
    done = publish(open_lake(place), days=[DAY])
    assert (done.version, done.added, done.removed) == (2, 2, 4)
    assert digest(rows_in_bucket(place)) == before
    with ObjectLake.replace(place, NO_GRACE):
        pass
    assert digest(rows_in_bucket(place)) == before
    with pytest.raises(FileNotFoundError):  # never wrong rows
        rows_in_bucket(place, 1)
    assert ObjectLake.open(place).unexpected([DAY, DAY + 1]) == ([], 0)  # an audit does not mind the log
    with pytest.raises(DeltaError, match="append-only"):
        DeltaTable(f"{place}/packets", storage_options=in_bucket(place)).delete("sequence > 0")


@pytest.mark.parametrize("number", [1, 2])
def test_of_two_publishers_of_a_bucket_the_second_goes_on_behind_the_first(object_server, place, number):
    put_batch(place, [1])
    if number == 2:
        publish(open_lake(place))
        put_batch(place, [2])
    lake, met = open_lake(place), list[DeltaPublished]()

    def overtake(asked: Asked) -> None:
        if asked.is_conditional and "_delta_log" in asked.key:
            object_server.behave()
            met.append(publish(open_lake(place)))

    object_server.before = overtake
    assert publish(lake).version == met[0].version == number - 1
    assert rows_in_bucket(place).num_rows == number


def test_a_store_that_fails_is_told_of(object_server, place):
    put_batch(place, [1])
    object_server.before = lambda asked: "403 No" if "_delta_log" in asked.key else None
    with pytest.raises(ObjectStoreError, match=r"the object store, at s3://.*_delta_log: .*403"):
        publish(open_lake(place))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_publisher_of_a_bucket_that_is_killed_has_committed_or_has_not(object_server, place, moment):
    put_batch(place, [1])
    publish(open_lake(place))
    put_batch(place, [2])
    command = [sys.executable, "-m", "strata_pipeline", "publish-delta", "--lake", place]
    writer = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def kill(asked: Asked) -> str | None:
        if not asked.is_conditional or "_delta_log" not in asked.key:
            return None
        writer.kill()
        writer.wait()
        return "503 Nobody listens"

    setattr(object_server, moment, kill)
    assert writer.wait(60) == -signal.SIGKILL
    object_server.behave()
    assert rows_in_bucket(place).num_rows == (2 if moment == "after" else 1)
    assert (publish(open_lake(place)).version, rows_in_bucket(place).num_rows) == (1, 2)


def test_a_log_in_a_bucket_is_of_its_own_chain_or_made_again(place):
    put_batch(place, [1, 2])
    put_batch(place, [3])
    publish(open_lake(place))
    other = f"{place}-other"
    put_batch(other, [1])
    source, target = ObjectLake.open(place).store, ObjectLake.open(other).store
    for name in source.keys("packets/_delta_log"):
        target.put(name, source.get(name))
    refused = CliRunner().invoke(app, ["publish-delta", "--lake", other])
    assert refused.exit_code == 1 and "not of this chain" in " ".join(refused.output.split())
    done = CliRunner().invoke(app, ["publish-delta", "--lake", other, "--rebuild", "--json"])
    assert done.exit_code == 0 and '"rows": 1' in done.stdout
    assert rows_in_bucket(other).num_rows == 1
    [lost] = target.keys("packets/day=2024-10-04")
    target.delete([lost])
    publish(open_lake(other))  # known files are not opened
    with pytest.raises(LakeError, match=r"is missing. Run audit"):
        publish(open_lake(other), rebuild=True)


def test_spark_reads_the_same_rows(spark, tmp_path):
    path = tmp_path / "lake"
    write_batch(path, [1, 2, 3])
    publish(Lake.open(path))
    write_batch(path, [4])
    publish(Lake.open(path))
    for version in (0, 1):
        found = spark.read.parquet(*map(str, published_files(path, version))).select(*COLUMNS).toArrow()
        assert digest(found) == digest(with_pyarrow(path, version))
