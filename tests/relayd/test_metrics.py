from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from strata.protocol.errors import ErrorCode

from relayd.metrics import (
    CLOSE_REASONS,
    MESSAGE_TYPES,
    OTHER,
    PUBLISH_OUTCOMES,
    READ_OUTCOMES,
    Metrics,
    forget_process,
)

ROOT = Path(__file__).parents[2]


def samples(metrics: Metrics) -> dict[str, float]:
    text = metrics.render()[1].decode()
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_is_counted_is_rendered():
    metrics = Metrics()
    metrics.connections.inc()
    metrics.connections_total.inc()
    metrics.publishes["accepted"].inc(3)
    metrics.commit_packets.observe(7)
    found = samples(metrics)
    assert found["relayd_connections"] == 1
    assert found["relayd_connections_opened_total"] == 1
    assert found["relayd_publishes_total[accepted]"] == 3
    assert found["relayd_commit_packets_bucket[8.0]"] == 1
    assert found["relayd_commit_packets_sum"] == 7


def test_a_stranger_s_word_never_makes_a_series():
    metrics = Metrics()
    before = samples(metrics).keys()
    for family in (
        metrics.messages_received,
        metrics.errors_sent,
        metrics.publishes,
        metrics.connections_closed,
    ):
        family["\x00 whatever a peer says"].inc()
        assert family[OTHER] is family["anything"]
    assert samples(metrics).keys() == before
    assert samples(metrics)["relayd_messages_received_total[other]"] == 1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("publishes", PUBLISH_OUTCOMES),
        ("errors_sent", tuple(ErrorCode)),
        ("messages_received", MESSAGE_TYPES),
        ("connections_closed", CLOSE_REASONS),
        ("store_reads", READ_OUTCOMES),
        ("events_sent", ("live", "store")),
    ],
)
def test_every_known_value_has_its_own_series_from_the_start(name, values):
    family = getattr(Metrics(), name)
    assert len({id(family[value]) for value in (*values, OTHER)}) == len(values) + 1


def test_days_that_wait_stand_under_one_reason():
    metrics = Metrics()
    metrics.retention_waits(3, "differs")
    metrics.retention_waits(2, "behind")
    found = samples(metrics)
    assert found["relayd_retention_waiting_days[behind]"] == 2
    assert found["relayd_retention_waiting_days[differs]"] == 0
    metrics.retention_waits(0, None)
    assert samples(metrics)["relayd_retention_waiting_days[behind]"] == 0


def test_two_relays_in_one_process_do_not_meet():
    one, other = Metrics(), Metrics()
    one.connections_total.inc()
    assert samples(other)["relayd_connections_opened_total"] == 0


def test_all_names_carry_the_prefix():
    for name in samples(Metrics()):
        assert name.startswith(("relayd_", "process_"))


def test_dashboards_and_alerts_name_metrics_that_exist():
    metrics = Metrics()
    known = {name.partition("[")[0] for name in samples(metrics)}
    # They have no series before the first label, for example a peer's name.
    known |= {
        f"{each.name}{'_total' if each.type == 'counter' else ''}" for each in metrics.registry.collect()
    }
    # One is counted by the parent of several workers, and one appears with the plug-in that it describes.
    known |= {"relayd_worker_restarts_total", "relayd_policy_plugin_verdicts_total"}
    known |= {name.removesuffix("_count") for name in known}  # a histogram may be named without its suffix
    for path in (ROOT / "deploy").rglob("*"):
        if path.suffix in {".json", ".yml"}:
            used = set(re.findall(r"\b(?:relayd_[a-z_]+|process_[a-z_]+)\b", path.read_text()))
            assert used <= known, path
    json.loads((ROOT / "deploy/grafana/dashboards/relayd.json").read_text())


PARENT = """
import subprocess, sys, time
from pathlib import Path
from relayd.metrics import Metrics, forget_process, share_between_processes

def worker(waiting):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, __file__, "worker", waiting], **pipes)
    process.stdout.readline()
    return process

if sys.argv[1] == "worker":
    metrics = Metrics()
    metrics.publishes["accepted"].inc()
    metrics.commit_packets.observe(1)
    metrics.connections.set(2)
    metrics.database_up.set(1)
    metrics.log_sequence.set(7)
    metrics.retention_waits(int(sys.argv[2]), "behind")
    while time.process_time() < 0.2:
        pass
    metrics.count_processor()
    print("up", flush=True)
    if sys.stdin.readline().strip() == "render":
        sys.stdout.write(metrics.render()[1].decode())
        sys.stdout.flush()
else:
    share_between_processes(Path(sys.argv[1]))
    for _ in range(3):  # one that ends again and again
        ended = worker("0")
        ended.communicate(b"")
        forget_process(ended.pid)
    first, second, third = worker("8"), worker("9"), worker("5")
    first.communicate(b"")
    forget_process(first.pid)
    print(third.communicate(b"render\\n")[0].decode())
    second.communicate(b"")
"""


@pytest.mark.slow
def test_workers_add_up_what_they_count(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PARENT)
    path = f"{ROOT}:{ROOT / 'client'}"
    done = subprocess.run(
        [sys.executable, program, tmp_path / "shared"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONPATH": path},
    )
    lines = done.stdout.splitlines()
    assert 'relayd_publishes_total{outcome="accepted"} 6.0' in lines  # a dead worker's work stays counted
    assert 'relayd_commit_packets_bucket{le="1.0"} 6.0' in lines
    left = sorted(path.name for path in (tmp_path / "shared").iterdir() if "gauge" not in path.name)
    assert len(left) == 6, left  # of two workers, and of all earlier ones
    assert "relayd_connections 4.0" in lines  # its connections do not
    assert "relayd_database_up 1.0" in lines
    assert "relayd_log_sequence 7.0" in lines
    assert 'relayd_retention_waiting_days{reason="behind"} 5.0' in lines  # the last one that looked is right
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)
    (processor,) = (line for line in lines if line.startswith("process_cpu_seconds_total "))
    assert float(processor.split()[1]) >= 6 * 0.2, "that of ended workers too"


def test_a_worker_that_was_killed_before_it_had_counted_anything_is_no_trouble(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for name in ("counter_7.db", "histogram_7.db", "gauge_livesum_7.db"):
        (tmp_path / name).touch()
    forget_process(7)
    assert not list(tmp_path.iterdir())
