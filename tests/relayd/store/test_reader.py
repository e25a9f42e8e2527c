"""Reads under stress: slow ones, cancelled ones, lost connections, replicas that lag."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from typing import Any

import asyncpg
import pytest
import uvloop
from strata.protocol.sequences import DAY_SECONDS

from relayd.lineage import KnownLog
from relayd.store import LogQuery, NewPacket, Store, StoreTimeout, StoreUnavailable, connection
from relayd.store.columns import string_key
from relayd.store.connection import ConnectionPool
from relayd.store.payers import Payer, line_of
from relayd.store.reader import Reader
from relayd.store.turns import Turn, Turns

NOW = 1_790_000_000
READING = "SELECT pid FROM pg_stat_activity WHERE application_name = 'relayd pages' AND state = 'active'"


@pytest.fixture
async def locked(store, sql, packet):
    """A log whose packets cannot be read: a page waits until the test ends."""
    await store.append([packet(1)], NOW)
    transaction = sql.transaction()
    await transaction.start()
    await sql.execute("LOCK TABLE packets IN ACCESS EXCLUSIVE MODE")
    yield
    await transaction.rollback()


async def test_a_slow_read_ends_in_the_database_and_leaves_the_connection(database, locked, sql, observer):
    async with await Store.open(database, read_timeout=0.1, read_connections=1) as store:
        with pytest.raises(StoreTimeout):
            await store.page(LogQuery(), 10, NOW)
        assert await observer.fetch(READING) == []
        pid = store._reader._pages._idle[0].get_server_pid()
        await sql.execute("ROLLBACK")
        assert len((await store.page(LogQuery(), 10, NOW)).rows) == 1
        assert store._reader._pages._idle[0].get_server_pid() == pid
        await sql.execute("BEGIN")


async def test_the_types_of_a_log_are_told_each_once_from_any_key_on(store, packet):
    assert await store.types(b"", 5) == []
    kinds = ["POST", "É", "", "x" * 600, "A\0B", "POST", "REPLY", "POST"]
    for day in range(3):  # one partition each
        batch = [packet(10 * day + n, type=kind) for n, kind in enumerate(kinds)]
        await store.append(batch, NOW + day * DAY_SECONDS)
    keys = sorted(set(map(string_key, kinds)))
    assert await store.types(b"", 50) == keys
    assert await store.types(b"", 2) == keys[:2] == [b"", b"A\0B"]
    assert await store.types(keys[1] + b"\0", 3) == keys[2:5]
    assert await store.types(b"\xff\xff", 3) == []


async def test_cancelling_a_read_cancels_it_in_the_database(database, locked, sql, observer, eventually):
    async with await Store.open(database, read_connections=1) as store:
        reading = asyncio.create_task(store.page(LogQuery(), 10, NOW))
        await eventually(lambda: observer.fetch(READING))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

        async def gone() -> bool:
            return not await observer.fetch(READING)

        await eventually(gone)
        await sql.execute("ROLLBACK")
        assert len((await store.page(LogQuery(), 10, NOW)).rows) == 1
        await sql.execute("BEGIN")


async def test_slow_pages_do_not_hold_up_lookups(database, locked, sql, observer, eventually):
    async with await Store.open(database, read_connections=2) as store:
        pages = [asyncio.create_task(store.page(LogQuery(), 10, NOW)) for _ in range(8)]

        async def both_busy() -> bool:
            return len(await observer.fetch(READING)) == 2

        await eventually(both_busy)
        assert await store.head() > 0
        await store.ping()
        for page in pages:
            page.cancel()
        await asyncio.wait(pages)


async def test_a_lost_connection_is_replaced(database, packet, sql):
    async with await Store.open(database, read_connections=1) as store:
        await store.append([packet(1)], NOW)
        await store.page(LogQuery(), 10, NOW)
        await sql.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name LIKE 'relayd%' AND datname = current_database()"
        )
        for _ in range(3):
            try:
                page = await store.page(LogQuery(), 10, NOW)
                break
            except StoreUnavailable:
                continue
        assert len(page.rows) == 1
        for _ in range(3):
            try:
                await store.append([packet(2)], NOW)
                break
            except StoreUnavailable:
                continue
        assert len((await store.page(LogQuery(), 10, NOW)).rows) == 2


async def test_a_closed_store_says_so(database, packet):
    store = await Store.open(database)
    await store.close()
    await store.close()
    for call in (store.head(), store.page(LogQuery(), 1, NOW), store.append([packet(1)], NOW), store.ping()):
        with pytest.raises(StoreUnavailable):
            await call


async def test_closing_ends_what_is_waiting(database, locked, sql, observer, eventually):
    store = await Store.open(database)
    reading = asyncio.create_task(store.page(LogQuery(), 10, NOW))
    await eventually(lambda: observer.fetch(READING))
    await store.close()
    with pytest.raises(StoreUnavailable):
        await reading


async def test_a_connection_that_is_being_opened_when_the_pool_closes_is_lent_to_nobody(database):
    opened: list[asyncpg.Connection] = []

    async def closes_meanwhile(connection: asyncpg.Connection) -> None:
        opened.append(connection)
        await pool.close()

    pool = ConnectionPool(database, 1, name="relayd pages", connect_timeout=5, check=closes_meanwhile)
    with pytest.raises(StoreUnavailable, match="the store is closed"):
        async with pool.lease():
            pytest.fail("it was lent")
    assert opened[0].is_closed()


@pytest.fixture
async def giving_way(database):
    """A pool of four connections that gives way to more urgent work."""
    pool = ConnectionPool(database, 4, name="relayd pages", connect_timeout=5)
    pool.gives_way = lambda: True
    yield pool
    await pool.close()


async def lent_when(pool: ConnectionPool, given: asyncio.Event, ends: asyncio.Event) -> None:
    async with pool.lease():
        given.set()
        await ends.wait()


async def test_pages_are_read_one_at_a_time_while_others_are_in_a_hurry(giving_way, monkeypatch):
    monkeypatch.setattr(connection, "_LONG", 60.0)
    ends = [asyncio.Event() for _ in range(3)]
    given = [asyncio.Event() for _ in range(3)]
    async with asyncio.TaskGroup() as group:
        for n in range(3):
            group.create_task(lent_when(giving_way, given[n], ends[n]))
        for n in range(3):
            await given[n].wait()
            assert [event.is_set() for event in given] == [k <= n for k in range(3)]
            ends[n].set()


async def test_a_slow_page_holds_up_no_other(giving_way, monkeypatch):
    monkeypatch.setattr(connection, "_LONG", 0.01)
    ends, given = asyncio.Event(), [asyncio.Event() for _ in range(5)]
    async with asyncio.TaskGroup() as group:
        for n in range(5):
            group.create_task(lent_when(giving_way, given[n], ends))
        for n in range(4):
            await given[n].wait()
        assert not given[4].is_set(), "there are four connections"
        ends.set()


def test_a_look_that_is_due_at_once_stops_nobody(monkeypatch):
    """A timer less than half a millisecond away is no timer to uvloop: its handle has no time."""
    monkeypatch.setattr(connection, "_LONG", 0.0004)
    faults: list[dict[str, Any]] = []

    async def read_pages() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        pool = ConnectionPool("", 4, name="relayd pages", connect_timeout=5)
        pool.gives_way = lambda: True
        monkeypatch.setattr(pool, "_take", as_good_as_a_connection)

        async def read() -> None:
            async with pool.lease():
                await asyncio.sleep(0.002)

        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            for _ in range(100):
                group.create_task(read())
        await pool.close()

    uvloop.run(read_pages())
    assert faults == []


class NoServer:
    """A connection that is never used."""

    def is_closed(self) -> bool:
        return False

    async def close(self, timeout: float) -> None:
        pass


async def as_good_as_a_connection() -> NoServer:
    return NoServer()


async def test_pages_are_read_together_once_nobody_is_in_a_hurry(giving_way, monkeypatch):
    monkeypatch.setattr(connection, "_LONG", 60.0)
    giving_way.gives_way = lambda: False
    ends, given = asyncio.Event(), [asyncio.Event() for _ in range(4)]
    async with asyncio.TaskGroup() as group:
        for each in given:
            group.create_task(lent_when(giving_way, each, ends))
        for each in given:
            await each.wait()
        ends.set()


@pytest.mark.req("R-154")
async def test_a_replica_that_lags_is_not_asked_for_what_it_lacks(server, database, empty_database, packet):
    """A second database stands in for a replica: what matters is how far its head has come, and its term."""
    from relayd.store import migrate

    await migrate(empty_database)
    async with (
        await Store.open(database, read_url=empty_database) as store,
        replica(empty_database) as behind,
    ):
        first = [packet(n) for n in range(3)]
        await store.append(first, NOW)
        term = store.known.lineage.current
        await behind.execute("UPDATE log_head SET tag = $1", term.tag)
        await replay(behind, first)
        await store.append([packet(3)], NOW)
        assert len((await store.page(LogQuery(), 10, NOW)).rows) == 4
        head = await behind.fetchval("SELECT last_sequence FROM log_head")
        # It answers up to its own head: recognised by a packet that only it has.
        await replay(behind, [packet(99)])
        rows = (await store.page(LogQuery(up_to=head + 1), 10, NOW)).rows
        assert rows[-1].body == packet(99).body
        assert (await store.page(LogQuery(up_to=head), 10, NOW)).rows == rows[:3]
        await store.append([packet(4)], NOW)
        assert (await store.page(LogQuery(up_to=head + 2), 10, NOW)).rows[-1].body == packet(4).body


@pytest.mark.req("R-154")
async def test_a_replica_that_has_parted_from_the_primary_is_not_asked(database, empty_database, packet):
    from relayd.store import migrate

    await migrate(empty_database)
    async with (
        await Store.open(database, read_url=empty_database) as store,
        replica(empty_database) as parted,
    ):
        await store.append([packet(1)], NOW)
        # It goes further than the primary, under a term that the primary never had.
        await replay(parted, [packet(n) for n in range(50, 60)])
        assert [row.body for row in (await store.page(LogQuery(), 10, NOW)).rows] == [packet(1).body]


@pytest.mark.req("R-154")
async def test_a_replica_that_was_ahead_of_the_server_promoted_is_asked_for_nothing_behind_the_parting(
    database, empty_database, packet
):
    """Of two standbys, the one used for reads had more than the promoted one, and continues."""
    from relayd.store import migrate

    await migrate(empty_database)
    outcomes: list[str] = []
    async with (
        await Store.open(database, read_url=empty_database, on_replica=outcomes.append) as store,
        replica(empty_database) as ahead,
    ):
        shared, lost, new = ([packet(n) for n in range(start, start + 2)] for start in (0, 50, 90))
        await store.append(shared, NOW)
        await ahead.execute("UPDATE log_head SET tag = $1", store.known.lineage.current.tag)
        await replay(ahead, shared + lost)
        head = await store.head()
        assert len((await store.page(LogQuery(up_to=head), 10, NOW)).rows) == 2
        assert outcomes == ["served"]
        await store.begin_epoch("moved")  # a separate term of the promoted server
        await store.append(new, NOW)
        rows = (await store.page(LogQuery(up_to=await store.head()), 10, NOW)).rows
        assert [row.body for row in rows] == [each.body for each in shared + new]


@contextlib.asynccontextmanager
async def replica(url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def replay(behind: asyncpg.Connection, packets: list[NewPacket]) -> None:
    """Append under the present term of the database."""
    await behind.fetchrow(
        "SELECT * FROM relay_append($1, $2, $3, $4, $5, $6, $7, NULL, NULL, NULL, false,"
        " (SELECT tag FROM log_head), 0, NULL)",
        NOW,
        [packet.packet_id for packet in packets],
        [packet.author_id.encode() for packet in packets],
        [packet.content_type.encode() for packet in packets],
        [packet.timestamp for packet in packets],
        [packet.expires_at for packet in packets],
        [packet.body for packet in packets],
    )


async def test_a_replica_that_is_away_is_done_without(database, packet):
    async with await Store.open(database, read_url="postgresql://127.0.0.1:1/none") as store:
        await store.append([packet(1)], NOW)
        assert len((await store.page(LogQuery(), 10, NOW)).rows) == 1


async def test_a_replica_that_keeps_silent_holds_up_one_page_and_not_the_next(database, packet):
    """A machine that has vanished silently: connections are accepted, and nothing is ever answered."""
    asked, outcomes = list[socket.socket](), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        url = f"postgresql://relayd@127.0.0.1:{silent.getsockname()[1]}/none?sslmode=disable"
        async with await Store.open(
            database, read_url=url, connect_timeout=0.5, on_replica=outcomes.append
        ) as store:
            await store.append([packet(1)], NOW)
            store._reader._replica_pause = 1000.0
            for _ in range(20):
                assert len((await store.page(LogQuery(), 10, NOW)).rows) == 1
            with contextlib.suppress(BlockingIOError):
                while True:
                    asked.append(silent.accept()[0])
    for each in asked:
        each.close()
    assert len(asked) == 1
    assert outcomes == ["unavailable"] * 20


async def test_a_replica_that_is_back_is_asked_again(database, packet):
    outcomes = list[str]()
    async with await Store.open(database, read_url=database, on_replica=outcomes.append) as store:
        await store.append([packet(1)], NOW)
        store._reader._replica_failed()
        await store.page(LogQuery(), 10, NOW)
        store._reader._replica_due_at = 0.0
        await store.page(LogQuery(), 10, NOW)
        assert outcomes == ["unavailable", "served"]
        assert store._reader._replica_pause == 1.0


async def test_a_server_that_stops_answering_is_unavailable_in_time(database, locked, sql, monkeypatch):
    pool = ConnectionPool(database, 1, name="relayd pages", connect_timeout=5, turn_timeout=0.2)
    reader = Reader(KnownLog(), pool, pool, None)  # no statement timeout on the server
    with pytest.raises(StoreUnavailable, match="in time"):
        await reader.page(LogQuery(), 10, NOW, 1000)
    await pool.close()


class Reading:
    """A payer with a name."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def used_database(self, seconds: float, now: float) -> None:
        self.seconds += seconds


