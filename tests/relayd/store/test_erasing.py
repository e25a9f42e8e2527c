"""Erased packets are removed from their rows, their places stay, and a second run finds nothing to do."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from strata.protocol.ids import Identity
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.tombstones import read_tombstone, told_place

from relayd import failpoints
from relayd.failpoints import FailpointRaised
from relayd.moderation import Act, SubjectKind
from relayd.store import AppendOutcome, Gone, Store
from relayd.store.erasing import Erased, Eraser, vacuum
from relayd.store.types import LogQuery

NOW = 1_790_000_000
ALICE, BOB = "did:strata:alice", "did:strata:bob"
RELAY = Identity(bytes(31) + b"r")


def eraser(store: Store, batch: int = 500) -> Eraser:
    return Eraser(store.url, RELAY, batch=batch)


async def erase(store: Store, kind: SubjectKind, *subjects: str, batch: int = 500) -> Erased:
    return await eraser(store, batch).erase(
        kind, subjects, reason="asked for", actor="ann", via="command", now=NOW + 5
    )


@pytest.fixture
async def mixed(store: Store, packet):
    """Ten packets of Alice and Bob in turns; Alice's last one is a revocation."""
    made = [packet(number, author=BOB if number % 2 else ALICE) for number in range(9)]
    made.append(packet(9, author=ALICE, type="KEY_EVENT"))
    await store.append(made, NOW)
    return made


async def test_an_authors_packets_are_gone_and_all_places_stay(store: Store, mixed, sql: asyncpg.Connection):
    before = await sql.fetch("SELECT sequence, received_at, packet_id FROM packets ORDER BY sequence")
    assert await erase(store, SubjectKind.AUTHOR, ALICE, batch=2) == Erased(5, 1)
    after = await sql.fetch("SELECT sequence, received_at, packet_id FROM packets ORDER BY sequence")
    assert before == after, "what manifests, cursors and the duplicate index rest on"
    bob = [made for made in mixed if made.author_id == BOB]
    for query in (
        LogQuery(),
        LogQuery(ascending=False),
        LogQuery(packet_ids=frozenset(m.packet_id for m in mixed)),
    ):
        page = await store.page(query, 100, NOW)
        assert {row.body for row in page.rows} == {made.body for made in [*bob, mixed[9]]}
    page = await store.page(LogQuery(authors=frozenset({ALICE})), 100, NOW)
    assert [row.body for row in page.rows] == [mixed[9].body]
    for made in mixed[:9:2]:
        assert await store.by_id(made.packet_id, NOW) == Gone(
            *(await store.find([made.packet_id]))[made.packet_id]
        )
    entries = await store.tail(0, None, 100)
    assert [entry.packet.body for entry in entries[:3]] == [b"", mixed[1].body, b""]
    assert {entry.packet.author_id for entry in entries[:9:2]} == {""}
    buried = await store.tombstones([made.packet_id for made in mixed])
    assert set(buried) == {made.packet_id for made in mixed[:9:2]}
    for packet_id, raw in buried.items():
        told = read_tombstone(raw)
        assert (told.packet_id, told.erased_at) == ("0x" + packet_id.hex(), NOW + 5)
        assert (told.sequence, told.received_at) == (await store.find([packet_id]))[packet_id]
    # The same packet again: it is a duplicate, as before, and is not stored.
    (place,) = (await store.append([mixed[0]], NOW + 6)).dispositions
    assert place.outcome is AppendOutcome.DUPLICATE
    assert (await sql.fetchval("SELECT count(*) FROM packets WHERE body <> ''")) == 5
    assert await erase(store, SubjectKind.AUTHOR, ALICE) == Erased(0, 1)
    lines = await store.moderation.log()
    assert {(line.act, line.kind, line.subject, line.actor) for line in lines} == {
        (Act.ERASE, SubjectKind.AUTHOR, ALICE, "ann")
    }
    assert len(lines) == 3, "one for each batch"


async def test_packets_are_erased_by_id_and_unknown_ones_change_nothing(store: Store, mixed):
    ids = ["0x" + each.packet_id.hex() for each in (mixed[1], mixed[2], mixed[9])]
    assert await erase(store, SubjectKind.PACKET, *ids, "0x" + "ee" * 32) == Erased(2, 1)
    assert await erase(store, SubjectKind.PACKET, *ids) == Erased(0, 1)
    page = await store.page(LogQuery(), 100, NOW)
    assert len(page.rows) == 8


