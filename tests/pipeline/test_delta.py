"""The Delta log: readers agree with the manifests at every version, whatever is killed and when."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from strata.protocol.lake import first_of_day
from strata_pipeline.cli import app
from strata_pipeline.errors import LakeError, UsageError
from strata_pipeline.lake.delta import APP, delta_log, is_published, publish, published_files
from strata_pipeline.lake.generations import replace_day, staged_day
from strata_pipeline.lake.lake import Lake
from strata_pipeline.lake.rows import digest_of
from typer.testing import CliRunner

from tests.support.toy_lakes import DAY, compacted, faults, place, read, staged, write_batch

COMMITS = int(os.environ.get("STRATA_DELTA_COMMITS", "6"))
"""Commits beside kills: a thousand take some minutes."""
COLUMNS = ["sequence", "received_at", "packet_id", "size"]

Reader = Callable[[Path, int], pa.Table]


def with_pyarrow(lake: Path, version: int) -> pa.Table:
    return DeltaTable(lake / "packets", version=version).to_pyarrow_dataset().to_table(columns=COLUMNS)


def with_duckdb(lake: Path, version: int) -> pa.Table:
    # DuckDB's own reader of Delta is an extension from the network; its scan of the table's files is not.
    rows = DeltaTable(lake / "packets", version=version).to_pyarrow_dataset()
    return duckdb.from_arrow(rows).project(", ".join(COLUMNS)).to_arrow_table()


def with_polars(lake: Path, version: int) -> pa.Table:
    found = pl.scan_delta(str(lake / "packets"), version=version).select(COLUMNS).collect().to_arrow()
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
    [summary] = pl.scan_delta(str(path / "packets")).group_by("kind").len().sort("kind").collect().rows()[:1]
    assert summary == ("NOTE", 3)

    # A compaction changes the files of a version to come, and no row.
    before = digest(with_pyarrow(path, 3))
    compact(path, DAY)
    with pytest.raises(FileNotFoundError):  # never wrong rows
        with_pyarrow(path, 3)
    done = publish(Lake.open(path), days=[DAY])
    assert (done.version, done.added, done.removed, done.rows) == (4, 2, 6, 9)
    assert {digest(reader(path, 4)) for reader in READERS} == {before}
    assert faults(path) == []  # an audit does not mind the log


def test_a_log_that_is_removed_or_foreign_is_made_again(tmp_path):
    path = tmp_path / "lake"
    with pytest.raises(UsageError, match="holds no lake yet"), Lake.write(path) as lake:
        publish(lake)
    write_batch(path, [1, 2])
    write_batch(path, [3])
    publish(Lake.open(path))
    shutil.rmtree(delta_log(Lake.open(path)))
    assert publish(Lake.open(path)).version == 0

    # Whatever makes the log doubtful is refused until somebody says otherwise.
    other = tmp_path / "other"
    write_batch(other, [1])
    shutil.copytree(path / "packets" / "_delta_log", other / "packets" / "_delta_log")
    with pytest.raises(LakeError, match="not of this chain"):
        publish(Lake.open(other))
    assert publish(Lake.open(other), rebuild=True).rows == 1
    assert (other / "_aside" / "delta_log" / "00000000000000000000.json").exists()
    (path / "packets" / "_delta_log" / "00000000000000000000.json").write_text("{nonsense")
    with pytest.raises(LakeError, match="--rebuild"):
        publish(Lake.open(path))
    done = CliRunner().invoke(app, ["publish-delta", "--lake", str(path), "--rebuild", "--json"])
    assert done.exit_code == 0 and '"rows": 3' in done.stdout
    again = CliRunner().invoke(app, ["publish-delta", "--lake", str(path)])
    assert "0 files added, 0 taken out, 3 rows" in again.stdout


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
    assert not is_published(Lake.open(path))
    assert publish(Lake.open(path)).added == len(published)


def test_a_batch_in_the_making_is_not_in_the_table_and_rows_cannot_be_deleted_through_it(tmp_path):
    path = tmp_path / "lake"
    write_batch(path, [1, 2])
    lake = Lake.open(path)
    manifest, packets, _ = staged(lake, [3, 4])
    assert packets is not None
    batch = next((path / "packets").glob("day=*")) / f"batch={manifest.span}"
    shutil.copytree(packets, batch)  # in sight, and its manifest not written yet
    assert publish(Lake.open(path)).rows == 2
    with pytest.raises(DeltaError, match="append-only"):
        DeltaTable(path / "packets").delete(f"sequence > {first_of_day(DAY)}")
    assert len(read(path)) == 4


WRITER = """
import sys
from pathlib import Path
from strata_pipeline.lake.delta import publish
from strata_pipeline.lake.lake import Lake
from tests.support.toy_lakes import write_batch
path, count = Path(sys.argv[1]), int(sys.argv[2])
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
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    while Lake.open(path).chain.end.number < COMMITS:
        command = [sys.executable, "-c", WRITER, str(path), str(COMMITS)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
            time.sleep(drawn.uniform(0.01, 0.2) * max(1, COMMITS / 60))
            writer.kill()
        kills += 1
        with Lake.write(path):  # as the next archive does
            pass
        publish(Lake.open(path))
        lake = Lake.open(path)
        table = DeltaTable(path / "packets")
        assert table.transaction_version(APP) == lake.chain.end.number - 1
        rows = table.to_pyarrow_dataset().to_table(columns=["sequence"])["sequence"].to_pylist()
        assert sorted(rows) == read(path) == [place(n + 1) for n in range(len(rows))]
    assert kills
    version = DeltaTable(path / "packets").version()
    assert len({digest(reader(path, version)) for reader in READERS}) == 1


def test_spark_reads_the_same_rows(spark, tmp_path):
    path = tmp_path / "lake"
    write_batch(path, [1, 2, 3])
    publish(Lake.open(path))
    write_batch(path, [4])
    publish(Lake.open(path))
    for version in (0, 1):
        found = spark.read.parquet(*map(str, published_files(path, version))).select(*COLUMNS).toArrow()
        assert digest(found) == digest(with_pyarrow(path, version))
