"""How a session that compares sets reads a peer's answers; the rest is in tests/relayd/federation."""

from __future__ import annotations

import time
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

import pytest
from strata.relays.reconciling import _ahead as clock_ahead


def shaken(date: str | None) -> Any:
    """A connection for which the relay dated the handshake."""
    return SimpleNamespace(response=SimpleNamespace(headers={} if date is None else {"Date": date}))


def test_the_clock_of_a_peer_is_that_of_its_handshake():
    assert abs((clock_ahead(shaken(formatdate(time.time() + 1000, usegmt=True))) or 0) - 1000) <= 2


@pytest.mark.parametrize(
    "date", [None, "", "Mon, 01 Jan 99999999999 00:00:00 GMT", "1 Jan 2024 1:2:3 +99999999999999999999"]
)
def test_a_date_that_is_none_tells_nothing(date):
    assert clock_ahead(shaken(date)) is None
