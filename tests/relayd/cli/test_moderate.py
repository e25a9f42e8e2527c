"""The moderating commands refuse impossible arguments before they look for a database."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from relayd import cli
from relayd.cli import moderate
from relayd.moderation import Ruled

DID, HASH = "did:strata:zAlice", "0x" + "ab" * 32
PLACE = f'{{"packet_id":"{HASH}","received_at":0,"sequence":1}}'
NOWHERE = ("--database-url", "postgresql://127.0.0.1:1/none")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["ban", HASH, "--reason", "x"], "relayd remove"),
        (["ban", "POST", "--reason", "x"], "--kind type"),
        (["ban", "0.0.0.0/0", "--reason", "x"], "too wide"),
        (["ban", DID, "--reason", " "], "a reason has"),
        (["ban", DID, "--reason", "x", "--for", "soon"], "not a duration"),
        (["ban", DID, "--reason", "x", "--for", "0d"], "not a duration"),
        (["ban", DID, "--reason", "x", "--by", " "], "--by takes a name"),
        (["ban", "KEY_EVENT", "--kind", "type", "--reason", "x"], "cannot be banned"),
        (["remove", DID, "--reason", "x"], "64 hex digits"),
        (["erase", "--reason", "x"], "name packets, or authors"),
        (["erase", HASH, "--author", DID, "--reason", "x"], "name packets, or authors"),
        (["erase", HASH, "--places", "-", "--reason", "x"], "name packets, or authors"),
        (["erase", HASH, "--dry-run", "--reason", "x"], "--dry-run needs --places"),
        (["erase", HASH], "a reason has"),
        (["erase", "--places", "-"], "a reason has"),
        (["erase", "--places", "absent", "--dry-run"], "absent"),
        (["erase", "--places", "-", "--reason", "x"], "stdin names no place"),
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
        ["erase", "--places", "-", "--reason", "x"],
        ["list"],
        ["log"],
    ],
)
def test_a_database_that_cannot_be_reached_is_3(arguments: list[str]):
    told = CliRunner().invoke(cli.app, [*arguments, *NOWHERE], input=PLACE, prog_name="relayd")
    assert told.exit_code == 3


class _Rulings:
    """A log of rulings, the newest with the number `newest`."""

    def __init__(self, newest: int) -> None:
        self._newest = newest

    async def log(self, *, before: int | None, subject: str | None, limit: int) -> list[Ruled]:
        last = self._newest if before is None else before - 1
        row = (0, "root", "command", "erase", "packet", HASH, "x", None, None)
        return [Ruled(number, *row) for number in range(last, max(0, last - limit), -1)]


@pytest.mark.parametrize(
    ("rulings", "arguments", "told", "is_cut"),
    [
        (2500, ["--json"], 2500, False),
        (2000, ["--json"], 2000, False),
        (2500, ["--json", "--limit", "1200"], 1200, False),
        (51, [], 50, True),
        (50, [], 50, False),
        (0, [], 0, False),
        (2500, ["--limit", "1200"], 1200, True),
    ],
)
def test_the_log_has_each_ruling_or_says_that_it_lacks_some(
    monkeypatch: pytest.MonkeyPatch, rulings: int, arguments: list[str], told: int, is_cut: bool
):
    @contextlib.asynccontextmanager
    async def opened_store(settings: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(moderation=_Rulings(rulings))

    monkeypatch.setattr(moderate, "opened_store", opened_store)
    result = CliRunner().invoke(cli.app, ["log", *arguments, *NOWHERE], prog_name="relayd")
    assert result.exit_code == 0
    if "--json" in arguments:
        numbers = [line["number"] for line in json.loads(result.stdout)]
    else:
        numbers = [int(line.split()[0]) for line in result.stdout.splitlines()]
    assert numbers == list(range(rulings, rulings - told, -1))
    assert ("--limit" in result.stderr) is is_cut
