"""A process's background chores continue, whatever the system refuses."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from structlog.testing import capture_logs

from relayd.access.memory import Pressure
from relayd.config import Settings
from relayd.metrics import Metrics
from relayd.process import chores
from relayd.process.chores import GuardKeeper, watch_memory
from relayd.sessions.registry import Registry


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system refuse to start threads."""

    async def to_thread(*arguments: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "to_thread", to_thread)


async def test_memory_is_watched_where_no_thread_can_start(no_threads: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chores, "_MEMORY_INTERVAL", 0.0)
    monkeypatch.setattr(chores, "resident_bytes", lambda: 100)
    registry = Registry()
    watching = asyncio.create_task(watch_memory(Settings(memory_limit_bytes=100), registry, Metrics()))
    for _ in range(10):
        await asyncio.sleep(0)
    seen = [registry.pressure]
    monkeypatch.setattr(chores, "resident_bytes", lambda: 1)
    for _ in range(10):
        await asyncio.sleep(0)
    seen.append(registry.pressure)
    assert seen == [Pressure.FULL, Pressure.FINE] and not watching.done()
    watching.cancel()


async def test_a_guard_that_cannot_be_written_is_told_once(no_threads: None):
    keeper = GuardKeeper(
        cast(Any, SimpleNamespace(write=None)), cast(Any, SimpleNamespace(known=SimpleNamespace(claim=None)))
    )
    with capture_logs() as lines:
        for _ in range(2):
            await keeper.write()
    assert [line["event"] for line in lines] == ["log_guard_not_written"]
