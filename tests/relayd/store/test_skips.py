"""What is stored about a peer's refused packets."""

from __future__ import annotations

import asyncpg
import pytest
from strata.protocol.errors import ErrorCode, InvalidPacket

from relayd.store import Store
from relayd.store.items import ItemRange
from relayd.store.peers import PeerStore, register_peers
from relayd.store.skips import reason_of

NOW = 1_790_000_000
SPAN = ItemRange(NOW - 1000, NOW, NOW)
ONE, TWO, THREE = (bytes([n]) * 32 for n in (1, 2, 3))


@pytest.fixture
async def table(database):
    table = PeerStore(database)
    yield table
    await table.close()


@pytest.fixture
async def peer(database) -> int:
    return (await register_peers(database, [("did:strata:zA", "wss://a")]))["did:strata:zA"]


def test_a_reason_is_a_code_and_its_detail():
    assert reason_of(InvalidPacket(ErrorCode.KEY_REVOKED, "no")) == "key_revoked"
    assert reason_of(InvalidPacket(ErrorCode.POLICY_REJECTED, "no", detail="a/b")) == "policy_rejected/a/b"


async def test_what_may_pass_the_next_time_is_left_out(store, table, peer):
    passing = (ErrorCode.INTERNAL_ERROR, ErrorCode.RATE_LIMITED, ErrorCode.TIMESTAMP_IN_FUTURE)
    for detail in (None, "later"):
        reasons = [reason_of(InvalidPacket(code, "no", detail=detail)) for code in passing]
        await table.skip(peer, [(bytes([n]) * 32, NOW, each) for n, each in enumerate(reasons)], 9)
        assert await store.skips(peer, SPAN, 9) == []
    assert len(await table.skip_reasons(peer)) == 3


async def test_the_last_reason_counts(store, table, peer):
    """A packet that might pass was fetched again and refused permanently: comparisons stop fetching it."""
    await table.skip(peer, [(ONE, NOW, "rate_limited/later")], 9)
    await table.skip(peer, [(ONE, NOW, "blocked_author")], 9)
    assert await store.skips(peer, SPAN, 9) == [(NOW, ONE)]
    assert await table.skip_reasons(peer) == {"blocked_author": 1}


async def test_no_more_are_kept_also_where_all_are_of_one_time(store, table, peer):
    await table.skip(peer, [(each, NOW, "blocked_author") for each in (ONE, TWO, THREE)], 2)
    assert sorted(await store.skips(peer, SPAN, 9)) == [(NOW, TWO), (NOW, THREE)]


async def test_a_log_that_has_lost_its_end_forgets_them(store, table, peer):
    """One of them may have come from elsewhere since, and be lost."""
    await table.skip(peer, [(ONE, NOW, "invalid_signature")], 9)
    await store.begin()
    assert await store.skips(peer, SPAN, 9) == [(NOW, ONE)]
    await store.begin_epoch("operator")
    assert await store.skips(peer, SPAN, 9) == []


async def test_so_does_a_log_to_which_a_lake_was_put_back(store, table, peer, database):
    """`strata-pipeline restore` begins the epoch itself, before a relay writes."""
    await store.begin()
    await table.skip(peer, [(ONE, NOW, "invalid_signature")], 9)
    connection = await asyncpg.connect(database)
    await connection.execute("SELECT relay_open_term('restore', $1, true, 1)", NOW)
    await connection.close()
    async with await Store.open(database) as again:
        await again.begin()
        assert await again.skips(peer, SPAN, 9) == []
        await table.skip(peer, [(ONE, NOW, "invalid_signature")], 9)
    async with await Store.open(database) as later:
        await later.begin()
        assert await later.skips(peer, SPAN, 9) == [(NOW, ONE)]