@pytest.mark.parametrize(
    ("column", "value"),
    [("received_at", 2**53), ("received_at", -(2**63)), ("packet_id", b""), ("packet_id", bytes(33))],
)
async def test_a_damaged_row_is_erased_and_has_a_tombstone_that_holds(
    store: Store, mixed, sql: asyncpg.Connection, column, value
):
    sequence = await sql.fetchval("SELECT sequence FROM packets WHERE packet_id = $1", mixed[2].packet_id)
    await sql.execute(f"UPDATE packets SET {column} = $1 WHERE sequence = $2", value, sequence)
    place = await sql.fetchrow("SELECT packet_id, received_at FROM packets WHERE sequence = $1", sequence)
    assert await erase(store, SubjectKind.AUTHOR, ALICE) == Erased(5, 1)
    row = await sql.fetchrow("SELECT * FROM packets WHERE sequence = $1", sequence)
    assert row["body"] == b"" and row[column] == value, "its place is what manifests rest on"
    text = await sql.fetchval("SELECT body FROM tombstones WHERE sequence = $1", sequence)
    tombstone = read_tombstone(text)
    assert (tombstone.packet_id, tombstone.received_at) == told_place(*place)


@pytest.mark.parametrize("kind", [SubjectKind.PACKET, SubjectKind.AUTHOR])
async def test_a_packet_that_the_log_has_twice_is_erased_at_both_places(
    store: Store, packet, sql: asyncpg.Connection, kind: SubjectKind
):
    made = packet(1, author=ALICE)
    await store.append([made], NOW)
    await sql.execute(
        "DELETE FROM packet_ids"
    )  # it was forgotten, and an import has brought the packet again
    await store.append([made, packet(2, author=ALICE)], NOW)
    subject = f"0x{made.packet_id.hex()}" if kind is SubjectKind.PACKET else ALICE
    assert (await erase(store, kind, subject)).packets == (2 if kind is SubjectKind.PACKET else 3)
    left = await sql.fetch("SELECT body FROM packets WHERE packet_id = $1", made.packet_id)
    assert [row["body"] for row in left] == [b"", b""]


async def test_what_carries_keys_is_never_erased(store: Store, packet):
    await store.append(
        [packet(n, author=ALICE, type=type_) for n, type_ in enumerate(sorted(IDENTITY_TYPES))], NOW
    )
    assert await erase(store, SubjectKind.AUTHOR, ALICE) == Erased(0, len(IDENTITY_TYPES))


@pytest.mark.parametrize("place", ["before_commit", "after_commit"])
async def test_an_erasure_that_is_cut_off_is_whole_batches_and_goes_on(
    store: Store, mixed, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, place: str
):
    monkeypatch.setattr(failpoints, "ARMED", True)
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse(f"store.erase.{place}=raise@2"))
    with pytest.raises(FailpointRaised):
        await erase(store, SubjectKind.AUTHOR, ALICE, batch=2)
    monkeypatch.undo()
    gone = 2 if place == "before_commit" else 4
    assert await sql.fetchval("SELECT count(*) FROM packets WHERE body = ''") == gone
    assert await sql.fetchval("SELECT count(*) FROM tombstones") == gone
    assert await erase(store, SubjectKind.AUTHOR, ALICE, batch=2) == Erased(5 - gone, 1)
    assert await sql.fetchval("SELECT count(*) FROM tombstones") == 5


@pytest.mark.parametrize("kind", [SubjectKind.AUTHOR, SubjectKind.PACKET])
async def test_an_erasure_that_is_cut_off_before_its_end_clears_the_space_when_it_is_run_again(
    store: Store, mixed, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, kind: SubjectKind
):
    async def vacuumed() -> int:
        await sql.execute("SELECT pg_stat_clear_snapshot()")
        count: int = await sql.fetchval(
            "SELECT coalesce(sum(vacuum_count), 0) FROM pg_stat_user_tables WHERE relname LIKE 'packets\\_d%'"
        )
        return count

    subject = ALICE if kind is SubjectKind.AUTHOR else "0x" + mixed[0].packet_id.hex()
    monkeypatch.setattr(failpoints, "ARMED", True)
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse("store.erase.after_commit=raise"))
    with pytest.raises(FailpointRaised):
        await erase(store, kind, subject)
    assert await vacuumed() == 0
    monkeypatch.undo()
    assert (await erase(store, kind, subject)).packets == 0
    assert await vacuumed() == 1


async def test_a_day_that_retention_drops_before_its_space_is_cleared_is_no_failure(store: Store, sql):
    await vacuum(sql, "packets_d1")  # there is no such day any more


async def test_two_erasures_and_appends_at_once_stay_out_of_each_others_way(
    store: Store, second_store: Store, mixed, packet
):
    appends = [second_store.append([packet(100 + n, author=BOB)], NOW + 7) for n in range(5)]
    both = asyncio.gather(
        erase(store, SubjectKind.AUTHOR, ALICE, batch=1), erase(store, SubjectKind.AUTHOR, ALICE, batch=2)
    )
    await asyncio.gather(*appends)
    done, again = await both
    assert done.packets + again.packets == 5
    assert len((await store.page(LogQuery(), 100, NOW)).rows) == 10


async def test_tombstones_cannot_be_taken_back(store: Store, mixed, sql: asyncpg.Connection):
    await erase(store, SubjectKind.AUTHOR, BOB)
    with pytest.raises(asyncpg.RestrictViolationError, match="only grows"):
        await sql.execute("DELETE FROM tombstones")
