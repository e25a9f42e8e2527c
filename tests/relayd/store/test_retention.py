"""Dropping days: what is dropped, what stays, and which requests are still served meanwhile."""

from __future__ import annotations

import asyncio
import time

import pytest
import structlog
from msgspec.structs import replace
from strata.protocol.ids import Identity
from strata.protocol.keys import IDENTITY_TYPES
from strata.protocol.sequences import DAY_SECONDS, day_of

from relayd.moderation import SubjectKind
from relayd.store import AppendOutcome, Gone, LogQuery, Store
from relayd.store.erasing import Eraser
from relayd.store.retention import Swept
from relayd.store.types import EXEMPT_TYPES, NewPacket, StoredPacket

NOW = 1_790_000_000
TODAY = NOW // DAY_SECONDS


async def bodies(store, query=LogQuery(), now=NOW):  # noqa: B008
    return [row.body for row in (await store.page(query, 500, now)).rows]


async def partitions(sql, parent):
    rows = await sql.fetch(
        "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = $1::regclass ORDER BY 1", parent
    )
    return [row[0] for row in rows]


async def fill_days(store, packet, days):
    """Store on each day one packet of each exempt type and two plain ones."""
    for day in range(days):
        batch = [packet(10 * day), packet(10 * day + 1)]
        author = f"did:strata:{day}"
        batch += [packet(10 * day + 2 + n, author=author, type=type_) for n, type_ in enumerate(EXEMPT_TYPES)]
        await store.append(batch, NOW + day * DAY_SECONDS)


@pytest.mark.req("R-073")
def test_whatever_may_change_a_key_is_exempt():
    assert set(EXEMPT_TYPES) > {"KEY_EVENT", "RECOVERY_APPROVAL", "DID_DOCUMENT"} == IDENTITY_TYPES


@pytest.mark.req("R-073", "R-309")
async def test_old_days_go_and_exempt_types_stay_at_their_place(database, packet, sql):
    async with await Store.open(database, retention_days=3) as store:
        await fill_days(store, packet, 6)
        before = {row.body: row for row in (await store.page(LogQuery(), 500, NOW)).rows}
        now = NOW + 5 * DAY_SECONDS
        assert await store.maintain(now) == Swept(days=2, generations=0)
        assert await partitions(sql, "packets") == [
            *(f"packets_d{TODAY + day}" for day in range(2, 7)),
            "packets_kept",
        ]
        kept = [10 * day + 2 + n for day in range(2) for n in range(len(EXEMPT_TYPES))]
        left = [10 * day + n for day in range(2, 6) for n in range(2 + len(EXEMPT_TYPES))]
        page = await store.page(LogQuery(), 500, now)
        expected = [packet(n).body for n in kept + left]
        assert page.rows == [before[body] for body in expected]
        # Every way to find them still works.
        types = frozenset(EXEMPT_TYPES[:2])
        assert len(await bodies(store, LogQuery(types=types, ascending=False))) == 12
        stored = await store.by_id(packet(2).packet_id, now)
        assert isinstance(stored, StoredPacket) and stored.body == packet(2).body
        assert isinstance(await store.by_id(packet(0).packet_id, now), Gone)
        assert await store.maintain(now) == Swept(0, 0)


@pytest.mark.req("R-309")
@pytest.mark.parametrize("days_ahead", [400, -400])
async def test_a_clock_that_is_far_wrong_drops_nothing(database, packet, monkeypatch, days_ahead):
    today = int(time.time())
    async with await Store.open(database, retention_days=30) as store:
        for n in (5, 0):
            await store.append([packet(n)], today - n * DAY_SECONDS)
        monkeypatch.setattr(time, "time", lambda: today + days_ahead * DAY_SECONDS)
        with structlog.testing.capture_logs() as lines:
            assert (await store.maintain()).days == 0
        assert [line["event"] for line in lines] == ["clocks_differ"]
        assert await bodies(store, now=today) == [packet(5).body, packet(0).body]
        assert (await store.maintain(today + 400 * DAY_SECONDS)).days >= 1, "it would have been dropped"


