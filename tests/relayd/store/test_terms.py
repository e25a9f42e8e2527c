"""Terms in the database: opened under the lock, by each process that begins to write, and compared by all."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from relayd.lineage import Claim, Mark
from relayd.store import Store, StoreUnavailable
from relayd.store.guard import Guard
from relayd.store.types import LogLost, NewPacket

NOW = 1_790_000_000


async def test_processes_adopt_each_others_terms_and_append_in_turn(store, second_store, packet):
    for n in range(0, 8, 2):
        await store.append([packet(n)], NOW)
        await second_store.append([packet(n + 1)], NOW)
    await store.head()
    assert store.known.lineage.current == second_store.known.lineage.current
    assert store.known.lineage.current.epoch == 1
    assert len(store.known.lineage.path) == 3  # the first, and one for each writer


async def _by_feed(store: Store, packet: NewPacket) -> int:
    """Subscribers got the packet."""
    return len(await store.tail(0, None, 9)) - 1


async def _by_repeat(store: Store, packet: NewPacket) -> int:
    """A client that published it again got OK."""
    return len(await store.find([packet.packet_id]))


async def _by_keys(store: Store, packet: NewPacket) -> int:
    """The author is judged by it."""
    return len(await store.identities.packets_of([packet.author_id], ["KEY_EVENT"]))


@pytest.mark.req("R-154")
@pytest.mark.parametrize("read", [_by_feed, _by_repeat, _by_keys])
async def test_what_a_process_has_read_is_missed_when_it_is_gone(store, second_store, packet, sql, read):
    """It has written nothing and has read no head since."""
    await store.append([packet(0)], NOW)
    await second_store.head()
    lost = packet(1, type="KEY_EVENT")
    await store.append([lost], NOW)
    assert await read(second_store, lost) == 1
    # A standby that had only the first packet, promoted.
    await sql.execute("UPDATE log_head SET last_sequence = last_sequence - 1")
    with pytest.raises(LogLost):
        await second_store.head()


@pytest.mark.req("R-154")
@pytest.mark.parametrize("terms", ["the same", "others"])
async def test_a_process_whose_place_is_gone_appends_nothing(store, second_store, packet, sql, terms):
    await store.append([packet(n) for n in range(5)], NOW)
    await second_store.head()
    head = await store.head()
    # The rows of a copy that was taken after three packets, and what another relay appended to it.
    await sql.execute("DELETE FROM packets WHERE sequence > $1", head - 2)
    await sql.execute("DELETE FROM packet_ids WHERE sequence > $1", head - 2)
    await sql.execute("UPDATE log_head SET last_sequence = $1", head - 2)
    if terms == "others":
        await sql.execute("SELECT relay_open_term('start', 0, false, 1)")
        await sql.execute("UPDATE log_head SET last_sequence = $1", head + 10)
    for one in (store, second_store):
        with pytest.raises(LogLost):
            await one.append([packet(9)], NOW)
        with pytest.raises(LogLost):
            await one.head()
        assert one.lost.is_set()
    assert await sql.fetchval("SELECT count(*) FROM packets") == 3


@pytest.mark.req("R-157")
async def test_one_loss_begins_one_epoch_however_many_prove_it(database, store, packet, sql):
    await store.append([packet(n) for n in range(5)], NOW)
    claim = store.known.claim
    await sql.execute("UPDATE log_head SET last_sequence = last_sequence - 2")
    stores = [await Store.open(database) for _ in range(6)]
    try:
        # Some know it from before; others learn it from a reader whose place is gone.
        await asyncio.gather(
            *(one.begin([claim]) for one in stores[:3]),
            *(one.begin_epoch("cursor", claim.mark) for one in stores[3:]),
        )
        for one in stores:
            await one.head()
            assert one.known.lineage.current.epoch == 2
        (reset,) = await stores[0].resets()
        assert reset.good_to == claim.mark.sequence - 2
    finally:
        for one in stores:
            await one.close()


async def test_a_place_of_a_later_epoch_leads_beyond_it(store, packet):
    """Two restores of one backup do not assign an epoch's number twice."""
    await store.append([packet(1)], NOW)
    reset = await store.begin_epoch("cursor", Mark(2**40, b"lost", 7))
    assert reset is not None and reset.epoch == 8
    assert await store.begin_epoch("cursor", Mark(2**40, b"gone", 7)) is None


