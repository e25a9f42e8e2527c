"""The pipeline's synthetic day: its packets, the disk that it needs, and how a job's memory is measured."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from strata.protocol.packets import Packet
from strata.protocol.sequences import first_of_day
from strata_pipeline.cli import app
from strata_pipeline.errors import LogError
from strata_pipeline.jobs.archive import archive
from typer.testing import CliRunner

from benches import disk_use, pipeline, pipeline_day, pipeline_log, pipeline_packets
from benches.job_memory import Ran, run, together
from benches.pipeline_day import check_space
from benches.pipeline_log import append, empty_log, forget
from benches.pipeline_packets import Made, made_rows
from tests.support.toy_lakes import faults, read

DAY = 20_000 * 86_400


def test_the_packets_of_a_day_are_signed_and_come_all_day_from_a_few_authors_most():
    made = Made(400, True, DAY, 86_399, first=1000, authors=50, varied=True)
    rows = made_rows(range(400), made=made)
    assert rows[0][0] == DAY and max(row[0] for row in rows) // 86_400 == 20_000
    assert [row[0] for row in rows] == sorted(row[0] for row in rows) and rows[200][0] > DAY + 40_000
    packets = [Packet.parse(row[5]) for row in rows]
    for row, packet in zip(rows, packets, strict=True):
        packet.verify()
        told = (packet.timestamp, packet.digest, packet.author_id.encode(), packet.content_type.encode())
        assert told == row[1:5]
    assert len({packet.digest for packet in packets}) == 400
    [(_, most), *_] = Counter(packet.author_id for packet in packets).most_common()
    assert 400 / 50 * 3 < most < 400
    texts = Counter(pipeline_packets._varied(number)[1] for number in range(4000))
    assert 1 < max(texts.values()) < 20 and len(texts) > 3850
    # Made by several processes: a chunk is the same, whichever makes it.
    assert made_rows(range(100, 110), made=made) == rows[100:110]


@pytest.fixture
def in_threads(monkeypatch):
    """Make packets in threads: a test process that has threads of Spark should not fork."""
    monkeypatch.setattr(pipeline_log, "ProcessPoolExecutor", ThreadPoolExecutor)


def in_process(command: list[str], environment: Mapping[str, str]) -> Ran:
    """As `run`, in the Spark session of the tests."""
    arguments = [word for word in command[3:] if word not in ("--master", "local[2]")]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        done = CliRunner().invoke(app, arguments)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert done.exit_code == 0, done.output
    return Ran(done.stdout, seconds=2.0, peak_mb=100.0, java_mb=60.0, python_mb=40.0)


def test_a_day_in_portions_is_all_in_the_lake(spark, tmp_path, monkeypatch, in_threads):
    jobs: list[str] = []

    def look_and_run(command: list[str], environment: Mapping[str, str]) -> Ran:
        jobs.append(command[3])
        assert environment == {"SPARK_LOCAL_DIRS": str(tmp_path / "day-spark")}
        if command[3] == "compact":
            assert not (tmp_path / "day-log").exists() and faults(tmp_path / "day-lake") == []
            numbers = Counter(sequence & 0xFFFF_FFFF for sequence in read(tmp_path / "day-lake"))
            # The small days before and after have five each.
            assert numbers == Counter(range(1, 51)) + Counter({number: 2 for number in range(1, 6)})
        if command[3] in ("audit", "traffic"):
            assert not (tmp_path / "day-lake" / "_retired").exists()
        return in_process(command, environment)

    said: list[str] = []
    monkeypatch.setattr(pipeline_day, "run", look_and_run)
    monkeypatch.setattr(pipeline_day, "_SMALL", 5)
    monkeypatch.setattr(pipeline_day, "_BATCHES", 6)
    found = pipeline_day.measure(50, tmp_path, said.append, portion_rows=20, audited=21)
    assert jobs == ["archive"] * 4 + ["compact", "audit", "traffic"]
    values = {one.name: one.value for one in found}
    # 50 rows in three runs of two seconds.
    assert values["50 rows, archive"] == 50 / 6 and values["50 rows, archive, peak memory"] == 100
    # The newest 21 are in the last two portions, which have 30.
    assert (
        values["50 rows, compact"] == 25
        and values["50 rows, audit --since"] == 15
        and values["log, bytes a row"] > 1_000
    )
    portions = [line for line in said if "portion" in line]
    assert len(portions) == 3 and "portion 2 of 3" in portions[1] and "40 of 50 rows" in portions[1]
    assert not list(tmp_path.iterdir())


def test_a_day_of_which_only_the_end_comes_out_of_a_log_is_all_in_the_lake(
    spark, tmp_path, monkeypatch, in_threads
):
    monkeypatch.setattr(pipeline_day, "run", in_process)
    monkeypatch.setattr(pipeline_day, "_SMALL", 5)
    said: list[str] = []
    steps = pipeline_day._Steps(50, tmp_path, said.append)
    tips, done = pipeline_day._archive(steps, 10, 20)
    assert (len(tips), len(done.runs), done.packets) == (2, 2, 25) and "30 of 30 rows written" in said[1]
    assert faults(tmp_path / "day-lake") == []
    numbers = Counter(sequence & 0xFFFF_FFFF for sequence in read(tmp_path / "day-lake"))
    assert numbers == Counter(range(1, 51)) + Counter({number: 2 for number in range(1, 6)})


def test_what_is_forgotten_must_be_in_the_lake(spark, tmp_path, in_threads):
    made = Made(30, True, DAY, 86_399)
    with empty_log(tmp_path / "log") as server:
        append(server.url, made, range(10))
        reached = archive(spark, server.url, tmp_path / "lake").reached
        with pytest.raises(ValueError, match=f"ends at {reached}, and what is archived at {reached - 1}"):
            forget(server.url, reached - 1)
        forget(server.url, reached)
        assert archive(spark, server.url, tmp_path / "lake").packets == 0
        append(server.url, made, range(10, 20))
        # A process that has not archived the missing rows does not mistake the rest of the day for all of it.
        with pytest.raises(LogError, match="rows are missing"):
            archive(spark, server.url, tmp_path / "late")
        done = archive(spark, server.url, tmp_path / "lake")
        assert (done.packets, done.reached) == (10, reached + 10)
    assert read(tmp_path / "lake") == [first_of_day(20_000) + number for number in range(1, 21)]


def test_runs_count_together():
    first, second = Ran("a", 1.0, 10.0, 9.0, 2.0, 3.0), Ran("b", 2.0, 8.0, 4.0, 5.0, 4.0)
    assert together([first, second]) == Ran("b", 3.0, 10.0, 9.0, 5.0, 7.0)


def test_a_folder_is_watched(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_use, "_LOOK_SECONDS", 0.01)
    with disk_use.watched(tmp_path) as peak:
        (tmp_path / "much").write_bytes(b"x" * 2**20)
        while peak.taken < 2**20:
            time.sleep(0.01)
        (tmp_path / "much").unlink()
    assert 2**20 <= peak.taken < 2**21 and disk_use.taken(tmp_path) == 0


def test_a_day_that_the_disk_cannot_hold_is_refused_before_it_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4 * 10**9))
    check_space(tmp_path, 1000)
    said = r"100,000,000 rows takes about 61\.2 GB of disk, and .* has 4\.0 GB free: .*--folder"
    with pytest.raises(SystemExit, match=said):
        pipeline.main(["day", "--rows", "100000000", "--folder", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_a_command_is_watched_with_its_children():
    child = "import time; held = bytearray(64 * 2**20); time.sleep(1.5)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}]); print('done')"
    ran = run([sys.executable, "-c", parent])
    assert ran.told == "done\n" and ran.seconds > 1
    assert 64 < ran.python_mb == ran.peak_mb < 640 and ran.java_mb == 0
    with pytest.raises(SystemExit, match="failed; see above"):
        run([sys.executable, "-c", "raise SystemExit(3)"])
