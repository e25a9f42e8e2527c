"""Connections whose server has vanished silently: all operations on them end in time, and recover."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from relayd.moderation import NOTHING_READ, SubjectKind
from relayd.roll import Question
from relayd.store import LogQuery, NewPacket, Store, StoreUnavailable, moderation, peers, roll, sizes
from relayd.store import store as store_module
from relayd.store.connection import connect, translate_errors
from relayd.store.items import ItemPlace, ItemRange
from relayd.store.moderation import Ruling
from relayd.store.peers import PeerStore, register_peers
from relayd.store.types import StoreError

NOW = 1_790_000_000
LONG = 20.0
"""Seconds in which even a busy machine finishes what may take a fraction of one."""


class Line:
    """A line to a database server that can go dead: it accepts bytes, and nothing comes back."""

    def __init__(self, address: str | tuple[str, int]) -> None:
        self._address = address
        self._dies_at: bytes | None = None
        self.is_dead = False

    def dies_at(self, text: bytes) -> None:
        """Go dead when a program sends this."""
        self._dies_at = text

    def mend(self) -> None:
        """Carry bytes over new connections."""
        self._dies_at, self.is_dead = None, False

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[int]:
        """Accept connections; yields the port."""
        carrying: set[asyncio.Task[None]] = set()

        def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            carrying.add(asyncio.create_task(self._carry(reader, writer)))

        server = await asyncio.start_server(taken, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in carrying:
                task.cancel()
            await asyncio.gather(*carrying, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(self._address, str):
            back, forth = await asyncio.open_unix_connection(self._address)
        else:
            back, forth = await asyncio.open_connection(*self._address)
        try:
            await asyncio.gather(self._pass_on(reader, forth, is_program=True), self._pass_on(back, writer))
        finally:
            writer.close()
            forth.close()

    async def _pass_on(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, is_program: bool = False
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65_536):
                if is_program and self._dies_at is not None and self._dies_at in data:
                    self.is_dead = True
                if self.is_dead:
                    await asyncio.Event().wait()
                target.write(data)
            target.close()


@pytest.fixture
async def line(database: str) -> Line:
    connection = await asyncpg.connect(database)
    line = Line(connection._addr)
    await connection.close()
    return line


@pytest.fixture
async def url(database: str, line: Line) -> AsyncIterator[str]:
    """The database, over that line."""
    parts = urlsplit(database)
    user = parts.netloc.rpartition("@")[0]
    async with line.open() as port:
        yield f"postgresql://{user}@127.0.0.1:{port}{parts.path}?sslmode=disable"


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (store_module, "_GRACE_SECONDS"),
        (store_module, "_LONGEST_CHECK"),
        (store_module, "_LONGEST_CHORE"),
        (moderation, "_LONGEST_RULING"),
        (peers, "_LONGEST"),
        (roll, "_GRACE"),
        (sizes, "_LONGEST_LOOK"),
    ):
        monkeypatch.setattr(module, name, 0.5)


Call = Callable[[Store, NewPacket], Awaitable[object]]
SPAN = ItemRange(0, NOW, NOW)
CALLS: dict[str, tuple[bytes, Call]] = {
    "append": (b"relay_append", lambda store, packet: store.append([packet], NOW)),
    "begin": (b"idle_in_transaction", lambda store, packet: store.begin()),
    "head": (b"last_sequence", lambda store, packet: store.head()),
    "find": (b"packet_ids", lambda store, packet: store.find([packet.packet_id])),
    "page": (b"packets", lambda store, packet: store.page(LogQuery(), 9, NOW)),
    "items": (b"packets", lambda store, packet: store.items(SPAN, ItemPlace())),
    "tail": (b"packets", lambda store, packet: store.tail(0, None, 9)),
    "authors": (b"author_id", lambda store, packet: store.identities.authors("KEY_EVENT")),
    "keys": (b"packets", lambda store, packet: store.identities.packets_of(["did:strata:a"], ["KEY_EVENT"])),
    "trust": (
        b"packets",
        lambda store, packet: store.identities.trust_acts("did:strata:a", ["TRUST_EDGE"], after=0, most=9),
    ),
    "last ruling": (b"moderation_log", lambda store, packet: store.moderation.last()),
    "bans": (b"moderation_log", lambda store, packet: store.moderation.read(NOTHING_READ)),
    "ban": (
        b"LOCK TABLE",
        lambda store, packet: store.moderation.rule(
            [Ruling(SubjectKind.TYPE, "POST", True, "spam", "op", "test")], NOW
        ),
    ),
    "ask": (b"pg_locks", lambda store, packet: store.roll.ask(Question(), 0.5)),
    "answer": (b"pg_notify", lambda store, packet: store.roll.answer("relayd_roll_1", [b"{}"])),
    "maintain": (b"relay_add_day", lambda store, packet: store.maintain(NOW)),
    "sizes": (b"pg_database_size", lambda store, packet: store.sizes()),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_server_that_is_gone_without_a_word_holds_nobody_up(name, url, line, packet):
    """Also in the middle of a transaction: no rollback is awaited that nobody will answer."""
    text, call = CALLS[name]
    async with await Store.open(url, read_timeout=0.5, append_timeout=1.0, connect_timeout=1.0) as store:
        line.dies_at(text)
        async with asyncio.timeout(LONG):
            with pytest.raises(StoreUnavailable):
                await call(store, packet(1))
        assert line.is_dead
        line.mend()
        for _ in range(20):  # one for each connection that was idle meanwhile, and has died unnoticed
            with contextlib.suppress(StoreUnavailable):
                async with asyncio.timeout(LONG):
                    await call(store, packet(1))
                break
        else:
            pytest.fail("it did not come back")


@pytest.mark.parametrize("how", ["register", "lead", "rows"])
async def test_what_is_remembered_of_peers_is_away_in_time(how, url, line):
    store = PeerStore(url, connect_timeout=1.0, answer_timeout=0.5)
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "register": lambda: register_peers(url, [("did:strata:peer", "wss://peer")], connect_timeout=1.0),
        "lead": store.take_lead,
        "rows": store.rows,
    }
    line.dies_at(
        {"register": b"INSERT INTO peers", "lead": b"pg_try_advisory_lock", "rows": b"FROM peers"}[how]
    )
    async with asyncio.timeout(LONG):
        with pytest.raises(StoreUnavailable):
            await calls[how]()
    line.mend()
    await store.close()  # the lead is gone with the connection
    await calls[how]()
    await store.close()


async def test_a_start_is_told_of_it_in_time(url, line):
    line.dies_at(b"relay_secrets")
    async with asyncio.timeout(LONG):
        with pytest.raises(StoreUnavailable):
            await Store.open(url, connect_timeout=1.0)


@pytest.mark.parametrize("url", ["postgresql:///d?host=/tmp&port=hunter2", "postgresql://u:hunter2/x@h/d"])
async def test_a_url_that_is_none_is_said_without_its_parts(url):
    """Text in the place of a port may be a part of a password."""
    with pytest.raises(StoreError, match="the database URL cannot be used") as raised:
        await connect(url, name="test", connect_timeout=1)
    assert "hunter2" not in str(raised.value)


LIMITS = ("idle_session", "idle_in_transaction_session", "statement", "lock", "transaction")


async def test_limits_of_a_session_are_ours_whatever_the_database_has_for_everybody(database):
    """An idle writer whose session ends opens a new term with the next commit; 0 is no limit of a read."""
    ask = await asyncpg.connect(database)
    for limit in LIMITS:
        await ask.execute(f"ALTER DATABASE {urlsplit(database).path[1:]} SET {limit}_timeout = 1000")
    await ask.close()
    async with await Store.open(database, read_timeout=3.0004) as store:
        for pool in store._pools:
            async with pool.lease() as connection:
                shown = [await connection.fetchval(f"SHOW {limit}_timeout") for limit in LIMITS]
            assert shown == ["0", "0", "3001ms", "0", "0"]
    connection = await connect(database, name="test", connect_timeout=LONG)
    assert [await connection.fetchval(f"SHOW {limit}_timeout") for limit in LIMITS] == ["0"] * 5
    await connection.close()


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_who_waits_for_the_log_sees_what_was_appended_meanwhile(
    database, packet, eventually, isolation
):
    """Whatever the default isolation: otherwise two relays on one database fail each other's batches."""
    other, ask = await asyncpg.connect(database), await asyncpg.connect(database)
    name = urlsplit(database).path[1:]
    await ask.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = '{isolation}'")
    async with await Store.open(database) as store:
        await store.append([packet(0)], NOW)
        held = other.transaction()
        await held.start()
        await other.execute("UPDATE log_head SET last_sequence = last_sequence")
        appending = asyncio.create_task(store.append([packet(1)], NOW))
        await eventually(
            lambda: ask.fetchval(
                "SELECT 1 FROM pg_stat_activity WHERE application_name = 'relayd writer'"
                " AND wait_event_type = 'Lock' AND datname = current_database()"
            )
        )
        await held.commit()
        assert (await appending).dispositions[0].sequence == await store.head()
    await ask.close()
    await other.close()


