"""Pages: the SQL of every shape of query against a filter that is easy to read, and the query plans."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata.protocol.sequences import DAY_SECONDS

from relayd.store import LogPage, LogQuery, NewPacket, Store, StoredPacket
from relayd.store.declined import covers
from relayd.store.queries import page_statement, ways
from relayd.store.types import Declined, Gone, LogEntry

NOW = 1_790_000_000
AUTHORS = [f"did:strata:{name}" for name in ("alice", "bob", "carol", "dave")]
TYPES = ["TEXT", "MEDIA", "", "a\0b"]
START = NOW - 4 * DAY_SECONDS
IDS = [bytes([n]) * 32 for n in range(250)]
HASHES = ["0x" + digit * 64 for digit in "0af"]
BODIES = [
    *(b"b" * size for size in (0, 1, 40, 900, 5000)),
    *(b'{"content":{"media":[{"media_hash":"%b"}],"text":"\xc3\xa9"}}' % hash_.encode() for hash_ in HASHES),
    b'{"content":{"media":[{"media_hash":"%b"},{"media_hash":"%b"}]}}'
    % (HASHES[0].encode(), HASHES[1].encode()),
    # Not a member, but text that looks like one; and hashes of something else.
    b'{"content":{"text":"\\"media_hash\\":\\"%b\\""}}' % HASHES[0].encode(),
    b'{"provenance_header":{"genesis_media_hash":"%b"}}' % HASHES[0].encode(),
]


def make_log() -> list[tuple[int, NewPacket]]:
    """Packets with their times of receipt: four days, unevenly, many in one second."""
    chance = random.Random(7)
    log, received_at = [], START
    for n in range(200):
        received_at += chance.choice([0, 0, 0, 1, 60, 7000])
        log.append(
            (
                received_at,
                NewPacket(
                    IDS[n],
                    chance.choice(AUTHORS),
                    chance.choice(TYPES),
                    # As admission permits: at most 300 s ahead, up to a day behind.
                    received_at - chance.choice([-300, -299, 0, 5, 3600, 86_400]),
                    chance.choice([None, None, None, received_at + 10_000, NOW - 1, NOW, NOW + 1]),
                    chance.choice(BODIES),
                    annotation=chance.choice([None, None, b"found"]),
                ),
            )
        )
    return log


LOG = make_log()


def matches(packet: NewPacket, sequence: int, received_at: int, query: LogQuery, now: int) -> bool:
    checks = [
        packet.expires_at is None or now <= packet.expires_at,
        query.after < sequence,
        query.up_to is None or sequence <= query.up_to,
        not query.authors or packet.author_id in query.authors,
        not query.types or packet.content_type in query.types,
        not query.packet_ids or packet.packet_id in query.packet_ids,
        query.since is None or packet.timestamp >= query.since,
        query.until is None or packet.timestamp <= query.until,
        query.received_since is None or received_at >= query.received_since,
        query.received_until is None or received_at <= query.received_until,
    ]
    return all(checks)


def naive_page(
    stored: list[tuple[int, int, NewPacket]], query: LogQuery, limit: int, now: int, max_bytes: int
) -> list[StoredPacket]:
    found = [row for row in stored if matches(row[2], row[0], row[1], query, now)]
    found.sort(key=lambda row: row[0], reverse=not query.ascending)
    page: list[StoredPacket] = []
    for sequence, received_at, packet in found[:limit]:
        if sum(len(row.body) for row in page) >= max_bytes:
            break
        page.append(StoredPacket(sequence, received_at, packet.body, packet.annotation))
    return page


def is_declined(packet: NewPacket, declined: Declined) -> bool:
    def hashes(value: object) -> set[str]:
        if isinstance(value, dict):
            own = {value["media_hash"]} if "media_hash" in value else set()
            return own.union(*(hashes(member) for member in value.values()))
        return set().union(*(hashes(member) for member in value)) if isinstance(value, list) else set()

    return (
        packet.author_id in declined.authors
        or packet.content_type in declined.types
        or packet.packet_id in declined.packet_ids
        or bool(packet.body.startswith(b"{") and hashes(json.loads(packet.body)) & declined.media_hashes)
    )


async def fill(store: Store) -> list[tuple[int, int, NewPacket]]:
    stored = []
    for received_at, group in itertools.groupby(LOG, key=lambda item: item[0]):
        packets = [packet for _, packet in group]
        appended = await store.append(packets, received_at)
        stored += [
            (place.sequence, place.received_at, packet)
            for place, packet in zip(appended.dispositions, packets, strict=True)
        ]
    return stored


times = st.integers(START - 400, NOW + 400) | st.sampled_from([0, -(2**53) + 1, 2**53 - 1]) | st.sampled_from(
    [t + d for t, _ in LOG[::17] for d in (-300, -1, 0, 1)]
)  # fmt: skip


@st.composite
def queries(draw: st.DrawFn, sequences: list[int]) -> LogQuery:
    def maybe(strategy):
        return draw(st.none() | st.none() | strategy)

    places = st.sampled_from(sequences) | st.sampled_from([0, sequences[-1] + 10])
    return LogQuery(
        after=draw(st.just(0) | places),
        up_to=maybe(places),
        ascending=draw(st.booleans()),
        authors=frozenset(maybe(st.sets(st.sampled_from([*AUTHORS, "nobody"]))) or ()),
        types=frozenset(maybe(st.sets(st.sampled_from([*TYPES, "NONE"]))) or ()),
        packet_ids=frozenset(maybe(st.sets(st.sampled_from(IDS))) or ()),
        since=maybe(times),
        until=maybe(times),
        received_since=maybe(times),
        received_until=maybe(times),
    )


@pytest.mark.req("R-100", "R-103", "R-152", "R-302", "R-303", "R-304", "R-305", "R-306")
def test_every_query_gives_what_a_plain_filter_gives(database):
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        store = runner.run(Store.open(database))
        stored = runner.run(fill(store))
        sequences = [row[0] for row in stored]

        @settings(max_examples=400, deadline=None)
        @given(
            query=queries(sequences),
            limit=st.integers(1, 30) | st.just(500),
            now=st.sampled_from([START, NOW - 1, NOW, NOW + 1, NOW + 2]),
            max_bytes=st.sampled_from([1, 900, 6000, 2**22]),
        )
        def check(query: LogQuery, limit: int, now: int, max_bytes: int) -> None:
            expected = naive_page(stored, query, limit, now, max_bytes)
            page = runner.run(store.page(query, limit, now, max_bytes))
            assert page.rows == expected
            # `exhausted` may be reported only when nothing is left, and must be at the end.
            everything = naive_page(stored, query, len(stored), now, 2**40)
            assert not page.exhausted or len(expected) == len(everything)
            assert expected or page.exhausted

        try:
            check()
        finally:
            runner.run(store.close())


def some(values: list) -> st.SearchStrategy[frozenset]:
    return st.just(frozenset()) | st.frozensets(st.sampled_from(values), max_size=20)


ALL_DECLINED = st.builds(
    Declined,
    authors=some([*AUTHORS, "nobody", "x" * 600]),
    types=some([*TYPES, "NONE"]),
    packet_ids=some(IDS),
    media_hashes=some([*HASHES, "0x" + "1" * 64]),
)


@pytest.mark.req("R-323")
def test_what_is_declined_is_in_no_page_and_under_no_id(database):
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        store = runner.run(Store.open(database))
        stored = runner.run(fill(store))

        @settings(max_examples=200, deadline=None)
        @given(
            query=queries([row[0] for row in stored]),
            limit=st.integers(1, 30) | st.just(500),
            declined=ALL_DECLINED,
            which=st.sampled_from(stored),
        )
        def check(query: LogQuery, limit: int, declined: Declined, which: tuple[int, int, NewPacket]) -> None:
            served = [row for row in stored if not is_declined(row[2], declined)]
            store.declined = declined
            page = runner.run(store.page(query, limit, START))
            assert page.rows == naive_page(served, query, limit, START, 2**40)
            sequence, received_at, packet = which
            found = runner.run(store.by_id(packet.packet_id, START))
            assert isinstance(found, StoredPacket if which in served else Gone)
            assert covers(declined, packet) is (which not in served)
            [entry] = runner.run(store.tail(sequence - 1, sequence, 1))
            assert entry == LogEntry(sequence, received_at, packet), "the feed and backups see everything"

        try:
            check()
        finally:
            runner.run(store.close())


@pytest.mark.req("R-323")
async def test_a_page_under_way_when_policy_changes_is_read_anew(store, sql, observer, eventually):
    stored = await fill(store)
    reading_now = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'relayd pages' AND state = 'active'"
    )
    await sql.execute("BEGIN")
    await sql.execute("LOCK TABLE packets IN ACCESS EXCLUSIVE MODE")
    reading = asyncio.create_task(store.page(LogQuery(), 500, START))
    await eventually(lambda: observer.fetchval(reading_now))
    store.declined = Declined(authors=frozenset(AUTHORS[:2]))
    await sql.execute("ROLLBACK")
    rows = (await reading).rows
    assert [row.sequence for row in rows] == [row[0] for row in stored if row[2].author_id in AUTHORS[2:]]


@pytest.mark.req("R-154", "R-306")
@pytest.mark.parametrize("ascending", [True, False])
async def test_walking_all_pages_yields_everything_once(store, ascending):
    stored = await fill(store)
    walked, after, up_to = [], 0, None
    while True:
        query = LogQuery(after=after, up_to=up_to, ascending=ascending, authors=frozenset(AUTHORS))
        page = await store.page(query, 7, START)
        walked += [row.sequence for row in page.rows]
        if page.exhausted:
            break
        if ascending:
            after = walked[-1]
        else:
            up_to = walked[-1] - 1
    expected = [row[0] for row in stored if row[2].expires_at is None or row[2].expires_at >= START]
    assert walked == (expected if ascending else expected[::-1])


@pytest.mark.req("R-152")
async def test_a_thousand_packets_of_one_second_page_completely(store, packet):
    for start in range(0, 1000, 250):
        await store.append([packet(n) for n in range(start, start + 250)], NOW)
    walked, after = [], 0
    while page := (await store.page(LogQuery(after=after), 33, NOW)).rows:
        walked += [row.body for row in page]
        after = page[-1].sequence
    assert walked == [packet(n).body for n in range(1000)]


async def test_a_page_stops_at_its_size_but_never_before_the_first_row(store, packet):
    await store.append([packet(n, size=1000) for n in range(10)], NOW)
    sizes = (1, 1000, 1001, 9000, 9001)
    pages = [await store.page(LogQuery(), 10, NOW, size) for size in sizes]
    assert [len(page.rows) for page in pages] == [1, 1, 2, 9, 10]


async def test_very_many_values_make_pages_shorter_not_wrong(store, packet):
    await store.append([packet(n, author=f"did:strata:{n % 900}") for n in range(3000)], NOW)
    query = LogQuery(authors=frozenset(f"did:strata:{n}" for n in range(800)))
    walked, after = [], 0
    while True:
        page = await store.page(LogQuery(after=after, authors=query.authors), 500, NOW)
        walked += [row.body for row in page.rows]
        if page.exhausted:
            break
        after = page.rows[-1].sequence
    assert walked == [packet(n).body for n in range(3000) if n % 900 < 800]


async def test_an_unsettled_bound_is_not_remembered(store, packet):
    """With `received_until` in the present, later packets within the bound must still be found."""
    await store.append([packet(1)], NOW)
    query = LogQuery(received_until=NOW + 10)
    assert len((await store.page(query, 10, NOW)).rows) == 1
    await store.append([packet(2)], NOW + 5)
    await store.append([packet(3)], NOW + 10)
    await store.append([packet(4)], NOW + 11)
    assert len((await store.page(query, 10, NOW)).rows) == 3
    await store.append([packet(5)], NOW + 12)
    assert len((await store.page(query, 10, NOW)).rows) == 3


@pytest.fixture(scope="module")
def varied(server, packet) -> Iterator[str]:
    """Five thousand packets of fifty authors and ten types, never changed."""
    name = f"relayd_varied_{os.getpid()}"
    server.execute(f"CREATE DATABASE {name} TEMPLATE {server.template}")

    async def fill() -> None:
        async with await Store.open(server.url_of(name)) as store:
            for start in range(0, 5000, 500):
                batch = [
                    packet(
                        n,
                        author=f"did:strata:{n % 50}",
                        type=f"T{n % 10}",
                        timestamp=NOW - 40 + n // 100,
                        size=400,
                    )
                    for n in range(start, start + 500)
                ]
                await store.append(batch, NOW)

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(fill())
    server.execute_in(name, "ANALYZE packets")  # as autovacuum does once a minute
    yield server.url_of(name)
    server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.req("R-302", "R-303", "R-304", "R-300")
@pytest.mark.parametrize(
    ("query", "index"),
    [
        (LogQuery(), "packets_d20717_pkey"),
        (LogQuery(ascending=False), "packets_d20717_pkey"),
        (LogQuery(authors=frozenset(["did:strata:3"])), "packets_d20717_author_id_sequence_idx"),
        (
            LogQuery(authors=frozenset(["did:strata:3", "did:strata:4"])),
            "packets_d20717_author_id_sequence_idx",
        ),
        (LogQuery(types=frozenset(["T3"])), "packets_d20717_content_type_sequence_idx"),
        (LogQuery(types=frozenset(["T3", "T4"])), "packets_d20717_content_type_sequence_idx"),
        (LogQuery(packet_ids=frozenset([b"x" * 32])), "packet_ids_d20717_d20747_id"),
        # Not a bitmap of all matches and of pages without a summary, but a bounded number of rows in order.
        (LogQuery(until=NOW - 1_000_000, ascending=False), "packets_d20717_pkey"),
        (LogQuery(since=NOW + 295), "packets_d20717_pkey"),
    ],
    ids=["all", "descending", "author", "authors", "type", "types", "id", "until", "since"],
)
async def test_every_shape_uses_its_index(varied, query, index):
    async with await Store.open(varied) as store, store._reader._pages.lease() as connection:
        text, parameters = page_statement(query, 100, NOW, 2**22, 0, None)
        plan = "\n".join(row[0] for row in await connection.fetch("EXPLAIN " + text, *parameters))
    assert index in plan
    assert "Seq Scan on packets_d" not in plan


@pytest.mark.req("R-152", "R-306")
def test_a_search_cut_short_at_its_cost_goes_on_where_it_stopped(database):
    """Pages that may examine only a few rows: however they are cut, walking them yields everything once."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        store = runner.run(Store.open(database))
        stored = runner.run(fill(store))

        @settings(max_examples=80, deadline=None)
        @given(
            query=queries([row[0] for row in stored]),
            limit=st.integers(1, 30) | st.just(500),
            candidates=st.integers(1, 40),
            max_bytes=st.sampled_from([900, 2**22]),
            many=st.booleans(),
        )
        def check(query: LogQuery, limit: int, candidates: int, max_bytes: int, many: bool) -> None:
            if many and query.authors:  # so many that the log itself is read first
                query = replace(query, authors=query.authors | {f"nobody {n}" for n in range(64)})
            expected = naive_page(stored, query, len(stored), START, 2**40)
            walked: list[StoredPacket] = []
            while True:
                page = runner.run(store.page(query, limit, START, max_bytes, candidates))
                assert len(page.rows) <= limit
                walked += page.rows
                if page.exhausted:
                    break
                reached = page.rows[-1].sequence if page.reached is None else page.reached
                before = query
                if query.ascending:
                    query = replace(query, after=reached)
                else:
                    query = replace(query, up_to=reached - 1)
                assert query != before, "every page gets further"
            assert walked == expected

        try:
            check()
        finally:
            runner.run(store.close())


