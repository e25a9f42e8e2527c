"""The abuse table as policy reads it."""

from __future__ import annotations

import asyncpg
import pytest

from relayd.store.types import AbuseEntry

NOW = 1_790_000_000


async def test_rows_in_force_come_out_and_expired_ones_do_not(store, sql):
    assert await store.abuse(NOW) == []
    rows = [
        ("did:x:b", "limit", "bursts", NOW),
        ("did:x:a", "block", "spam", None),
        ("did:x:c", "block", "was spam", NOW - 1),
    ]
    await sql.executemany(
        "INSERT INTO abuse (author_id, verdict, reason, expires_at) VALUES ($1, $2, $3, $4)", rows
    )
    assert await store.abuse(NOW) == [
        AbuseEntry("did:x:a", "block", "spam", None),
        AbuseEntry("did:x:b", "limit", "bursts", NOW),
    ]
    assert [row.author_id for row in await store.abuse(NOW + 1)] == ["did:x:a"]


async def test_the_table_takes_no_verdict_that_policy_does_not_know(sql):
    with pytest.raises(asyncpg.CheckViolationError):
        await sql.execute("INSERT INTO abuse (author_id, verdict, reason) VALUES ('a', 'ban', 'b')")
