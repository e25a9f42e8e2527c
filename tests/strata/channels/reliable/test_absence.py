"""Being away and joining: all that the relays have, in order, and a report about the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
from strata.channels.encryption import GroupKey, GroupKeyEncryption
from strata.channels.messaging.reading import HistoryPage
from strata.channels.messaging.values import ConnectionStatus, NodeMessageReceived, ReceivedEnvelope
from strata.channels.persistence import MemoryPersistence
from strata.channels.reliable import (
    HistoryGap,
    IrretrievableMessage,
    MessagesUndecryptable,
    ReliableChannel,
    SyncStatus,
)
from strata.channels.sds import HistoryEntry, SdsMessage
from strata.protocol.errors import ConnectionFailed

from tests.support.scripted_node import (
    START,
    START_MS,
    TOPIC,
    Query,
    Reversing,
    ScriptedNode,
    chunks,
    elapsed,
    ephemeral,
    opened,
    said,
    segments,
    settle,
    sync,
)
from tests.support.virtual_time import virtually

PAGE = 20
N = TypeVar("N", bound="PagingNode")


@dataclass
class PagingNode(ScriptedNode):
    """A node over one relay with a log that can be read in either order and from any place."""

    log: list[NodeMessageReceived] = field(default_factory=list)
    fails_after: int | None = None
    """The relay is cut off after this many pages."""
    relay_ahead: float = 0.0
    """How many seconds the relay's clock is ahead."""
    tells_time: bool = False
    """Whether the relay reports its clock, and when it received each message."""
    reads: int = 0
    """Messages that were read, by any query."""
    pages_read: int = 0
    finds_by_hash: bool = True

    async def read(
        self,
        topic: str,
        *,
        order: str,
        since_ms: int,
        until_ms: int | None = None,
        after: str | None = None,
    ) -> AsyncGenerator[HistoryPage, None]:
        query = Query(0.0, topic, since_ms)
        self.queries.append(query)
        at = 0 if after is None else int(after)
        oldest = 0 if order == "asc" and at else since_ms - 1000  # a place says more than a time
        chosen = [
            (place, event)
            for place, event in enumerate(self.log, 1)
            if (event.message.timestamp or 0) * 1000 >= oldest
            and (until_ms is None or (event.message.timestamp or 0) * 1000 <= until_ms)
            and (after is None or (place > at if order == "asc" else place < at))
        ]
        if order == "desc":
            chosen.reverse()
        for start in range(0, len(chosen), PAGE):
            if self.fails_after is not None and query.pages == self.fails_after:
                raise ConnectionFailed("the relay went away")
            await asyncio.sleep(0.001)
            part = chosen[start : start + PAGE]
            query.pages += 1
            self.pages_read += 1
            self.reads += len(part)
            yield HistoryPage([event for _, event in part], str(part[-1][0]))

    async def history(
        self, topic: str, *, since_ms: int
    ) -> AsyncGenerator[Sequence[NodeMessageReceived], None]:
        async for page in self.read(topic, order="desc", since_ms=since_ms):
            yield page.messages

    def keep(self, message: SdsMessage | bytes, *, at: float = 0.0) -> NodeMessageReceived:
        """The relay stores a message that was sent this many seconds after the start."""
        payload = message if isinstance(message, bytes) else message.encode()
        event = NodeMessageReceived(
            self.hash_of(payload),
            ReceivedEnvelope(content_topic=TOPIC, payload=payload, timestamp=int(START + at)),
            received_at=int(START + at + self.relay_ahead) if self.tells_time else None,
        )
        self.stored[event.message_hash] = event
        self.log.append(event)
        return event

    def store_time(self) -> float | None:
        return START + 100 + elapsed() + self.relay_ahead if self.tells_time else None

    def expire(self, count: int) -> None:
        """The relay loses its oldest messages."""
        for event in self.log[:count]:
            del self.stored[event.message_hash]
        self.log = self.log[count:]


def talk(
    node: PagingNode,
    count: int,
    *,
    first: int = 0,
    every: float = 1.0,
    after: Sequence[SdsMessage] = (),
) -> list[SdsMessage]:
    """Make messages of three people who each name the last two; the relay keeps all of them."""
    made: list[tuple[SdsMessage, bytes]] = []
    for n in range(first, first + count):
        follows = [HistoryEntry(each.message_id, hint, each.sender_id) for each, hint in made[-2:]]
        follows = follows or [HistoryEntry(each.message_id, None, each.sender_id) for each in after[-2:]]
        message = said(n, sender="bcd"[n % 3], follows=follows, lamport=START_MS + int(n * every * 1000))
        made.append((message, node.keep(message, at=n * every).message_hash))
    return [message for message, _ in made]


def payloads(messages: Sequence[SdsMessage]) -> list[bytes]:
    return [f"{each.sender_id} {each.message_id.split('-')[1]}".encode() for each in messages]


async def synced(channel: ReliableChannel) -> SyncStatus:
    """Wait until the channel reports that it is synced."""
    while not (status := channel.sync_status()).is_synced:  # noqa: ASYNC110 -- time is simulated
        await asyncio.sleep(0.05)
    return status


def at(node: N, seconds: float) -> N:
    """Set the clock of a node to this many seconds after the start."""
    node.clock_offset = seconds
    return node


# Any amount.


@virtually
async def test_a_gap_far_larger_than_what_may_wait_is_closed_in_order() -> None:
    node = at(PagingNode(), 1_000)
    messages = talk(node, 400)
    async with opened(node, max_waiting=40, max_missing=40, max_inbox_messages=50) as (channel, told):
        assert await synced(channel)
        assert told.payloads == payloads(messages)
        assert channel.statistics.sds.refused_full == 0 and told.of(IrretrievableMessage) == []
        assert node.reads == 400, "each is read once"
        await asyncio.sleep(1_000)
        assert told.payloads == payloads(messages) and not told.of(HistoryGap)