@pytest.mark.parametrize("statement", ["PREPARE a AS SELECT 1; PREPARE a AS SELECT 1", "EXECUTE a"])
async def test_a_session_that_is_not_ours_alone_is_told_of_the_pooler(database, statement):
    ask = await asyncpg.connect(database)
    with pytest.raises(StoreUnavailable, match="pooler"), translate_errors():
        await ask.execute(statement)
    await ask.close()


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (asyncpg.DiskFullError("could not extend file: No space left on device"), "lacks disk or memory: "),
        (asyncpg.TooManyConnectionsError('too many connections for role "relayd"'), "CONNECTION LIMIT"),
    ],
)
def test_a_database_that_lacks_what_it_needs_is_there_and_may_be_asked_again(error, sentence):
    with pytest.raises(StoreUnavailable, match=sentence), translate_errors():
        raise error


async def test_a_server_that_knows_no_setting_of_ours_is_too_old(database):
    with pytest.raises(StoreError, match=r"no_such_setting.*PostgreSQL 15 or newer"):
        await connect(database, name="test", connect_timeout=5.0, settings={"no_such_setting": "1"})


def test_a_pooler_that_knows_none_of_our_settings_is_named():
    with pytest.raises(StoreUnavailable, match=r"startup parameter: jit; if a pooler"), translate_errors():
        raise asyncpg.ProtocolViolationError("unsupported startup parameter: jit")


