"""What a link reads from its peer, before anything is judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import Raw
from strata.protocol.ids import Identity
from strata.relays.connection.queue import QueuedEvent
from strata.relays.connection.values import Query

from relayd.federation.link import PeerLink
from relayd.federation.link_parts import LinkEnded, LinkParts, NotListed
from relayd.federation.mesh import DOWN_SECONDS, Mesh
from relayd.federation.peers_file import Upstream
from relayd.store.peers import PeerPlace

PEER = Upstream(url="wss://a", relay_id="did:strata:zA")


async def test_a_cursor_that_cannot_be_kept_ends_the_link_before_its_packet_is_on_its_way():
    """It would be stored in one commit with packets of others, and all of them would fail."""
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
    link = PeerLink(PEER, 1, 1, PeerPlace(None, None), cast(LinkParts, parts))

    def event(cursor: str) -> QueuedEvent:
        return QueuedEvent(Raw(b"{}"), 0, cursor, False, None, 0.0, 2)

    link._receive(event("1:1"))
    with pytest.raises(LinkEnded, match="cursor"):
        link._receive(event("1:\0"))
    assert len(submitted) == 1


class Unwilling:
    """Stands in for the driver to a peer that can be reached and lets nobody replicate."""

    def __init__(self) -> None:
        self.announced: object | None = None
        self.session = SimpleNamespace(allows=lambda capability: False)
        self.link: PeerLink | None = None

    def prepare(self) -> None:
        pass

    async def open(self) -> None:
        assert self.link is not None
        self.announced = object()
        self.link._changed()

    async def authenticate(self, timeout: float) -> object:
        return self.session

    def stop(self, error: Exception) -> None:
        pass

    async def stopped(self) -> None:
        pass


async def test_a_peer_that_is_reached_and_never_read_is_silent_however_often_it_is_tried(
    monkeypatch: pytest.MonkeyPatch,
):
    """Packets that it has sent to the others of its group come from nobody else."""
    now, other = 0.0, "did:strata:zB"
    monkeypatch.setattr("relayd.federation.link.time", SimpleNamespace(monotonic=lambda: now))
    mesh = Mesh("did:strata:zMe", {PEER.relay_id: "g", other: "g"}, now)
    mesh.start(other, None, now)
    assert PEER.relay_id in mesh.read(other, now).not_via
    parts = SimpleNamespace(
        identity=Identity.generate(),
        admission=SimpleNamespace(release=lambda publisher: None),
        mesh=mesh,
        store_mark=None,
        told=None,
        clock=lambda: 0,
        max_backfill_seconds=60,
    )
    while now < DOWN_SECONDS:
        link = PeerLink(PEER, 1, 1, PeerPlace(None, None), cast(LinkParts, parts))
        link._driver = driver = cast(Any, Unwilling())
        driver.link = link
        with pytest.raises(NotListed):
            await link.run()
        now += DOWN_SECONDS / 3
    assert mesh.is_due(other, now)
    assert PEER.relay_id not in mesh.read(other, now).not_via


class Asked(Exception):
    """The peer was asked."""


@pytest.mark.req("R-364", "R-365")
async def test_a_first_reading_that_was_interrupted_begins_anew_whatever_the_age_of_what_came():
    """In a group no cursor is kept until the others are there, and a peer's log is not in order of age: what
    is still unread may have come late from another relay."""
    mesh = Mesh("did:strata:zMe", {PEER.relay_id: "g", "did:strata:zB": "g"}, 0.0)
    parts = SimpleNamespace(identity=Identity.generate(), mesh=mesh, store_mark=None)
    link = PeerLink(PEER, 1, 1, PeerPlace(None, 1_790_000_000), cast(LinkParts, parts))
    asked: list[Query] = []

    def subscribe(query: Query) -> object:
        asked.append(query)
        raise Asked

    link._driver = cast(Any, SimpleNamespace(subscribe=subscribe))
    mesh.start(PEER.relay_id, None, 0.0)
    with pytest.raises(Asked):
        await link._read()
    assert [(query.cursor, query.since) for query in asked] == [(None, 0)]
