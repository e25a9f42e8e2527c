"""The metrics that archive and audit give Prometheus, from run to run, and how commands end."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from pathlib import Path

import pytest
import typer
from prometheus_client.parser import text_string_to_metric_families
from strata_pipeline.cli import app
from strata_pipeline.cli.app import failures_told
from strata_pipeline.cli.progress import tasks_under_way
from strata_pipeline.cli.watching import watched
from strata_pipeline.errors import LakeError, LogUnavailable, UsageError
from strata_pipeline.lake.delta import published_files
from strata_pipeline.metrics import COUNTERS, GAUGES, JobMetrics, served
from typer.testing import CliRunner

from tests.support import relay_logs

ROOT = Path(__file__).resolve().parents[2]


def read(file: Path) -> dict[str, float]:
    """The values of a file, without the labels that are the same for all."""
    found = {}
    for family in text_string_to_metric_families(file.read_text()):
        for sample in family.samples:
            about = sample.labels.get("about")
            found[sample.name + (f"/{about}" if about else "")] = sample.value
    return found


def test_a_run_goes_on_from_what_the_last_one_told(tmp_path):
    file = tmp_path / "archive.prom"
    lake = str(tmp_path / "lake")
    with watched("archive", lake, file) as metrics:
        metrics.add("strata_archive_packets", 30)
        metrics.set("strata_archive_head_reached_seconds", 1_000)
    first = read(file)
    assert (first["strata_archive_packets_total"], first["strata_pipeline_exit_code"]) == (30, 0)
    with pytest.raises(LogUnavailable), watched("archive", lake, file) as metrics:
        metrics.add("strata_archive_packets", 2)
        raise LogUnavailable("nobody answers")
    told = read(file)
    assert told["strata_archive_packets_total"] == 32 and told["strata_pipeline_runs_total"] == 2
    assert told["strata_archive_head_reached_seconds"] == 1_000
    assert told["strata_pipeline_exit_code"] == 3 and told["strata_lake_broken"] == 0
    assert told["strata_pipeline_run_succeeded_seconds"] == first["strata_pipeline_run_succeeded_seconds"]
    assert told["strata_pipeline_run_ended_seconds"] > first["strata_pipeline_run_ended_seconds"]
    assert 0 < told["strata_lake_free_bytes"] <= told["strata_lake_disk_bytes"]
    assert [path.name for path in tmp_path.iterdir()] == ["archive.prom"]
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_damaged_lake_stays_broken_until_a_run_finds_it_whole(tmp_path):
    file = tmp_path / "audit.prom"
    for error, broken in (
        (LakeError("manifest 3 is missing"), 1), (LogUnavailable("away"), 1), (None, 0), (UsageError("no"), 0)
    ):  # fmt: skip
        try:
            with watched("audit", "lake", file):
                if error is not None:
                    raise error
        except (LakeError, LogUnavailable, UsageError):
            pass
        assert read(file)["strata_lake_broken"] == broken


@pytest.mark.parametrize("text", ["garbage {", 'strata_archive_packets_total{lake="x"} 5\n', "\x00"])
def test_a_file_that_says_nothing_of_this_lake_is_begun_anew(tmp_path, text):
    file = tmp_path / "archive.prom"
    file.write_text(text)
    with watched("archive", str(tmp_path), file) as metrics:
        metrics.add("strata_archive_packets", 1)
    assert read(file)["strata_archive_packets_total"] == 1


def test_files_of_several_commands_lie_beside_each_other(tmp_path):
    # node_exporter refuses a folder in which two files have the same series.
    for command in ("archive", "audit", "audit-since"):
        with watched(command, "lake", tmp_path / f"{command}.prom") as metrics:
            metrics.set_findings({"packet: doubled": 2, "packet: expired": 1, "erasure: row": 4})
    series = [
        line.partition("} ")[0]
        for file in tmp_path.iterdir()
        for line in file.read_text().splitlines()
        if not line.startswith("#")
    ]
    assert len(series) == len(set(series))
    findings = {name: value for name, value in read(tmp_path / "audit.prom").items() if "findings" in name}
    assert findings["strata_audit_findings/packet"] == 3 and findings["strata_audit_findings/log"] == 0
    assert findings["strata_audit_findings/erasure"] == 4


@pytest.mark.parametrize("name", ["archive.txt", "archive", "archive.prom.old", ".prom"])
def test_a_file_that_no_collector_would_read_is_a_mistake_at_the_start(tmp_path, name):
    """Alerts on metrics that nobody reads would never fire."""
    with pytest.raises(UsageError, match=r"--metrics-file .*\.prom"):
        JobMetrics("archive", "lake", tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_metrics_that_cannot_be_written_are_a_mistake_at_the_start_and_no_reason_to_stop_later(
    tmp_path, capsys
):
    with pytest.raises(UsageError, match="--metrics-file"):
        JobMetrics("archive", "lake", tmp_path / "nowhere" / "archive.prom")
    folder = tmp_path / "metrics"
    folder.mkdir()
    metrics = JobMetrics("archive", "lake", folder / "archive.prom")
    (folder / "archive.prom").unlink()
    folder.rmdir()
    metrics.ended(0)
    assert "cannot be written" in capsys.readouterr().err


def test_a_lake_whose_disk_cannot_be_looked_at_is_no_mistake_in_the_name_of_a_file(tmp_path, capsys):
    file = tmp_path / "archive.prom"
    metrics = JobMetrics("archive", "a" * 300, file)
    metrics.add("strata_archive_batches", 1)
    metrics.ended(0)
    assert read(file)["strata_archive_batches_total"] == 1 and capsys.readouterr().err == ""
    JobMetrics("audit", "a" * 300)


def test_an_endpoint_answers_while_the_job_runs(tmp_path):
    metrics = JobMetrics("archive", f"file://{tmp_path}")
    metrics.add("strata_archive_packets", 7)
    with served(metrics, "127.0.0.1:0") as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    assert f'strata_archive_packets_total{{command="archive",lake="{tmp_path}"}} 7.0' in text
    for wrong in ("7447", "127.0.0.1:99999", "127.0.0.1:http", "256.1.1.1:1"):
        with pytest.raises(UsageError, match="--metrics-listen"), served(metrics, wrong):
            pass


def test_a_run_that_cannot_begin_has_failed(tmp_path):
    (tmp_path / "tip").touch()
    audit = tmp_path / "audit.prom"
    done = CliRunner().invoke(
        app, ["audit", "--lake", "x", "--tip-file", str(tmp_path / "tip"), "--metrics-file", str(audit)]
    )
    assert (done.exit_code, read(audit)["strata_pipeline_exit_code"]) == (2, 2)
    archive = tmp_path / "archive.prom"
    with served(JobMetrics("archive", "lake"), "127.0.0.1:0") as port:
        with pytest.raises(UsageError), watched("archive", "lake", archive, f"127.0.0.1:{port}"):
            pass
    assert read(archive)["strata_pipeline_exit_code"] == 2


def test_alerts_name_metrics_that_exist():
    known = {f"{name}_total" for name in COUNTERS} | set(GAUGES) | {"strata_audit_findings"}
    for path in (ROOT / "deploy" / "prometheus").glob("pipeline*"):
        assert set(re.findall(r"\bstrata_(?:archive|audit|lake|pipeline)_\w+", path.read_text())) <= known


def test_errors_of_the_system_and_signals_end_a_command_with_a_line(capsys):
    with pytest.raises(typer.Exit) as ended, failures_told():
        Path("/dev/null/lake").mkdir()
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "strata-pipeline: /dev/null/lake: Not a directory\n"
    with pytest.raises(typer.Exit) as ended, failures_told():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert ended.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(BrokenPipeError), failures_told():
        raise BrokenPipeError


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["archive", "--metrics-listen", "127.0.0.1:9100"], "needs --continuous"),
        (["audit", "--since", "3", "--tip-file", "x"], "leave one out"),
        (["audit", "--tip-file", "empty"], "is empty"),
        (["audit", "--lake", ""], "names no place"),
        (["archive", "--lake", ""], "names no place"),
        (["views", "--lake", ""], "names no place"),
        (["copy", "--to", ""], "names no place"),
        (["traffic", "--output", ""], "names no place"),
        (["report", "--output", ""], "names no place"),
        (["report", "--output", "x", "--scores", ""], "names no place"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_starts(tmp_path, monkeypatch, arguments, why):
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    url = ["--database-url", "postgresql://x"] if arguments[0] == "archive" else []
    lake = [] if "--lake" in arguments else ["--lake", "lake"]
    done = CliRunner().invoke(app, [*arguments, *url, *lake])
    assert done.exit_code == 2 and why in done.stderr


@pytest.mark.timeout(900)
def test_archive_and_audit_tell_what_they_did_and_audits_go_on_from_a_tip(spark, log_url, tmp_path):
    lake, tip = tmp_path / "lake", tmp_path / "tip"

    def run(command: str, *options: str) -> tuple[int, dict[str, float]]:
        file = tmp_path / f"{command}.prom"
        arguments = [command, "--lake", str(lake), "--metrics-file", str(file), *options, "--json"]
        where = {"STRATA_PIPELINE_DATABASE_URL": log_url} if command == "archive" else {}
        done = CliRunner().invoke(app, arguments, env=where)
        return done.exit_code, read(file)

    relay_logs.append(log_url, relay_logs.make_many(12))
    code, told = run("archive", "--delta")
    assert (code, told["strata_archive_packets_total"], told["strata_archive_behind_packets"]) == (0, 12, 0)
    assert told["strata_archive_head_reached_seconds"] > 0
    code, told = run("audit", "--tip-file", str(tip))
    assert (code, told["strata_audit_holds"], told["strata_audit_packets"]) == (0, 1, 12)
    whole = tip.read_text()
    assert len(whole) == 65 and len(published_files(lake)) > 0

    # The second audit reads only new batches; its findings leave the tip unchanged.
    relay_logs.append(log_url, relay_logs.make_many(7, first=12))
    assert run("archive")[1]["strata_archive_packets_total"] == 19
    (lake / "packets" / "left-behind.parquet").touch()
    code, told = run("audit", "--tip-file", str(tip))
    assert (code, told["strata_audit_holds"], told["strata_audit_packets"]) == (1, 0, 7)
    assert (told["strata_audit_findings/file"], told["strata_lake_broken"]) == (1, 0)
    assert tip.read_text() == whole

    # A truncated chain is a broken lake.
    for manifest in (lake / "_manifests").glob("*.json"):
        manifest.unlink()
    code, told = run("audit", "--tip-file", str(tip))
    assert (code, told["strata_lake_broken"], tip.read_text()) == (1, 1, whole)
    assert tasks_under_way(spark) is None