async def test_a_dump_that_is_restored_is_a_log_that_may_lack_its_end(store, packet, sql, database):
    await store.append([packet(1)], NOW)
    await store.close()
    # The result of a dump: the same rows in another table.
    await sql.execute(
        "CREATE TABLE copy (LIKE log_head INCLUDING ALL); INSERT INTO copy SELECT * FROM log_head;"
        " DROP TABLE log_head; ALTER TABLE copy RENAME TO log_head"
    )
    async with await Store.open(database) as again:
        await again.append([packet(2)], NOW)
        (reset,) = await again.resets()
        assert (reset.reason, reset.epoch) == ("moved", 2)


@pytest.mark.req("R-157")
@pytest.mark.parametrize("knows_the_end", [True, False])
async def test_on_another_timeline_the_log_may_lack_its_end_unless_somebody_knows_it(
    store, packet, sql, database, knows_the_end
):
    await store.append([packet(1)], NOW)
    claims = [store.known.claim] if knows_the_end else []
    await store.close()
    await sql.execute("UPDATE log_terms SET timeline = timeline + 1")
    async with await Store.open(database) as promoted:
        await promoted.begin(claims)
        assert [reset.reason for reset in await promoted.resets()] == ([] if knows_the_end else ["moved"])


@pytest.mark.req("R-157")
async def test_what_an_earlier_process_knew_proves_a_loss(store, packet, sql, database):
    await store.append([packet(n) for n in range(5)], NOW)
    claim = store.known.claim
    await store.close()
    await sql.execute("UPDATE log_head SET last_sequence = last_sequence - 2")
    async with await Store.open(database) as again:
        await again.begin([claim])
        (reset,) = await again.resets()
        assert (reset.reason, reset.good_to) == ("rolled_back", claim.mark.sequence - 2)


@pytest.mark.req("R-157")
async def test_what_another_process_knew_is_waited_for_and_not_for_long(store, packet, database):
    """After a loss two workers restart, and the first is asked for a place of the second's last term."""
    await store.append([packet(1)], NOW)
    known = store.known.claim
    lost = Mark(known.mark.sequence + 5, b"gone", 1)
    claim = Claim(lost, (*known.terms, (lost.tag or b"", known.mark.sequence)))
    await store.close()
    async with await Store.open(database) as first, await Store.open(database) as second:
        await first.begin()
        asked = asyncio.create_task(first.good_to(lost))
        await second.begin([claim])
        assert await asked == known.mark.sequence
        first._others_told_at = 0.0
        assert await first.good_to(Mark(99, b"none", 1)) is None


async def test_a_process_that_keeps_restarting_fills_nothing(database, packet, store):
    await store.append([packet(1)], NOW)
    for _ in range(40):
        await store.begin_epoch("operator")
    assert len(store.known.lineage.path) < 25


@pytest.mark.req("R-155")
async def test_a_term_that_is_cut_off_leaves_no_half(database, store, packet, sql, observer, eventually):
    await store.append([packet(1)], NOW)
    before = await sql.fetch("SELECT * FROM log_terms ORDER BY number")
    async with await Store.open(database) as other:
        async with sql.transaction():
            await sql.execute("SELECT FROM log_head FOR UPDATE")
            opening = asyncio.create_task(other.begin())
            waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            pid = await eventually(lambda: observer.fetchval(waiting))
            await observer.execute("SELECT pg_terminate_backend($1)", pid)
            with pytest.raises(StoreUnavailable):
                await opening
        assert await sql.fetch("SELECT * FROM log_terms ORDER BY number") == before
        await other.append([packet(2)], NOW)


def test_a_guard_says_what_was_written_of_this_log_alone(tmp_path):
    path = tmp_path / "there" / "log-guard"
    claim = Claim(Mark(5, b"term", 3), ((b"term", 2),), is_exact=True)
    Guard(path, b"key").write(claim)
    read = Guard(path, b"key").read()
    assert read == Claim(Mark(5, b"term", 3), ((b"term", 2),))
    assert Guard(path, b"another").read() is None
    for garbage in (b"", b"{}", b"\xff" * 10, path.read_bytes()[:-3], b"[" * 70_000):
        path.write_bytes(garbage)
        assert Guard(path, b"key").read() is None
    path.unlink()
    assert Guard(path, b"key").read() is None
    with contextlib.suppress(PermissionError):
        assert list(path.parent.iterdir()) == []