@pytest.mark.req("R-309", "R-236")
async def test_of_an_author_s_manifests_only_the_current_one_outlives_retention(database, packet, sql):
    def manifest(number: int, author: str = "did:strata:a") -> NewPacket:
        made: NewPacket = packet(number, author=author, type="CLIENT_MANIFEST")
        return made

    async with await Store.open(database, retention_days=1) as store:
        tied = [manifest(n) for n in (2, 3, 4)]
        days = [
            [manifest(1), manifest(10, "did:strata:b"), packet(20, author="did:strata:a", type="KEY_EVENT")],
            tied,
            [packet(30)],
            [manifest(40), packet(41)],
            [packet(50)],
        ]
        left = []
        for day, batch in enumerate(days):
            now = NOW + day * DAY_SECONDS
            await store.append(batch, now)
            await store.maintain(now)
            left.append(
                [
                    row.body
                    for row in await store.identities.packets_of(
                        ["did:strata:a", "did:strata:b"], ["CLIENT_MANIFEST"]
                    )
                ]
            )
        newest = min(tied, key=lambda one: one.packet_id)
        other = manifest(10, "did:strata:b").body
        assert left == [
            [manifest(1).body, other],
            *[[other, newest.body]] * 2,
            *[[other, manifest(40).body]] * 2,
        ]
        kept = [row[0] for row in await sql.fetch("SELECT body FROM packets_kept ORDER BY sequence")]
        assert kept == [other, packet(20, author="did:strata:a", type="KEY_EVENT").body]
        for gone in (manifest(1), *tied):
            assert isinstance(await store.by_id(gone.packet_id, now), Gone), "and it is no new packet either"


@pytest.mark.req("R-309", "R-236")
@pytest.mark.parametrize("is_same_day", [True, False])
async def test_an_older_manifest_that_a_peer_brings_later_pushes_no_newer_one_out(
    database, packet, is_same_day
):
    def manifest(number: int, witnessed_at: int | None = None) -> NewPacket:
        made: NewPacket = packet(number, author="did:strata:a", type="CLIENT_MANIFEST")
        return replace(made, witnessed_at=witnessed_at, ingest_peer=None if witnessed_at is None else 1)

    async with await Store.open(database, retention_days=1) as store:
        newest, older = manifest(1), manifest(2, NOW - 5)
        await store.append([newest], NOW)
        for day in range(6):
            now = NOW + day * DAY_SECONDS
            if day == (0 if is_same_day else 3):
                await store.append([older], now + 9)
            await store.append([packet(100 + day)], now + 10)
            await store.maintain(now)
            rows = await store.identities.packets_of(["did:strata:a"], ["CLIENT_MANIFEST"])
            assert [row.body for row in rows] == [newest.body], day
        assert isinstance(await store.by_id(older.packet_id, now), Gone)
        await store.append([manifest(3)], now)
        for day in range(6, 9):
            now = NOW + day * DAY_SECONDS
            await store.append([packet(100 + day)], now)
            await store.maintain(now)
        assert isinstance(await store.by_id(newest.packet_id, now), Gone)
        rows = await store.identities.packets_of(["did:strata:a"], ["CLIENT_MANIFEST"])
        assert [row.body for row in rows] == [manifest(3).body]


@pytest.mark.req("R-309", "R-388")
async def test_of_a_relay_s_descriptors_only_the_current_one_outlives_retention(database, packet, sql):
    def descriptor(number: int, author: str = "did:strata:a", expires_at: int | None = None) -> NewPacket:
        made: NewPacket = packet(number, author=author, type="RELAY_DESCRIPTOR", expires_at=expires_at)
        return made

    async def kept() -> list[bytes]:
        return [row[0] for row in await sql.fetch("SELECT body FROM packets_kept ORDER BY sequence")]

    async with await Store.open(database, retention_days=1) as store:
        soon, later = NOW + DAY_SECONDS, NOW + 5 * DAY_SECONDS
        other, short = descriptor(1, "did:strata:b", later), descriptor(7, "did:strata:c", soon)
        renewed = [descriptor(n, expires_at=later) for n in (2, 3)]
        by_a_peer = replace(descriptor(4), witnessed_at=NOW - 9, ingest_peer=1)
        days = [
            [other, renewed[0], short, descriptor(5, "did:strata:b", soon)],
            [by_a_peer],
            [renewed[1]],
            *([packet(100 + day)] for day in range(5)),
        ]
        left = []
        for day, batch in enumerate(days):
            now = NOW + day * DAY_SECONDS
            for n, each in enumerate(batch):
                await store.append([each], now + n)
            await store.maintain(now + 10)
            left.append(await kept())
        first, second = [other.body, renewed[0].body], [other.body, renewed[1].body]
        assert left == [[], [], first, first, second, [], [], []]


