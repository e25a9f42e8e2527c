"""What Spark must shuffle and hold, and that nothing rules out a Spark Connect server."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest
import strata_pipeline
from pyspark.sql import functions as F
from strata_pipeline.datasets import Packets
from strata_pipeline.datasets.channels import ChannelPackets
from strata_pipeline.datasets.traffic import Abuse, AuthorHours, NearDuplicates, Seconds, Texts
from strata_pipeline.errors import LakeError, UsageError
from strata_pipeline.jobs.restore import restore
from strata_pipeline.jobs.tables import check_output, tables_of, write_page, writing
from strata_pipeline.lake import files
from strata_pipeline.lake.lake import Lake
from strata_pipeline.planning import joined_in_place, parallelism, planned, shuffled_once
from strata_pipeline.schemas import schema
from strata_pipeline.transforms import restoring as restoring_rows
from strata_pipeline.transforms.bursts import find_bursts
from strata_pipeline.transforms.near_duplicates import find_clusters, find_meetings, find_near_duplicates
from strata_pipeline.transforms.reliability import find_gaps
from strata_pipeline.transforms.signatures import SigningKeys, identity_packets, keys_by_authors
from strata_pipeline.transforms.traffic import count_hours, whole_seconds

from tests.support import relay_logs
from tests.support.lake_rows import dataset
from tests.support.toy_lakes import write_batch


def plan_of(frame) -> list[str]:
    """The nodes of a plan, each with its inputs and arguments."""
    told = frame._jdf.queryExecution().explainString(
        frame.sparkSession._jvm.org.apache.spark.sql.execution.ExplainMode.fromString("formatted")
    )
    return re.split(r"\n\n+", told)


def shuffled_rows(frame) -> int:
    """The rows that have gone through the shuffles of a frame that was collected."""
    rows, nodes = 0, [frame._jdf.queryExecution().executedPlan()]
    for node in nodes:
        name = node.nodeName()
        if name == "Exchange":
            rows += node.metrics().apply("shuffleRecordsWritten").value()
        if name == "AdaptiveSparkPlan":
            nodes.append(node.executedPlan())
        elif name.endswith("QueryStage"):
            nodes.append(node.plan())
        children = node.children()
        nodes += [children.apply(n) for n in range(children.size())]
    return rows


def test_no_signature_is_shuffled_for_each_bucket_and_no_aggregate_sorts(spark):
    texts = Texts.empty(spark)
    plan = plan_of(find_near_duplicates(texts, find_meetings(texts)).frame)
    by_bucket = [node for node in plan if "Exchange" in node and "hashpartitioning(bucket" in node]
    assert by_bucket and not any("signature" in node for node in by_bucket)
    gaps = plan_of(find_gaps(ChannelPackets.empty(spark)).frame)
    assert any("HashAggregate" in node for node in plan) and any("HashAggregate" in node for node in gaps)
    assert not any("SortAggregate" in node for node in [*plan, *gaps])


def test_of_texts_that_nobody_repeats_no_sample_is_shuffled(spark):
    rows = [(n, 0, f"author {n % 7}", "POST", f"text {n}", [n] * 32) for n in range(500)]
    copies = [(n, 0, f"author {n % 7}", "POST", 3) for n in (10, 11, 17)]
    clusters = find_clusters(
        Texts(spark.createDataFrame(rows, schema("texts"))),
        NearDuplicates(spark.createDataFrame(copies, schema("near_duplicates"))),
    ).frame
    name = "spark.sql.autoBroadcastJoinThreshold"
    before = spark.conf.get(name)
    spark.conf.set(name, "-1")  # as for copies that are too many to be sent to all tasks
    try:
        [row] = clusters.collect()
    finally:
        spark.conf.set(name, before)
    assert (row.first_sequence, row.sample, row.copies, row.authors) == (3, "text 3", 3, 2)
    assert shuffled_rows(clusters) == 7, "of 500 texts"


def test_seconds_and_hours_are_shuffled_once(spark):
    each = [(f"author {n % 7}", f"TYPE{n % 3}", 60 * n) for n in range(600)]
    seconds = Seconds(spark.createDataFrame([(*one, 1, 9) for one in each], schema("seconds")))
    some = [(n, at, author, kind, 0) for n, (author, kind, at) in enumerate(each[:20])]
    copies = NearDuplicates(spark.createDataFrame(some, schema("near_duplicates")))
    name = "spark.sql.autoBroadcastJoinThreshold"
    before = spark.conf.get(name)
    spark.conf.set(name, "-1")  # as for rows that are too many to be sent to all tasks
    try:
        with joined_in_place(spark):
            hours = count_hours(whole_seconds(seconds), copies).frame
            counted = sum(row.near_duplicates for row in hours.collect())
    finally:
        spark.conf.set(name, before)
    assert (counted, shuffled_rows(hours)) == (20, 600 + 2 * 20)
    told = [(f"author {n % 7}", 3600 * n, 1, 200 * (n == 50), 0, 0) for n in range(90)]
    bursts = find_bursts(AuthorHours(spark.createDataFrame(told, schema("author_hours")))).frame
    assert [row.hour_at for row in bursts.collect()] == [3600 * 50]
    assert shuffled_rows(bursts) == 90


def test_a_shuffle_has_partitions_for_the_rows_that_there_are(spark):
    name = "spark.sql.shuffle.partitions"
    before = spark.conf.get(name)
    with planned(spark, 10**9):
        assert int(spark.conf.get(name)) > 3_000
    with planned(spark, 10):
        assert spark.conf.get(name) == before
    with planned(spark, 2**53):  # which a forged manifest may tell
        assert spark.conf.get("spark.sql.shuffle.partitions") == "100000"
    with pytest.raises(ZeroDivisionError), planned(spark, 10**9):
        raise ZeroDivisionError
    assert spark.conf.get(name) == before and parallelism(spark) == 2


def test_a_task_of_a_restore_reads_many_small_files(spark, log_url, tmp_path, monkeypatch):
    for number in range(1, 37):
        write_batch(tmp_path, [2 * number, 2 * number + 1])
    parts: list[int] = []
    real = restoring_rows.stage_packets

    def counted(packets: Packets, *others: Any) -> Any:
        parts.append(packets.frame.rdd.getNumPartitions())
        return real(packets, *others)

    monkeypatch.setattr("strata_pipeline.jobs.restore.stage_packets", counted)
    with pytest.raises(LakeError, match="does not hold"):  # these bodies are no packets
        restore(spark, log_url, tmp_path)
    assert parts[0] <= 2, "for two cores, and not one for 32 of 72 files"


def test_keys_are_read_for_a_share_of_the_authors_at_a_time(spark):
    bodies = [relay_logs.make(n, who=n, type="DID_DOCUMENT") for n in range(12)]
    bodies += [relay_logs.make(100 + n, who=n) for n in range(12)]
    packets = dataset(spark, list(enumerate(bodies)))
    whole = SigningKeys.of(packets).events
    assert len(whole) == 12
    assert [keys.events for _, keys in keys_by_authors(packets)] == [whole]
    size = identity_packets(packets).agg(F.sum(F.length("body"))).collect()[0][0]
    shares = list(keys_by_authors(packets, most_bytes=size // 2))
    assert len(shares) >= 2 and all(len(keys.events) < 12 for _, keys in shares)
    assert {did: events for _, keys in shares for did, events in keys.events.items()} == whole
    dids = [row.author_id for row in packets.frame.select("author_id").distinct().collect()]
    for did in (*dids, None):
        # Each author is in one share, where its keys are, and Spark agrees.
        [(authors, keys)] = [(authors, keys) for authors, keys in shares if authors.have(did)]
        assert (did in keys.events) == (did in whole)
        row = spark.createDataFrame([(did,)], "author_id string")
        assert row.where(authors.are("author_id")).count() == 1


def test_tables_of_a_job_that_fails_are_the_older_ones(spark, tmp_path):
    row = ("a", "block", "pipeline: x", 5)
    abuse = Abuse(
        spark.createDataFrame([row], "author_id string, verdict string, reason string, expires_at long")
    )

    def write(output: Path, **tables: Abuse) -> list[list[Any]]:
        """Write tables as a job does; return the rows that the job reads of them."""
        with tables_of(spark, output) as made:
            return [made.once(name, table).frame.collect() for name, table in tables.items()]

    def there() -> list[str]:
        return sorted(path.name for path in (tmp_path / "out").rglob("*.parquet"))

    assert write(tmp_path / "out", abuse=abuse, again=abuse) == [[row], [row]]
    before = there()
    broken = Abuse(abuse.frame.withColumn("reason", F.raise_error(F.lit("no")).cast("string")))
    with pytest.raises(Exception, match="no"):
        write(tmp_path / "out", abuse=abuse, again=broken)
    assert there() == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["abuse", "again"]
    write(tmp_path / "out", abuse=abuse)
    assert spark.read.parquet(str(tmp_path / "out" / "abuse")).count() == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write(tmp_path / "file" / "out", abuse=abuse)


def test_jobs_use_data_frames_alone():
    """A Spark Connect server knows no RDDs and gives no context: code that asks for one must do without."""
    found = []
    root = Path(strata_pipeline.__file__).parent
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text())
        guarded = {
            id(inner) for block in ast.walk(tree) for part in caught(block) for inner in ast.walk(part)
        }
        found += [
            f"{path.relative_to(root)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr in {"sparkContext", "rdd", "parallelize"}
            if id(node) not in guarded
        ]
    assert found == []


def caught(block: ast.AST) -> list[ast.stmt]:
    """The statements in this block whose errors do not propagate."""
    match block:
        case ast.Try(handlers=[ast.ExceptHandler(type=ast.Name(id="Exception" | "PySparkException"))]):
            return block.body
        case ast.With(items=[ast.withitem(context_expr=call)]) if (
            ast.unparse(call) == "contextlib.suppress(Exception)"
        ):
            return block.body
    return []


def test_drafts_of_killed_jobs_go_and_those_of_others_stay(tmp_path: Path) -> None:
    killed, busy, new = (tmp_path / f"_writing.{name}" for name in ("1", "2", "3"))
    for folder in (killed, busy, new):
        (folder / "table").mkdir(parents=True)
    for folder in (killed, busy):
        os.utime(folder, (0, 0))
    with files.occupied(busy), writing(tmp_path) as draft:
        assert sorted(tmp_path.iterdir()) == sorted([busy, new, draft])
    assert sorted(tmp_path.iterdir()) == [busy, new]


def test_half_a_page_of_a_killed_job_goes_with_the_next_one(tmp_path: Path) -> None:
    killed, busy, new, other, named = (
        tmp_path / name
        for name in ("_lag.html.1", "_lag.html.2", "_lag.html.3", "_notes.html.4", "_lag.html.old")
    )
    for file in (killed, busy, new, other, named):
        file.write_text("half")
    for file in (killed, busy, other, named):
        os.utime(file, (0, 0))
    with files.occupied(busy):
        write_page(tmp_path / "lag.html", "whole")
    assert sorted(tmp_path.iterdir()) == sorted([busy, new, other, named, tmp_path / "lag.html"])
    assert (tmp_path / "lag.html").read_text() == "whole"


def test_results_stay_out_of_a_lake_by_whatever_way_it_is_named(tmp_path: Path) -> None:
    write_batch(tmp_path / "lake", [1])
    lake = Lake.open(tmp_path / "lake")
    (tmp_path / "link").symlink_to(tmp_path / "lake")
    (tmp_path / "beside").mkdir()
    for name in ("lake", "lake/packets/site", "link/packets", "beside/../lake/packets"):
        with pytest.raises(UsageError, match="lies in the lake"):
            check_output(tmp_path / name, lake)
    assert check_output(tmp_path / "beside", lake) == tmp_path / "beside"


def test_shuffles_stay_for_the_next_query_but_where_a_job_says_that_they_are_used_once(spark):
    cleaned = "spark.sql.classic.shuffleDependency.fileCleanup.enabled"
    # A frame that is kept is computed part by part, from what was shuffled for its first part.
    assert spark.conf.get(cleaned, "false") == "false"
    with shuffled_once(spark):
        assert spark.conf.get(cleaned) == "true"
    assert spark.conf.get(cleaned, "false") == "false"
