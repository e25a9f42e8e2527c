"""What becomes of a peer's packets, with an admission that is told what to say."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import Raw
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.relays.connection.stream import QueuedEvent

from relayd.admission.request import PublishRequest
from relayd.federation.judging import Judging
from relayd.federation.peers_file import Upstream

NOW = 1_790_000_000


class MadeLink:
    """A link whose admission takes every packet and says nothing by itself."""

    def __init__(self) -> None:
        self.submitted: list[PublishRequest] = []
        self.ended: list[str] = []
        admission = SimpleNamespace(submit=self.submitted.append, is_full=lambda: False)
        parts = SimpleNamespace(admission=admission, max_backfill_seconds=604_800, clock=lambda: NOW)
        self.judging = Judging(
            Upstream("wss://a", "did:strata:zA"),
            1,
            cast(Any, parts),
            cast(Any, None),
            offer=cast(Any, None),
            stored=lambda: None,
            wake=lambda: None,
            end=self.ended.append,
            check=lambda: None,
        )


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_verdict_on_keys_may_come_when_nobody_waits_for_them_any_more(is_refused):
    link = MadeLink()
    event = QueuedEvent(Raw(b"{}"), NOW, None, None)
    waiting = asyncio.create_task(link.judging._take_key(event))
    await asyncio.sleep(0)
    [request] = link.submitted
    waiting.cancel()  # they took too long, or the link has ended
    await asyncio.wait([waiting])
    if is_refused:
        link.judging.publish_refused(request, InvalidPacket(ErrorCode.INVALID_SCHEMA, "no"))
    else:
        link.judging.publish_accepted(request, NOW, duplicate=False)
    assert not link.ended


async def test_whoever_fetches_keys_goes_on_when_they_are_judged():
    link = MadeLink()
    event = QueuedEvent(Raw(b"{}"), NOW, None, None)
    waiting = asyncio.create_task(link.judging._take_key(event))
    await asyncio.sleep(0)
    link.judging.publish_accepted(link.submitted[0], NOW, duplicate=True)
    async with asyncio.timeout(10):
        await waiting
