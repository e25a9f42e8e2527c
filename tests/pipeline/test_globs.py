"""Names of folders that readers would interpret as patterns."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest
from strata_pipeline.datasets import Packets
from strata_pipeline.errors import UsageError
from strata_pipeline.globs import for_duckdb, for_spark
from strata_pipeline.jobs.reputation import reputation
from strata_pipeline.lake.lake import Lake
from strata_pipeline.views import statements

from tests.support.toy_lakes import write_batch


def test_plain_paths_stay_as_they_are():
    path = Path("/srv/lake's own, 100 %/day=2026-11-21")
    assert for_spark(path) == for_duckdb(path) == str(path)


def test_what_no_pattern_can_name_is_refused():
    assert for_spark(Path("/a:b")) == "/a:b"
    with pytest.raises(UsageError, match="a colon"):
        for_spark(Path("/a:b/{c}"))
    with pytest.raises(UsageError, match="a backslash"):
        statements("/a\\b")
    with pytest.raises(UsageError, match="without a colon"):
        statements("/a:b", "spark")


def test_duckdb_reads_the_named_folder_and_none_like_it(tmp_path):
    for name in ("[a]*?", "a!!", "[a]!!"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.json").write_text("{}")
    [row] = duckdb.execute("SELECT count(*) FROM glob(?)", [f"{for_duckdb(tmp_path / '[a]*?')}/*"]).fetchall()
    assert row == (1,)


def test_spark_reads_the_named_folder_and_none_like_it(spark, tmp_path):
    folder = tmp_path / "{a,b} [c]*?\\"
    write_batch(folder, [1, 2, 3])
    for name in ("a c!!", "b c!!", "{a,b} [c]!!\\"):
        write_batch(tmp_path / name, range(1, 9))
    assert Packets.of(spark, Lake.open(folder)).frame.count() == 3
    # A file beside batches causes the other way of reading.
    next((folder / "packets").iterdir()).joinpath("stray.parquet").write_bytes(b"")
    assert Packets.of(spark, Lake.open(folder)).frame.count() == 3
    probes = tmp_path / "{probes}"
    probes.mkdir()
    (probes / "one.jsonl").write_text("no observation\n")
    assert reputation(spark, probes).malformed == 1
