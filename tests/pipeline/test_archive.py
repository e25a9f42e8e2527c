"""The log into the lake: each packet once, whatever happens."""

from __future__ import annotations

import logs
import pyarrow.dataset as pads
from strata_pipeline.jobs.archive import archive


def test_the_lake_holds_the_log_exactly(spark, log_url, tmp_path):
    made = logs.make_many(500, types=("POST", "/chat/1/room/proto", "x/../y"))
    logs.append(log_url, made)
    done = archive(spark, log_url, tmp_path / "lake", batch_rows=200)
    assert (done.batches, done.packets, done.quarantined, done.behind) == (3, 500, 0, 0)
    rows = pads.dataset(tmp_path / "lake" / "packets", partitioning="hive").to_table().sort_by("sequence")
    assert rows["packet_id"].to_pylist() == [packet.digest for packet in made]
    assert rows["body"].to_pylist() == [packet.canonical for packet in made]
    assert rows["content_type"].to_pylist() == [packet.content_type for packet in made]
    assert set(rows["kind"].to_pylist()) == {"POST", "channel", "other"}
    again = archive(spark, log_url, tmp_path / "lake")
    assert (again.batches, again.reached, again.tip) == (0, done.reached, done.tip)
