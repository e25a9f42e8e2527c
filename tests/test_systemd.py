"""The relay's unit for systemd, as far as it shows without systemd."""

from __future__ import annotations

from pathlib import Path

from relayd.config import Settings
from relayd.exit_codes import EXIT_CONFIGURATION, EXIT_DATABASE, EXIT_PORT

UNIT = (Path(__file__).resolve().parents[1] / "deploy" / "systemd" / "relayd.service").read_text()
LINES = [line.partition("=") for line in UNIT.splitlines() if not line.startswith("#")]


def _values(name: str) -> list[str]:
    return [value for found, _, value in LINES if found == name]


def test_what_starting_again_does_not_mend_is_not_started_again():
    """systemd considers only the exit code of the main process: a check before it would loop for ever."""
    assert _values("Restart") == ["on-failure"]
    (prevented,) = _values("RestartPreventExitStatus")
    assert {int(code) for code in prevented.split()} == {EXIT_CONFIGURATION, EXIT_PORT}
    assert EXIT_DATABASE not in map(int, prevented.split())
    assert not _values("ExecStartPre") and not _values("ExecCondition")


def test_a_relay_has_time_to_drain():
    (seconds,) = _values("TimeoutStopSec")
    assert int(seconds) >= Settings().drain_spread + Settings().drain_timeout + 5
