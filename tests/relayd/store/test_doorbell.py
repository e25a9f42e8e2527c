"""The doorbell: others' commits ring, our own do not, and none is missed over a lost connection."""

from __future__ import annotations

import asyncio

import pytest

from relayd.store import Store, StoreUnavailable

NOW = 1_790_000_000
LISTENING = (
    "SELECT pid FROM pg_stat_activity"
    " WHERE application_name = 'relayd doorbell' AND datname = current_database()"
)


@pytest.mark.req("R-311", "R-167")
async def test_commits_of_others_ring_with_the_last_sequence(store, second_store, packet, eventually):
    rings: list[int] = []
    await second_store.listen(rings.append)
    assert rings == [0]
    await store.append([packet(1), packet(2)], NOW)
    head = await store.head()
    await eventually(lambda: rings[-1] == head)
    assert rings == [0, head]


async def test_own_commits_and_mere_duplicates_do_not_ring(store, second_store, packet, eventually):
    rings: list[int] = []
    await store.listen(rings.append)
    await store.append([packet(1)], NOW)
    await second_store.append([packet(1)], NOW)
    await second_store.append([packet(2)], NOW)
    head = await store.head()
    await eventually(lambda: rings[-1] == head)
    assert rings == [0, head]


@pytest.mark.req("R-311")
async def test_what_was_committed_while_it_was_deaf_rings_afterwards(
    store, second_store, packet, sql, eventually
):
    rings: list[int] = []
    await second_store.listen(rings.append)
    async with sql.transaction():
        # While this is held the doorbell cannot read the head, so it cannot recover.
        await sql.execute("LOCK TABLE log_head IN ROW EXCLUSIVE MODE")
        await sql.execute("SELECT pg_terminate_backend($1)", await sql.fetchval(LISTENING))
        await store.append([packet(1)], NOW)
    head = await store.head()
    await eventually(lambda: rings[-1] == head)
    await store.append([packet(2)], NOW)
    await eventually(lambda: rings[-1] == head + 1)


async def test_an_append_that_was_lost_sight_of_rings(store, packet, sql, observer, eventually):
    """It may be in the log, and nobody else would report it."""
    rings: list[int] = []
    await store.append([packet(0)], NOW)
    await store.listen(rings.append)
    async with sql.transaction():
        await sql.execute("SELECT FROM log_head FOR UPDATE")
        attempt = asyncio.create_task(store.append([packet(1)], NOW))
        waiting = (
            "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%relay_append%'"
        )
        pid = await eventually(lambda: observer.fetchval(waiting))
        await sql.execute("SELECT pg_terminate_backend($1)", pid)
        with pytest.raises(StoreUnavailable):
            await attempt
    await eventually(lambda: len(rings) >= 2)


async def test_closing_ends_it(database, sql, eventually):
    from relayd.store import Store

    store = await Store.open(database)
    await store.listen(lambda sequence: None)
    with pytest.raises(RuntimeError):
        await store.listen(lambda sequence: None)
    await store.close()

    async def silent() -> bool:
        return not await sql.fetch(LISTENING)

    await eventually(silent)


async def test_a_store_closes_in_whichever_step_of_a_doubt(database):
    for steps in range(6):
        store = await Store.open(database)
        await store.listen(lambda sequence: None)
        await asyncio.sleep(0.02)  # it waits for messages
        assert store._doorbell is not None and store._listener is not None
        store._doorbell.doubt()
        for _ in range(steps):
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await store.close()
        assert store._listener.cancelled(), steps


async def test_a_log_that_is_being_restored_is_listened_to_again(
    store, second_store, packet, sql, eventually
):
    """For a while its tables exist but are empty."""
    rings: list[int] = []
    await store.append([packet(0)], NOW)
    await second_store.listen(rings.append)
    assert second_store._doorbell is not None and second_store._listener is not None
    pid = await sql.fetchval(LISTENING)
    await sql.execute("CREATE TEMPORARY TABLE kept AS SELECT * FROM log_head")
    await sql.execute("DELETE FROM log_head")
    second_store._doorbell.doubt()
    with pytest.raises(StoreUnavailable):
        await second_store.head()

    async def looked() -> bool:
        return bool(await sql.fetchval(LISTENING) != pid)

    await eventually(looked)
    await sql.execute("INSERT INTO log_head SELECT * FROM kept")
    await store.append([packet(1)], NOW)
    head = await store.head()
    await eventually(lambda: rings[-1] == head)