@virtually
async def test_live_messages_that_find_no_room_while_the_history_is_read_come_in_their_turn() -> None:
    node = at(PagingNode(), 1_000)
    messages = talk(node, 200)
    async with opened(node, max_waiting=5, max_inbox_messages=30) as (channel, told):
        late = talk(node, 60, first=200, after=messages)
        linked = said(300, sender="e", follows=[messages[-1], late[-1]], lamport=START_MS + 300_000)
        node.keep(linked, at=300)
        for event in node.log[200:]:
            await node.message_events.emit(event)
        assert await synced(channel)
        assert told.payloads == payloads([*messages, *late, linked])


@virtually
async def test_what_found_no_room_is_read_again_even_if_the_relay_is_away_for_a_while() -> None:
    node = at(PagingNode(), 1_000)
    async with opened(node, max_waiting=1, retrieve_frequency_ms=0) as (channel, told):
        await synced(channel)
        made = talk(node, 6, first=1_000)
        node.fails_after = 0
        for event in (node.log[5], node.log[2]):  # the second of them finds no room
            await node.deliver(event)
        assert not channel.sync_status().is_synced
        await asyncio.sleep(60)
        assert told.payloads == []
        node.fails_after = None
        await asyncio.sleep(400)
        assert told.payloads == payloads(made) and channel.sync_status().is_synced


@virtually
async def test_a_short_cut_after_a_long_day_reads_what_is_new_and_not_the_day() -> None:
    node = at(PagingNode(), 0)
    talk(node, 1, first=900)
    async with opened(node) as (channel, told):
        await synced(channel)
        for n in range(100):
            await asyncio.sleep(60)
            live = said(n, lamport=START_MS + n * 60_000)
            await node.deliver(node.keep(live, at=60 * (n + 1)))
        read = node.reads
        await node.disconnect()
        missed = said(200, sender="c", lamport=START_MS + 7_000_000)
        node.keep(missed, at=6_010)
        await asyncio.sleep(10)
        await node.reconnect()
        await synced(channel)
        assert told.payloads[-1] == b"c 200" and node.reads - read < 20


@virtually
async def test_a_full_inbox_holds_back_the_reading_and_memory_holds_a_page() -> None:
    node = at(PagingNode(), 1_000)
    messages = talk(node, 400)
    async with opened(node, take=False, max_inbox_messages=10) as (channel, _):
        await asyncio.sleep(30)
        assert channel.sync_status().inbox == 10 and node.reads <= 2 * PAGE
        assert not channel.sync_status().is_synced
        taken = [(await anext(channel)).payload for _ in range(400)]
        assert taken == payloads(messages)


@pytest.mark.req("C-298")
@virtually
async def test_what_waits_for_room_in_a_full_inbox_is_not_given_up_however_long_it_waits() -> None:
    node = ScriptedNode()
    async with opened(node, take=False, max_inbox_messages=2) as (channel, told):
        parts = chunks(10, b"abcdefgh", 4)
        await node.deliver(said(2, follows=[said(1)]), parts[0], said(3, sender="c"), said(4, sender="d"))
        blocked = asyncio.create_task(node.deliver(said(1), parts[1]))
        await asyncio.sleep(3_600)
        assert told.of(IrretrievableMessage) == []
        taken = [(await anext(channel)).payload for _ in range(5)]
        assert taken == [b"c 3", b"d 4", b"bob 1", b"bob 2", b"abcdefgh"]
        assert told.of(IrretrievableMessage) == []
        await blocked


@pytest.mark.req("C-173")
@virtually
async def test_a_reading_that_breaks_off_goes_on_behind_what_is_taken_after_a_restart() -> None:
    store = MemoryPersistence()
    node = at(PagingNode(), 10_000)
    messages = talk(node, 400)
    taken: list[bytes] = []
    lives = 0
    while len(taken) < 400:
        lives += 1
        node.fails_after = 3
        async with opened(node, persistence=store, max_waiting=30) as (channel, told):
            await asyncio.sleep(2)
            assert not channel.sync_status().is_synced or lives > 6
            taken += told.payloads
    assert taken == payloads(messages), "nothing is skipped, and nothing comes twice"
    assert lives == 7 and node.reads <= 400 + lives * PAGE, "nor is it read twice"


@virtually
async def test_a_wanted_message_finds_room_where_others_find_none() -> None:
    node = ScriptedNode()
    options: dict[str, Any] = {"query_on_connect": False, "retrieve_frequency_ms": 0, "max_waiting": 3}
    async with opened(node, **options) as (channel, told):
        chain = [said(0)]
        for n in range(1, 5):
            chain.append(said(n, follows=chain[-1:]))
        # Newest first: each message names the next one to arrive, and waits for it.
        for message in reversed(chain):
            await node.deliver(message)
        assert told.payloads == [f"bob {n}".encode() for n in range(5)]
        assert channel.statistics.sds.refused_full == 0
        for n in range(100, 120):
            await node.deliver(said(n, follows=[HistoryEntry(f"bob-{n + 1}", None, "bob")]))
        held = channel._session.engine.sds._incoming.waiting  # type: ignore[union-attr]
        assert len(held) <= 6, "a chain that a forger makes has an end"


@virtually
async def test_large_messages_span_pages_and_the_end_of_a_life() -> None:
    store = MemoryPersistence()
    node = at(PagingNode(), 1_000)
    big = bytes(range(256)) * 40
    before: list[SdsMessage] = []
    for n, content in enumerate(segments(big, size=200)):
        before = [said(n, content=content, follows=before[-1:], lamport=START_MS + n)]
        node.keep(before[0], at=n / 100)
    assert len(node.log) > 2 * PAGE
    node.fails_after = 1
    async with opened(node, persistence=store, segment_size_bytes=200) as (channel, told):
        await asyncio.sleep(2)
        assert told.payloads == [] and not channel.sync_status().is_synced
    node.fails_after = None
    async with opened(node, persistence=store, segment_size_bytes=200) as (channel, told):
        await synced(channel)
        assert told.payloads == [big]


