"""Jobs on a Spark Connect server, which the JVM of the other Spark tests becomes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from strata_pipeline.connect import connected, is_remote
from strata_pipeline.errors import PipelineError, UsageError
from strata_pipeline.jobs.archive import archive
from strata_pipeline.lake.object_lake import ObjectLake

from tests.support import lakes, relay_logs
from tests.support.object_lakes import put_batch
from tests.support.ports import free_port
from tests.support.toy_lakes import DAY, write_batch
from tests.support.toy_lakes import place as toy_place

Run = Callable[..., list[tuple[int, dict[str, Any], str]]]

# The commands as users type them, in one process: importing PySpark is most of a process's cost.
_COMMANDS = """
import json, sys
from strata_pipeline.cli import app
from typer.testing import CliRunner
for arguments in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, arguments)
    last = (done.stdout.splitlines() or ["{}"])[-1]
    print("done", json.dumps([done.exit_code, json.loads(last), done.stderr + repr(done.exception or "")]))
"""


@pytest.fixture(scope="module")
def server(spark: SparkSession) -> Iterator[str]:
    """The URL of a server."""
    port = free_port()
    java: Any = spark
    context, jvm = java._jsc.sc(), java._jvm
    context.conf().set("spark.connect.grpc.binding.port", str(port))
    context.conf().set("spark.connect.grpc.binding.address", "127.0.0.1")
    plugin = jvm.org.apache.spark.sql.connect.SparkConnectPlugin().driverPlugin()
    plugin.init(context, None)
    try:
        yield f"sc://127.0.0.1:{port}"
    finally:
        plugin.shutdown()


@pytest.fixture(scope="module")
def run(server: str) -> Run:
    """Runs commands on the server: for each the exit code, the last line of JSON and the errors."""

    def commands(*asked: list[str]) -> list[tuple[int, dict[str, Any], str]]:
        # No Java where the command runs: code that reaches the JVM other than through the server fails.
        environment = os.environ | {"SPARK_REMOTE": server, "JAVA_HOME": "/nowhere"}
        done = subprocess.run(
            [sys.executable, "-c", _COMMANDS, json.dumps([[*one, "--json"] for one in asked])],
            env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [tuple(json.loads(line)) for line in re.findall(r"^done (.*)$", done.stdout, re.MULTILINE)]

    return commands


def test_a_master_that_is_no_server_is_left_to_spark():
    assert is_remote("sc://host") and not is_remote("spark://host:7077") and not is_remote("")


@pytest.mark.parametrize(
    ("url", "asked", "told"),
    [
        ("sc://127.0.0.1:1", {}, "no Spark Connect server answers at sc://127.0.0.1:1"),
        ("sc://127.0.0.1:1/;token=secret", {"spark.driver.memory": "9g"}, "spark.driver.memory: the server"),
        ("sc://", {}, "named sc://host:port"),
        ("sc://host:many", {}, "named sc://host:port"),
    ],
)
def test_what_cannot_be_is_told_at_once_and_without_secrets(url, asked, told):
    with pytest.raises((PipelineError, UsageError), match=re.escape(told)) as caught:
        with connected(url, {}, asked, lambda folder: folder):
            pass
    assert "secret" not in str(caught.value)


def test_without_its_packages_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc_status", None)
    with pytest.raises(
        UsageError, match=r"needs grpc_status: pip install 'strata-pipeline\[spark,spark-connect\]'"
    ):
        with connected("sc://127.0.0.1:1", {}, {}, lambda folder: folder):
            pass


def test_jobs_that_read_a_lake_do_so_on_a_server(run, tmp_path, place):
    lake, output = tmp_path / "lake", tmp_path / "output"
    write_batch(lake, [1, 2, 3], [4])
    write_batch(lake, [1, 2], day=DAY + 1)
    stray = lake / "packets" / "day=2024-10-04" / "stray.parquet"
    stray.write_bytes(b"")
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes" / "one.jsonl").write_text("no observation\n")
    at = ["--lake", str(lake)]
    put_batch(place, [1, 2, 3], [4])
    author = ["--author", "did:key:somebody"]
    in_bucket, audited, found, sought, reported, scored = run(
        ["audit", "--lake", place],
        ["audit", *at],
        ["find", *at, *author],
        ["find", "--lake", place, *author],
        ["report", *at, "--output", str(output)],
        ["reputation", "--probes", str(tmp_path / "probes"), "--output", str(output)],
    )
    # These bodies are not packets. The other findings of an audit show that tasks on the server ran our code.
    assert audited[0] == 1 and audited[1]["counts"] == {"file: stray": 1, "packet: invalid_schema": 5}
    assert in_bucket[0] == 1 and in_bucket[1]["counts"] == {"packet: invalid_schema": 3}
    assert (found[0], found[1]["sequence"]) == (0, toy_place(2, DAY + 1)), found
    assert (sought[0], sought[1]["sequence"]) == (0, toy_place(4)), sought
    assert (reported[0], reported[1]["packets"], reported[1]["counted"]) == (0, 5, 2)
    assert (output / "index.html").exists()
    assert (scored[0], scored[1]["malformed"]) == (0, 1)
    assert pq.read_table(output / "malformed")["line"].to_pylist() == [b"no observation"]


def test_a_day_in_a_bucket_is_written_anew_on_a_server(spark, run, log_url, place):
    made = relay_logs.make_many(6)
    relay_logs.append(log_url, made, lakes.NOON)
    archive(spark, log_url, place, batch_rows=2)
    relay_logs.erase(log_url, made[2].packet_id)
    later = lakes.NOON + lakes.DAY
    relay_logs.append(log_url, relay_logs.make_many(2, first=6), later, witnessed_at=lakes.NOON)
    log, at = ["--database-url", log_url], ["--lake", place]
    archived, erased, compacted, audited = run(
        ["archive", *log, *at], ["erase", *log, *at, "--grace", "0"], ["compact", *at], ["audit", *at]
    )
    assert (archived[0], archived[1]["packets"]) == (0, 2), archived
    assert (erased[0], erased[1]["packets"]) == (0, 1), erased
    assert (compacted[0], compacted[1]["days"]) == (0, 1), compacted
    assert (audited[0], audited[1]["packets"]) == (0, 7), audited
    lake = ObjectLake.open(place)
    assert lake.witnesses.times_of(lake.manifests).times.tolist() == [lakes.NOON] * 2


def test_every_job_of_a_lake_on_a_disk_runs_on_a_server(run, log_url, new_log, tmp_path):
    made = relay_logs.make_many(6)
    relay_logs.append(log_url, made[:3], lakes.NOON)
    log, at = ["--database-url", log_url], ["--lake", str(tmp_path / "lake")]
    out = ["--output", str(tmp_path / "output")]
    [archived] = run(["archive", *log, *at])
    assert (archived[0], archived[1]["packets"]) == (0, 3), archived
    relay_logs.append(log_url, made[3:], lakes.NOON)
    relay_logs.append(log_url, relay_logs.make_many(2, first=6), lakes.NOON + lakes.DAY)
    relay_logs.erase(log_url, made[2].packet_id)
    done = run(
        ["archive", *log, *at], ["compact", *at], ["erase", *log, *at], ["audit", *log, *at],
        *([job, *at, *out] for job in ("traffic", "reliability", "trust", "report")),
        ["restore", "--database-url", new_log(), *at],
    )  # fmt: skip
    assert [code for code, _, _ in done] == [0] * len(done), done
    archived, compacted, erased, audited, traffic, _, _, report, restored = (told for _, told, _ in done)
    assert (archived["packets"], compacted["days"], erased["packets"], audited["packets"]) == (5, 1, 1, 7)
    assert audited["holds"] and (traffic["packets"], report["packets"], restored["packets"]) == (7, 7, 7)


def test_a_failure_on_a_server_is_told_with_its_cause(server, tmp_path):
    (tmp_path / "there").mkdir()
    code = (
        "import sys; from pyspark.sql import SparkSession\n"
        "from strata_pipeline.jobs.failures import translate_failures\n"
        "spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()\n"
        "with translate_failures('archiving'): spark.range(1).write.parquet(sys.argv[2])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, server, str(tmp_path / "there")],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    told = done.stderr.strip().splitlines()[-1]
    assert re.search(r"PipelineError: archiving: \[PATH_ALREADY_EXISTS\] Path .*there already exists", told)
