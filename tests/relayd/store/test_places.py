"""Packets are erased at named places, with or without a row, and only where the log can have had them."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from typing import Any

import asyncpg
import pytest
from msgspec import structs
from strata.protocol.ids import Identity
from strata.protocol.places import PacketPlace
from strata.protocol.provenance import ProvenanceTrust
from strata.protocol.provenance.manifest import CLIENT_MANIFEST
from strata.protocol.sequences import DAY_SECONDS, first_of_day
from strata.protocol.tombstones import read_tombstone

from relayd import failpoints
from relayd.admission.limits import AdmissionLimits
from relayd.config import Settings
from relayd.failpoints import FailpointRaised
from relayd.moderation import Act, SubjectKind
from relayd.store import AppendOutcome, Gone, LogQuery, Store
from relayd.store.counting import count_log
from relayd.store.erasing import Erased, Eraser
from relayd.store.places import Fate, KnownPlaces, PlaceEraser, PlacesErased, Row, judge
from relayd.transfer.examiner import Examiner
from relayd.transfer.files import import_log
from tests.support import relay_logs

NOW = 1_790_000_000
TODAY = NOW // DAY_SECONDS
RELAY = Identity(bytes(31) + b"r")
NAME, OTHER = "0x" + "ab" * 32, "0x" + "cd" * 32


def on(day: int, ordinal: int = 1, name: str = NAME) -> PacketPlace:
    return PacketPlace(name, first_of_day(day) + ordinal, day * DAY_SECONDS + 5)


def row(place: PacketPlace, **changed: Any) -> Row:
    return Row(bytes.fromhex(place.packet_id[2:]), place.received_at, False, True, "t")._replace(**changed)


@pytest.mark.parametrize(
    ("place", "fate", "why"),
    [
        (on(10), Fate.BURY, ""),  # its id is forgotten
        (on(15), Fate.REFUSE, "the log has never had packets of 1970-01-16"),
        (on(18), Fate.REFUSE, "remembers the ids of 1970-01-19, and this is none of them"),
        (on(20), Fate.REFUSE, "retention has not dropped 1970-01-21, and the log has no row there"),
        (on(30, 8), Fate.REFUSE, f"the log ends at {on(30, 7).sequence}"),
    ],
)
def test_a_place_without_a_row_must_be_one_that_retention_has_dropped(
    place: PacketPlace, fate: Fate, why: str
):
    known = KnownPlaces(on(30, 7).sequence, first_of_day(20), first_of_day(20), first_of_day(12))
    known.generations = [(first_of_day(16), first_of_day(40))]
    found = judge(place, known)
    assert found[0] is fate and why in found[1] and bool(why) is bool(found[1])


@pytest.mark.parametrize(
    ("head", "begins", "why"),
    [
        (on(30).sequence, 20, ""),  # before the log
        (on(30).sequence, 10, "retention has dropped no day, and of 1970-01-11 the log has no row there"),
        (on(30).sequence, None, "the log has no row there"),
        (0, 20, "the log is empty"),
    ],
)
def test_a_log_of_which_nothing_was_dropped_can_only_lack_what_was_before_it(head, begins, why):
    fate, told = judge(on(10), KnownPlaces(head, 0, None if begins is None else first_of_day(begins)))
    assert (fate is Fate.BURY) is not bool(why) and why in told


@pytest.mark.parametrize(
    ("found", "fate", "why"),
    [
        (row(on(10)), Fate.ERASE, ""),
        (row(on(10), is_full=False), Fate.ERASE, ""),  # empty without a tombstone: damage
        (row(on(10), is_spared=True), Fate.SPARE, ""),
        (row(on(10, name=OTHER)), Fate.REFUSE, f"the log has {OTHER} there"),
        (row(on(10), received_at=7), Fate.REFUSE, "the log received it at 7, and not at 864005"),
    ],
)
def test_a_row_at_the_place_must_be_the_one_that_is_named(found: Row, fate: Fate, why: str):
    known = KnownPlaces(on(30).sequence, 0, first_of_day(10), rows={on(10).sequence: found})
    assert judge(on(10), known) == (fate, why)


def test_what_other_tombstones_and_ids_tell_otherwise_is_refused():
    place = on(10)
    known = KnownPlaces(on(30).sequence, first_of_day(20), first_of_day(20), first_of_day(5))
    known.ids = {NAME: {(place.sequence, place.received_at)}}
    assert judge(place, known) == (Fate.BURY, "")
    known.ids = {NAME: {(place.sequence + 1, place.received_at)}}
    assert "the log has had it at" in judge(place, known)[1]
    known.ids = {NAME: {(place.sequence, 7)}}  # when the first relay received it, which a peer has told
    assert judge(place, known) == (Fate.BURY, "")
    known.ids = {NAME: {(place.sequence, place.received_at + 301)}}
    assert f"received at {place.received_at + 301}" in judge(place, known)[1]
    known.buried = {NAME: place.sequence + 1}  # an id has one tombstone, for all its places
    assert judge(place, known) == (Fate.ALREADY, "")
    known.rows = {place.sequence: row(place)}
    assert judge(place, known) == (Fate.ERASE, "")
    known.rows = {}
    known.buried, known.tombstones = {OTHER: place.sequence}, {place.sequence: OTHER}
    assert f"is that of {OTHER}" in judge(place, known)[1]
    known.buried, known.tombstones = {NAME: place.sequence}, {place.sequence: NAME}
    assert judge(place, known) == (Fate.ALREADY, "")
    # A row that has come back is emptied again.
    known.rows = {place.sequence: row(place)}
    assert judge(place, known) == (Fate.ERASE, "")


async def aged(store: Store, packet, sql: asyncpg.Connection) -> list[PacketPlace]:
    """Six days of four packets, the last of each day a revocation; retention has dropped the first three."""
    for day in range(6):
        made = [packet(10 * day + n, author=f"did:strata:{day}") for n in range(2)]
        made.append(packet(10 * day + 2, author=f"did:strata:{day}", type=CLIENT_MANIFEST))
        made.append(packet(10 * day + 3, author=f"did:strata:{day}", type="KEY_EVENT"))
        await store.append(made, NOW + day * DAY_SECONDS)
    rows = await sql.fetch("SELECT packet_id, sequence, received_at FROM packets ORDER BY sequence")
    await store.maintain(NOW + 5 * DAY_SECONDS)
    return [PacketPlace(f"0x{packet_id.hex()}", *place) for packet_id, *place in rows]


@pytest.fixture
async def old(database: str):
    async with await Store.open(database, retention_days=3, dedup_window_seconds=DAY_SECONDS) as store:
        yield store


async def erase(store: Store, *places: PacketPlace, batch: int = 500) -> PlacesErased:
    eraser = PlaceEraser(store.url, RELAY, batch=batch)
    return await eraser.erase(places, reason="asked for", actor="ann", via="command", now=NOW + 5)


async def test_dropped_packets_get_tombstones_alone_and_stay_out(old: Store, packet, sql):
    places = await aged(old, packet, sql)
    asked = [*places[:8], *places[20:]]
    assert await PlaceEraser(old.url, RELAY).survey(asked) == PlacesErased(5, 4, 0, 3)
    assert await sql.fetchval("SELECT count(*) FROM tombstones") == 0
    # Of the dropped days, the log has kept the manifests and the revocations.
    assert await erase(old, *asked, batch=3) == PlacesErased(5, 4, 0, 3)
    assert await erase(old, *asked) == PlacesErased(0, 0, 9, 3)
    buried = await old.tombstones([bytes.fromhex(place.packet_id[2:]) for place in places])
    taken = {place.packet_id: place for place in asked[:3] + asked[4:7] + asked[8:11]}
    assert {f"0x{name.hex()}" for name in buried} == set(taken)
    for text in buried.values():
        told = read_tombstone(text)
        assert PacketPlace(told.packet_id, told.sequence, told.received_at) == taken[told.packet_id]
        assert (told.erased_at, told.relay_id) == (NOW + 5, RELAY.did)
    lines = await old.moderation.log()
    assert [line.subject for line in reversed(lines)] == list(taken)
    assert {(line.act, line.kind, line.actor, line.via) for line in lines} == {
        (Act.ERASE, SubjectKind.PACKET, "ann", "command")
    }
    # The same packets again are duplicates, after any time.
    again = [packet(0), packet(10, type=CLIENT_MANIFEST), packet(50)]
    for later in (5, 400):
        await old.maintain(NOW + later * DAY_SECONDS)
        done = await old.append(again, NOW + later * DAY_SECONDS)
        assert {one.outcome for one in done.dispositions} == {AppendOutcome.DUPLICATE}
    assert isinstance(await old.by_id(bytes.fromhex(places[0].packet_id[2:]), NOW), Gone)


async def test_the_id_of_a_dropped_packet_is_remembered_even_if_it_was_forgotten(old: Store, packet, sql):
    places = await aged(old, packet, sql)
    await old.append([packet(900)], NOW + 70 * DAY_SECONDS)
    await old.maintain(NOW + 70 * DAY_SECONDS)
    await old.append([packet(901)], NOW + 71 * DAY_SECONDS)
    assert (await old.append([packet(1)], NOW + 71 * DAY_SECONDS)).dispositions[
        0
    ].outcome is AppendOutcome.STORED
    done = await erase(old, places[0], places[1])
    assert (done.dropped, done.refused) == (1, 1)
    assert "the log has had it at" in done.refusals[0].reason, "it has come in again elsewhere"
    (again,) = (await old.append([packet(0)], NOW + 72 * DAY_SECONDS)).dispositions
    assert (again.outcome, again.sequence, again.received_at) == (
        AppendOutcome.DUPLICATE, places[0].sequence, places[0].received_at
    )  # fmt: skip


async def test_a_dropped_packet_that_a_peer_brought_gets_its_tombstone(old: Store, packet, sql):
    await old.append([structs.replace(packet(n), witnessed_at=NOW - 60) for n in range(2)], NOW)
    rows = await sql.fetch("SELECT packet_id, sequence, received_at FROM packets ORDER BY sequence")
    await old.append([packet(9)], NOW + 5 * DAY_SECONDS)
    assert (await old.maintain(NOW + 5 * DAY_SECONDS)).days > 0
    assert await sql.fetchval("SELECT min(received_at) FROM packet_ids") == NOW - 60, "the index remembers"
    done = await erase(old, *(PacketPlace(f"0x{name.hex()}", *place) for name, *place in rows))
    assert (done.dropped, done.refusals) == (2, [])


async def test_tombstones_alone_change_nothing_for_readers_counts_and_retention(old: Store, packet, sql):
    places = await aged(old, packet, sql)
    before = await count_log(old.url), await old.page(LogQuery(), 100, NOW), await old.tail(0, None, 100)
    assert (await erase(old, *places[:2])).dropped == 2
    after = await count_log(old.url), await old.page(LogQuery(), 100, NOW), await old.tail(0, None, 100)
    assert before == after and before[0].missing == 0
    await old.append([packet(800)], NOW + 9 * DAY_SECONDS)
    assert (await old.maintain(NOW + 9 * DAY_SECONDS)).days > 0
    assert await sql.fetchval("SELECT count(*) FROM packets WHERE sequence <= $1", places[1].sequence) == 0


async def test_each_place_that_is_refused_is_named_and_the_others_are_done(old: Store, packet, sql):
    places = await aged(old, packet, sql)
    wrong = replace(places[23], packet_id=NAME)
    beyond = replace(places[22], packet_id=NAME, sequence=places[23].sequence + 1)
    twice = replace(places[1], packet_id=places[0].packet_id)
    done = await erase(old, places[0], twice, wrong, beyond, replace(places[4], packet_id=OTHER))
    assert (done.erased, done.dropped, done.already, done.refused) == (0, 1, 1, 3)
    assert [(one.packet_id, one.sequence) for one in done.refusals] == [
        (place.packet_id, place.sequence) for place in (wrong, beyond, replace(places[4], packet_id=OTHER))
    ]
    assert f"the log has {places[23].packet_id} there" in done.refusals[0].reason
    assert "the log ends at" in done.refusals[1].reason
    assert "is none of them" in done.refusals[2].reason


async def test_all_rows_that_the_log_has_of_a_packet_are_emptied(store: Store, packet, sql):
    for _ in range(2):
        await store.append([packet(1)], NOW)
        await sql.execute("DELETE FROM packet_ids")  # it was forgotten, and an import may bring it again
    rows = await sql.fetch("SELECT packet_id, sequence, received_at FROM packets ORDER BY sequence")
    places = [PacketPlace(f"0x{packet_id.hex()}", *place) for packet_id, *place in rows]
    assert (await erase(store, *places)).erased == 2
    assert await sql.fetchval("SELECT count(*) FROM packets WHERE body <> ''") == 0
    assert [*await sql.fetchrow("SELECT count(*), min(sequence) FROM tombstones")] == [1, places[0].sequence]
    assert await sql.fetchval("SELECT count(*) FROM packet_ids") == 1
    assert (await erase(store, *places)).already == 2


@pytest.mark.parametrize("place", ["before_commit", "after_commit"])
async def test_an_erasure_that_is_cut_off_is_whole_batches_and_goes_on(
    old: Store, packet, sql, monkeypatch: pytest.MonkeyPatch, place: str
):
    places = [one for n, one in enumerate(await aged(old, packet, sql)) if n % 4 < 2]
    monkeypatch.setattr(failpoints, "ARMED", True)
    monkeypatch.setattr(failpoints, "_armed", failpoints.parse(f"store.erase.{place}=raise@2"))
    with pytest.raises(FailpointRaised):
        await erase(old, *places, batch=5)
    monkeypatch.undo()
    gone = 5 if place == "before_commit" else 10
    assert await sql.fetchval("SELECT count(*) FROM tombstones") == gone
    assert await sql.fetchval("SELECT count(*) FROM moderation_log") == gone
    done = await erase(old, *places, batch=5)
    assert (done.erased + done.dropped, done.already) == (12 - gone, gone)


async def test_appends_retention_and_other_erasures_go_on_meanwhile(old: Store, packet, sql):
    places = [one for n, one in enumerate(await aged(old, packet, sql)) if n % 4 < 3]
    now = NOW + 6 * DAY_SECONDS
    async with await Store.open(old.url, retention_days=3, dedup_window_seconds=DAY_SECONDS) as other:
        appends = [asyncio.create_task(other.append([packet(500 + n)], now)) for n in range(10)]
        authors = [f"did:strata:{day}" for day in range(6)]
        by_author = Eraser(old.url, RELAY, batch=1).erase(
            SubjectKind.AUTHOR, authors, reason="asked for", actor="ann", via="command", now=NOW + 5
        )
        erasing = erase(old, *places, batch=1), erase(old, *places[::-1], batch=2)
        one, two, by, _ = await asyncio.gather(*erasing, by_author, other.maintain(now))
        stored = [await append for append in appends]
    assert one.refused == two.refused == 0
    assert one.erased + one.dropped + two.erased + two.dropped + by.packets == len(places)
    assert await sql.fetchval("SELECT count(*) FROM tombstones") == len(places)
    assert (
        await sql.fetchval("SELECT count(*) FROM packet_ids")
        == 24 + 10
        == await sql.fetchval("SELECT count(DISTINCT packet_id) FROM packet_ids")
    )
    assert {done.dispositions[0].outcome for done in stored} == {AppendOutcome.STORED}


async def test_a_batch_waits_for_an_append_that_has_begun(old: Store, packet, sql, observer, eventually):
    """Else the packet could come in again while its place is judged."""
    places = await aged(old, packet, sql)
    async with sql.transaction():
        await sql.execute("SELECT FROM log_head FOR UPDATE")
        erasing = asyncio.create_task(erase(old, places[0]))
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        await eventually(lambda: observer.fetchval(waiting))
    assert (await erasing).dropped == 1


async def test_a_row_that_a_restore_left_empty_gets_its_tombstone(store: Store, packet, sql):
    await store.append([packet(0), packet(1)], NOW)
    await sql.execute(
        "UPDATE packets SET body = '', annotation = 'x' WHERE packet_id = $1", packet(0).packet_id
    )
    await sql.execute("DELETE FROM packet_ids WHERE packet_id = $1", packet(0).packet_id)
    name, *place = await sql.fetchrow(
        "SELECT packet_id, sequence, received_at FROM packets ORDER BY sequence"
    )
    assert (await erase(store, PacketPlace(f"0x{name.hex()}", *place))).erased == 1
    assert (await count_log(store.url)).erased == 1
    assert await sql.fetchval("SELECT annotation IS NULL FROM packets WHERE packet_id = $1", name)
    (again,) = (await store.append([packet(0)], NOW + 1)).dispositions
    assert again.outcome is AppendOutcome.DUPLICATE


async def test_an_import_brings_nothing_back_of_before_the_log(store: Store, packet):
    await store.append([packet(0)], NOW)
    day = TODAY - 9
    made = relay_logs.make(1, at=day * DAY_SECONDS)
    done = await erase(store, PacketPlace(made.packet_id, first_of_day(day) + 1, day * DAY_SECONDS))
    assert (done.dropped, await store.find([made.digest])) == (1, {}), "no partition can hold its id"
    limits = AdmissionLimits.from_settings(Settings())
    examiner = Examiner(store, trust=ProvenanceTrust(), limits=limits)
    line = b'{"packet":%b,"received_at":%d}\n' % (made.canonical, day * DAY_SECONDS)
    summary = await import_log(store, io.BytesIO(line), examiner, now=lambda: NOW)
    assert (summary.lines, summary.stored, summary.erased) == (1, 0, 1)


async def test_what_was_erased_by_id_is_erased_already(store: Store, packet, sql):
    await store.append([packet(0)], NOW)
    name = f"0x{packet(0).packet_id.hex()}"
    eraser = Eraser(store.url, RELAY)
    done = await eraser.erase(SubjectKind.PACKET, [name], reason="x", actor="ann", via="command", now=NOW)
    assert done == Erased(1, 0)
    place = await sql.fetchrow("SELECT sequence, received_at FROM packets")
    assert await erase(store, PacketPlace(name, *place)) == PlacesErased(already=1)
