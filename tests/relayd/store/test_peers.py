"""Packets of peers in the log, and what the database stores about peers."""

from __future__ import annotations

import hashlib

import asyncpg
import pytest
import structlog
from msgspec.structs import replace

from relayd.federation.peers_file import Upstream
from relayd.federation.selection import stream_of
from relayd.store import AppendOutcome, LogQuery, Store
from relayd.store.peers import PeerComparison, PeerStore, register_peers
from relayd.store.types import PeerMark, StoreUnavailable

NOW = 1_790_000_000
HERE, THERE = ("did:strata:zA", "wss://a"), ("did:strata:zB", "wss://b")


@pytest.fixture
async def peers(database):
    numbers = await register_peers(database, [HERE, THERE])
    table = PeerStore(database)
    yield numbers, table
    await table.close()


async def told(store: Store, **query) -> list[tuple[bytes, int]]:
    page = await store.page(LogQuery(**query), 100, NOW)
    return [(row.body, row.received_at) for row in page.rows]


@pytest.mark.req("R-367")
async def test_an_import_keeps_the_time_of_the_first_relay_without_a_peer(store, packet):
    await store.append([replace(packet(1), witnessed_at=NOW - 5000)], NOW)
    [entry] = await store.tail(0, None, 10)
    assert (entry.received_at, entry.told_at, entry.packet.ingest_peer) == (NOW, NOW - 5000, None)


@pytest.mark.req("R-367", "R-375")
async def test_a_packet_of_a_peer_keeps_its_witness_and_its_peer(store, packet, peers):
    numbers, _ = peers
    peer = numbers[HERE[0]]
    ours, theirs = packet(1), replace(packet(2), witnessed_at=NOW - 5000, ingest_peer=peer)
    appended = await store.append([ours, theirs], NOW)
    assert [place.received_at for place in appended.dispositions] == [NOW, NOW]
    one, two = await store.tail(0, None, 10)
    assert (one.told_at, two.told_at, two.received_at) == (NOW, NOW - 5000, NOW)
    assert (two.packet.witnessed_at, two.packet.ingest_peer) == (NOW - 5000, peer)
    assert await told(store) == [(ours.body, NOW), (theirs.body, NOW - 5000)]
    assert await told(store, not_peers=frozenset({peer})) == [(ours.body, NOW)]
    # Time ranges, cursors and retention go by the time of arrival here.
    assert len(await told(store, received_since=NOW)) == 2
    found = await store.find([theirs.packet_id])
    assert found[theirs.packet_id][1] == NOW - 5000


@pytest.mark.req("R-368")
async def test_the_earliest_witness_counts_and_never_a_later_one(store, packet, peers):
    numbers, _ = peers
    plain, keys = packet(1), replace(packet(2), content_type="KEY_EVENT")
    await store.append([plain, keys], NOW)
    for witness, shown in [(NOW - 10, NOW - 10), (NOW - 5, NOW - 10), (NOW - 20, NOW - 20)]:
        again = [replace(each, witnessed_at=witness, ingest_peer=numbers[HERE[0]]) for each in (plain, keys)]
        places = (await store.append(again, NOW + 1)).dispositions
        assert {place.outcome for place in places} == {AppendOutcome.DUPLICATE}
        # An identity packet keeps the time with which its author's chain was built.
        assert [at for _, at in await told(store)] == [shown, NOW]


@pytest.mark.req("R-364")
async def test_how_far_a_peer_was_read_is_stored_with_the_packets(store, packet, peers):
    numbers, table = peers
    peer = numbers[HERE[0]]
    assert await table.take_lead()
    fence = next(row.fence for row in await table.rows() if row.peer_id == peer)
    theirs = replace(packet(1), witnessed_at=NOW - 50, ingest_peer=peer)
    await store.append([theirs], NOW, None, [PeerMark(peer, fence, "all", "c1", NOW - 50)])
    assert await table.place(peer, "all") == ("c1", NOW - 50)
    # Without a packet, as for refused packets; the last time only grows.
    await store.append([], NOW, None, [PeerMark(peer, fence, "all", "c2", NOW - 90)])
    assert await table.place(peer, "all") == ("c2", NOW - 50)
    # A former holder of the link changes nothing.
    await store.append([packet(2)], NOW, None, [PeerMark(peer, fence - 1, "all", "old", 1)])
    assert (await table.place(peer, "all")).cursor == "c2"
    assert (await table.place(peer, "types\nPOST\nauthors")).cursor is None


@pytest.mark.req("R-364")
async def test_how_far_a_peer_was_read_is_stored_for_any_selection(store, packet, peers):
    numbers, table = peers
    peer = numbers[HERE[0]]
    assert await table.take_lead()
    fence = next(row.fence for row in await table.rows() if row.peer_id == peer)
    authors = tuple(f"did:strata:z{hashlib.sha256(bytes([n])).hexdigest()}" for n in range(200))
    odd = ("PO\0ST",)
    streams = [
        stream_of(Upstream(url="wss://a", relay_id=HERE[0], types=types, authors=some))
        for types in ((), odd)
        for some in (authors, authors[:-1], authors[:1])
    ]
    for number, stream in enumerate(streams):
        await store.append([packet(number)], NOW, None, [PeerMark(peer, fence, stream, f"c{number}", NOW)])
    cursors = [(await table.place(peer, stream)).cursor for stream in streams]
    assert cursors == ["c0", "c1", "c2", "c3", "c4", "c5"]


