"""What is requested of a peer."""

from __future__ import annotations

import pytest
from strata.protocol.keys import IDENTITY_TYPES

from relayd.federation.peers_file import Upstream
from relayd.federation.selection import options_for, query_for, stream_of

NOW = 1_760_000_000
RELAY_ID = "did:strata:z6MkvDqGT54cXesYGvABpF1UapVNwjCqRcafi4Px6Thv5T3Z"


def peer(**members: tuple[str, ...]) -> Upstream:
    return Upstream(url="wss://peer.example/strata", relay_id=RELAY_ID, **members)  # type: ignore[arg-type]


@pytest.mark.req("R-298", "R-353", "R-355")
def test_a_peer_is_held_to_its_did_and_authenticated_to_before_it_is_asked_for_anything():
    options = options_for(peer())
    assert options.relay_id == RELAY_ID
    assert options.authenticate == "always"
    assert "replicate" in (options.capabilities or ())


@pytest.mark.req("R-365", "R-366")
@pytest.mark.parametrize(
    ("cursor", "last", "since", "fallback"),
    [
        (None, None, 0, 0),
        (None, NOW + 9, 0, NOW + 9 - 86_700),
        ("c", NOW + 9, None, NOW + 9 - 86_700),
        ("c", None, None, 0),
        (None, 86_701, 0, 1),
    ],
)
def test_it_is_read_from_where_it_was_read_to_or_from_its_beginning(cursor, last, since, fallback):
    query = query_for(peer(), cursor, (), last_witness=last)
    assert (query.cursor, query.since, query.cursor_fallback_since) == (cursor, since, fallback)


@pytest.mark.req("R-360")
def test_empty_lists_ask_for_everything_and_packets_with_keys_come_along():
    query = query_for(peer(), None, (), last_witness=None)
    assert (query.types, query.authors, stream_of(peer())) == ((), (), "all")
    some = query_for(peer(types=("POST",)), None, (), last_witness=None)
    assert set(some.types) == {"POST", "CLIENT_MANIFEST", *IDENTITY_TYPES}
    assert stream_of(peer(types=("B", "A"))) == stream_of(peer(types=("A", "B"))) != "all"