@pytest.mark.req("R-321")
async def test_a_reader_who_asks_for_much_waits_behind_one_who_asks_for_little(
    database, locked, sql, observer, eventually
):
    """Eight pages of one reader wait for the one connection when another reader requests its first."""
    done: list[str] = []
    dear, honest = Reading(), Reading()

    async def read(name: str, payer: Reading) -> None:
        await store.page(LogQuery(), 10, NOW, payer=payer)
        done.append(name)

    async with await Store.open(database, read_connections=1) as store:
        readers = [asyncio.create_task(read("dear", dear)) for _ in range(8)]
        await eventually(lambda: observer.fetch(READING))
        readers.append(asyncio.create_task(read("honest", honest)))
        readers[3].cancel()
        await sql.execute("ROLLBACK")
        await asyncio.wait(readers)
        await sql.execute("BEGIN")
    assert done == ["dear", "honest"] + ["dear"] * 6
    assert dear.seconds > honest.seconds > 0


LOOK_UPS: dict[str, Callable[[Store, Payer | None], Awaitable[object]]] = {
    "head": lambda store, payer: store.head(payer),
    "by id": lambda store, payer: store.by_id(b"x" * 32, NOW, payer),
    "find": lambda store, payer: store.find([b"x" * 32], payer),
    "findings": lambda store, payer: store.findings([b"x" * 32], payer),
    "keys": lambda store, payer: store.identities.packets_of(["did:strata:a"], ["KEY_EVENT"], payer=payer),
    "document": lambda store, payer: store.identities.by_key(b"x" * 33, payer),
    "trust": lambda store, payer: store.identities.trust_acts(
        "did:strata:a", ["TRUST_EDGE"], after=0, most=9, payer=payer
    ),
}