async def test_a_role_without_rights_is_told_what_it_needs(database):
    ask = await asyncpg.connect(database)
    await ask.execute("CREATE ROLE relayd_test_bystander")
    try:
        await ask.execute("SET ROLE relayd_test_bystander")
        with pytest.raises(StoreError, match=r"permission denied for .*has to own"), translate_errors():
            await ask.fetch("SELECT * FROM packets")
    finally:
        await ask.execute("RESET ROLE; DROP ROLE relayd_test_bystander")
        await ask.close()


@pytest.mark.parametrize(
    ("type", "values"),
    [
        ("bool", [True, None, False]),
        ("bytea", [b"", b"\0\xff"]),
        ("int2", [-(2**15)]),
        ("int4", [2**31 - 1]),
        ("int8", [-(2**63), 2**63 - 1]),
        ("text", ["ü,{}", ""]),
    ],
)
async def test_the_driver_need_not_ask_what_an_array_is(
    database: str, monkeypatch: pytest.MonkeyPatch, type: str, values: list[object]
) -> None:
    async def asks(*_: object) -> None:
        raise AssertionError("it asks")

    connection = await connect(database, name="test", connect_timeout=LONG)
    try:
        monkeypatch.setattr(asyncpg.Connection, "_introspect_types", asks)
        assert await connection.fetchval(f"SELECT $1::{type}[]", values) == values
        assert await connection.fetchval(f"SELECT $1::{type}[]", [values, values]) == [values, values]
        with pytest.raises(AssertionError, match="it asks"):
            await connection.fetchval("SELECT $1::inet[]", [])
    finally:
        connection.terminate()
