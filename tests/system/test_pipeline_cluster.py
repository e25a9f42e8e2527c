"""On a real standalone cluster: executors get what they need, and both workers do the work."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as pads
import pytest
from strata_pipeline.spark_home import quick_home

from benches.spark_cluster import DRIVER_CONF, Cluster, standalone_cluster
from tests.support.publishing import publish
from tests.support.quick_spark import QUICK_JAVA, QUICK_SPARK
from tests.support.relay_process import PostgresHost, RelayProcess, running

ROOT = Path(__file__).resolve().parents[2]
PACKETS = 400

QUICK = {**QUICK_SPARK, "spark.executor.extraJavaOptions": QUICK_JAVA}

# The program of the driver. Each job's tasks carry its name, so that the event log shows who ran them.
JOB = """
import json, sys
from strata_pipeline.jobs.archive import archive
from strata_pipeline.jobs.audit import audit
from strata_pipeline.session import open_session

master, conf, url, lake = json.loads(sys.argv[1])

def found(_):
    import strata, strata_pipeline
    return strata.__file__, strata_pipeline.__file__, sys.executable

with open_session("cluster", master=master, conf=conf) as spark:
    spark.sparkContext.setJobGroup("archive", "archive")
    archived = archive(spark, url, lake, partitions=2)
    spark.sparkContext.setJobGroup("audit", "audit")
    audited = audit(spark, lake)
    places = spark.sparkContext.range(2, numSlices=2).map(found).collect()
told = {"archived": archived.packets, "audited": audited.packets, "holds": audited.holds, "places": places}
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with all our dependencies, but without us."""
    made = tmp_path_factory.mktemp("made") / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    variables = {"base": str(made), "platbase": str(made)}
    # A path named in a .pth file is searched for packages, but not for .pth files of its own, such as the one
    # that makes this checkout importable.
    packages = Path(sysconfig.get_path("purelib", "venv", variables))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    quick = {**_home(), "SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA}
    with standalone_cluster(tmp_path_factory.mktemp("cluster"), workers=2, environment=quick) as running:
        yield running


@pytest.mark.timeout(900)  # seven processes of Java and Python must start, on any machine
def test_jobs_run_on_two_workers_that_have_only_what_was_sent(environment, cluster, tmp_path):
    # The environment has our dependencies and not us; otherwise the rest would prove nothing.
    command = [environment / "bin" / "python", "-I", "-c", "import pyarrow, nacl; import strata"]
    alone = subprocess.run(command, capture_output=True, text=True)
    assert alone.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'strata'"

    host = PostgresHost(tmp_path / "postgres")
    try:
        with running(RelayProcess(tmp_path / "relay", database_url=host.url)) as relay:
            published = asyncio.run(publish(relay.ws, PACKETS))
        told = _run_job(cluster, environment, host.url, tmp_path)
    finally:
        host.close()

    assert (told["archived"], told["audited"], told["holds"]) == (PACKETS, PACKETS, True)
    rows = pads.dataset(tmp_path / "lake" / "packets").to_table(["packet_id"])
    assert {f"0x{packet_id.hex()}" for packet_id in rows["packet_id"].to_pylist()} == set(published)
    for strata, pipeline, interpreter in told["places"]:
        assert {Path(strata).parents[1].name, Path(pipeline).parents[1].name} == {"strata_pipeline.zip"}
        # Unpacked from the archive into the executor's own folder.
        assert Path(interpreter).is_relative_to(cluster.folder)
    assert _workers_by_job(cluster, tmp_path / "events") == {"archive": {0, 1}, "audit": {0, 1}}


def _home() -> dict[str, str]:
    """Executors find PySpark in the environment that is sent, and compile no archive of Spark's."""
    home = quick_home()
    return {} if home is None else {"SPARK_HOME": home}


def _run_job(cluster: Cluster, environment: Path, url: str, folder: Path) -> dict[str, Any]:
    packed, events, started = folder / "environment.tar.gz", folder / "events", folder / "started"
    with tarfile.open(packed, "w:gz", compresslevel=1) as archive:
        archive.add(environment, arcname=".")
    events.mkdir()
    started.mkdir()
    # The driver plans with the same interpreter as the executors, under the same path.
    (started / "environment").symlink_to(environment)
    conf = {
        **DRIVER_CONF,
        **QUICK,
        "spark.archives": f"{packed}#environment",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
    }
    variables = {
        **os.environ,
        **_home(),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "client"), str(ROOT / "pipeline")]),
        "PYSPARK_PYTHON": "./environment/bin/python",
    }
    arguments = json.dumps([cluster.master, conf, url, str(folder / "lake")])
    driver = subprocess.run(
        [sys.executable, "-c", JOB, arguments], cwd=started, env=variables, capture_output=True, text=True
    )
    assert driver.returncode == 0, driver.stderr[-4000:]
    told: dict[str, Any] = json.loads(driver.stdout.splitlines()[-1])
    return told


def _workers_by_job(cluster: Cluster, events: Path) -> dict[str, set[int]]:
    """The workers that ran tasks of each job, from Spark's event log."""
    [record] = events.glob("*/events_*")
    jobs: dict[int, str] = {}
    workers: dict[str, set[int]] = defaultdict(set)
    for line in record.read_text().splitlines():
        match json.loads(line):
            case {
                "Event": "SparkListenerJobStart",
                "Stage IDs": stages,
                "Properties": {"spark.jobGroup.id": job},
            }:
                jobs |= dict.fromkeys(stages, job)
            case {"Event": "SparkListenerTaskEnd", "Stage ID": stage, "Task Info": {"Executor ID": executor}}:
                workers[jobs[stage]].add(cluster.worker_of(executor))
    return dict(workers)
