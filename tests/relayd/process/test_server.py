"""How a relay process restarts, with the serving itself simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from relayd.config import Settings
from relayd.lineage import NOWHERE, Claim
from relayd.process import server
from relayd.process.relay_tasks import Announce
from relayd.store.types import StoreTimeout, StoreUnavailable, UnsafeDatabase

CLAIM = Claim(NOWHERE, is_exact=True)


async def run(monkeypatch: pytest.MonkeyPatch, *outcomes: Exception | None) -> list[Claim | None]:
    """Serve until the outcomes are used up; returns the claim that each attempt got."""
    stop, claims, left = asyncio.Event(), list[Claim | None](), list(outcomes)

    async def attempt(*_: Any, claim: Claim | None, **others: Any) -> Claim:
        claims.append(claim)
        outcome = left.pop(0)
        if not left:
            stop.set()
        if outcome is not None:
            raise outcome
        return CLAIM

    monkeypatch.setattr(server, "_serve", attempt)
    monkeypatch.setattr(server, "_ANEW_PAUSE", 0.0)
    await server.serve(Settings(), "postgresql://", announce=lambda addresses: None, stop=stop)
    return claims


@pytest.mark.req("R-157")
async def test_a_relay_whose_log_was_replaced_waits_for_a_database_it_can_serve(monkeypatch):
    """It may be a standby for a moment, and perhaps only this process knows of the lost log."""
    standby = UnsafeDatabase("the database is a standby and takes no writes; use its primary")
    with structlog.testing.capture_logs() as lines:
        claims = await run(
            monkeypatch, None, StoreUnavailable("away"), standby, standby, StoreTimeout("slow"), None
        )
    assert claims == [None] + [CLAIM] * 5
    assert [line["problem"] for line in lines] == ["away", str(standby), "slow"]


@pytest.mark.parametrize("error", [StoreUnavailable("away"), UnsafeDatabase("fsync is off")])
async def test_a_relay_does_not_start_on_a_database_it_cannot_serve(monkeypatch, error):
    with pytest.raises(type(error)):
        await run(monkeypatch, error)


@pytest.mark.parametrize("is_listening", [False, True])
async def test_a_stop_amid_the_start_ends_it_and_one_later_drains(monkeypatch, is_listening):
    stop, ends = asyncio.Event(), list[str]()

    async def attempt(*_: Any, announce: Announce, **others: Any) -> Claim:
        if is_listening:
            announce({})
        asyncio.get_running_loop().call_soon(stop.set)
        try:
            async with asyncio.timeout(0.1):  # opening its store, or draining
                await asyncio.Event().wait()
        except TimeoutError:
            ends.append("in its own time")
        except asyncio.CancelledError:
            ends.append("at once")
            raise
        return CLAIM

    monkeypatch.setattr(server, "_serve", attempt)
    await server.serve(Settings(), "postgresql://", announce=lambda addresses: None, stop=stop)
    assert ends == ["in its own time" if is_listening else "at once"]


async def test_a_stop_amid_a_new_beginning_ends_it_once_what_was_lost_is_written_down(monkeypatch):
    stop, said = asyncio.Event(), list[str]()

    async def attempt(*_: Any, claim: Claim | None, written: Callable[[], None], **others: Any) -> Claim:
        if claim is None:
            return CLAIM  # the log has lost its end
        stop.set()
        for _round in range(5):
            await asyncio.sleep(0)
        said.append("written")
        written()
        try:
            async with asyncio.timeout(0.1):  # reading the keys
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            said.append("ended at once")
            raise
        return CLAIM

    monkeypatch.setattr(server, "_serve", attempt)
    monkeypatch.setattr(server, "_ANEW_PAUSE", 0.0)
    async with asyncio.timeout(10):
        await server.serve(Settings(), "postgresql://", announce=lambda addresses: None, stop=stop)
    assert said == ["written", "ended at once"]
