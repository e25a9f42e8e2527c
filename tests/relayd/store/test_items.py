"""The packets of a log that a comparison sees: in range, unexpired, not declined, read in whole pages."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from msgspec.structs import replace

from relayd.item_sets import TooManyItems, gather
from relayd.store import Store, items
from relayd.store.items import ItemRange
from relayd.store.peers import PeerStore, register_peers
from relayd.store.types import Declined

NOW = 1_790_000_000


async def ids(
    store: Store,
    span: ItemRange,
    *,
    most: int = 1000,
    skips_of: int | None = None,
    with_declined: bool = False,
    without: Collection[bytes] = (),
) -> set[bytes]:
    found = await gather(
        store, span, max_items=most, skips_of=skips_of, with_declined=with_declined, without=without
    )
    return {found[n][1] for n in range(len(found))}


def span(since: int = NOW - 1000, until: int = NOW, *types: str) -> ItemRange:
    return ItemRange(since, until, NOW + 300, types)


async def test_expired_and_declined_packets_are_left_out(store, packet):
    plain, ends, declined, old = (replace(packet(n), timestamp=NOW - 10) for n in range(4))
    old = replace(old, timestamp=NOW - 1001)
    ends, lasts = replace(ends, expires_at=NOW + 299), replace(packet(5), timestamp=NOW, expires_at=NOW + 300)
    await store.append([plain, ends, declined, old, lasts], NOW)
    store.declined = Declined(packet_ids=frozenset({declined.packet_id}))
    assert await ids(store, span()) == {plain.packet_id, lasts.packet_id}
    assert await ids(store, span(), without={lasts.packet_id}) == {plain.packet_id}
    # For the requesting side, declined packets count as known.
    everything = await ids(store, span(), with_declined=True)
    assert everything == {plain.packet_id, lasts.packet_id, declined.packet_id}


async def test_pages_and_values_are_read_to_the_end_and_each_packet_counts_once(store, packet, monkeypatch):
    monkeypatch.setattr(items, "ITEMS_AT_ONCE", 3)
    rows = [replace(packet(n), timestamp=NOW - n, content_type="AB"[n % 2]) for n in range(20)]
    await store.append(rows, NOW)
    assert await ids(store, span()) == {row.packet_id for row in rows}
    assert await ids(store, span(NOW - 9, NOW - 5)) == {row.packet_id for row in rows[5:10]}
    assert await ids(store, span(NOW - 1000, NOW, "A")) == {row.packet_id for row in rows[::2]}
    assert await ids(store, span(NOW - 1000, NOW, "A", "B", "A")) == {row.packet_id for row in rows}
    assert await ids(store, span(NOW - 1000, NOW, "C")) == set()
    with pytest.raises(TooManyItems):
        await ids(store, span(), most=19)


async def test_what_was_refused_of_a_peer_counts_where_all_types_are_compared(store, packet, database):
    numbers = await register_peers(database, [("did:strata:zA", "wss://a"), ("did:strata:zB", "wss://b")])
    one, other = numbers.values()
    table = PeerStore(database)
    refused = [(bytes([n]) * 32, NOW - 100 - n, "policy_rejected") for n in range(1, 6)]
    passing = ("internal_error/policy_unavailable", "internal_error", "rate_limited", "rate_limited/later")
    await table.skip(one, refused, 100)
    await table.skip(one, [(bytes([9, n]) * 16, NOW - 100, why) for n, why in enumerate(passing)], 100)
    await table.close()
    row = replace(packet(1), timestamp=NOW - 10)
    await store.append([row], NOW)
    assert await ids(store, span(), skips_of=one) == {row.packet_id, *(each[0] for each in refused)}
    assert await ids(store, span(NOW - 102), skips_of=one) == {row.packet_id, refused[0][0], refused[1][0]}
    assert await ids(store, span(), skips_of=other) == {row.packet_id}
    assert await ids(store, span(NOW - 1000, NOW, row.content_type), skips_of=one) == {row.packet_id}
    with pytest.raises(TooManyItems):  # a part of them would differ each time
        await ids(store, span(), most=5, skips_of=one)