async def test_a_mark_that_cannot_be_stored_fails_no_packet(store, packet, peers):
    numbers, table = peers
    peer = numbers[HERE[0]]
    assert await table.take_lead()
    fence = next(row.fence for row in await table.rows() if row.peer_id == peer)
    marks = [PeerMark(peer, fence, "all", "no\0cursor", NOW)]
    with structlog.testing.capture_logs() as lines:
        appended = await store.append([packet(1)], NOW, None, marks)
    assert [place.outcome for place in appended.dispositions] == [AppendOutcome.STORED]
    assert [line["event"] for line in lines] == ["peer_marks_refused"]
    assert (await table.place(peer, "all")).cursor is None


async def test_one_process_reads_from_peers_and_the_next_when_it_is_gone(database, peers):
    _, first = peers
    second = PeerStore(database)
    assert not await second.is_led()
    assert await first.take_lead()
    assert not await second.take_lead()
    assert await second.is_led()
    before = [row.fence for row in await first.rows()]
    await first.close()
    assert await second.take_lead()
    assert [row.fence for row in await second.rows()] == [fence + 1 for fence in before]
    await second.close()


async def test_whoever_has_lost_the_connection_leads_no_more_whoever_notices_first(database, peers):
    numbers, table = peers
    assert await table.take_lead()
    killer = await asyncpg.connect(database)
    await killer.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
        " WHERE application_name = 'relayd peers'"
    )
    await killer.close()
    with pytest.raises(StoreUnavailable):  # a link that reports its state, and continues
        await table.report(numbers[HERE[0]], "disconnected", None, NOW)
    other = PeerStore(database)
    assert await other.take_lead()
    with pytest.raises(StoreUnavailable):
        await table.rows()
    await table.close()
    assert not await table.take_lead()
    await other.close()


async def test_a_database_that_says_nothing_is_lost_in_time(database, peers):
    numbers, _ = peers
    table = PeerStore(database, answer_timeout=0.2)
    assert await table.take_lead()
    blocker = await asyncpg.connect(database)
    try:
        async with blocker.transaction():
            await blocker.execute("LOCK TABLE peers")
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    await table.rows()
    finally:
        await blocker.close()
    await table.close()
    assert [row.peer_id for row in await table.rows()] == sorted(numbers.values())
    await table.close()


async def test_what_an_operator_does(store, peers):
    numbers, table = peers
    peer, did = numbers[HERE[0]], HERE[0]
    assert await table.pause(did, True)
    assert await table.keep_conduct(peer, 2, 1, NOW, '{"a": 1}', follows=False)
    await table.report(peer, "disconnected", "x" * 9999, NOW)
    await table.skip(peer, [(bytes([n]) * 32, NOW + n, "policy_rejected") for n in range(9)], 4)
    await table.skip(peer, [], 4)
    row = next(row for row in await table.rows(counted=True) if row.peer_id == peer)
    assert (row.paused, row.offences, row.barred_until, row.state) == (True, 2, NOW, "disconnected")
    assert (row.has_conduct, await table.conduct(peer)) == (True, '{"a": 1}')
    assert (len(row.problem or ""), row.skipped) == (500, 4)
    assert {each.skipped for each in await table.rows()} == {0}, "looked at each second, they are not counted"
    assert await table.pause(did, False)
    assert await table.forgive(did)
    # A process that did not know of that overwrites nothing.
    assert not await table.keep_conduct(peer, 2, 1, NOW, "{}", follows=True)
    assert await table.conduct(peer) is None
    await store.append([], NOW, None, [PeerMark(peer, row.fence, "all", "c", 1)])
    assert await table.reset_cursor(did)
    assert (await table.place(peer, "all")).cursor is None
    after = next(row for row in await table.rows() if row.peer_id == peer)
    assert (after.paused, after.offences, after.fence) == (False, 0, row.fence + 1)
    assert not await table.forgive("did:strata:zNobody")


async def test_a_peers_own_words_are_kept_without_what_no_text_here_may_have(peers):
    """Otherwise they could not be stored, and reading from all peers would end with that."""
    numbers, table = peers
    peer = numbers[HERE[0]]
    await table.report(peer, "disconnected", "no\0thing \x1b[2J", NOW)
    told = next(row.problem for row in await table.rows() if row.peer_id == peer)
    assert told == "no\ufffdthing \ufffd[2J"  # nor can it control the terminal that shows it
    await table.compared(peer, {"problem": "no\0thing", "brought": 0}, done=None, equal_at=None)
    assert (await table.comparisons())[peer].found == {"problem": "no\ufffdthing", "brought": 0}


async def test_one_comparison_answers_requests_that_wait_together_and_covers_what_each_asks(peers):
    numbers, table = peers
    peer = numbers[HERE[0]]

    async def since(*asked: int | None) -> int | None:
        for each in asked:
            number = await table.ask_comparison(HERE[0], each)
        found: PeerComparison = (await table.comparisons())[peer]
        assert found.asked == number
        await table.compared(peer, {}, done=number, equal_at=None)
        return found.asked_since

    assert await since(NOW) == NOW
    assert await since(NOW - 9, NOW) == NOW - 9
    assert await since(None, NOW) is None
    assert await since(NOW, None) is None
    assert await since(NOW) == NOW
