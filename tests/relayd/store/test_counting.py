"""What is counted in a log: places without a row, rows that do not match their id, erased packets."""

from __future__ import annotations

import time

import asyncpg
from strata.protocol.ids import Identity

from relayd.moderation import SubjectKind
from relayd.store import Store
from relayd.store.counting import count_log, log_end, packets_beyond
from relayd.store.erasing import Eraser
from tests.support.made_packets import make, new_identity
from tests.support.stored_packets import as_stored

NOW = int(time.time())


async def test_each_kind_of_loss_is_counted_as_what_it_is(store: Store, sql: asyncpg.Connection):
    author = new_identity()
    made = [make(author, str(n)) for n in range(10)]
    await store.append([as_stored(packet) for packet in made[:6]], NOW - 86_400)
    await store.append([as_stored(packet) for packet in made[6:]], NOW)
    head = await store.head()
    assert (await log_end(store.url)).head == head
    counted = await count_log(store.url)
    assert (counted.packets, counted.erased, counted.missing, counted.damaged) == (10, 0, 0, 0)
    assert (counted.head, counted.last_received_at) == (head, NOW)
    eraser = Eraser(store.url, Identity(bytes(32)))
    await eraser.erase(
        SubjectKind.PACKET, [made[0].packet_id], reason="asked for", actor="ann", via="command", now=NOW
    )
    await sql.execute("DELETE FROM packets WHERE packet_id = $1", made[2].digest)
    await sql.execute("UPDATE packets SET body = 'other' WHERE packet_id = $1", made[3].digest)
    await sql.execute("UPDATE packets SET body = '' WHERE packet_id = $1", made[4].digest)
    counted = await count_log(store.url)
    assert (counted.packets, counted.erased, counted.missing, counted.damaged) == (8, 1, 1, 2)
    assert await packets_beyond(store.url, head - 2) == 2


async def test_a_packet_that_the_log_has_had_twice_is_counted_as_erased_twice(
    store: Store, sql: asyncpg.Connection
):
    row = as_stored(make(new_identity(), "1"))
    await store.append([row], NOW)
    await sql.execute(
        "DELETE FROM packet_ids"
    )  # it was forgotten, and an import has brought the packet again
    await store.append([row], NOW)
    eraser = Eraser(store.url, Identity(bytes(32)))
    await eraser.erase(
        SubjectKind.AUTHOR, [row.author_id], reason="asked for", actor="ann", via="command", now=NOW
    )
    counted = await count_log(store.url)
    assert (counted.packets, counted.erased, counted.damaged) == (0, 2, 0)


async def test_what_is_missing_at_the_end_of_a_day_or_with_all_of_it_is_counted(
    store: Store, sql: asyncpg.Connection
):
    author = new_identity()
    made = [make(author, str(n)) for n in range(9)]
    for day in range(3):
        await store.append(
            [as_stored(packet) for packet in made[3 * day : 3 * day + 3]], NOW - (2 - day) * 86_400
        )
    await sql.execute("DELETE FROM packets WHERE packet_id = ANY ($1)", [made[2].digest, made[8].digest])
    assert (await count_log(store.url)).missing == 2
    await sql.execute("DELETE FROM packets WHERE packet_id = ANY ($1)", [one.digest for one in made[3:6]])
    assert (await count_log(store.url)).missing == 5
    await sql.execute("DELETE FROM packet_ids")  # of packets missing here too, the head shows the last
    assert (await count_log(store.url)).missing == 1


async def test_days_that_retention_has_removed_are_not_missing(database: str):
    async with await Store.open(database, retention_days=1, dedup_window_seconds=10 * 86_400) as store:
        author = new_identity()
        await store.append([as_stored(make(author, str(n))) for n in range(3)], NOW - 5 * 86_400)
        await store.append([as_stored(make(author, "last"))], NOW)
        assert (await store.maintain(NOW)).days
        counted = await count_log(store.url)
    assert (counted.packets, counted.missing) == (1, 0)
