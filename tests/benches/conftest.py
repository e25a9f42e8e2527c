"""Benchmarks that run in the test's own process get relays and databases that start at once."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from benches import daemon
from relayd.postgres import EmbeddedPostgres
from tests.support.databases import copy_of_migrated, fill_cluster
from tests.support.forks import RELAYD, ForkedProcess


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay is a fork on a copy of a migrated data folder; in place of `initdb`, its work is copied."""
    monkeypatch.setattr(daemon, "spawn", _spawn)
    monkeypatch.setattr(EmbeddedPostgres, "_initialise", lambda server, fresh: fill_cluster(fresh))


def _spawn(command: Sequence[str], environment: Mapping[str, str], log: IO[str]) -> Any:
    arguments = command[command.index("serve") :]
    if "--data-dir" in arguments:  # otherwise its database is elsewhere
        copy_of_migrated(Path(arguments[arguments.index("--data-dir") + 1]))
    process = ForkedProcess(RELAYD, arguments, env=environment, stderr=log.fileno())
    assert process.stdout is not None
    process.stdout = io.TextIOWrapper(process.stdout)  # type: ignore[assignment]
    return process