@pytest.mark.parametrize(
    "query",
    [
        LogQuery(authors=frozenset(f"did:{n}" for n in range(1000))),
        LogQuery(types=frozenset(f"T{n}" for n in range(1000)), authors=frozenset(["did:a", "did:b"])),
        LogQuery(packet_ids=frozenset(n.to_bytes(32, "big") for n in range(500))),
    ],
    ids=["authors", "types", "ids"],
)
def test_many_values_travel_as_one(query):
    """The driver inspects each element of an array twice: milliseconds of the loop for a thousand."""
    for way in ways(query):
        _, parameters = page_statement(query, 500, NOW, 2**22, 0, None, way=way)
        assert not any(isinstance(value, list) for value in parameters)


ROWS = 30_000


@pytest.fixture(scope="module")
def crowded(server) -> Iterator[str]:
    """Half of the log is of one author and its own type; a thousand others share two types."""
    name = f"relayd_crowded_{os.getpid()}"
    server.execute(f"CREATE DATABASE {name} TEMPLATE {server.template}")
    day = NOW // DAY_SECONDS
    server.execute_in(
        name,
        f"""
        SELECT relay_add_day({day});
        INSERT INTO packets
            (sequence, received_at, "timestamp", expires_at, packet_id, author_id, content_type, body)
        SELECT ({day}::bigint << 32) + n, {NOW}, {NOW}, CASE WHEN n % 2 = 0 THEN {NOW} END,
            sha256(n::text::bytea),
            convert_to(CASE WHEN n % 2 = 0 THEN 'prolific' ELSE 'quiet ' || n / 2 % 1000 END, 'UTF8'),
            convert_to(CASE WHEN n % 2 = 0 THEN 'A' WHEN n % 4 = 1 THEN 'B' ELSE 'C' END, 'UTF8'),
            convert_to(repeat('x', 100), 'UTF8')
        FROM generate_series(1, {ROWS}) AS n;
        UPDATE log_head SET last_sequence = ({day}::bigint << 32) + {ROWS}, last_received_at = {NOW};
        ANALYZE packets;
        """,
    )
    yield server.url_of(name)
    server.execute(f"DROP DATABASE {name} WITH (FORCE)")


