"""Where a session gets its settings, and the message if there is no Java."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest
from strata_pipeline.errors import UsageError
from strata_pipeline.session import check_java, code_archive, java_options
from strata_pipeline.spark_defaults import configured, parse_defaults
from strata_pipeline.spark_home import quick_home, starting_quickly

from tests.support.quick_spark import QUICK_JAVA


def test_defaults_are_read_as_spark_reads_them(tmp_path, monkeypatch):
    text = "# remark\nspark.master  spark://h:7077\n\nspark.a=b c\nspark.d: e=f\n! other\nspark.alone\n"
    told = {"spark.master": "spark://h:7077", "spark.a": "b c", "spark.d": "e=f", "spark.alone": ""}
    assert parse_defaults(text) == told
    (tmp_path / "spark-defaults.conf").write_text(text)
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert configured() == told
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path / "none"))
    assert configured() == {}


def test_without_java_or_with_an_old_one_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="Java 17 or newer: install it"):
        check_java()
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="is openjdk version"):
        check_java()
    java.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(UsageError, match="does not run"):
        check_java()
    java.write_text("#!/bin/sh\necho 'openjdk version \"21.0.2\"' >&2\n")
    check_java()


def test_a_collector_that_was_asked_for_is_the_only_one():
    ours = java_options("", local=True)
    assert ours.startswith("-XX:+UseSerialGC ") and "-Dlog4j2.configurationFile=file:" in ours
    asked = java_options("-Dx=y -XX:+UseParallelGC", local=True)
    assert asked.startswith("-Dx=y -XX:+UseParallelGC -Dlog4j2") and "Serial" not in asked
    assert "GC" not in java_options("-Dx=y", local=False)
    assert java_options("", local=True, cores=16).startswith("-XX:+UseG1GC -XX:MinHeapFreeRatio")
    assert java_options("-XX:+UseG1GC -Dlog4j2.configurationFile=mine", local=True).endswith("=mine")


def test_an_archive_for_executors_is_put_where_it_is_removed_again(tmp_path):
    assert code_archive(tmp_path).parent == tmp_path


def test_the_archive_for_executors_holds_both_packages_and_their_schemas():
    names = zipfile.ZipFile(code_archive()).namelist()
    assert {"strata/__init__.py", "strata_pipeline/log/source.py", "strata_pipeline/schemas/log.toml"} <= {
        *names
    }
    assert not any("__pycache__" in name for name in names)


def test_workers_on_this_machine_import_the_installed_pyspark_whose_bytecode_is_kept(spark):
    def found(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyspark as theirs

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"path": [str(theirs.__file__)]})

    [row] = spark.range(1, numPartitions=1).mapInArrow(found, "path string").collect()
    assert row.path == pyspark.__file__


def test_a_home_of_spark_that_was_chosen_stays(monkeypatch):
    home = quick_home()
    assert home is not None and Path(home, "jars").is_dir() and not Path(home, "python").exists()
    for name in ("SPARK_HOME", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    with starting_quickly():
        assert os.environ["SPARK_HOME"] == home
        assert not Path(os.environ["PYSPARK_DRIVER_PYTHON"]).exists()
    assert not {"SPARK_HOME", "PYSPARK_DRIVER_PYTHON"} & {*os.environ}
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    with starting_quickly():
        assert os.environ["SPARK_HOME"] == "/opt/spark"
    assert os.environ["SPARK_HOME"] == "/opt/spark"


_IN_C = """
import sys
from strata_pipeline.session import open_session

with open_session("test", master="local[1]", conf={"spark.driver.extraJavaOptions": sys.argv[2]}) as spark:
    spark.range(3).write.parquet(sys.argv[1])
    print(spark.read.parquet(sys.argv[1]).count())
"""


@pytest.mark.timeout(900)
def test_names_outside_ascii_are_files_in_the_locale_c_too(tmp_path):
    """As jobs of cron run in it, and Ansible sets it."""
    done = subprocess.run(
        [sys.executable, "-c", _IN_C, tmp_path / "läke", QUICK_JAVA],
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, b"3"), done.stderr.decode(errors="replace")
    assert [each.name for each in tmp_path.iterdir()] == ["läke"]
