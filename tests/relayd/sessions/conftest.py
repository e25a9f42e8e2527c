"""A clock that the test sets, and connections in memory."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.relayd.sessions.connection_rig import Rig


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
async def rigs(clock: SimpleNamespace) -> AsyncIterator[Any]:
    made: list[Rig] = []

    def make(**settings: Any) -> Rig:
        made.append(Rig(clock, **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.socket.connection_lost(None)
        await rig.relay.admission.close()