QUIET = frozenset(f"quiet {n}" for n in range(1000))


@pytest.mark.req("R-321")
@pytest.mark.parametrize(
    "query",
    [
        LogQuery(authors=QUIET),
        LogQuery(authors=QUIET, types=frozenset(["A"])),
        LogQuery(authors=frozenset(["prolific"]), types=frozenset(["B"])),
        LogQuery(authors=frozenset(["prolific"]), types=frozenset(["B", "C"])),
        LogQuery(authors=frozenset(["prolific", "quiet 1"]), types=frozenset(["NONE"])),
        LogQuery(types=frozenset(["A"]), until=1),
        LogQuery(until=1),
        LogQuery(received_until=1, received_since=0),
        LogQuery(types=frozenset(f"type {n}" for n in range(1000))),
    ],
    ids=lambda query: "+".join(
        f.name for f in fields(query) if getattr(query, f.name) not in (None, frozenset())
    ),
)
@pytest.mark.parametrize("ascending", [True, False])
@pytest.mark.parametrize("expired", [True, False], ids=["half expired", "none expired"])
async def test_no_statement_looks_at_more_rows_than_it_may(crowded, query, ascending, expired):
    """A reader chooses the query, but never the cost of a statement: rows counted by PostgreSQL itself."""
    candidates, now = 1000, NOW + expired
    query = replace(query, ascending=ascending)
    async with await Store.open(crowded) as store, store._reader._pages.lease() as connection:
        for way in ways(query):
            text, parameters = page_statement(query, 500, now, 2**22, 0, None, way=way, candidates=candidates)
            plan = await connection.fetchval("EXPLAIN (ANALYZE, FORMAT JSON) " + text, *parameters)
            read = sum(rows_read(json.loads(plan)[0]["Plan"]))
            values = max(len(query.authors), len(query.types))
            # With very many values, each is looked up at least twice, and once more to see if there are more.
            assert read <= max(candidates + 1, candidates // 2 + values, 3 * values)


def rows_read(node: dict[str, Any]) -> Iterator[float]:
    """The rows that the scans of a plan have fetched, including discarded ones."""
    if "packets" in node.get("Relation Name", ""):
        looked_at = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
        yield node["Actual Loops"] * (looked_at + node.get("Rows Removed by Index Recheck", 0))
    for child in node.get("Plans", ()):
        yield from rows_read(child)


@pytest.mark.req("R-304")
async def test_a_bound_on_time_leaves_out_the_days_before_it(store, packet, sql):
    for day in range(5):
        await store.append([packet(day)], NOW + day * DAY_SECONDS)
    position = await sql.fetchval("SELECT relay_position($1)", NOW + 3 * DAY_SECONDS - 300)
    text, parameters = page_statement(LogQuery(since=NOW + 3 * DAY_SECONDS), 10, NOW, 2**22, position, None)
    plan = "\n".join(row[0] for row in await sql.fetch("EXPLAIN " + text, *parameters))
    scanned = {day for day in range(5) if f"packets_d{NOW // DAY_SECONDS + day}" in plan}
    assert scanned == {3, 4}


async def test_positions_agree_with_the_rows(store, sql):
    stored = await fill(store)
    for time in {t + d for _, t, _ in stored for d in (-1, 0, 1)} | {0, START - 10**6, NOW + 10**6}:
        position = await sql.fetchval("SELECT relay_position($1)", time)
        assert all((received_at < time) == (sequence <= position) for sequence, received_at, _ in stored)


async def test_an_empty_log_has_empty_pages(store):
    assert await store.page(LogQuery(), 10, NOW) == LogPage([], exhausted=True)
    assert await store.page(LogQuery(received_since=5, received_until=NOW), 10, NOW) == ([], True, None)
    assert await store.tail(0, None, 10) == []
    assert await store.head() == 0
