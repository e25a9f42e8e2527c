"""A filter for the feed and for the log: every condition counts in both, and its values are bounded."""

from __future__ import annotations

import pytest
from strata.protocol.errors import InvalidMessage
from strata.protocol.wire import Filters

from relayd.feed.filters import MAX_TYPE_BYTES, CompiledFilter, compile_filter
from relayd.store.types import LogEntry, LogQuery, NewPacket

ALICE, BOB, PEER = "did:strata:alice", "did:strata:bob", "did:strata:peer"
WHOLE = Filters(
    authors=[ALICE],
    types=["POST"],
    packet_ids=["0x" + "00" * 32],
    since=500,
    received_since=600,
    received_until=600,
    not_via=[PEER, "did:strata:unknown"],
)


def entry(*, peer: int) -> LogEntry:
    return LogEntry(10, 600, NewPacket(bytes(32), ALICE, "POST", 500, None, b"{}", ingest_peer=peer))


def compiled(filters: Filters, most: int = 100) -> CompiledFilter:
    return compile_filter(filters, max_values=most, peers={PEER: 8})


@pytest.mark.req("R-146", "R-147")
def test_the_log_is_asked_for_all_that_the_filter_says():
    asked = compiled(WHOLE).query(after=1, up_to=2, ascending=False, until=3)
    assert asked == LogQuery(
        after=1,
        up_to=2,
        ascending=False,
        authors=frozenset({ALICE}),
        types=frozenset({"POST"}),
        packet_ids=frozenset({bytes(32)}),
        since=500,
        until=3,
        received_since=600,
        received_until=600,
        not_peers=frozenset({8}),
    )


@pytest.mark.req("R-146", "R-147", "R-168")
@pytest.mark.parametrize(
    "change",
    [
        {"authors": [BOB]},
        {"types": ["NOTE"]},
        {"packet_ids": ["0x" + "11" * 32]},
        {"since": 501},
        {"received_since": 601},
        {"received_until": 599},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_live_packet_has_to_meet_every_condition(change):
    members = {name: getattr(WHOLE, name) for name in WHOLE.__struct_fields__}
    assert compiled(WHOLE).matches(entry(peer=7))
    assert not compiled(Filters(**members | change)).matches(entry(peer=7))


def test_what_came_from_a_relay_that_is_read_elsewhere_is_left_out():
    assert not compiled(WHOLE).matches(entry(peer=8))
    assert not compile_filter(WHOLE, max_values=100).not_peers, "where nothing is read from peers"


@pytest.mark.parametrize("member", ["authors", "types", "packet_ids", "not_via"])
def test_values_are_counted_over_all_members(member):
    values = ["0x" + f"{n:064x}" for n in range(3)]
    filters = Filters(**{"authors": [ALICE], "types": ["POST"]} | {member: values})
    count = sum(len(getattr(filters, name) or ()) for name in ("authors", "types", "packet_ids", "not_via"))
    compiled(filters, count)
    with pytest.raises(InvalidMessage) as refused:
        compiled(filters, count - 1)
    assert refused.value.detail == "too_many_filter_values"


@pytest.mark.parametrize("letter", ["a", "é", "€", "𝄞"])
def test_a_type_is_as_long_as_its_bytes(letter):
    size = len(letter.encode())
    longest = letter * (MAX_TYPE_BYTES // size) + "a" * (MAX_TYPE_BYTES % size)
    compiled(Filters(types=[longest]))
    with pytest.raises(InvalidMessage) as refused:
        compiled(Filters(types=[longest + "a"]))
    assert refused.value.detail == "types"


@pytest.mark.parametrize("wrong", ["", "0x", "00" * 32, "0x" + "AB" * 32, "0x" + "00" * 31])
def test_an_id_that_is_none_is_refused(wrong):
    with pytest.raises(InvalidMessage) as refused:
        compiled(Filters(packet_ids=[wrong]))
    assert refused.value.detail == "packet_ids"
