"""The lakes that benchmarks of the pipeline make, and what is read from them: small, with exact totals."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from strata_pipeline.cli import app
from strata_pipeline.lake.lake import Lake
from strata_pipeline.transforms.acknowledgements import PacketRow, follow, follow_rows
from strata_pipeline.transforms.channel_reading import message_of
from typer.testing import CliRunner

from benches import (
    pipeline_channel,
    pipeline_copies,
    pipeline_delta,
    pipeline_finished,
    pipeline_follow,
    pipeline_readers,
    pipeline_since,
    pipeline_traffic,
)
from benches.job_memory import Ran
from benches.job_stages import Job, Stage, read_job
from benches.measures import tenfold
from benches.pipeline_lakes import add_copies, add_made
from benches.pipeline_packets import Made
from tests.support.toy_lakes import faults, read

DAY = 20_000 * 86_400


def quiet(text: str) -> None:
    pass


def told_of(command: list[str], told: dict[str, object]) -> Ran:
    """Pretend to have run a command of the pipeline, which must exist."""
    assert command[1:3] == ["-m", "strata_pipeline"]
    job, *options = command[3:]
    parsed = typer.main.get_command(app)
    assert isinstance(parsed, typer.core.TyperGroup)
    parsed.commands[job].make_context(job, options)
    return Ran(json.dumps(told) + "\n", seconds=2.0, peak_mb=3.0, java_mb=1.0, python_mb=2.0, cpu_seconds=1.0)


def test_a_lake_that_is_made_is_what_its_chain_tells(tmp_path):
    lake = tmp_path / "lake"
    add_made(lake, Made(30, True, DAY, 86_399, authors=5, varied=True), 20)
    add_made(lake, Made(10, True, DAY + 86_400, first=30), 10)
    add_made(lake, Made(10, True, DAY + 86_400, first=40), 10)
    opened = Lake.open(lake)
    assert [one.packets for one in opened.manifests] == [20, 10, 10, 10]
    assert read(lake)[-1] == opened.reached == (20_001 << 32) + 20
    assert faults(lake) == [] and not (lake / "_bench").exists()
    expected = 30, sum((20_000 << 32) + number for number in range(1, 31))
    for name, ask in pipeline_readers.READERS.items():
        assert ask(lake, "2024-10-05") == expected, name


def test_batches_are_repeated_with_places_and_ids_of_their_own(tmp_path):
    lake = tmp_path / "lake"
    add_made(lake, Made(20, False, DAY), 10)
    add_copies(lake, 45)
    assert len(read(lake)) == len(set(read(lake))) == 50 and faults(lake) == []
    assert len({one.rows for one in Lake.open(lake).manifests}) == 5


def test_a_message_of_the_hot_channel_names_those_before_it_and_some_are_sent_twice():
    rows = pipeline_channel.messages(range(40), rows=40, at=DAY)
    found = [message_of(row[5], row[4].decode()) for row in rows]
    assert {told[0] for told in found} == {"content"}
    given = [
        PacketRow(number, row[0], str(told[3]), told[4], told[5] or [])
        for number, (row, told) in enumerate(zip(rows, found, strict=True))
    ]
    messages, everybody = follow(given)
    assert len(messages) == 36 and everybody
    carried = {told[4] for told in found}
    assert {name for told in found for name in told[5] or []} <= carried


def test_the_rows_of_a_hot_channel_are_followed_to_the_last():
    [found] = follow_rows(pipeline_follow.batches(60))
    assert found["first_sequence"].to_pylist() == list(range(1, 61))
    acknowledged = found["acknowledged_at"].is_valid().to_pylist()
    assert acknowledged == [True] * 59 + [False]


def test_sizes_grow_tenfold_up_to_the_one_asked_for():
    assert tenfold(100_000, 3_000_000) == [100_000, 1_000_000, 3_000_000]
    assert tenfold(100_000, 1_000_000) == [100_000, 1_000_000]
    assert tenfold(100_000, 10) == [10]


def test_publishing_is_measured(tmp_path):
    first, last = pipeline_delta.measure(3, tmp_path, quiet)
    assert first.value > 0 and last.value > 0 and not list(tmp_path.iterdir())


def stage(number: int, tasks: list[int], shuffled: int = 0) -> list[dict[str, object]]:
    """The events of a stage from second `number` on, one task after another."""
    events: list[dict[str, object]] = []
    at = 1000 * number
    for place, seconds in enumerate(tasks):
        events.append(
            {
                "Event": "SparkListenerTaskEnd",
                "Stage ID": number,
                "Stage Attempt ID": 0,
                "Task Info": {"Executor ID": str(place % 2), "Launch Time": at, "Finish Time": at + seconds},
                "Task Metrics": {
                    "Shuffle Write Metrics": {"Shuffle Bytes Written": shuffled},
                    "Disk Bytes Spilled": 0,
                },
            }
        )
    told = {
        "Stage ID": number,
        "Stage Attempt ID": 0,
        "Stage Name": "s",
        "Submission Time": at,
        "Completion Time": at + max(tasks),
    }
    return [*events, {"Event": "SparkListenerStageCompleted", "Stage Info": told}]


def test_stages_and_tasks_are_read_from_an_event_log(tmp_path):
    events = [
        {"Event": "SparkListenerApplicationStart", "Timestamp": 0},
        *stage(1, [4000, 4000], shuffled=50),
        *stage(7, [1000, 1000, 2000]),
        {"Event": "SparkListenerApplicationEnd", "Timestamp": 10_000},
    ]
    (tmp_path / "app").write_text("".join(json.dumps(event) + "\n" for event in events))
    job = read_job(tmp_path)
    assert (job.seconds, job.executors, job.shuffled, job.task_seconds) == (10.0, 2, 100, 12.0)
    assert job.alone == 10 - 4 - 2
    assert job.speedup(1) == 1 and job.speedup(2) == 2 and job.speedup(4) == 2
    lopsided = Job(1.0, 1, [Stage("s", 0.0, 1.0, [3.0, 1.0])])
    assert lopsided.speedup(2) == pytest.approx(4 / 3)


def test_the_files_of_a_finished_day_are_counted(spark, tmp_path, monkeypatch):
    def in_process(command: list[str]) -> Ran:
        arguments = [word for word in command[3:] if word not in ("--master", "local[2]")]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        return Ran(told=done.stdout, seconds=1.0)

    monkeypatch.setattr(pipeline_finished, "run", in_process)
    files, *_ = pipeline_finished.measure(40, tmp_path, quiet)
    assert files.value == 4 and not list(tmp_path.iterdir())


def test_copies_are_measured_and_restores_beside_them(tmp_path, monkeypatch):
    jobs: list[str] = []

    def in_process(command: list[str]) -> Ran:
        jobs.append(command[3])
        if command[3] != "copy":
            return told_of(command, {})
        done = CliRunner().invoke(app, command[3:])
        assert done.exit_code == 0, done.output
        return Ran(told=done.stdout, seconds=2.0)

    monkeypatch.setattr(pipeline_copies, "run", in_process)
    database = contextlib.nullcontext(SimpleNamespace(url="postgresql://x"))
    monkeypatch.setattr(pipeline_copies, "empty_log", lambda folder: database)
    found = pipeline_copies.measure(8, tmp_path, quiet)
    twice = ["copy", "copy"]
    assert jobs == [*twice, "restore", "compact", *twice, *twice] and not list(tmp_path.iterdir())
    assert [one.value for one in found if one.unit == "batches/s"] == [4.0] * 4
    assert found[-3].name == "2 batches a day, 4 days, copy"


def test_jobs_are_measured_and_have_to_be_exact(tmp_path, monkeypatch):
    def audited(command: list[str]) -> Ran:
        [lake] = (command[place + 1] for place, word in enumerate(command) if word == "--lake")
        [tip] = (command[place + 1] for place, word in enumerate(command) if word == "--since")
        return told_of(command, {"packets": sum(one.packets for one in Lake.open(lake).chain.after(tip))})

    monkeypatch.setattr(pipeline_since, "run", audited)
    for name, value in (("_SMALL_OLD", 10), ("_MADE", 5)):
        monkeypatch.setattr(pipeline_since, name, value)
    found = pipeline_since.measure(20, 50, tmp_path, quiet)
    assert [(one.value, one.unit) for one in found] == [(10.0, "/s"), (20.0, "/s"), (3.0, "MB")] * 2

    def reported(command: list[str]) -> Ran:
        [output] = (Path(command[place + 1]) for place, word in enumerate(command) if word == "--output")
        (output / "author_hours").mkdir(parents=True)
        pq.write_table(pa.table({"texts": [20, 10]}), output / "author_hours" / "part.parquet")
        return told_of(command, {"messages": 36, "gaps": 0, "unreadable": 0})

    shuffled = Job(1.0, 1, [Stage("s", 0.0, 1.0, [1.0], shuffled=6_000)])
    monkeypatch.setattr(pipeline_traffic, "read_job", lambda folder: shuffled)
    for module in (pipeline_traffic, pipeline_channel):
        monkeypatch.setattr(module, "run", reported)
    assert pipeline_traffic.measure(40, tmp_path, quiet)[0].value == 6_000 / 30
    assert [one.value for one in pipeline_channel.measure(40, tmp_path, quiet)] == [2.0, 3.0]
    with pytest.raises(SystemExit, match="not exact"):
        pipeline_channel.measure(50, tmp_path, quiet)
