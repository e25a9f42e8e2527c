"""Retrieving missed messages: by hint, by window, and on connecting (channel.md §8)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strata.channels.messaging.values import ConnectionStatus, NodeMessageReceived
from strata.channels.persistence import MemoryPersistence
from strata.channels.persistence.interface import Put
from strata.channels.persistence.records import QueryMark, read_records
from strata.channels.reliable import IrretrievableMessage
from strata.channels.reliable.catching_up import CatchingUp
from strata.channels.reliable.retrieval import ByHash, ByWindow, Retrieval
from strata.channels.sds import HistoryEntry, SdsMessage
from strata.protocol.errors import ConnectionFailed

from tests.support.scripted_node import (
    START_MS,
    Query,
    Reversing,
    ScriptedNode,
    elapsed,
    opened,
    said,
    settle,
)
from tests.support.virtual_time import virtually

DAY_MS = 86_400_000


def chain(node: ScriptedNode, length: int) -> list[SdsMessage]:
    """Store messages that each follow the previous one and hint at its hash."""
    made: list[SdsMessage] = []
    hint: bytes | None = None
    for n in range(length):
        follows = [HistoryEntry(made[-1].message_id, hint, "bob")] if made else []
        made.append(said(n, follows=follows))
        hint = node.packed(made[-1]).message_hash
    return made


# In the channel.


@pytest.mark.req("C-125", "C-162", "C-164", "C-166")
@virtually
async def test_a_gap_is_tracked_with_its_hint_and_closed_by_it() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, told):
        messages = chain(node, 3)
        hint = messages[2].causal_history[0].retrieval_hint
        event = node.stored.pop(hint or b"")
        await node.deliver(messages[0])
        await node.deliver(messages[2])
        (missing,) = channel.sync_status().missing
        assert (missing.message_id, missing.retrieval_hint, missing.sender_id) == ("bob-1", hint, "bob")
        await asyncio.sleep(1)
        assert node.fetches[0][1] == (hint,)
        assert told.payloads == [b"bob 0"]
        node.stored[event.message_hash] = event
        await asyncio.sleep(40)
        assert channel.sync_status().missing == ()
        assert told.payloads == [b"bob 0", b"bob 1", b"bob 2"]


@pytest.mark.req("C-166")
@virtually
async def test_what_arrives_by_another_way_is_not_asked_for_any_more() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, _):
        first = said(1)
        await node.deliver(said(2, follows=[HistoryEntry("bob-1", bytes(32), "bob")]))
        assert len(channel.sync_status().missing) == 1
        await node.deliver(first)
        assert channel.sync_status().missing == ()
        await asyncio.sleep(60)
        assert node.fetches == []


@pytest.mark.req("C-163")
@virtually
async def test_the_store_is_asked_again_at_the_given_frequency() -> None:
    node = ScriptedNode()
    async with opened(node, retrieve_frequency_ms=7_000, query_on_connect=False) as (_, _told):
        await node.deliver(said(2, follows=[HistoryEntry("bob-1", bytes(32), "bob")]))
        await asyncio.sleep(30)
        asked = sorted([at for at, _ in node.fetches] + [query.at for query in node.queries])
        # Soon after the gap is found, seven seconds later, then less often while nothing is found.
        assert [round(at) for at in asked] == [0, 7, 21]


@pytest.mark.req("C-163")
@virtually
async def test_gaps_that_come_one_after_the_other_are_asked_for_together() -> None:
    node = ScriptedNode()
    async with opened(node, retrieve_frequency_ms=7_000, query_on_connect=False) as (_, _told):
        for n in range(1, 6):
            await node.deliver(said(10 + n, follows=[HistoryEntry(f"bob-{n}", bytes([n]) * 32, "bob")]))
            await asyncio.sleep(1)
        await asyncio.sleep(5)
        # The first alone; the next query comes one retrieval interval later, and covers all the others.
        assert [round(at) for at, _ in node.fetches] == [0]
        assert [round(query.at) for query in node.queries] == [7]


@pytest.mark.req("C-163")
@virtually
async def test_with_a_frequency_of_zero_the_store_is_never_asked_for_a_gap() -> None:
    node = ScriptedNode()
    async with opened(node, retrieve_frequency_ms=0, query_on_connect=False) as (_, _told):
        await node.deliver(said(2, follows=[HistoryEntry("bob-1", bytes(32), "bob")]))
        await asyncio.sleep(600)
        assert node.fetches == [] and node.queries == []


@pytest.mark.req("C-164")
@virtually
async def test_without_a_hint_the_topic_is_read_through() -> None:
    node = ScriptedNode()
    async with opened(node, query_on_connect=False) as (_, told):
        first = said(1)
        node.pages = [[node.packed(said(9, sender="carol"))], [node.packed(first)], [node.packed(said(0))]]
        await node.deliver(said(2, follows=[HistoryEntry("bob-1", None, "bob")]))
        await asyncio.sleep(1)
        assert node.fetches == []
        (query,) = node.queries
        # It ends as soon as nothing is missing.
        assert query.pages == 2
        assert set(told.payloads) == {b"carol 9", b"bob 1", b"bob 2"}


@pytest.mark.req("C-164")
@virtually
async def test_a_hint_that_leads_nowhere_is_followed_by_reading_the_topic_through() -> None:
    node = ScriptedNode()
    async with opened(node, query_on_connect=False, retrieve_frequency_ms=5_000) as (_, told):
        node.pages = [[node.packed(said(1))]]
        await node.deliver(said(2, follows=[HistoryEntry("bob-1", bytes(32), "bob")]))
        await asyncio.sleep(20)
        assert len(node.fetches) == 1 and len(node.queries) == 1
        assert told.payloads == [b"bob 1", b"bob 2"]


@pytest.mark.req("C-164")
@virtually
async def test_a_hint_of_another_length_is_no_packet_id() -> None:
    node = ScriptedNode()
    async with opened(node, query_on_connect=False) as (_, _told):
        await node.deliver(said(2, follows=[HistoryEntry("bob-1", b"short", "bob")]))
        await asyncio.sleep(1)
        assert node.fetches == [] and len(node.queries) == 1


@pytest.mark.req("C-165")
@virtually
async def test_what_is_retrieved_goes_the_way_of_everything() -> None:
    node, hook = ScriptedNode(), Reversing()
    async with opened(node, encryption=hook, query_on_connect=False) as (channel, told):
        first = node.packed(hook.encrypt(said(1).encode()))
        garbage = node.packed(b"stored by somebody else")
        second = said(
            2,
            follows=[
                HistoryEntry("bob-1", first.message_hash, "bob"),
                HistoryEntry("bob-0", garbage.message_hash, "bob"),
            ],
        )
        await node.deliver(hook.encrypt(second.encode()))
        await asyncio.sleep(1)
        assert channel.log() == ["bob-1"] and told.payloads == [b"bob 1"]
        assert channel.statistics.sds.undecodable >= 1
        # The same message again, as from the store: it is delivered once.
        await node.deliver(first)
        assert told.payloads == [b"bob 1"]


@pytest.mark.req("C-167", "C-056")
@virtually
async def test_what_cannot_be_had_is_told() -> None:
    node = ScriptedNode()
    async with opened(node, lost_message_timeout_ms=60_000) as (_, told):
        await node.deliver(said(2, follows=[HistoryEntry("bob-1", bytes(32), "bob")]))
        await asyncio.sleep(50)
        assert told.of(IrretrievableMessage) == []
        await asyncio.sleep(30)
        assert [event.message_id for event in told.of(IrretrievableMessage)] == ["bob-1"]
        asked = len(node.fetches) + len(node.queries)
        await asyncio.sleep(600)
        assert len(node.fetches) + len(node.queries) == asked


@pytest.mark.req("C-168")
@virtually
async def test_a_gap_of_a_hundred_messages_is_chased_to_its_end() -> None:
    node = ScriptedNode()
    async with opened(node, query_on_connect=False) as (channel, told):
        messages = chain(node, 102)
        newest_first = list(node.stored.values())[::-1]
        node.pages = [newest_first[start : start + 20] for start in range(0, 102, 20)]
        await node.deliver(messages[0])
        await node.deliver(messages[101])
        await asyncio.sleep(30)
        assert told.payloads == [f"bob {n}".encode() for n in range(102)]
        assert channel.sync_status().missing == ()
        # Bounded: not one query for each of them.
        assert len(node.fetches) + len(node.queries) <= 10


@pytest.mark.req("C-168")
@virtually
async def test_hints_alone_close_a_gap_too_when_each_answer_brings_something() -> None:
    node = ScriptedNode()
    async with opened(node, query_on_connect=False) as (_, told):
        messages = chain(node, 5)
        await node.deliver(messages[0])
        await node.deliver(messages[4])
        await asyncio.sleep(1)  # far less than the ten seconds between fruitless queries
        assert told.payloads == [f"bob {n}".encode() for n in range(5)]
        assert [len(hashes) for _, hashes in node.fetches] == [1, 1, 1] and node.queries == []


@pytest.mark.req("C-169", "C-174")
@virtually
async def test_what_was_missed_while_away_is_fetched_at_the_start() -> None:
    node = ScriptedNode()
    first = said(1)
    node.pages = [[node.packed(said(2, follows=[first])), node.packed(first)]]
    async with opened(node) as (_, told):
        assert len(node.queries) == 1 and told.payloads == [b"bob 1", b"bob 2"]


@pytest.mark.req("C-169")
@virtually
async def test_a_store_that_becomes_available_is_asked_then() -> None:
    node = ScriptedNode()
    await node.disconnect()
    node.pages = [[node.packed(said(1))]]
    async with opened(node) as (_, told):
        await asyncio.sleep(60)
        assert node.queries == []
        await node.reconnect()
        await settle()
        assert len(node.queries) == 1 and told.payloads == [b"bob 1"]


@pytest.mark.req("C-169")
@virtually
async def test_a_store_that_fails_is_asked_again() -> None:
    node = ScriptedNode(store_error=ConnectionFailed("away"))
    async with opened(node) as (channel, told):
        await asyncio.sleep(1)
        assert len(node.queries) == 1 and channel.statistics.retrievals_failed == 1
        node.store_error = None
        node.pages = [[node.packed(said(1))]]
        await asyncio.sleep(10)
        assert len(node.queries) == 2 and told.payloads == [b"bob 1"]


@pytest.mark.req("C-169", "C-170")
@pytest.mark.parametrize("away", [1, 60, 240, 360])
@virtually
async def test_every_reconnection_after_being_offline_asks_for_what_was_missed(away: int) -> None:
    node = ScriptedNode()
    async with opened(node) as (_, told):
        assert len(node.queries) == 1
        await node.disconnect()
        await asyncio.sleep(away)
        node.pages = [[node.packed(said(1))]]
        await node.reconnect()
        await settle()
        assert len(node.queries) == 2 and told.payloads == [b"bob 1"]
        await node.set_status(ConnectionStatus.PARTIALLY_CONNECTED)
        await node.reconnect()
        await settle()
        assert len(node.queries) == 2, "it was not offline"


@pytest.mark.req("C-169")
@virtually
async def test_a_query_after_a_reconnection_that_fails_is_made_again() -> None:
    node = ScriptedNode()
    async with opened(node):
        await node.disconnect()
        await asyncio.sleep(10)
        node.store_error = ConnectionFailed("away")
        await node.reconnect()
        await asyncio.sleep(1)
        asked = len(node.queries)
        assert asked == 2
        node.store_error = None
        await asyncio.sleep(10)
        assert len(node.queries) == asked + 1


@pytest.mark.req("C-170")
def test_the_threshold_of_a_store_that_becomes_available_can_be_set() -> None:
    catching_up = CatchingUp(enabled=True, threshold_ms=10_000, window_ms=DAY_MS)
    assert catching_up.is_due(0)
    catching_up.begin(0)
    catching_up.succeeded(0, 0)
    assert not catching_up.is_due(9_000) and catching_up.is_due(11_000)
    catching_up.offline()
    assert catching_up.is_due(1)


def test_a_clock_that_is_set_back_during_a_reading_delays_no_retry() -> None:
    catching_up = CatchingUp(enabled=True, threshold_ms=10_000, window_ms=DAY_MS)
    catching_up.begin(START_MS)
    catching_up.missed(stored=True)
    now = START_MS - 3_600_000
    catching_up.clock_stepped(-3_600_000)
    catching_up.succeeded(START_MS, now, progress=False)
    assert not catching_up.is_due(now) and catching_up.is_due(now + 20_000)


@pytest.mark.req("C-169")
@virtually
async def test_without_query_on_connect_the_history_is_left_alone() -> None:
    node = ScriptedNode()
    async with opened(node, query_on_connect=False):
        await asyncio.sleep(3600)
        assert node.queries == []


def own_page(node: ScriptedNode, n: int, *, follows: bool) -> list[NodeMessageReceived]:
    return [node.packed(said(n, follows=[HistoryEntry("bob-0", None, "bob")] if follows else []))]


@pytest.mark.req("C-171")
@virtually
async def test_a_query_goes_to_the_end_whatever_the_pages_hold() -> None:
    node = ScriptedNode()

    def foreign(n: int) -> list[NodeMessageReceived]:
        return [node.packed(said(n, channel="hall", follows=[said(n - 1, channel="hall")]))]

    node.pages = [foreign(9), foreign(8), own_page(node, 7, follows=True), own_page(node, 6, follows=True)]
    async with opened(node, retrieve_frequency_ms=0):
        assert [query.pages for query in node.queries] == [4]


@pytest.mark.req("C-171")
@virtually
async def test_a_query_reads_on_past_messages_without_history() -> None:
    node = ScriptedNode()
    node.pages = [own_page(node, n, follows=False) for n in (9, 8, 7, 6)]
    async with opened(node) as (_, told):
        assert [query.pages for query in node.queries] == [4]
        assert len(told.payloads) == 4


@pytest.mark.req("C-172")
@virtually
async def test_older_pages_are_read_first_and_nothing_has_to_wait() -> None:
    node = ScriptedNode()
    messages = chain(node, 4)
    by_id = {SdsMessage.decode(e.message.payload).message_id: e for e in node.stored.values()}  # type: ignore[union-attr]
    node.pages = [[by_id[each.message_id]] for each in reversed(messages)]
    async with opened(node, max_waiting=1) as (channel, told):
        await settle()
        assert [query.pages for query in node.queries] == [4] and node.fetches == []
        assert told.payloads == [b"bob 0", b"bob 1", b"bob 2", b"bob 3"]
        assert channel.statistics.sds.refused_full == 0


@pytest.mark.req("C-173")
@virtually
async def test_the_window_begins_at_the_last_success_and_is_capped() -> None:
    store = MemoryPersistence()
    node = ScriptedNode()
    async with opened(node, persistence=store):
        await asyncio.sleep(5)
    assert node.queries[0].since_ms <= START_MS - 29 * DAY_MS  # nothing known: as far back as allowed
    for seconds, expected_ms in ((2 * 86_400, START_MS), (60 * 86_400, None)):
        late = ScriptedNode()
        late.clock_offset = seconds
        async with opened(late, persistence=store):
            await settle()
        now_ms = START_MS + seconds * 1000
        since = late.queries[0].since_ms
        if expected_ms is None:
            assert abs(since - (now_ms - 30 * DAY_MS)) < 60_000
        else:
            # From the last success on, minus some minutes of grace for others' clocks.
            assert expected_ms - 15 * 60_000 <= since <= expected_ms + 10_000


@pytest.mark.req("C-173")
@virtually
async def test_a_message_received_moves_the_window_as_a_query_does() -> None:
    store = MemoryPersistence()
    node = ScriptedNode()
    async with opened(node, persistence=store, query_on_connect=False):
        await asyncio.sleep(3 * 86_400)
        await node.deliver(said(1))
    again = ScriptedNode()
    again.clock_offset = 4 * 86_400
    async with opened(again, persistence=store):
        await settle()
    received_ms = START_MS + 3 * DAY_MS
    assert received_ms - 15 * 60_000 <= again.queries[0].since_ms <= received_ms + 1_000


@pytest.mark.req("C-174")
@virtually
async def test_a_channel_that_is_stopped_fetches_what_it_missed_when_it_starts_again() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, told):
        await channel.stop()
        node.pages = [[node.packed(said(1))]]
        await asyncio.sleep(1)
        await channel.start()
        await settle()
        assert told.payloads == [b"bob 1"] and len(node.queries) == 2


@pytest.mark.req("C-302")
@virtually
async def test_a_store_that_falls_silent_is_left_after_a_while() -> None:
    node = ScriptedNode()

    class Silent(ScriptedNode):
        async def history(
            self, topic: str, *, since_ms: int
        ) -> AsyncGenerator[Sequence[NodeMessageReceived], None]:
            self.queries.append(Query(elapsed(), topic, since_ms))
            await asyncio.Event().wait()
            yield []

    node = Silent()
    async with opened(node) as (channel, told):
        await asyncio.sleep(61)
        assert channel.statistics.retrievals_failed == 1
        # Messages that arrive are received in the meantime.
        await node.deliver(said(1))
        assert told.payloads == [b"bob 1"]


# Only the schedule of retrieval.

HINTED = [HistoryEntry("m1", bytes(32), "bob"), HistoryEntry("m2", bytes(31) + b"\x01", "bob")]
BARE = [HistoryEntry("m3", None, "bob")]


@pytest.mark.req("C-163")
def test_a_gap_is_asked_for_soon_but_not_at_once() -> None:
    schedule = Retrieval(10_000)
    assert schedule.at == math.inf
    schedule.found_missing(1_000)
    assert 1_000 < schedule.at <= 1_500
    at = schedule.at
    schedule.found_missing(1_100)
    assert schedule.at == at


def test_a_short_frequency_is_soon_enough() -> None:
    schedule = Retrieval(50)
    schedule.found_missing(0)
    assert schedule.at == 50


@pytest.mark.req("C-164")
def test_hints_are_asked_for_together_once_each_and_at_most_so_many() -> None:
    schedule = Retrieval(10_000)
    many = [HistoryEntry(f"m{n}", n.to_bytes(32, "big"), "bob") for n in range(1_000)]
    plan = schedule.take(0, [*HINTED, *HINTED, *many])
    assert isinstance(plan, ByHash)
    assert len(plan.hashes) == len(set(plan.hashes)) == 128


def test_what_has_hints_goes_before_what_has_none() -> None:
    assert Retrieval(10_000).take(0, [*BARE, *HINTED]) == ByHash((bytes(32), bytes(31) + b"\x01"))
    assert Retrieval(10_000).take(0, BARE) == ByWindow()


@pytest.mark.req("C-168")
def test_as_long_as_answers_bring_something_the_next_question_follows_at_once() -> None:
    schedule = Retrieval(10_000)
    plans = []
    for now in range(6):
        plans.append(schedule.take(now, HINTED))
        schedule.finished(now, brought=1, still_missing=True)
        assert schedule.at == now
    # After four queries by hint the topic is read through once, then hints are used again.
    assert [type(plan) for plan in plans] == [ByHash] * 4 + [ByWindow, ByHash]


@pytest.mark.req("C-163")
def test_fruitless_questions_alternate_and_grow_rarer_up_to_a_bound() -> None:
    schedule = Retrieval(10_000)
    now, plans, waits = 0, [], []
    for _ in range(12):
        plans.append(type(schedule.take(now, HINTED)))
        schedule.finished(now, brought=0, still_missing=True)
        waits.append(int(schedule.at - now))
        now = int(schedule.at)
    assert plans == [ByHash, ByWindow] * 6
    assert waits[:3] == [10_000, 20_000, 40_000]
    assert waits == sorted(waits) and waits[-1] == 320_000


def test_news_of_a_gap_does_not_hasten_what_was_fruitless() -> None:
    schedule = Retrieval(10_000)
    schedule.take(0, HINTED)
    schedule.finished(100, brought=0, still_missing=True)
    schedule.found_missing(200)
    assert schedule.at >= 10_000


def test_nothing_missing_asks_nothing_and_forgets_what_was_fruitless() -> None:
    schedule = Retrieval(10_000)
    schedule.take(0, HINTED)
    schedule.finished(0, brought=0, still_missing=True)
    assert schedule.take(20_000, []) is None and schedule.at == math.inf
    schedule.take(30_000, HINTED)
    schedule.finished(30_000, brought=0, still_missing=True)
    assert schedule.at == 40_000


def test_a_store_that_could_not_be_asked_is_asked_again_after_the_frequency() -> None:
    schedule = Retrieval(10_000)
    schedule.take(0, HINTED)
    schedule.failed(500)
    assert schedule.at == 10_500


def test_a_gap_found_while_a_question_is_under_way_waits_for_its_answer() -> None:
    schedule = Retrieval(10_000)
    schedule.take(0, HINTED)
    schedule.found_missing(10)
    assert schedule.at == math.inf
    schedule.finished(20, brought=1, still_missing=True)
    assert schedule.at == 20


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["found", "brought", "fruitless", "closed", "failed"]), st.integers(0, 5_000)
        ),
        max_size=60,
    )
)
@settings(deadline=None)
def test_whatever_happens_a_gap_is_asked_for_again_within_bounds(steps: list[tuple[str, int]]) -> None:
    schedule = Retrieval(10_000)
    now = 0
    open_gap = False
    for what, passed in steps:
        now += passed
        if what == "found":
            open_gap = True
            schedule.found_missing(now)
        elif open_gap and schedule.at <= now:
            assert schedule.take(now, HINTED) is not None
            if what == "failed":
                schedule.failed(now)
            else:
                open_gap = what != "closed"
                schedule.finished(now, brought=int(what == "brought"), still_missing=open_gap)
        if open_gap:
            assert schedule.at - now <= 320_000
        assert schedule.at == math.inf or schedule.at >= 0


# Only catching up.


def catching(threshold: int = 300_000, mark: QueryMark | None = None, enabled: bool = True) -> CatchingUp:
    return CatchingUp(enabled=enabled, threshold_ms=threshold, window_ms=30 * DAY_MS, mark=mark)


@pytest.mark.req("C-169", "C-174")
def test_the_first_connection_is_always_asked() -> None:
    recent = catching(mark=QueryMark(START_MS - 1_000, START_MS - 1_000))
    assert recent.is_due(START_MS)
    recent.succeeded(START_MS, START_MS)
    assert not recent.is_due(START_MS + 300_000)
    assert recent.is_due(START_MS + 300_001)
    recent.stopped()
    assert recent.is_due(START_MS + 1)
    assert not catching(enabled=False).is_due(START_MS)


@pytest.mark.req("C-173")
@pytest.mark.parametrize(
    ("mark", "since"),
    [
        (None, START_MS - 30 * DAY_MS),
        (QueryMark(START_MS - DAY_MS, 0), START_MS - DAY_MS - 600_000),
        (QueryMark(START_MS - 5 * DAY_MS, START_MS - DAY_MS), START_MS - DAY_MS - 600_000),
        (QueryMark(START_MS - 60 * DAY_MS, START_MS - 61 * DAY_MS), START_MS - 30 * DAY_MS),
        (QueryMark(START_MS + 300_000, 0), START_MS - 600_000),  # the clock was set back
        # It was wrong when this was stored, for an unknown time: the whole window.
        (QueryMark(START_MS + DAY_MS, 0), START_MS - 30 * DAY_MS),
    ],
)
def test_where_the_window_begins(mark: QueryMark | None, since: int) -> None:
    assert catching(mark=mark).since(START_MS) == since


def marks(changes: list[object]) -> list[QueryMark]:
    puts = {str(n): change.value for n, change in enumerate(changes) if isinstance(change, Put)}
    return list(read_records(QueryMark, puts).values())


@pytest.mark.req("C-173")
def test_the_mark_is_stored_after_a_query_at_times_while_receiving_and_at_the_end() -> None:
    upto = catching()
    upto.succeeded(START_MS, START_MS)
    assert marks([*upto.changes_to_store()]) == [QueryMark(START_MS, 0)]
    upto.received(START_MS + 1)
    upto.changes_to_store()
    for n in range(100):
        upto.received(START_MS + 2 + n)
    assert len(marks([*upto.changes_to_store()])) <= 1  # not one for each message
    upto.stopped()
    assert marks([*upto.changes_to_store()]) == [QueryMark(START_MS, START_MS + 101)]
    upto.stopped()
    assert upto.changes_to_store() == []


@pytest.mark.req("C-172")
def test_a_stored_message_without_room_keeps_its_place_whatever_is_heard_meanwhile() -> None:
    upto = catching()
    upto.begin(START_MS)
    upto.page_taken(20, START_MS, "a", START_MS)
    upto.missed(stored=True)
    upto.missed()
    upto.page_taken(20, START_MS, "b", START_MS)
    upto.succeeded(START_MS, START_MS)
    assert upto.position == "a"


@pytest.mark.req("C-172")
def test_what_is_heard_after_a_message_without_room_does_not_stand_for_it() -> None:
    upto = catching()
    upto.begin(START_MS)
    upto.page_taken(20, START_MS, "a", START_MS)
    upto.succeeded(START_MS, START_MS)
    upto.missed()
    upto.received(START_MS + 1_200_000)
    assert upto.begin(START_MS + 1_200_000) < START_MS and upto.position == "a"


def test_a_gap_is_looked_for_no_further_back_than_the_window() -> None:
    assert catching().oldest(START_MS) == START_MS - 30 * DAY_MS
