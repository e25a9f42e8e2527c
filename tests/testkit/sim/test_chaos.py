"""Many worlds in which everything goes wrong: nothing is lost, nothing doubled, all agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from strata_testkit.sim import KINDS

RUNS = int(os.environ.get("STRATA_TEST_SIM_RUNS", "60"))
CHUNK = 60


@pytest.mark.timeout(60 + 2 * RUNS)
@pytest.mark.req("C-093", "C-141", "C-257", "C-296", "C-297", "C-298")
@pytest.mark.parametrize("first", range(0, RUNS, CHUNK))
def test_all_agree_and_nothing_is_lost_or_doubled(first):
    """Each message is delivered once, all participants have the same log, every delivery error is true."""
    count = min(CHUNK, RUNS - first)
    command = [
        sys.executable,
        "-m",
        "strata",
        "simulate",
        "--first",
        str(first),
        "--worlds",
        str(count),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert not report["problems"], "\n".join(report["problems"])
    assert done.returncode == 0
    # An empty run proves nothing: every kind of fault occurred and was checked.
    checks, faults = report["checks"], report["faults"]
    assert report["runs"] == count
    assert checks["messages"] > 5 * count
    assert checks["deliveries"] > checks["messages"]
    assert checks["order_pairs"] > count
    assert checks["acknowledgements"] > 5 * count
    for fault in ("lost_messages", "lost_requests", "lost_answers", "duplicates", "crashes", "partitions"):
        assert faults[fault] > count, fault
    for fault in ("forgotten", "clock_jumps", "relay_crashes", "disk_failures", "disk_losses"):
        assert faults[fault] > 0, fault
    if count == CHUNK:
        for fault in ("sleeps", "forgeries", "devices_lost", "messages_relays_lost"):
            assert faults[fault] > 0, fault
        assert len(report["worlds"]) > sum(not kind.open_because for kind in KINDS.values()) - 2
        assert checks["weighed"] > 20
        assert checks["idle_minutes"] > 1
        assert checks["told_missing"] > 20