# What is heard during the reading.


@dataclass
class GatedNode(PagingNode):
    """A relay that answers no read until its gate opens."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, *args: Any, **options: Any) -> AsyncGenerator[HistoryPage, None]:
        async with aclosing(super().read(*args, **options)) as pages:
            async for page in pages:
                await self.gate.wait()
                yield page
        await self.gate.wait()


def crossed(node: PagingNode, known: Sequence[SdsMessage]) -> list[SdsMessage]:
    """Two messages of one sender, who heard two other messages in between: the second names only these."""
    first = said(20, follows=known[-1:], lamport=START_MS + 20_000)
    second = said(21, follows=known[-2:], lamport=START_MS + 21_000)
    for message in (first, second):
        node.keep(message, at=20)
    return [first, second]


async def first_life(store: MemoryPersistence) -> tuple[GatedNode, list[SdsMessage]]:
    """A relay whose gate has closed, and the messages that a participant has read from it."""
    node = at(GatedNode(), 100)
    node.gate.set()
    messages = talk(node, 5)
    async with opened(node, persistence=store) as (channel, told):
        await synced(channel)
        assert told.payloads == payloads(messages)
    node.gate.clear()
    return node, messages


@pytest.mark.req("C-298")
@virtually
async def test_what_is_heard_while_the_store_is_read_waits_for_what_its_sender_said_before() -> None:
    node, known = await first_life(store := MemoryPersistence())
    news = crossed(node, known)
    async with opened(node, persistence=store) as (channel, told):
        await node.deliver(node.log[-1])
        await node.deliver(ephemeral(1, b"at once"))
        assert told.payloads == [b"at once"]
        node.gate.set()
        await synced(channel)
        assert told.payloads == [b"at once", *payloads(news)]
        await node.deliver(said(30, follows=news, lamport=START_MS + 30_000))
        assert told.payloads[-1] == b"bob 30", "from then on nothing waits"


@pytest.mark.req("C-298")
@pytest.mark.parametrize("settling", [False, True])
@virtually
async def test_it_waits_too_for_what_the_node_leaves_to_another_reading(settling: bool) -> None:
    node, known = await first_life(store := MemoryPersistence())
    if settling:  # the first reading is over, and waits for a message that names one that no store has
        node.keep(said(10, sender="e", follows=[said(9, sender="e")], lamport=START_MS - 900_000), at=10)
        node.gate.set()
    async with opened(node, persistence=store) as (channel, told):
        await asyncio.sleep(0.5)
        assert channel.sync_status().syncing is not None
        news = crossed(node, known)
        await node.deliver(replace(node.log[-2], stored=True))
        await node.deliver(node.log[-1])
        assert told.payloads == []
        node.gate.set()
        await synced(channel)
        assert [each for each in told.payloads if each.startswith(b"bob")] == payloads(news)


@pytest.mark.req("C-298")
@virtually
async def test_and_so_it_does_when_the_relay_was_away() -> None:
    node, known = await first_life(store := MemoryPersistence())
    node.gate.set()
    async with opened(node, persistence=store) as (channel, told):
        await synced(channel)
        await node.disconnect()
        node.gate.clear()
        news = crossed(node, known)
        await node.reconnect()
        await node.deliver(node.log[-1])
        assert told.payloads == []
        node.gate.set()
        await synced(channel)
        assert told.payloads == payloads(news)


@pytest.mark.req("C-278")
@virtually
async def test_what_is_heard_right_after_an_absence_does_not_shorten_the_reading() -> None:
    node = at(PagingNode(), 0)
    async with opened(node) as (channel, told):
        await synced(channel)
        for n in range(20):
            await asyncio.sleep(60)
            await node.deliver(node.keep(said(n, lamport=START_MS + n * 60_000), at=60 * (n + 1)))
        await node.disconnect()
        missed = [said(n, sender="c", lamport=START_MS + 1_250_000 + n) for n in range(100, 103)]
        for each in missed:
            node.keep(each, at=1_250)
        await asyncio.sleep(3_600)
        # The subscription is back before the node has reported that the relay is.
        await node.deliver(*(replace(event, stored=True) for event in node.log[-3:]))
        live = said(200, sender="d", lamport=START_MS + 4_800_000)
        await node.deliver(node.keep(live, at=4_800))
        await node.reconnect()
        await synced(channel)
        assert sorted(told.payloads[20:]) == payloads([*missed, live])


@pytest.mark.req("C-298")
@virtually
async def test_and_when_the_reading_broke_off_with_the_connection() -> None:
    node, known = await first_life(store := MemoryPersistence())
    node.fails_after = 0
    talk(node, 1, first=6, after=known)
    async with opened(node, persistence=store) as (channel, told):
        assert channel.statistics.retrievals_failed == 1
        await node.disconnect()
        node.fails_after = None
        news = crossed(node, known)
        await node.reconnect()
        await node.deliver(node.log[-1])
        assert told.payloads == []
        node.gate.set()
        await synced(channel)
        assert [each for each in told.payloads if each.startswith(b"bob")] == payloads(news)
        assert elapsed() < 1, "a relay that is back is read at once"


@pytest.mark.req("C-298")
@virtually
async def test_and_when_the_reading_fell_silent_with_the_connection() -> None:
    node, known = await first_life(store := MemoryPersistence())
    talk(node, 1, first=6, after=known)
    async with opened(node, persistence=store) as (channel, told):
        await node.disconnect()
        await asyncio.sleep(100)
        assert channel.statistics.retrievals_failed == 1
        news = crossed(node, known)
        await node.reconnect()
        await node.deliver(node.log[-1])
        assert told.payloads == []
        node.gate.set()
        await synced(channel)
        assert [each for each in told.payloads if each.startswith(b"bob")] == payloads(news)


@pytest.mark.req("C-257", "C-298")
@pytest.mark.parametrize("reads", [True, False])
@virtually
async def test_what_waits_to_be_read_at_the_end_of_a_life_waits_in_the_next_one(reads: bool) -> None:
    node, known = await first_life(store := MemoryPersistence())
    news = crossed(node, known)
    async with opened(node, persistence=store) as (_, told):
        await node.deliver(node.log[-1])
    assert told.payloads == []
    async with opened(node, persistence=store, query_on_connect=reads) as (channel, told):
        assert told.payloads == ([] if reads else payloads(news[1:])), "where nothing is read, nothing waits"
        node.gate.set()
        if reads:
            await synced(channel)
            assert told.payloads == payloads(news)


@virtually
async def test_what_is_heard_does_not_wait_for_a_store_that_is_silent_or_has_failed() -> None:
    node, known = await first_life(store := MemoryPersistence())
    live = [said(n, follows=known[-1:], lamport=START_MS + n * 1_000) for n in range(20, 23)]
    async with opened(node, persistence=store) as (channel, told):
        node.keep(live[0], at=20)
        await node.deliver(node.log[-1])
        assert told.payloads == []
        await asyncio.sleep(5)
        assert told.payloads == payloads(live[:1])
        await asyncio.sleep(60)
        assert channel.statistics.retrievals_failed == 1
        await node.deliver(live[1])
        assert told.payloads == payloads(live[:2]), "it is being asked again, and nothing waits for it"
        node.gate.set()
        await synced(channel)
        await node.disconnect()
        node.gate.clear()
        await node.reconnect()
        await node.deliver(live[2])
        assert told.payloads == payloads(live[:2]), "a store that has answered is waited for"
        node.gate.set()
        await synced(channel)
        assert told.payloads == payloads(live)


@virtually
async def test_a_flood_that_is_heard_while_the_store_is_read_takes_little_room_and_is_read_later() -> None:
    node, known = await first_life(store := MemoryPersistence())
    async with opened(node, persistence=store, max_waiting=4) as (channel, told):
        news = [said(20 + n, follows=known[-1:], lamport=START_MS + 20_000 + n) for n in range(30)]
        for message in news:
            await node.deliver(node.keep(message, at=20))
        assert channel.statistics.sds.refused_full == 26 and told.payloads == []
        node.gate.set()
        await synced(channel)
        assert told.payloads == payloads(news)


# How it is reported.


@virtually
async def test_a_channel_is_not_synced_before_it_is_and_says_how_far_it_has_come() -> None:
    node = at(PagingNode(), 400)
    messages = talk(node, 400)
    async with opened(node, take=False, max_inbox_messages=100) as (channel, _):
        await settle()
        seen: list[SyncStatus] = []
        for _ in messages:
            await anext(channel)
            seen.append(channel.sync_status())
        await synced(channel)
        assert channel.sync_status().syncing is None
    reading = [status for status in seen if status.syncing is not None]
    assert reading and not any(status.is_synced for status in reading)
    read = [status.syncing.read for status in reading if status.syncing is not None]
    assert read == sorted(read) and read[-1] > 200
    estimates = {s.syncing.about for s in reading if s.syncing is not None and s.syncing.about is not None}
    assert estimates and all(350 <= estimate <= 450 for estimate in estimates), estimates
    assert str(reading[-1].syncing).startswith("syncing 3")


@virtually
async def test_while_no_relay_can_be_reached_a_channel_does_not_say_that_it_is_synced() -> None:
    node = PagingNode()
    await node.disconnect()
    async with opened(node) as (channel, _):
        await asyncio.sleep(60)
        assert not channel.sync_status().is_synced
        await node.reconnect()
        await synced(channel)
        await node.disconnect()
        await settle()
        assert not channel.sync_status().is_synced


# What no relay has any longer.


@pytest.mark.parametrize("known", [0, 40])
@virtually
async def test_what_has_expired_is_one_gap_and_the_channel_goes_on(known: int) -> None:
    store = MemoryPersistence()
    node = at(PagingNode(), 100)
    messages = talk(node, known)
    if known:
        async with opened(node, persistence=store) as (_, told):
            await asyncio.sleep(1)
            assert len(told.payloads) == known
    messages += talk(node, 300 - known, first=known, after=messages)
    node.expire(200)
    node.clock_offset = 1_000
    async with opened(node, persistence=store, max_waiting=50) as (channel, told):
        await asyncio.sleep(2)
        assert told.payloads == payloads(messages[200:])
        (gap,) = told.of(HistoryGap)
        assert (gap.to_id, gap.to_time) == (messages[200].message_id, START_MS + 200_000)
        if known:
            assert (gap.from_id, gap.from_time) == (messages[39].message_id, START_MS + 39_000)
        else:
            assert gap.from_id is None and gap.from_time is None
        assert set(gap.message_ids) == {messages[198].message_id, messages[199].message_id}
        assert gap.at_least == 2
        assert channel.sync_status().is_synced
        live = said(999, sender="b", follows=messages[-2:], lamport=START_MS + 999_000)
        await node.deliver(node.keep(live, at=999))
        assert told.payloads[-1] == b"b 999", "live ones follow at once"
        await asyncio.sleep(3_000)
        assert told.of(IrretrievableMessage) == [], "and nothing is told a second time"
        assert len(told.of(HistoryGap)) == 1


@virtually
async def test_where_all_has_expired_live_messages_are_heard_at_once() -> None:
    node = at(PagingNode(), 1_000)
    messages = talk(node, 30)
    node.expire(30)
    async with opened(node) as (_, told):
        for n in range(3):
            messages.append(said(n, sender="live", follows=messages[-2:], lamport=START_MS + 1_000_000 + n))
            await node.deliver(node.keep(messages[-1], at=1_000))
        await asyncio.sleep(2)
        assert told.payloads == [b"live 0", b"live 1", b"live 2"]
        assert len(told.of(HistoryGap)) == 1


@pytest.mark.parametrize("retention", [None, 300])
@virtually
async def test_what_may_be_on_its_way_is_a_gap_once_it_is_old(retention: int | None) -> None:
    node = at(PagingNode(), 100)
    messages = talk(node, 60)
    node.expire(30)
    waits = retention or 600
    async with opened(node, max_waiting=10, retention_seconds=retention) as (channel, told):
        await asyncio.sleep(waits - 100)
        assert told.payloads == [] and told.of(HistoryGap) == []
        assert not channel.sync_status().is_synced
        await asyncio.sleep(100)
        assert told.payloads == payloads(messages[30:]), "what had no room is read at once"
        (gap,) = told.of(HistoryGap)
        assert set(gap.message_ids) == {messages[28].message_id, messages[29].message_id}
        await asyncio.sleep(3_000)
        assert told.of(IrretrievableMessage) == [] and len(told.of(HistoryGap)) == 1


@pytest.mark.parametrize("relay_ahead", [0, -3_000, 3_000])
@pytest.mark.parametrize("ahead", [1_200, -1_200, 90_000])
@virtually
async def test_a_wrong_clock_changes_nothing_about_what_is_gone(ahead: float, relay_ahead: float) -> None:
    """Neither the reader's clock nor the relay's, which dates the messages too."""
    node = PagingNode(tells_time=True, relay_ahead=relay_ahead)
    messages = talk(node, 60)
    node.expire(30)
    async with opened(at(node, 100 + ahead)) as (channel, told):
        await asyncio.sleep(500)
        assert told.payloads == [] and told.of(HistoryGap) == []
        assert not channel.sync_status().is_synced
        await asyncio.sleep(60)  # the oldest message that is left was sent 600 s ago
        assert told.payloads == payloads(messages[30:])
        (gap,) = told.of(HistoryGap)
        assert set(gap.message_ids) == {messages[28].message_id, messages[29].message_id}


@virtually
async def test_a_message_from_so_long_ago_that_it_may_have_been_delivered_is_told_once() -> None:
    """Messages from a long partition arrive after more messages than the number of ids remembered."""
    node = at(PagingNode(), 1_000)
    async with opened(node, max_known_ids=20, max_history=10) as (channel, told):
        await synced(channel)
        for n in range(60):
            await node.deliver(node.keep(said(n, lamport=START_MS + 900_000 + n), at=900))
        assert len(told.payloads) == 60
        late = said(99, sender="carol", lamport=START_MS + 800_000)
        for _ in range(3):
            await node.deliver(node.keep(late, at=800))
        assert channel.statistics.sds.refused_old == 3
        (refused,) = told.of(IrretrievableMessage)
        assert (refused.message_id, refused.sender_id) == (late.message_id, "carol")
        assert channel.sync_status().is_synced


@pytest.mark.req("C-296")
@pytest.mark.parametrize("restarts", [False, True])
@virtually
async def test_whoever_speaks_while_it_reads_more_than_it_remembers_still_gets_all(restarts: bool) -> None:
    node, store = at(GatedNode(), 1_000), MemoryPersistence()
    messages = talk(node, 200)
    options: dict[str, Any] = {"persistence": store, "max_known_ids": 50, "max_history": 10}
    got: list[bytes] = []
    async with opened(node, **options) as (channel, told):
        await channel.send(b"hello")
        await settle()
        if restarts:
            node.fails_after = 3
        node.gate.set()
        await asyncio.sleep(0.0035)  # it has read more than it remembers
        await channel.send(b"hello again")
        await asyncio.sleep(1)
        got += told.payloads
    node.fails_after = None
    node.keep(node.sent[0].sds, at=1_000)
    async with opened(node, **options) as (channel, told):
        await asyncio.sleep(1)
        assert got + told.payloads == payloads(messages)
        assert channel.statistics.sds.refused_old == 0 and channel.health.sender_conflict is None


@virtually
async def test_a_newcomer_whose_clock_is_ahead_drops_nothing_of_what_is_said_from_now_on() -> None:
    node = at(PagingNode(tells_time=True), 1_200)
    async with opened(node, join="now") as (channel, told):
        await synced(channel)
        await node.disconnect()
        missed = said(1, lamport=START_MS + 120_000)
        node.keep(missed, at=120)
        await asyncio.sleep(60)
        await node.reconnect()
        await asyncio.sleep(30)
        assert told.payloads == [b"bob 1"]


@virtually
async def test_what_had_no_room_and_expired_before_it_was_read_again_is_told() -> None:
    node = at(PagingNode(), 100)
    messages = talk(node, 60)
    node.expire(10)
    async with opened(node, max_waiting=10) as (channel, told):
        await asyncio.sleep(100)
        assert told.payloads == [] and channel.statistics.sds.refused_full > 0
        node.expire(40)  # while the successors of the beginning wait, nearly all other messages expire too
        await asyncio.sleep(1_500)
        had = {
            each.message_id
            for gap in told.of(HistoryGap)
            for each in messages
            if each.message_id in gap.message_ids
        }
        handed = set(told.payloads)
        lacked = {m.message_id for m, p in zip(messages, payloads(messages), strict=True) if p not in handed}
        assert lacked - had == {each.message_id for each in messages[:8]}, "nobody names the first ones"
        assert channel.sync_status().is_synced
        told_times = len(told.of(HistoryGap))
        await asyncio.sleep(3_000)
        assert len(told.of(HistoryGap)) == told_times and told.of(IrretrievableMessage) == []


@pytest.mark.parametrize("hints", [True, False])
@virtually
async def test_a_relay_that_comes_back_is_asked_before_anything_is_called_gone(hints: bool) -> None:
    node = at(PagingNode(), 5_000)
    messages = talk(node, 40)
    away, node.log = node.log[:20], node.log[20:]
    for event in away:
        del node.stored[event.message_hash]
    node.connection_status = ConnectionStatus.PARTIALLY_CONNECTED
    if not hints:
        node.finds_by_hash = False
    async with opened(node) as (channel, told):
        await asyncio.sleep(8)
        assert told.of(HistoryGap) == []
        for event in away:
            node.stored[event.message_hash] = event
        node.log += away  # they are new at the place that the reading has reached
        await node.set_status(ConnectionStatus.CONNECTED)
        await asyncio.sleep(30)
        assert told.of(HistoryGap) == [] and told.of(IrretrievableMessage) == []
        assert told.payloads == payloads(messages)
        assert channel.sync_status().is_synced


@virtually
async def test_a_relay_that_stays_away_holds_up_nothing_for_long() -> None:
    node = at(PagingNode(), 5_000)
    messages = talk(node, 40)
    node.expire(20)
    node.connection_status = ConnectionStatus.PARTIALLY_CONNECTED
    async with opened(node) as (_, told):
        await asyncio.sleep(10)
        assert told.payloads == []
        await asyncio.sleep(10)
        assert told.payloads == payloads(messages[20:]) and len(told.of(HistoryGap)) == 1


@virtually
async def test_a_message_of_a_gap_keeps_no_query_going() -> None:
    node = at(PagingNode(), 5_000)
    messages = talk(node, 40)
    node.expire(20)
    async with opened(node) as (_, told):
        await asyncio.sleep(2)
        assert told.payloads == payloads(messages[20:])
        asked = len(node.fetches) + len(node.queries)
        unknown = HistoryEntry("unknown", bytes(32), "c")
        live = said(1, sender="b", follows=[messages[-1], unknown], lamport=START_MS + 5_000_000)
        await node.deliver(node.keep(live, at=5_000))
        await asyncio.sleep(300)
        assert len(node.fetches) + len(node.queries) - asked < 30, "at longer and longer intervals"


@virtually
async def test_what_was_missing_already_is_looked_at_again_when_a_message_waits_for_it() -> None:
    node = at(PagingNode(), 1_000)
    messages = talk(node, 30)
    node.expire(30)
    async with opened(node) as (_, told):
        await node.deliver(sync(1_000_000, sender="d", follows=messages[-2:]))
        await asyncio.sleep(2)
        live = said(0, sender="live", follows=messages[-2:], lamport=START_MS + 1_002_000)
        await node.deliver(node.keep(live, at=1_002))
        await asyncio.sleep(3)
        assert told.payloads == [b"live 0"] and len(told.of(HistoryGap)) == 1


@virtually
async def test_many_who_talked_at_the_edge_of_a_gap_make_one_gap() -> None:
    node = at(PagingNode(), 1_000)
    # Rounds of five who have not heard of one another: each names two of the previous five.
    rounds: list[list[tuple[SdsMessage, bytes]]] = []
    for turn in range(12):
        last = rounds[-1] if rounds else []
        now: list[tuple[SdsMessage, bytes]] = []
        for person in range(5):
            named = [last[(person + step) % 5] for step in (0, 2)] if last else []
            follows = [HistoryEntry(each.message_id, hint, each.sender_id) for each, hint in named]
            message = said(turn, sender="bcdef"[person], follows=follows, lamport=START_MS + turn * 1000)
            now.append((message, node.keep(message, at=turn).message_hash))
        rounds.append(now)
    node.expire(32)  # in the middle of a round
    async with opened(node) as (channel, told):
        await asyncio.sleep(2)
        assert len(told.payloads) == 28 and channel.sync_status().is_synced
        assert len(told.of(HistoryGap)) == 1


@pytest.mark.req("C-126")
@virtually
async def test_a_hole_in_the_midst_is_waited_for_and_told_by_its_own_event() -> None:
    node = at(PagingNode(), 1_000)
    messages = talk(node, 60)
    (hole,) = [event for event in node.log if messages[30].encode() == event.message.payload]
    node.log.remove(hole)
    del node.stored[hole.message_hash]
    async with opened(node, lost_message_timeout_ms=60_000) as (_, told):
        await asyncio.sleep(30)
        assert told.payloads == payloads(messages[:30])
        await asyncio.sleep(60)
        assert told.payloads == payloads(messages[:30] + messages[31:])
        assert [each.message_id for each in told.of(IrretrievableMessage)] == [messages[30].message_id]
        assert told.of(HistoryGap) == []


@virtually
async def test_how_long_others_wait_for_a_message_is_apart_from_how_long_it_is_looked_for() -> None:
    node = ScriptedNode()
    async with opened(node, hold_back_ms=20_000, lost_message_timeout_ms=300_000, query_on_connect=False) as (
        channel,
        told,
    ):
        await node.deliver(said(2, follows=[HistoryEntry("bob-1", bytes(32), "bob")]))
        await asyncio.sleep(15)
        assert told.payloads == []
        await asyncio.sleep(15)
        assert told.payloads == [b"bob 2"]
        (missing,) = channel.sync_status().missing
        assert missing.message_id == "bob-1" and missing.released
        assert told.of(IrretrievableMessage) == [], "it is still looked for"
        await node.deliver(said(1), said(3, follows=[HistoryEntry("bob-0", bytes(32), "bob")]))
        assert told.payloads == [b"bob 2", b"bob 1"], "and welcome when it comes"
        await asyncio.sleep(320)
        assert [each.message_id for each in told.of(IrretrievableMessage)] == ["bob-0"]


# What was never sent.


@virtually
async def test_forged_dependencies_cost_no_second_reading() -> None:
    node = at(PagingNode(), 1_000)
    talk(node, 110)
    async with opened(node, retrieve_frequency_ms=1_000) as (channel, _):
        await synced(channel)
        assert node.reads == 110
        for n in range(20):
            await node.deliver(sync(n, sender="mallory", follows=[HistoryEntry(f"none-{n}", None, "x")]))
            await asyncio.sleep(30)
        assert node.reads == 110, "what was read is not read again"
        talk(node, 10, first=1_000)
        await node.deliver(sync(99, sender="mallory", follows=[HistoryEntry("none-99", None, "x")]))
        await asyncio.sleep(600)
        assert node.reads <= 121, "but what is new is"


@virtually
async def test_nor_in_a_room_that_was_empty_when_it_was_first_read() -> None:
    node = PagingNode()
    async with opened(node, retrieve_frequency_ms=1_000) as (channel, _):
        await synced(channel)
        for n in range(110):
            await node.deliver(node.keep(said(n, lamport=START_MS + n), at=1))
        for n in range(20):
            await node.deliver(sync(n, sender="mallory", follows=[HistoryEntry(f"none-{n}", None, "x")]))
            await asyncio.sleep(20)
        assert node.reads == 110, "the first has no place to go on from, and reads forwards to get one"


@virtually
async def test_forged_dependencies_cost_no_second_reading_of_a_store_without_cursors_either() -> None:
    class Plain(ScriptedNode):
        read_messages = 0

        async def history(
            self, topic: str, *, since_ms: int
        ) -> AsyncGenerator[Sequence[NodeMessageReceived], None]:
            found = [e for e in self.log if (e.message.timestamp or 0) * 1000 >= since_ms]
            for start in range(0, len(found), PAGE):
                self.read_messages += len(found[start : start + PAGE])
                yield found[::-1][start : start + PAGE]

        log: list[NodeMessageReceived]

    source = PagingNode()
    talk(source, 110)
    node = Plain()
    node.log, node.stored = source.log, source.stored
    node.clock_offset = 10_000
    async with opened(node, retrieve_frequency_ms=1_000, query_on_connect=False) as (_, _told):
        for n in range(20):
            await node.deliver(sync(n, sender="mallory", follows=[HistoryEntry(f"none-{n}", None, "x")]))
            await asyncio.sleep(30)
        assert node.read_messages == 110


@virtually
async def test_a_relay_that_finds_nothing_by_name_is_not_read_through_for_names_that_nobody_has_sent() -> (
    None
):
    node = at(PagingNode(finds_by_hash=False), 1_000)
    messages = talk(node, 110)
    async with opened(node, retrieve_frequency_ms=1_000) as (channel, told):
        await synced(channel)
        for n in range(20):
            forged = HistoryEntry(f"none-{n}", n.to_bytes(32, "big"), "x")
            await node.deliver(sync(n, sender="mallory", follows=[forged]))
            await asyncio.sleep(30)
        assert node.reads == 110 and node.fetches == []
        late = talk(node, 2, first=2_000, after=messages)
        await node.deliver(node.log[-1])
        await asyncio.sleep(400)
        assert told.payloads[-2:] == payloads(late), "what is there is found all the same"


@virtually
async def test_all_of_it_holds_for_an_encrypted_channel() -> None:
    hook, node, plain = Reversing(), at(PagingNode(), 1_000), PagingNode()
    messages = talk(plain, 200)
    for event in plain.log:
        kept = node.keep(hook.encrypt(event.message.payload), at=(event.message.timestamp or START) - START)
        node.stored[event.message_hash] = kept
    node.log = node.log[100:]
    for event in plain.log[:100]:
        del node.stored[event.message_hash]
    async with opened(node, encryption=hook, max_waiting=30) as (channel, told):
        await synced(channel)
        assert told.payloads == payloads(messages[100:]) and len(told.of(HistoryGap)) == 1
        page = await channel.history(limit=10)
        assert [each.payload for each in page.messages] == payloads(messages[190:])


@virtually
async def test_what_the_node_leaves_to_a_reading_that_has_come_to_its_end_is_read_all_the_same() -> None:
    node = at(PagingNode(), 10_000)
    messages = talk(node, 30)
    node.expire(10)
    async with opened(node) as (channel, told):
        # The reading has come to the end, and waits before it takes messages for lost.
        await asyncio.sleep(0.5)
        assert channel.sync_status().syncing is not None and node.reads == 20
        late = said(99, sender="e", lamport=START_MS + 9_000_000)
        await node.message_events.emit(replace(node.keep(late, at=9_000), stored=True))
        await synced(channel)
        assert told.payloads == payloads([*messages[10:], late])


# Joining.


@virtually
async def test_who_joins_now_hears_what_is_said_and_waits_for_nothing_from_before() -> None:
    node = at(PagingNode(), 1_000)
    before = talk(node, 300)
    node.expire(200)
    store = MemoryPersistence()
    async with opened(node, join="now", persistence=store) as (channel, told):
        await synced(channel)
        now = [said(0, sender="live", follows=before[-2:], lamport=START_MS + 1_000_000)]
        # Somebody who was away for a long time names what only he saw last.
        now.append(said(1, sender="late", follows=[before[0], before[1]], lamport=START_MS + 1_000_001))
        for message in now:
            await node.deliver(node.keep(message, at=1_000))
        await asyncio.sleep(2)
        assert told.payloads == [b"live 0", b"late 1"]
        assert told.of(HistoryGap) == [] and told.of(IrretrievableMessage) == []
        assert channel.sync_status().is_synced
        assert node.reads <= PAGE * 4
    missed = said(2, sender="live", follows=now, lamport=START_MS + 1_200_000)
    node.keep(missed, at=1_200)
    node.clock_offset = 1_300
    async with opened(node, join="now", persistence=store) as (channel, told):
        await synced(channel)
        assert told.payloads == [b"live 2"], "one who was here before has missed something"


@virtually
async def test_who_joins_now_takes_what_was_said_before_its_node_began_to_hear() -> None:
    node = at(PagingNode(), 100)
    before = talk(node, 100)
    since = talk(node, 2 * PAGE + 5, first=100, every=1.0, after=before)
    # The channel does not hear of these: the node heard only what came after them.
    async with opened(node, join="now") as (channel, told):
        await synced(channel)
        assert told.payloads == payloads(since)
        assert node.reads <= PAGE * 5, "and not all that was said before"


@virtually
async def test_a_newcomer_counts_a_slow_clock_against_nobody_who_speaks_after_it_joined() -> None:
    node = at(PagingNode(tells_time=True), 0)
    node.relay_ahead = -100.0  # it shows the same time as our clock
    async with opened(node, join="now") as (channel, told):
        await synced(channel)
        await node.disconnect()
        await asyncio.sleep(60)
        slow = said(1, sender="slow", lamport=START_MS + 60_000)
        event = node.keep(slow, at=-300)
        node.log[-1] = replace(event, received_at=int(START + 60))
        await node.reconnect()
        await asyncio.sleep(30)
        assert told.payloads == [b"slow 1"]


@virtually
async def test_who_joins_from_a_time_on_reads_from_there() -> None:
    node = at(PagingNode(), 1_000)
    messages = talk(node, 300)
    async with opened(node, since=START + 250) as (channel, told):
        await synced(channel)
        assert told.payloads == payloads(messages[250:])
        assert told.of(HistoryGap) == [] and channel.sync_status().missing == ()
        await asyncio.sleep(1_000)
        assert told.payloads == payloads(messages[250:]) and told.of(IrretrievableMessage) == []


def test_join_and_since_that_contradict_each_other_are_refused() -> None:
    node = ScriptedNode()
    from strata.channels.reliable import InvalidConfiguration, make_channel

    with pytest.raises(InvalidConfiguration):
        make_channel(node, "room", TOPIC, "alice", join="now", since=5)
    with pytest.raises(InvalidConfiguration):
        make_channel(node, "room", TOPIC, "alice", options={"join": "later"})


# What cannot be opened.


KEYS = [GroupKey(bytes([n]) * 32) for n in (1, 2)]


def under(*keys: GroupKey) -> GroupKeyEncryption:
    return GroupKeyEncryption("room", keys)


def sealed_talk(node: PagingNode, count: int, key: GroupKey, *, first: int = 0) -> list[SdsMessage]:
    """As `talk`, encrypted with a key."""
    plain, hook = PagingNode(), under(key)
    messages = talk(plain, count, first=first)
    for event in plain.log:
        node.keep(hook.encrypt(event.message.payload), at=(event.message.timestamp or START) - START)
    return messages


def undecryptable(channel: ReliableChannel) -> list[MessagesUndecryptable]:
    told: list[MessagesUndecryptable] = []
    channel.message_events.on(MessagesUndecryptable.name, told.append)
    return told


@pytest.mark.req("C-244")
@pytest.mark.parametrize("join", ["history", "now"])
@virtually
async def test_what_a_wrong_key_did_not_open_comes_once_the_key_is_right(join: Any) -> None:
    node = at(PagingNode(), 1_000)
    before = sealed_talk(node, 3 * PAGE, KEYS[0])
    store = MemoryPersistence()
    async with opened(node, encryption=under(KEYS[1]), persistence=store, join=join) as (channel, told):
        warned = undecryptable(channel)
        await asyncio.sleep(30)
        since = sealed_talk(node, 2 * PAGE, KEYS[0], first=1_100)
        await node.disconnect()
        await asyncio.sleep(200)
        await node.reconnect()
        await asyncio.sleep(30)
        assert told.payloads == [] and not channel.sync_status().is_synced
        assert warned and channel.health.undecryptable >= 2 * PAGE
    node.clock_offset = 2_000
    async with opened(node, encryption=under(KEYS[0]), persistence=store, join=join) as (channel, told):
        await synced(channel)
        assert told.payloads == payloads(since if join == "now" else [*before, *since])
        assert channel.health.undecryptable == 0


@virtually
async def test_a_key_that_is_put_right_while_the_channel_is_open_brings_what_it_missed() -> None:
    node, keys = at(PagingNode(), 100), under(KEYS[0])
    old = sealed_talk(node, 10, KEYS[0])
    async with opened(node, encryption=keys) as (channel, told):
        await synced(channel)
        new = sealed_talk(node, 2 * PAGE, KEYS[1], first=100)
        for event in node.log[10:-1]:
            await node.deliver(event)
        assert told.payloads == payloads(old) and channel.health.undecryptable == 2 * PAGE - 1
        keys.use(KEYS)
        await node.deliver(node.log[-1])
        await asyncio.sleep(5)
        assert told.payloads == payloads([*old, *new])
        assert channel.health.undecryptable == 0 and (await synced(channel)).caught_up


@virtually
async def test_after_a_rotation_that_was_missed_the_next_opening_reads_on_from_before_it() -> None:
    node, store = at(PagingNode(), 100), MemoryPersistence()
    old = sealed_talk(node, 10, KEYS[0])
    async with opened(node, encryption=under(KEYS[0]), persistence=store) as (channel, told):
        await synced(channel)
        new = sealed_talk(node, 2 * PAGE, KEYS[1], first=100)
        for event in node.log[10:]:
            await node.deliver(event)
        await node.disconnect()
        await asyncio.sleep(2_000)
        await node.reconnect()
        await asyncio.sleep(60)
        assert told.payloads == payloads(old)
    node.clock_offset = 3_000
    async with opened(node, encryption=under(*KEYS), persistence=store) as (channel, told):
        await synced(channel)
        assert told.payloads == payloads(new)


@virtually
async def test_what_a_stranger_writes_makes_nobody_read_anything_again() -> None:
    node, keys = at(PagingNode(), 100), under(KEYS[0])
    messages = sealed_talk(node, 10, KEYS[0])
    async with opened(node, encryption=keys) as (channel, told):
        warned = undecryptable(channel)
        await synced(channel)
        reads = node.reads
        later = sealed_talk(node, 30, KEYS[0], first=100)
        for event in node.log[10:]:
            await node.deliver(b"not for anybody", event)
            await asyncio.sleep(3)
        assert told.payloads == payloads([*messages, *later])
        assert node.reads == reads and channel.sync_status().is_synced
        assert channel.statistics.undecryptable == 30 and len(warned) == 2
