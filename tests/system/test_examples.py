"""The examples do what they say."""

import json
import subprocess
import sys

import pytest
from relay_process import ROOT


@pytest.mark.timeout(120)
def test_the_demo_kills_a_relay_and_loses_nothing():
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--kills", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["kills"] == 2
    assert counts["acknowledged"] > 0 and counts["received"] >= counts["acknowledged"]
    assert (counts["lost"], counts["doubled"], counts["out_of_order"]) == (0, 0, 0)


@pytest.mark.timeout(120)
@pytest.mark.req("C-272")
def test_many_relays_survive_the_death_of_one():
    command = [sys.executable, str(ROOT / "examples" / "many_relays.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts == {"acknowledged": 100, "received": 100, "lost": 0, "doubled": 0}
