"""Appending: order, gaps, duplicates, the clock, and failures."""

from __future__ import annotations

import asyncio
import contextlib
import random

import asyncpg
import pytest
from msgspec.structs import replace
from strata.protocol.ids import Identity
from strata.protocol.sequences import DAY_SECONDS, day_of, first_of_day

from relayd.lineage import SKEW_SECONDS
from relayd.moderation import SubjectKind
from relayd.store import AppendOutcome, Disposition, Gone, LogQuery, NewPacket, Store, StoreUnavailable
from relayd.store.erasing import Eraser
from relayd.store.types import IdentitiesMoved, TimeMoved

NOW = 1_790_000_000
FIRST = first_of_day(NOW // DAY_SECONDS) + 1


async def everything(store, up_to=None):
    """The whole log, read in small pages."""
    entries, after = [], 0
    while page := await store.tail(after, up_to, 7):
        entries += page
        after = page[-1].sequence
    return entries


@pytest.mark.req("R-097", "R-305")
async def test_a_batch_gets_consecutive_sequences_in_its_order(store, packet):
    appended = await store.append([packet(n) for n in range(5)], NOW)
    assert appended.previous == 0
    assert appended.dispositions == [Disposition(AppendOutcome.STORED, FIRST + n, NOW) for n in range(5)]
    again = await store.append([packet(9)], NOW + 1)
    assert again == (FIRST + 4, [Disposition(AppendOutcome.STORED, FIRST + 5, NOW + 1, None)])
    assert await store.head() == FIRST + 5
    assert [entry.packet for entry in await everything(store)] == [packet(n) for n in (0, 1, 2, 3, 4, 9)]


@pytest.mark.req("R-097", "R-108")
async def test_what_was_appended_is_there_after_a_restart(database, packet):
    async with await Store.open(database) as store:
        await store.append([packet(1)], NOW)
        before = await everything(store)
    async with await Store.open(database) as store:
        assert await everything(store) == before
        again = await store.append([packet(1)], NOW + 50)
    assert again.dispositions == [Disposition(AppendOutcome.DUPLICATE, FIRST, NOW, None)]


@pytest.mark.req("R-161", "R-311", "R-111")
async def test_processes_that_append_at_once_leave_no_gap_and_never_go_back(
    store, second_store, packet, database
):
    """Two appenders with overlapping ids, and a reader that follows the head throughout."""
    chance = random.Random(4)
    seen: list[int] = []
    done = asyncio.Event()

    async def append(target: Store, start: int) -> list[Disposition]:
        places = []
        number = start
        while number < start + 300:
            size = chance.randint(1, 20)
            # Every tenth id is common to both.
            batch = [packet(n if n % 10 else 1_000_000 + n % 300) for n in range(number, number + size)]
            places += (await target.append(batch, NOW)).dispositions
            number += size
        return places

    async def follow() -> None:
        # A reader that continues after the last it saw must meet every sequence, or the order was broken.
        after = 0
        async with await Store.open(database) as reader:
            while True:
                last_round = done.is_set()
                while page := await reader.tail(after, None, 50):
                    seen.extend(entry.sequence for entry in page)
                    after = page[-1].sequence
                if last_round:
                    return

    reader = asyncio.create_task(follow())
    first, second = await asyncio.gather(append(store, 0), append(second_store, 300))
    done.set()
    await reader
    stored = [place.sequence for place in first + second if place.outcome is AppendOutcome.STORED]
    assert sorted(stored) == list(range(FIRST, FIRST + len(stored)))
    assert seen == sorted(stored)
    duplicates = {place.sequence for place in first + second if place.outcome is AppendOutcome.DUPLICATE}
    assert duplicates and duplicates <= set(stored)


@pytest.mark.req("R-109", "R-111")
async def test_duplicates_get_the_place_of_the_first_copy(store, second_store, packet):
    await store.append([packet(1), packet(2)], NOW)
    appended = await second_store.append([packet(3), packet(2), packet(4), packet(4), packet(1)], NOW + 5)
    stored, duplicate = AppendOutcome.STORED, AppendOutcome.DUPLICATE
    assert appended == (
        FIRST + 1,
        [
            (stored, FIRST + 2, NOW + 5, None),
            (duplicate, FIRST + 1, NOW, None),
            (stored, FIRST + 3, NOW + 5, None),
            (duplicate, FIRST + 3, NOW + 5, None),
            (duplicate, FIRST, NOW, None),
        ],
    )
    assert len(await everything(store)) == 4


async def test_a_batch_of_duplicates_moves_nothing(store, packet):
    await store.append([packet(1)], NOW)
    appended = await store.append([packet(1)], NOW + 99)
    assert appended == (FIRST, [(AppendOutcome.DUPLICATE, FIRST, NOW, None)])
    assert await store.head() == FIRST


async def test_the_database_itself_refuses_an_id_twice_in_a_batch(sql):
    ids = [b"i" * 32] * 2
    with pytest.raises(asyncpg.UniqueViolationError):
        await sql.fetch(
            "SELECT * FROM relay_append($1, $2, $3, $3, $4, $5, $3, NULL, NULL, NULL, false,"
            " (SELECT tag FROM log_head), 0, NULL)",
            NOW,
            ids,
            [b"x"] * 2,
            [1, 1],
            [None, None],
        )


@pytest.mark.req("R-099", "R-152")
async def test_a_clock_that_steps_back_is_held(store, second_store, packet):
    await store.append([packet(1)], NOW)
    appended = await second_store.append([packet(2)], NOW - SKEW_SECONDS)
    assert appended.dispositions == [(AppendOutcome.STORED, FIRST + 1, NOW, None)]


@pytest.mark.req("R-099", "R-152", "R-305")
@pytest.mark.parametrize("ahead", [7200, 3 * DAY_SECONDS, 3650 * DAY_SECONDS])
async def test_the_log_is_told_no_further_ahead_of_the_clock_than_the_skew(
    store, second_store, packet, ahead
):
    await store.append([packet(1)], NOW + ahead)
    after, told = await store.head(), []
    for number, now in enumerate([NOW, NOW + 1, NOW + SKEW_SECONDS, NOW + SKEW_SECONDS + 1, NOW + 1], 2):
        which = second_store if number % 2 else store
        (place,) = (await which.append([packet(number)], now)).dispositions
        assert place.sequence == after + number - 1  # the order and the days go on where they were
        told.append(place.received_at)
    held = NOW + SKEW_SECONDS
    assert told == [held, held, held, held + 1, held + 1]
    page = await store.page(LogQuery(), 10, NOW)
    assert [row.received_at for row in page.rows] == [NOW + ahead, *told]
    repeated = await store.append([packet(2)], NOW + 1)
    assert repeated.dispositions == [(AppendOutcome.DUPLICATE, after + 1, held, None)]
    for query, expected in (
        (LogQuery(received_since=held + 1), [NOW + ahead, held + 1, held + 1]),
        (LogQuery(received_until=held), [held, held, held]),
        (LogQuery(received_since=held + 1, received_until=held + 1, ascending=False), [held + 1, held + 1]),
    ):
        page = await store.page(query, 10, NOW)
        assert [row.received_at for row in page.rows] == expected


async def test_what_was_judged_as_of_another_time_is_not_stored(store, second_store, packet):
    await second_store.append([packet(1)], NOW + 2)
    head = await store.head()
    with pytest.raises(TimeMoved):
        await store.append([packet(2)], NOW, followed=head)
    assert await store.head() == head
    assert store.known.time_at(NOW) == NOW + 2
    appended = await store.append([packet(2)], NOW, followed=head)
    assert appended.dispositions == [(AppendOutcome.STORED, head + 1, NOW + 2, None)]


@pytest.mark.req("R-099")
async def test_processes_whose_clocks_differ_by_less_than_the_skew_agree_on_one_time(
    store, second_store, packet
):
    told, judged_again = [], 0
    for number in range(20):
        which, now = (second_store, NOW - 200) if number % 2 else (store, NOW)
        while True:
            try:
                appended = await which.append([packet(number)], now + number // 10, followed=2**60)
                break
            except TimeMoved:
                judged_again += 1
        told.append(appended.dispositions[0].received_at)
    assert told == [NOW] * 10 + [NOW + 1] * 10
    assert judged_again == 2, "the process that is behind learns of each second once"


@pytest.mark.req("R-152")
async def test_a_new_day_starts_its_own_partition_and_count(store, packet, sql):
    midnight = (NOW // DAY_SECONDS + 1) * DAY_SECONDS
    await store.append([packet(1)], midnight - 1)
    appended = await store.append([packet(2), packet(3)], midnight)
    tomorrow = first_of_day(midnight // DAY_SECONDS) + 1
    assert appended.previous == FIRST
    assert [place.sequence for place in appended.dispositions] == [tomorrow, tomorrow + 1]
    assert await sql.fetchval(f"SELECT count(*) FROM packets_d{day_of(tomorrow)}") == 2
    assert [entry.packet for entry in await everything(store)] == [packet(1), packet(2), packet(3)]


async def test_days_without_a_relay_are_passed_over(store, packet):
    await store.append([packet(1)], NOW)
    later = NOW + 400 * DAY_SECONDS
    appended = await store.append([packet(2), packet(1)], later)
    assert appended.dispositions == [
        (AppendOutcome.STORED, first_of_day(later // DAY_SECONDS) + 1, later, None),
        (AppendOutcome.DUPLICATE, FIRST, NOW, None),
    ]


@pytest.mark.req("R-312", "R-307")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0",
        "a\0b",
        "'; DROP TABLE packets; --",
        "\\x00",
        "é😀",
        "x" * 600,
        "x" * 100_000,
        "\uffff\u0000" * 300,
    ],
    ids=["empty", "nul", "inner-nul", "quotes", "escape", "unicode", "long", "very-long", "long-nul"],
)
async def test_any_text_is_stored_and_found_exactly(store, text):
    import msgspec

    body = msgspec.json.encode({"author_id": "did:strata:a" + text, "content": {"type": text}})
    stored = NewPacket(b"1" * 32, "did:strata:a" + text, text, NOW, None, body)
    other = NewPacket(b"2" * 32, "did:strata:b", text + "x", NOW, None, b"{}")
    appended = await store.append([stored, other], NOW)
    assert [place.outcome for place in appended.dispositions] == [AppendOutcome.STORED] * 2
    for query in (
        LogQuery(types=frozenset([text])),
        LogQuery(types=frozenset([text, "nothing"])),
        LogQuery(authors=frozenset([stored.author_id])),
        LogQuery(authors=frozenset([stored.author_id]), types=frozenset([text])),
    ):
        page = await store.page(query, 10, NOW)
        assert page == ([(FIRST, NOW, body, None)], True, None)
    assert (await store.tail(0, None, 1))[0].packet == stored


async def test_rows_that_cannot_be_stored_fail_alone(store, packet, sql):
    """Some are caught before they are sent, the others by the database, and the batch survives them."""
    await sql.execute("ALTER TABLE packets ADD CONSTRAINT no_thirteen CHECK (length(body) <> 13)")
    batch = [packet(n) for n in range(20)]
    batch[2] = packet(2, timestamp=2**63)
    batch[3] = packet(3, expires_at=-(2**63) - 1)
    batch[5] = packet(5, type="\ud800")
    for n in (0, 7, 8, 19):
        batch[n] = packet(n, size=13)
    appended = await store.append(batch, NOW)
    invalid = [n for n, place in enumerate(appended.dispositions) if place.outcome is AppendOutcome.INVALID]
    assert invalid == [0, 2, 3, 5, 7, 8, 19]
    stored = [place.sequence for place in appended.dispositions if place.outcome is AppendOutcome.STORED]
    assert stored == list(range(FIRST, FIRST + 13))
    assert appended.previous == 0
    assert len(await everything(store)) == 13


async def test_a_batch_of_nothing_but_unstorable_rows(store, packet):
    appended = await store.append([packet(1, timestamp=2**70)], NOW)
    assert appended == (0, [(AppendOutcome.INVALID, 0, 0, None)])
    assert await store.append([], NOW) == (0, [])


async def test_findings_are_of_what_is_stored_and_has_any(store, packet):
    await store.append([replace(packet(1), annotation=b"found"), packet(2)], NOW)
    ids = [packet(1).packet_id, packet(2).packet_id, b"?" * 32]
    assert await store.findings(ids) == {ids[0]: b"found"}


@pytest.mark.req("R-100", "R-103", "R-300")
async def test_find_and_by_id(store, packet):
    await store.append([packet(1), packet(2, expires_at=NOW + 10)], NOW)
    one, two = packet(1), packet(2)
    assert await store.find([one.packet_id, b"?" * 32]) == {one.packet_id: (FIRST, NOW)}
    assert await store.find([]) == {}
    assert await store.by_id(one.packet_id, NOW) == (FIRST, NOW, one.body, None)
    assert await store.by_id(b"?" * 32, NOW) is None
    at_the_edge = await store.by_id(two.packet_id, NOW + 10)
    gone = await store.by_id(two.packet_id, NOW + 11)
    assert at_the_edge == (FIRST + 1, NOW, two.body, None)
    assert isinstance(gone, Gone) and gone == (FIRST + 1, NOW)


@pytest.mark.req("R-189", "R-311")
async def test_an_append_cut_off_by_the_server_heals_and_doubles_nothing(
    store, packet, sql, observer, eventually
):
    """The connection dies while the append waits for the log; the second try succeeds."""
    await store.append([packet(0)], NOW)
    async with sql.transaction():
        await sql.execute("SELECT FROM log_head FOR UPDATE")
        attempt = asyncio.create_task(store.append([packet(1), packet(2)], NOW))
        waiting = (
            "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%relay_append%'"
        )
        pid = await eventually(lambda: observer.fetchval(waiting))
        await sql.execute("SELECT pg_terminate_backend($1)", pid)
        with pytest.raises(StoreUnavailable):
            await attempt
    again = await store.append([packet(1), packet(2)], NOW)
    assert [place.outcome for place in again.dispositions] == [AppendOutcome.STORED] * 2
    assert [entry.sequence for entry in await everything(store)] == [FIRST, FIRST + 1, FIRST + 2]


async def test_an_append_that_was_cancelled_leaves_the_writer_usable(
    store, packet, sql, observer, eventually
):
    await store.append([packet(0)], NOW)
    async with sql.transaction():
        await sql.execute("SELECT FROM log_head FOR UPDATE")
        attempt = asyncio.create_task(store.append([packet(1)], NOW))
        waiting = (
            "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%relay_append%'"
        )
        await eventually(lambda: observer.fetchval(waiting))
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
    appended = await store.append([packet(2)], NOW)
    assert appended.dispositions[0].outcome is AppendOutcome.STORED
    sequences = [entry.sequence for entry in await everything(store)]
    assert sequences == list(range(FIRST, FIRST + len(sequences)))


async def test_a_log_that_does_not_answer_is_unavailable_in_time(database, packet, sql):
    async with await Store.open(database, append_timeout=0.2) as store, sql.transaction():
        await sql.execute("SELECT FROM log_head FOR UPDATE")
        with pytest.raises(StoreUnavailable):
            await store.append([packet(1)], NOW)


async def test_large_bodies_come_back_as_they_were(store, packet):
    bodies = [packet(n, size=size) for n, size in enumerate((1999, 2001, 9000, 300_000, 1_048_576))]
    await store.append(bodies, NOW)
    page = await store.page(LogQuery(), 10, NOW)
    assert [row.body for row in page.rows] == [new.body for new in bodies]


@pytest.mark.req("R-241")
@pytest.mark.parametrize("by_peer", [False, True])
async def test_an_act_of_trust_waits_for_those_of_its_author_that_others_have_committed(
    store, second_store, packet, by_peer
):
    async def act(store: Store, number: int, followed: int, type: str = "TRUST_EDGE", author: str = "did:a"):
        new = replace(packet(number, type=type, author=author), witnessed_at=NOW if by_peer else None)
        return (await store.append([packet(900 + number), new], NOW, followed)).dispositions[1].sequence

    first = await act(second_store, 1, 0)
    for number, type in ((2, "TRUST_EDGE"), (3, "TRUST_REVOCATION")):
        with pytest.raises(IdentitiesMoved) as moved:
            await act(store, number, first - 1, type)
        assert moved.value.sequence == first
    await act(store, 4, first - 1, "POST")
    await act(store, 5, first - 1, author="did:b")
    await act(store, 6, first)
    assert len(await store.tail(0, None, 10)) == 8


@pytest.mark.req("R-113", "R-114")
async def test_a_second_packet_with_the_same_equivalence_key_is_not_stored(store):
    key, other = bytes([9]) * 32, bytes([8]) * 32

    def keyed(number: int, key: bytes | None) -> NewPacket:
        return NewPacket(bytes([number]) * 32, "did:strata:a", "ATTESTATION", 5, None, b"{}", key)

    first = await store.append([keyed(1, key), keyed(2, key), keyed(3, None), keyed(1, key)], NOW)
    assert [place.outcome.value for place in first.dispositions] == [
        "stored",
        "duplicate",
        "stored",
        "duplicate",
    ]
    assert first.dispositions[1].duplicate_of == bytes([1]) * 32
    again = await store.append([keyed(4, key), keyed(5, other), keyed(3, None)], NOW + 100)
    assert [place.outcome.value for place in again.dispositions] == ["duplicate", "stored", "duplicate"]
    assert again.dispositions[0].duplicate_of == bytes([1]) * 32
    assert again.dispositions[2].duplicate_of is None
    assert again.dispositions[0].sequence == first.dispositions[0].sequence
    stored = await store.tail(0, None, 10)
    assert [entry.packet.packet_id[0] for entry in stored] == [1, 3, 5]
    assert await store.by_id(key, NOW) is None, "a key is no packet id"
    page = await store.page(LogQuery(packet_ids=frozenset([key, bytes([1]) * 32])), 10, NOW)
    assert [row.sequence for row in page.rows] == [stored[0].sequence]


@pytest.mark.req("R-113", "R-114")
@pytest.mark.parametrize("by_peer", [False, True])
async def test_the_key_of_an_expired_packet_goes_to_the_next_one(store, by_peer):
    key = bytes([9]) * 32

    def keyed(number: int, expires_at: int | None, witnessed_at: int | None = None) -> NewPacket:
        return NewPacket(
            bytes([number]) * 32,
            "did:strata:a",
            "DID_DOCUMENT",
            5,
            expires_at,
            b"{%d}" % number,
            key,
            witnessed_at=witnessed_at,
        )

    async def outcome(now: int, packet: NewPacket) -> tuple[str, bytes | None]:
        (place,) = (await store.append([packet], now)).dispositions
        return place.outcome.value, place.duplicate_of

    first, second = bytes([1]) * 32, bytes([2]) * 32
    assert await outcome(NOW, keyed(1, NOW + 10)) == ("stored", None)
    assert await outcome(NOW + 10, keyed(2, None)) == ("duplicate", first), "it is served until then"
    # A peer received the renewed one after the end of the first; this relay's clock is late.
    now, witness = (NOW + 10, NOW + 11) if by_peer else (NOW + 11, None)
    assert await outcome(now, keyed(2, None, witness)) == ("stored", None)
    assert await outcome(NOW + 12, keyed(3, None)) == ("duplicate", second)
    assert await outcome(NOW + 12, keyed(1, NOW + 10)) == ("duplicate", None), "its id stays known"
    found = await store.identities.by_key(key)
    assert found is not None and found.body == b"{2}"
    both = await store.append([keyed(4, NOW + 20), keyed(5, None)], NOW + 13)
    assert {place.duplicate_of for place in both.dispositions} == {second}


@pytest.mark.req("R-113")
async def test_the_key_of_an_erased_packet_stays_taken_and_no_packet_is_named(store):
    key = bytes([9]) * 32
    made = [NewPacket(bytes([n]) * 32, "did:strata:a", "ATTESTATION", 5, None, b"{}", key) for n in range(4)]
    await store.append([made[0]], NOW)
    subject = "0x" + made[0].packet_id.hex()
    await Eraser(store.url, Identity(bytes(32))).erase(
        SubjectKind.PACKET, [subject], reason="asked for", actor="ann", via="command", now=NOW
    )
    again = await store.append(made, NOW + 5)
    outcomes = [(place.outcome.value, place.duplicate_of) for place in again.dispositions]
    assert outcomes == [("duplicate", None), *[("erased", None)] * 3]
    assert len(await store.tail(0, None, 10)) == 1


async def test_whoever_asks_hears_which_process_commits_and_of_the_next_one(database, packet, sql):
    told: list[int] = []
    async with await Store.open(database, on_backend=told.append) as store:
        await store.append([packet(1)], NOW)
        assert told == [store._log.backend_pid]
        await sql.execute("SELECT pg_terminate_backend($1, 5000)", told[0])
        with contextlib.suppress(StoreUnavailable):  # it may have noticed by now
            await store.append([packet(2)], NOW)
        await store.append([packet(2)], NOW)
        assert told[1:] == [store._log.backend_pid] != told[:1]
