"""Settings of a cluster that change how Spark writes Parquet, and what a lake is made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from strata_pipeline.jobs.archive import archive
from strata_pipeline.jobs.audit import audit
from strata_pipeline.jobs.compact import compact

from tests.support import relay_logs
from tests.support.lakes import DAY, NOON, bodies

FOREIGN = {
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
    "parquet.block.size": "1000",
    "parquet.bloom.filter.enabled": "true",
    "parquet.enable.dictionary": "false",
    "parquet.page.size": "100",
    "parquet.page.write-checksum.enabled": "false",
    "parquet.summary.metadata.level": "ALL",
    "parquet.writer.version": "PARQUET_2_0",
}


@pytest.fixture
def foreign(spark) -> Iterator[None]:
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    for name, value in FOREIGN.items():
        hadoop.set(name, value)
    yield
    for name in FOREIGN:
        hadoop.unset(name)


@pytest.mark.usefixtures("foreign")
def test_a_lake_is_written_whatever_the_cluster_sets(spark, log_url, tmp_path: Path):
    made = relay_logs.make_many(40)
    for day, packets in enumerate((made[:30], made[30:])):
        relay_logs.append(log_url, packets, NOON + day * DAY)
    assert archive(spark, log_url, tmp_path, batch_rows=15).packets == 40
    assert compact(spark, tmp_path, grace=0).days == 1
    assert bodies(tmp_path) == [packet.canonical for packet in made]
    audited = audit(spark, tmp_path)
    assert audited.holds, audited.findings
    assert not [*tmp_path.rglob("_*metadata")]
