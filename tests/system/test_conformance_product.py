"""`strata conformance` against a real relay: it passes all of it, with the documented exit codes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from strata_testkit.conformance import all_checks

from tests.support.relay_process import RelayProcess, running
from tests.support.strata_command import strata_command

DEADLINE = 110
ROWS = sorted(
    {row for check in all_checks() if not check.floods for row in check.rows}
    - {"R-019", "R-021"}  # absences, which no test proves
)
"""The requirements that the tool judges in a plain run."""


def strata(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `strata conformance`."""
    done = strata_command("conformance", *arguments, timeout=DEADLINE)
    return subprocess.CompletedProcess(arguments, *done)


def judged(done: subprocess.CompletedProcess[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    *results, summary = [json.loads(line) for line in done.stdout.splitlines()]
    return results, summary


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RelayProcess]:
    """A relay that limits even its own machine, for the checks that flood it."""
    folder = tmp_path_factory.mktemp("limited")
    config = folder / "relayd.toml"
    config.write_text("unlimited_addresses = []\nanonymous_publish_limit = 60\nlimit_window_seconds = 20\n")
    with running(RelayProcess(folder, arguments=("--config", str(config)))) as process:
        yield process


@pytest.mark.req(*ROWS)
def test_our_relay_passes_every_check_and_none_is_skipped(relay: RelayProcess):
    done = strata("--json", relay.ws)
    results, summary = judged(done)
    wrong = [result for result in results if result["result"] != "passed"]
    assert not wrong
    assert summary["conforms"] is True
    assert summary["summary"]["MUST"]["passed"] > 100
    assert done.returncode == 0
    assert "they publish" in done.stderr


@pytest.mark.req("R-170")
def test_a_slow_reader_of_our_relay_loses_nothing(relay: RelayProcess):
    done = strata("--json", "--limits", "--only", "a-slow-reader-loses-nothing", relay.ws)
    results, _ = judged(done)
    assert [result["result"] for result in results] == ["passed"], results
    assert done.returncode == 0


@pytest.mark.req("R-314", "R-315", "R-319")
def test_the_limits_of_our_relay_are_honest(limited: RelayProcess):
    done = strata("--json", "--limits", "--only", "limits-are-honest", limited.ws)
    results, _ = judged(done)
    assert [result["result"] for result in results] == ["passed"], results
    assert done.returncode == 0


def test_a_selection_prints_a_table(relay: RelayProcess):
    done = strata("--only", "R-15*", "--level", "MUST", relay.ws)
    assert done.returncode == 0, done.stdout
    assert "10. SUBSCRIBE, EVENT, UNSUBSCRIBE" in done.stdout
    assert "Every MUST that could be judged holds" in done.stdout


def test_no_relay_there_is_its_own_exit_code(unused_tcp_port: int):
    done = strata(f"ws://127.0.0.1:{unused_tcp_port}/strata")
    assert (done.returncode, done.stdout) == (3, "")
    assert "is the relay running?" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["http://127.0.0.1/strata"],
        ["--only", "R-999"],
        ["--only", "R;1"],
        ["--level", "PERHAPS"],
        ["--identity", "/nowhere/at/all", "ws://127.0.0.1:1/strata"],
        ["wss://relay.example.net/strata"],
    ],
)
def test_usage(arguments: list[str]):
    done = strata(*arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr


def test_the_list_is_what_would_run():
    done = strata("--list", "--json", "--only", "R-152,the-seam-*")
    assert {json.loads(line)["check"] for line in done.stdout.splitlines()} == {
        "history-is-in-order-of-arrival",
        "the-seam-is-tight",
    }
    assert done.returncode == 0
