"""The moderating commands refuse what cannot be meant before they look for a database."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from relayd import cli

DID, HASH = "did:strata:zAlice", "0x" + "ab" * 32
NOWHERE = ("--database-url", "postgresql://127.0.0.1:1/none")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["ban", HASH, "--reason", "x"], "relayd remove"),
        (["ban", "POST", "--reason", "x"], "--kind type"),
        (["ban", "0.0.0.0/0", "--reason", "x"], "too wide"),
        (["ban", DID, "--reason", " "], "a reason has"),
        (["ban", DID, "--reason", "x", "--for", "soon"], "expected a number"),
        (["ban", DID, "--reason", "x", "--for", "0d"], "expected a number"),
        (["ban", DID, "--reason", "x", "--by", " "], "--by takes a name"),
        (["ban", "KEY_EVENT", "--kind", "type", "--reason", "x"], "cannot be banned"),
        (["remove", DID, "--reason", "x"], "64 hex digits"),
        (["erase", "--reason", "x"], "name packets, or authors"),
        (["erase", HASH, "--author", DID, "--reason", "x"], "name packets, or authors"),
        (["erase", HASH], "a reason has"),
        (["ban", DID], "--reason"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_2(arguments: list[str], problem: str):
    result = CliRunner().invoke(cli.app, [*arguments, *NOWHERE], prog_name="relayd")
    assert result.exit_code == 2
    assert problem in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["ban", DID, "--reason", "x"],
        ["unban", DID],
        ["remove", HASH, "--reason", "x"],
        ["restore", HASH],
        ["erase", HASH, "--reason", "x"],
        ["list"],
        ["log"],
    ],
)
def test_a_database_that_cannot_be_reached_is_3(arguments: list[str]):
    assert CliRunner().invoke(cli.app, [*arguments, *NOWHERE], prog_name="relayd").exit_code == 3
