"""The table of bans and its log: whole changes, in one order, that nobody can undo in secret."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from relayd.moderation import NOTHING_READ, Act, Ban, LastRuling, SubjectKind
from relayd.store import Store
from relayd.store.moderation import Ruling
from relayd.store.types import StoreUnavailable

NOW = 1_790_000_000
DID = "did:strata:zAlice"


def ruling(subject: str = DID, *, bans: bool = True, expires_at: int | None = None, reason: str = "spam"):
    return Ruling(SubjectKind.AUTHOR, subject, bans, reason, "root", "command", expires_at)


async def test_a_ruling_is_in_the_table_and_in_the_log(store: Store):
    nothing = await store.moderation.last()
    assert await store.moderation.read(NOTHING_READ) == (nothing, [], False, [])
    assert await store.moderation.rule([ruling()], NOW) == [True]
    made = Ban(SubjectKind.AUTHOR, DID, "spam", "root", None, NOW)
    first = await store.moderation.last()
    assert (nothing.number, first.number) == (0, 1)
    assert await store.moderation.read(nothing) == (first, [made], False, [])
    assert await store.moderation.rule([ruling()], NOW + 1) == [False], "it is banned already"
    assert await store.moderation.rule([ruling(reason="more spam", expires_at=NOW + 9)], NOW + 2) == [True]
    changed = Ban(SubjectKind.AUTHOR, DID, "more spam", "root", NOW + 9, NOW + 2)
    assert await store.moderation.rule([ruling(bans=False, reason="appeal")], NOW + 3) == [True]
    assert await store.moderation.rule([ruling(bans=False)], NOW + 4) == [False]
    lines = await store.moderation.log()
    assert [(line.number, line.act, line.reason, line.before, line.after) for line in lines] == [
        (3, Act.UNBAN, "appeal", changed, None),
        (2, Act.BAN, "more spam", made, changed),
        (1, Act.BAN, "spam", None, made),
    ]
    assert [line.number for line in await store.moderation.log(before=3, limit=1)] == [2]
    assert await store.moderation.log(subject="did:x:other") == []
    assert await store.moderation.bans(NOW) == []


async def test_what_is_over_is_cleared_away_with_the_next_ruling(store: Store):
    await store.moderation.rule([ruling(expires_at=NOW + 5)], NOW)
    assert [ban.subject for ban in await store.moderation.bans(NOW + 5)] == [DID]
    assert await store.moderation.bans(NOW + 6) == []
    await store.moderation.rule([ruling("did:x:b"), ruling("did:x:c")], NOW + 6)
    newest = await store.moderation.log()
    assert [(line.act, line.subject, line.via) for line in newest] == [
        (Act.BAN, "did:x:c", "command"),
        (Act.BAN, "did:x:b", "command"),
        (Act.EXPIRE, DID, "relay"),
        (Act.BAN, DID, "command"),
    ]
    found = await store.moderation.bans(NOW + 6, after=(SubjectKind.AUTHOR, "did:x:b"))
    assert [ban.subject for ban in found] == ["did:x:c"]
    assert await store.moderation.bans(NOW + 6, kind=SubjectKind.TYPE) == []


async def test_rulings_at_the_same_time_take_turns_and_their_numbers_leave_none_out(
    store: Store, second_store: Store
):
    many = [
        each.moderation.rule([ruling(f"did:x:{name}{n}")], NOW)
        for n in range(10)
        for name, each in (("a", store), ("b", second_store))
    ]
    assert await asyncio.gather(*many) == [[True]] * 20
    assert [line.number for line in await store.moderation.log()] == list(range(20, 0, -1))
    (last, _), bans, _, _ = await second_store.moderation.read(NOTHING_READ)
    assert (last, len(bans)) == (20, 20)


async def test_a_ruling_that_a_failover_lost_is_told_from_the_next_one_of_its_number(
    store: Store, sql: asyncpg.Connection
):
    """The promoted standby lacks the last rulings, and assigns their numbers to the next ones."""
    moderation = store.moderation
    await moderation.rule([ruling("did:x:kept")], NOW)
    kept = await moderation.last()
    await sql.execute(_ERASES, 2)
    await sql.execute(_CLOSES, 3, "this-1")
    seen = await moderation.last()
    assert await moderation.read(kept) == (
        seen,
        [Ban(SubjectKind.AUTHOR, "did:x:kept", "spam", "root", None, NOW)],
        True,
        ["this-1"],
    )
    assert (await moderation.read(seen))[2:] == (False, [])
    await sql.execute("ALTER TABLE moderation_log DISABLE TRIGGER USER")
    await sql.execute("DELETE FROM moderation_log WHERE number > 1")
    await sql.execute(_ERASES, 2)
    await sql.execute(_CLOSES, 3, "this-2")
    last = await moderation.last()
    assert last.number == seen.number and last != seen
    assert (await moderation.read(seen))[2:] == (True, ["this-2"])
    assert (await moderation.read(LastRuling(9, seen.digest)))[2:] == (True, ["this-2"])
    assert (await moderation.read(last))[2:] == (False, [])


_LINE = "INSERT INTO moderation_log (number, at, actor, via, act, kind, subject, reason) VALUES"
_ERASES = f"{_LINE} ($1, {NOW}, 'root', 'command', 'erase', 'author', '{DID}', 'law')"
_CLOSES = f"{_LINE} ($1, {NOW}, 'root', 'wire', 'close', 'session', $2, 'law')"


async def test_the_log_of_rulings_only_grows(store: Store, sql: asyncpg.Connection):
    await store.moderation.rule([ruling()], NOW)
    for statement in (
        "UPDATE moderation_log SET actor = 'somebody else'",
        "DELETE FROM moderation_log",
        "TRUNCATE moderation_log",
    ):
        with pytest.raises(asyncpg.RestrictViolationError, match="only grows"):
            await sql.execute(statement)


async def test_what_a_newer_program_has_ruled_is_told_as_it_stands(store: Store, sql: asyncpg.Connection):
    await store.moderation.rule([ruling()], NOW)
    for number, act, kind in ((2, "silence", "author"), (3, "ban", "language")):
        await sql.execute(
            "INSERT INTO moderation_log (number, at, actor, via, act, kind, subject, reason, before, after)"
            " VALUES ($1, $2, 'ann', 'wire', $3, $4, 'x', 'why', NULL, '{\"how\": 1}')",
            number, NOW, act, kind,
        )  # fmt: skip
    told = await store.moderation.log()
    assert [(line.act, line.kind, line.subject) for line in told[:2]] == [
        ("ban", "language", "x"),
        ("silence", "author", "x"),
    ]
    assert told[0].after is told[1].after is None
    assert told[2].after is not None


async def test_every_process_is_told_of_a_ruling(store: Store, second_store: Store):
    told = asyncio.Event()
    await store.listen(lambda sequence: None, told.set)
    await second_store.moderation.rule([ruling()], NOW)
    await asyncio.wait_for(told.wait(), 20)


async def test_a_database_that_is_away_is_said_to_be(database: str):
    store = await Store.open(database)
    await store.close()
    with pytest.raises(StoreUnavailable):
        await store.moderation.last()
