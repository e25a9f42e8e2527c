"""`strata status` and `strata bench` against a real relay."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.support.relay_process import RelayProcess
from tests.support.strata_command import strata_command


@pytest.fixture
def strata(tmp_path):
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        done = strata_command(*arguments, timeout=90, XDG_CONFIG_HOME=tmp_path)
        return subprocess.CompletedProcess([*map(str, arguments)], *done)

    return run


def test_status_tells_what_the_relay_is(relay: RelayProcess, strata, tmp_path):
    key_file = tmp_path / "me.json"
    did = json.loads(strata("keygen", "--output", key_file, "--json").stdout)["did"]
    done = strata("status", relay.ws, "--identity", key_file, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["reachable"] and found["status"] == "ok" and found["software"]["name"] == "relayd"
    assert found["relay_id"].startswith("did:strata:")
    assert {"gapless", "history_marker"} <= set(found["extensions"])
    assert found["limits"]["max_packet_bytes"] > 0
    assert abs(found["clock"]["difference"]) <= found["clock"]["error"] + 0.01, "one machine has one clock"
    assert found["latency"]["connect"]["samples"] == found["latency"]["round_trip"]["samples"] == 5
    assert found["authenticated"]["author_id"] == did
    assert "publish" in found["authenticated"]["capabilities"]


def test_bench_counts_every_packet_and_every_delivery(relay: RelayProcess, strata):
    done = strata("bench", relay.ws, "--count", 300, "--subscribers", 4, "--seconds", 30, "--json")
    assert done.returncode == 0, done.stderr
    publish, fan_out = map(json.loads, done.stdout.splitlines())
    assert (publish["stored"], publish["refused"]) == (300, {})
    assert (fan_out["stored"], fan_out["deliveries"]) == (300, 1200)


def test_a_context_leads_there(relay: RelayProcess, strata):
    assert strata("context", "add", "here", "--relay", relay.ws).returncode == 0
    assert strata("context", "use", "here").returncode == 0
    assert relay.ws in strata("status", "--samples", 1).stdout