@pytest.mark.req("R-321")
@pytest.mark.parametrize("name", LOOK_UPS)
async def test_many_look_ups_of_one_wait_behind_a_single_one_of_another(store, name, monkeypatch):
    """Those of the relay itself, such as the feed's, have no payer and wait no longer either."""
    look_up, begun = LOOK_UPS[name], list[Hashable]()
    dear, one, another = Reading(), Reading(), Reading()
    begin = Turns.begin

    def begin_and_note(turns: Turns) -> Turn | None:
        turn = begin(turns)
        if turn is not None:
            begun.append(turn.line.payer)
        return turn

    async with contextlib.AsyncExitStack() as lent:
        for pool in (store._reader._lookups, store._reader._lookups, store.identities._budgets):
            await lent.enter_async_context(pool.lease(Reading()))
        # The order in which they begin: how long each takes is the database's affair.
        monkeypatch.setattr(Turns, "begin", begin_and_note)
        asking = [asyncio.ensure_future(look_up(store, dear)) for _ in range(16)]
        await asyncio.sleep(0)
        asking += [asyncio.ensure_future(look_up(store, payer)) for payer in (one, another, None)]
        await asyncio.sleep(0)
    await asyncio.gather(*asking)
    assert {line_of(payer) for payer in (one, another, None)} <= set(begun[:8])
    assert dear.seconds > 0
