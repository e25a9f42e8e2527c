"""What a link takes from its peer, before anything is judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import Raw
from strata.protocol.ids import Identity
from strata.relays.connection.stream import QueuedEvent

from relayd.federation.link import Link
from relayd.federation.link_parts import LinkEnded, LinkParts
from relayd.federation.peers_file import Upstream
from relayd.store.peers import PeerPlace

PEER = Upstream(url="wss://a", relay_id="did:strata:zA")


async def test_a_cursor_that_cannot_be_kept_ends_the_link_before_its_packet_is_on_its_way():
    """It would be stored in one commit with packets of others, and that would fail for all of them."""
    submitted: list[Any] = []
    admission = SimpleNamespace(submit=submitted.append)
    parts = SimpleNamespace(
        identity=Identity.generate(),
        admission=admission,
        mesh=None,
        store_mark=None,
        told=None,
        clock=lambda: 0,
        max_backfill_seconds=60,
    )
    link = Link(PEER, 1, 1, PeerPlace(None, None, None), cast(LinkParts, parts))

    def event(cursor: str) -> QueuedEvent:
        return QueuedEvent(Raw(b"{}"), 0, cursor, False, None, 0.0, 2)

    link._receive(event("1:1"))
    with pytest.raises(LinkEnded, match="cursor"):
        link._receive(event("1:\0"))
    assert len(submitted) == 1