@pytest.mark.req("R-310", "R-108", "R-102")
async def test_ids_outlive_their_packets_by_the_duplicate_window(database, packet):
    async with await Store.open(database, retention_days=2, dedup_window_seconds=7 * DAY_SECONDS) as store:
        await store.maintain(NOW)
        await store.append([packet(1), packet(2, expires_at=NOW + 1)], NOW)
        for day in range(1, 8):
            now = NOW + day * DAY_SECONDS
            await store.maintain(now)
            appended = await store.append([packet(1), packet(2), packet(100 + day)], now)
            outcomes = [place.outcome for place in appended.dispositions]
            assert outcomes == [AppendOutcome.DUPLICATE, AppendOutcome.DUPLICATE, AppendOutcome.STORED], day
        assert packet(1).body not in await bodies(store)


@pytest.mark.req("R-310")
async def test_generations_go_in_the_end_but_not_the_ids_of_exempt_packets(database, packet, sql):
    async with await Store.open(database, retention_days=2, dedup_window_seconds=2 * DAY_SECONDS) as store:
        await store.maintain(NOW)
        await store.append([packet(1), packet(2, type="KEY_EVENT")], NOW)
        for day in range(1, 6):
            now = NOW + day * DAY_SECONDS
            await store.append([packet(100 + day)], now)
            await store.maintain(now)
        assert await store.by_id(packet(1).packet_id, now) is None
        stored = await store.by_id(packet(2).packet_id, now)
        assert isinstance(stored, StoredPacket) and stored.body == packet(2).body
        appended = await store.append([packet(2), packet(1)], now)
        assert [place.outcome for place in appended.dispositions] == [
            AppendOutcome.DUPLICATE,
            AppendOutcome.STORED,
        ]
        # Look-ups by id probe few partitions, however long the relay has run.
        assert len(await partitions(sql, "packet_ids")) <= 5


@pytest.mark.req("R-310")
async def test_what_was_erased_is_known_for_good(database, packet):
    """Peers may bring a manifest of any age, and one of them may still have it."""
    async with await Store.open(database, retention_days=1, dedup_window_seconds=DAY_SECONDS) as store:
        manifest, plain = packet(1, type="CLIENT_MANIFEST"), packet(2)
        await store.maintain(NOW)
        await store.append([manifest, plain], NOW)
        await Eraser(store.url, Identity(bytes(32))).erase(
            SubjectKind.PACKET,
            ["0x" + manifest.packet_id.hex()],
            reason="asked for",
            actor="ann",
            via="command",
            now=NOW,
        )
        for day in range(1, 5):
            now = NOW + day * DAY_SECONDS
            await store.append([packet(100 + day)], now)
            await store.maintain(now)
        appended = await store.append([manifest, plain], now)
        assert [place.outcome for place in appended.dispositions] == [
            AppendOutcome.DUPLICATE,
            AppendOutcome.STORED,
        ]
        assert isinstance(await store.by_id(manifest.packet_id, now), Gone)


@pytest.mark.req("R-113", "R-310")
async def test_what_a_removed_packet_stated_may_be_stated_again_but_not_what_an_erased_one_did(database):
    def stating(number: int, key: int) -> NewPacket:
        ids = bytes([number]) * 32, bytes([key]) * 32
        return NewPacket(ids[0], "did:strata:a", "ATTESTATION", 5, None, b"{}", ids[1])

    async with await Store.open(database, retention_days=1, dedup_window_seconds=9 * DAY_SECONDS) as store:
        await store.maintain(NOW)
        await store.append([stating(1, 201), stating(2, 202)], NOW)
        await Eraser(store.url, Identity(bytes(32))).erase(
            SubjectKind.PACKET, ["0x" + "02" * 32], reason="asked", actor="ann", via="command", now=NOW
        )
        now = NOW + 3 * DAY_SECONDS
        await store.append([stating(3, 203)], now)
        await store.maintain(now)
        appended = await store.append([stating(4, 201), stating(5, 202)], now)
        assert [place.outcome for place in appended.dispositions] == [
            AppendOutcome.STORED,
            AppendOutcome.ERASED,
        ]


async def test_without_retention_everything_stays(database, packet, sql):
    async with await Store.open(database, retention_days=0) as store:
        for day in (0, 400, 4000):
            await store.append([packet(day)], NOW + day * DAY_SECONDS)
            assert await store.maintain(NOW + day * DAY_SECONDS) == Swept(0, 0)
        assert len(await bodies(store)) == 3
        found = await store.find([packet(number).packet_id for number in (0, 400, 4000)])
        assert len(found) == 3
        assert len(await partitions(sql, "packet_ids")) == 4


async def test_tomorrow_is_prepared(store, sql, packet):
    await store.maintain(NOW)
    assert await partitions(sql, "packets") == [f"packets_d{TODAY}", f"packets_d{TODAY + 1}", "packets_kept"]
    # If a clock was wrong when it prepared days, packets of today are still accepted.
    await store.maintain(NOW + 90 * DAY_SECONDS)
    appended = await store.append([packet(1)], NOW - DAY_SECONDS)
    assert day_of(appended.dispositions[0].sequence) == TODAY - 1


