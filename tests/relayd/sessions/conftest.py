"""A clock of our own, and connections in memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from relayd.sessions import connection as connection_module
from tests.relayd.sessions.connection_rig import (
    Rig,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(connection_module.time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
async def rigs(clock: SimpleNamespace) -> Iterator[Any]:
    made: list[Rig] = []

    def make(**settings: Any) -> Rig:
        made.append(Rig(clock, **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.socket.connection_lost(None)
        await rig.relay.admission.close()
