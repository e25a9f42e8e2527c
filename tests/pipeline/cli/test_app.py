"""The `strata-pipeline` command line, without any Spark."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import strata_pipeline
import typer
from strata_pipeline.cli import app
from strata_pipeline.cli.archive import Stopping
from typer.core import TyperGroup
from typer.testing import CliRunner

COMMANDS = (
    "archive", "audit", "compact", "find", "erase", "reliability", "traffic", "trust", "reputation",
    "restore", "publish-delta", "report", "views", "copy",
)  # fmt: skip


def pipeline(*arguments: str, **options):
    return CliRunner().invoke(app, arguments, prog_name="strata-pipeline", **options)


def test_version():
    assert pipeline("--version").stdout == f"{version('relayd')}\n"


def test_the_module_runs_as_the_command():
    root = Path(strata_pipeline.__file__).parents[2]
    paths = {"PYTHONPATH": os.pathsep.join([str(root / "pipeline"), str(root / "client")])}
    command = [sys.executable, "-m", "strata_pipeline", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=paths)
    assert done.stdout == f"{version('relayd')}\n"


def test_help_is_whole():
    text = pipeline("-h").stdout
    assert text == pipeline("--help").stdout
    assert "…" not in text and "..." not in text.partition("Commands:")[2]
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    assert tuple(group.commands) == COMMANDS
    for command in COMMANDS:
        assert "  -h, --help" in pipeline(command, "-h").stdout


@pytest.mark.parametrize(
    ("arguments", "nearest"), [(["achive"], "'archive'"), (["compact", "--lak", "x"], "--lake")]
)
def test_a_wrong_name_is_answered_with_the_nearest(arguments, nearest):
    done = pipeline(*arguments)
    assert done.exit_code == 2 and nearest in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["audit"],
        ["compact"],
        ["find", "0x" + "ab" * 32],
        ["erase", "--database-url", "postgresql://127.0.0.1:1/x"],
        ["reliability"],
        ["traffic"],
        ["trust"],
        ["restore", "--database-url", "postgresql://127.0.0.1:1/x"],
        ["report", "--output", "pages"],
    ],
    ids=lambda words: words[0],
)
def test_a_lake_that_is_not_there_is_told_before_spark_starts(words, tmp_path, monkeypatch):
    """On a busy machine that takes a minute."""

    def open_session(*_: object, **__: object):
        raise AssertionError("Spark starts")

    monkeypatch.setattr("strata_pipeline.session.open_session", open_session)
    monkeypatch.chdir(tmp_path)
    done = pipeline(*words, "--lake", "nowhere")
    assert done.exit_code == 1 and not done.stdout
    told = f"strata-pipeline: there is no lake in {tmp_path}/nowhere: _manifests is missing\n"
    assert done.stderr == told
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_probe_logs_that_is_none_is_told_before_spark_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("strata_pipeline.session.open_session", None)
    done = pipeline("reputation", "--probes", str(tmp_path / "nowhere"))
    assert done.exit_code == 2 and "nowhere is not a folder; put there what" in done.stderr


def test_whose_tombstones_count_is_said_by_a_did():
    done = pipeline("audit", "--lake", "nowhere", "--relay", "wss://relay.example")
    assert done.exit_code == 2 and "--relay takes a DID" in done.stderr


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ([], "name packets, or authors with --author"),
        (["0x" + "ab" * 32, "--author", "did:strata:a"], "name packets, or authors with --author"),
        (["0xab"], "'0xab' is not a packet id: 0x and 64 hex digits"),
        (["--author", "ann"], "--author takes a DID, and 'ann' is none"),
        (["0x" + "ab" * 32] * 1001, "more than 1,000 are looked for at a time"),
    ],
    ids=["nothing", "both", "id", "author", "many"],
)
def test_a_search_names_packets_or_authors(asked, problem):
    done = pipeline("find", "--lake", "nowhere", *asked)
    assert done.exit_code == 2 and problem in done.stderr


@pytest.mark.parametrize("at", ["nan", "inf", "-1e999", "1e300", "tomorrow", ""])
def test_a_time_that_is_none_is_told(tmp_path, at):
    done = pipeline("reputation", "--probes", str(tmp_path), "--at", at)
    assert done.exit_code == 2 and "a time is Unix seconds" in done.stderr


@pytest.mark.parametrize("option", ["burst-floor", "burst-ceiling", "burst-hours", "verdict-hours"])
def test_a_bound_that_no_count_reaches_is_told(tmp_path, option):
    done = pipeline("traffic", "--lake", str(tmp_path), f"--{option}", str(2**63))
    assert done.exit_code == 2 and "from 1 to" in done.stderr


@pytest.mark.parametrize("command", [["compact"], ["erase", "--database-url", "postgresql://nowhere"]])
def test_a_grace_of_more_seconds_than_times_have_is_told(command):
    done = pipeline(*command, "--lake", "s3://bucket/lake", "--grace", str(10**15))
    assert done.exit_code == 2 and "--grace" in done.stderr


def test_probes_lie_in_a_folder_that_has_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for wrong in (["--probes", ""], ["--probes", ".", "--output", ""]):
        done = pipeline("reputation", *wrong)
        assert done.exit_code == 2 and "names no place" in done.stderr


def test_a_signal_stops_an_archive_whenever_it_comes():
    """An event blocks itself permanently if its lock is held when the handler runs."""
    stopping = Stopping()
    before = signal.signal(signal.SIGTERM, stopping.ask)
    try:
        assert not stopping.wait(0) and not stopping.is_asked()
        sys.setprofile(lambda *_: signal.raise_signal(signal.SIGTERM))
        stopping.wait(0)
        stopping.ask()
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGTERM, before)
    assert stopping.is_asked() and stopping.wait(math.inf) and stopping.is_asked()


def test_a_shell_can_complete_commands():
    asking = {
        "_STRATA_PIPELINE_COMPLETE": "complete_bash",
        "COMP_WORDS": "strata-pipeline re",
        "COMP_CWORD": "1",
    }
    assert pipeline(env=asking).stdout.split() == ["reliability", "reputation", "restore", "report"]


def test_help_and_completion_load_no_spark():
    code = "import sys, strata_pipeline.cli; print(*sys.modules)"
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=paths)
    assert not {"pyspark", "pyarrow", "pandas", "numpy"} & set(done.stdout.split())


def test_planning_a_read_of_the_log_loads_neither_the_driver_nor_pandas():
    code = "import sys, strata_pipeline.log.source; print(*sys.modules)"
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=paths)
    assert not {"pandas", "adbc_driver_manager.dbapi"} & set(done.stdout.split())


def test_without_its_packages_the_command_says_what_to_install():
    code = "import sys; sys.modules['pyspark'] = None; from strata_pipeline.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "audit", "--lake", "nowhere"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "make pipeline" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device here")
def test_a_full_disk_below_stdout_is_a_sentence():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from strata_pipeline.cli import main; main()", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "strata-pipeline: No space left on device\n"
