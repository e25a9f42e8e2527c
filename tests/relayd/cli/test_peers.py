"""The output of `relayd peers` without a relay."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from relayd import cli
from relayd.exit_codes import EXIT_CONFIGURATION

NOWHERE = ("--database-url", "postgresql://127.0.0.1:1/none")


@pytest.mark.parametrize("since", ["1m", "2999-01-01", "999999999999"])
def test_a_comparison_of_nothing_is_refused(since):
    arguments = ["peers", "reconcile", "did:strata:none", "--since", since]
    result = CliRunner().invoke(cli.app, [*arguments, *NOWHERE], prog_name="relayd")
    assert result.exit_code == EXIT_CONFIGURATION
    assert f"--since {since}: packets younger than 120 seconds" in result.stderr


@pytest.mark.parametrize("since", ["soon", "1y", "9" * 13])
def test_a_time_that_is_none_is_refused(since):
    arguments = ["peers", "reconcile", "did:strata:none", "--since", since]
    result = CliRunner().invoke(cli.app, [*arguments, *NOWHERE], prog_name="relayd")
    assert result.exit_code == EXIT_CONFIGURATION
    assert f"--since: not a time: {since!r}; try" in result.stderr