async def test_a_clock_far_ahead_never_drops_the_day_of_the_head(database, packet):
    async with await Store.open(database, retention_days=1) as store:
        await store.append([packet(1)], NOW)
        await store.maintain(NOW + 90 * DAY_SECONDS)
        assert await bodies(store) == [packet(1).body]
        await store.append([packet(2)], NOW + 1)
        assert await bodies(store) == [packet(1).body, packet(2).body]


async def test_a_clock_far_behind_makes_no_day_that_was_dropped(database, packet, sql):
    async with await Store.open(database, retention_days=3) as store:
        await fill_days(store, packet, 6)
        assert (await store.maintain(NOW + 5 * DAY_SECONDS)).days == 2
        before = await partitions(sql, "packets")
        assert await store.maintain(NOW - 400 * DAY_SECONDS) == Swept(0, 0)
        assert await partitions(sql, "packets") == before


async def test_one_process_sweeps_at_a_time(database, packet):
    async with (
        await Store.open(database, retention_days=1) as store,
        await Store.open(database, retention_days=1) as other,
    ):
        await fill_days(store, packet, 8)
        now = NOW + 7 * DAY_SECONDS
        swept = await asyncio.gather(store.maintain(now), other.maintain(now))
        assert sum(one.days for one in swept) == 6


async def test_a_reader_that_will_not_let_go_delays_a_sweep_but_not_the_log(
    database, packet, sql, eventually
):
    """While the sweep waits for a long read it releases the log again and again."""
    async with await Store.open(database, retention_days=1) as store:
        await fill_days(store, packet, 4)
        now = NOW + 3 * DAY_SECONDS
        reading = sql.transaction(isolation="repeatable_read")
        await reading.start()
        await sql.fetchval("SELECT count(*) FROM packets")
        sweep = asyncio.create_task(store.maintain(now))
        appended = await store.append([packet(1000)], now)
        assert appended.dispositions[0].outcome is AppendOutcome.STORED
        assert not sweep.done()
        await reading.rollback()
        assert (await sweep).days == 2


@pytest.mark.req("R-154")
async def test_a_walk_goes_on_across_a_sweep(database, packet):
    async with await Store.open(database, retention_days=1) as store:
        await fill_days(store, packet, 5)
        first = await store.page(LogQuery(), 7, NOW)
        await store.maintain(NOW + 4 * DAY_SECONDS)
        rest = await store.page(LogQuery(after=first.rows[-1].sequence), 500, NOW)
        sequences = [row.sequence for row in first.rows + rest.rows]
        assert sequences == sorted(set(sequences))
        assert {packet(n).body for n in range(30, 46)} - {packet(n).body for n in range(36, 40)} <= {
            row.body for row in rest.rows
        }


async def test_a_round_that_was_cut_off_is_finished_by_the_next(database, packet, sql):
    async with await Store.open(database, retention_days=2) as store:
        await fill_days(store, packet, 4)
        name = f"packets_d{TODAY}"
        await sql.execute(f"ALTER TABLE packets DETACH PARTITION {name}")
        await store.maintain(NOW)
        assert await sql.fetchval("SELECT to_regclass($1)", name) is None


@pytest.mark.req("R-309", "R-099")
async def test_after_a_clock_was_years_ahead_each_day_still_ends_and_is_dropped(database, packet, sql):
    async with await Store.open(database, retention_days=2) as store:
        await store.append([packet(0), packet(1, type="KEY_EVENT")], NOW)
        await store.maintain(NOW)
        await store.append([packet(2), packet(3, type="KEY_EVENT")], NOW + 3650 * DAY_SECONDS)
        left, heads = [], []
        for day in range(7):
            now = NOW + day * DAY_SECONDS
            await store.append([packet(10 + day)], now + 10)
            await store.maintain(now + 20)
            await store.maintain(now + 30)
            await store.append([packet(20 + day)], now + 40)
            heads.append(day_of(await store.head()) - TODAY - 3650)
            left.append(await bodies(store, now=now + 50))
        assert heads == [0, 1, 2, 3, 4, 5, 6]
        expected = [1, 3, 24, 15, 25, 16, 26]
        assert left[-1] == [packet(number).body for number in expected]
        assert len(left[2]) == 4 + 2 * 3, "nothing is dropped too early"
        assert await partitions(sql, "packets") == [
            *(f"packets_d{TODAY + 3650 + day}" for day in range(4, 8)),
            "packets_kept",
        ]
