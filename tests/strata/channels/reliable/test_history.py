"""A channel's past, backwards and page by page, without any peer online (`ReliableChannel.history`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from strata.channels.messaging.reading import HistoryPage
from strata.channels.reliable import (
    HistoryGap,
    InvalidPlace,
    MessageReceived,
    PastMessages,
    ReliableChannel,
)
from strata.channels.sds import HistoryEntry, SdsMessage
from strata.protocol.errors import ConnectionFailed

from tests.strata.channels.reliable.test_absence import PagingNode, at, payloads, talk
from tests.support.scripted_node import (
    START,
    START_MS,
    opened,
    said,
    segments,
    sync,
)
from tests.support.virtual_time import virtually

QUIETLY: dict[str, Any] = {"join": "now", "retrieve_frequency_ms": 0}


async def walk(channel: ReliableChannel, limit: int) -> list[PastMessages]:
    """All pages, the newest first."""
    pages = [await channel.history(limit=limit)]
    while pages[-1].more:
        pages.append(await channel.history(before=pages[-1].before, limit=limit))
    return pages


def said_in(pages: list[PastMessages]) -> list[bytes]:
    return [message.payload for page in reversed(pages) for message in page.messages]


@pytest.mark.parametrize("limit", [1, 7, 20, 33, 1_000])
@virtually
async def test_the_past_comes_backwards_in_whole_pages_and_each_message_once(limit: int) -> None:
    node = at(PagingNode(), 1_000)
    messages = talk(node, 100)
    async with opened(node, **QUIETLY) as (channel, told):
        pages = await walk(channel, limit)
        assert said_in(pages) == payloads(messages)
        assert all(len(page.messages) == limit for page in pages[:-1])
        assert all(page.is_complete for page in pages)
        assert pages[-1].before is None
        assert told.payloads == [], "nothing was handed over"


@virtually
async def test_what_is_in_the_past_looks_as_what_is_handed_over() -> None:
    node = at(PagingNode(), 1_000)
    talk(node, 5)
    async with opened(node) as (channel, told):
        handed = told.of(MessageReceived)
        page = await channel.history()
        assert [each.message_id for each in page.messages] == [each.message_id for each in handed]
        for theirs, ours in zip(page.messages, handed, strict=True):
            assert (theirs.request_id, theirs.sender_id) == (ours.request_id, ours.sender_id)
            assert (theirs.payload, theirs.hash) == (ours.payload, ours.hash)
        assert [each.timestamp for each in page.messages] == [START_MS + 1000 * n for n in range(5)]
        assert len(told.payloads) == 5, "nothing was handed over a second time"


@virtually
async def test_the_past_has_the_place_and_the_author_of_each_message_as_it_was_handed_over() -> None:
    node = at(PagingNode(), 1_000)
    one, two, three = segments(b"in three parts", size=5)
    (between,) = segments(b"between")
    parts = [("bob", one), ("carol", between), ("bob", two), ("bob", three)]
    last: list[SdsMessage] = []
    for n, (sender, content) in enumerate(parts):
        last = [said(n, sender=sender, content=content, follows=last, lamport=START_MS + 1000 * n)]
        node.keep(last[0], at=n)
    node.log = [
        replace(event, message=replace(event.message, author=f"did:x:{n}", meta=b"proof"))
        for n, event in enumerate(node.log)
    ]
    async with opened(node) as (channel, told):
        handed = sorted(told.of(MessageReceived), key=lambda each: each.order or (0, ""))
        assert [each.payload for each in handed] == [b"in three parts", b"between"]
        for past, ours in zip((await channel.history()).messages, handed, strict=True):
            assert (past.payload, past.author, past.meta) == (ours.payload, ours.author, ours.meta)
            assert (past.order, past.sent_at) == (ours.order, ours.sent_at) and past.order


@virtually
async def test_the_past_is_that_of_the_members_whoever_the_node_reads() -> None:
    node = at(PagingNode(), 1_000)
    messages = talk(node, 6)
    node.log = [
        replace(event, message=replace(event.message, author=("did:x:bob", "did:x:mallory", None)[n % 3]))
        for n, event in enumerate(node.log)
    ]
    async with opened(node, **QUIETLY, members=("did:x:bob",)) as (channel, _):
        said_by_bob = [payload for n, payload in enumerate(payloads(messages)) if n % 3 != 1]
        assert said_in(await walk(channel, 2)) == said_by_bob


class Swapping(PagingNode):
    """A node over relays that stored some messages in another order: it alternates between both orders."""

    async def read(self, topic: str, **options: Any) -> AsyncGenerator[HistoryPage, None]:
        turned = len(self.queries) % 2
        async with aclosing(super().read(topic, **options)) as pages:
            async for page in pages:
                found = list(page.messages)
                for place in range(turned, len(found) - 1, 2):
                    found[place : place + 2] = found[place : place + 2][::-1]
                yield HistoryPage(found, page.position)


@pytest.mark.parametrize("limit", [1, 4, 7, 30])
@virtually
async def test_a_page_begins_behind_what_was_read_in_whatever_order_it_comes(limit: int) -> None:
    node = at(Swapping(), 1_000)
    messages = talk(node, 70)
    async with opened(node, **QUIETLY) as (channel, _):
        assert sorted(said_in(await walk(channel, limit))) == sorted(payloads(messages))


@pytest.mark.parametrize("gone", [0, 1, 5])
@virtually
async def test_a_past_goes_on_where_packets_before_the_cut_are_gone_and_without_what_came_since(
    gone: int,
) -> None:
    node = at(PagingNode(), 1_000)
    messages = talk(node, 30)
    async with opened(node, **QUIETLY) as (channel, _):
        newest = await channel.history(limit=5)
        del node.log[25 : 25 + gone]
        node.keep(said(31, lamport=START_MS + 2_000_000), at=2_000)
        older = await channel.history(before=newest.before, limit=30)
        assert [each.payload for each in older.messages] == payloads(messages)[:25]


@virtually
async def test_a_place_of_an_earlier_version_is_one_still() -> None:
    node = at(PagingNode(), 1_000)
    messages = talk(node, 30)
    async with opened(node, **QUIETLY) as (channel, _):
        page = await channel.history(limit=5)
        assert page.before is not None
        place = msgspec.msgpack.decode(bytes.fromhex(page.before))
        before = msgspec.msgpack.encode(place[:4]).hex()
        older = await channel.history(before=before, limit=30)
        assert [each.payload for each in older.messages] == payloads(messages)[:25]


@pytest.mark.parametrize("limit", [1, 2, 3])
@virtually
async def test_large_messages_and_those_that_were_sent_again_are_there_once(limit: int) -> None:
    node = at(PagingNode(), 1_000)
    big = bytes(range(256)) * 30
    last = [said(0)]
    node.keep(last[0], at=0)
    for n, content in enumerate(segments(big, size=100), 1):
        last = [said(n, content=content, follows=last, lamport=START_MS + n * 10)]
        node.keep(last[0], at=n / 100)
        if n == 40:
            node.keep(said(999, sender="carol", lamport=START_MS + 405), at=1)
    node.keep(sync(1, follows=last), at=2)
    node.keep(said(0), at=9)  # the same message again
    node.keep(last[0], at=10)
    async with opened(node, **QUIETLY) as (channel, _):
        pages = await walk(channel, limit)
        assert sorted(said_in(pages)) == sorted([b"bob 0", big, b"carol 999"])


@pytest.mark.parametrize("segmentation", ["auto", "off"])
@virtually
async def test_payloads_without_segments_are_there_where_the_channel_takes_them(segmentation: str) -> None:
    node = at(PagingNode(), 1_000)
    (looks_like_one,) = segments(b"spoilt")
    contents = [b"hello", b"hello", looks_like_one[:-1] + b"?"]  # one twice, and a segment with another hash
    for n, content in enumerate(contents):
        node.keep(said(n, content=content), at=n)
    if segmentation == "auto":
        for n, content in enumerate(segments(b"in two parts", size=8), len(contents)):
            node.keep(said(n, content=content), at=n)
    async with opened(node, segmentation=segmentation) as (channel, told):
        handed = told.of(MessageReceived)
        assert [each.payload for each in handed][:3] == contents
        for limit in (1, 2, 10):
            pages = await walk(channel, limit)
            past = [message for page in reversed(pages) for message in page.messages]
            assert [(each.request_id, each.payload) for each in past] == [
                (each.request_id, each.payload) for each in handed
            ]
    node.log = node.log[:3]
    async with opened(node, **QUIETLY, sender_id="dave") as (channel, _):
        assert said_in(await walk(channel, 10)) == [], "by default a payload without a segment is none"


@virtually
async def test_a_page_says_what_is_missing() -> None:
    node = at(PagingNode(), 1_000)
    messages = talk(node, 60)
    (hole,) = [event for event in node.log if event.message.payload == messages[50].encode()]
    node.log.remove(hole)
    del node.stored[hole.message_hash]
    async with opened(node, **QUIETLY) as (channel, _):
        newest, older = await channel.history(limit=5), await channel.history(before=START + 40, limit=20)
        assert newest.is_complete
        assert older.is_complete and older.messages[-1].payload == payloads(messages)[39]
        with_hole = await channel.history(before=newest.before, limit=10)
        assert with_hole.missing == (messages[50].message_id,) and not with_hole.is_complete
    node.expire(20)
    async with opened(node, **QUIETLY, sender_id="dave") as (channel, told):
        pages = await walk(channel, 30)
        assert set(pages[-1].missing) == {messages[18].message_id, messages[19].message_id}
        assert len(said_in(pages)) == 39 and not told.of(HistoryGap)


@pytest.mark.parametrize(("most", "found"), [(1_500, 1), (1_000, 0)])
@virtually
async def test_a_message_may_name_as_many_as_the_channel_takes(most: int, found: int) -> None:
    node = at(PagingNode(), 1_000)
    before = [said(n) for n in range(1_200)]
    node.keep(said(1_200, follows=before), at=1)
    async with opened(node, **QUIETLY, max_received_history=most) as (channel, _):
        assert len((await channel.history()).messages) == found


@virtually
async def test_messages_of_other_channels_and_garbage_are_no_part_of_it() -> None:
    node = at(PagingNode(), 1_000)
    node.keep(b"garbage", at=1)
    node.keep(said(1, channel="hall"), at=2)
    node.keep(said(2), at=3)
    node.keep(SdsMessage("bob", "bob-3", "room", START_MS, (), None, (), b"no segment"), at=4)
    async with opened(node, **QUIETLY) as (channel, _):
        page = await channel.history()
        assert [each.payload for each in page.messages] == [b"bob 2"] and not page.more


@virtually
async def test_places_and_limits_that_make_no_sense_are_refused() -> None:
    node = PagingNode()
    async with opened(node, **QUIETLY) as (channel, _):
        for wrong in ("", "zz", "00", "93c0"):
            with pytest.raises(InvalidPlace):
                await channel.history(before=wrong)
        for limit in (0, -1, 1_001):
            with pytest.raises(ValueError, match="limit"):
                await channel.history(limit=limit)
        node.fails_after = 0
        node.keep(said(1))
        with pytest.raises(ConnectionFailed):
            await channel.history()


@virtually
async def test_asking_for_the_past_disturbs_nothing() -> None:
    node = at(PagingNode(), 1_000)
    messages = talk(node, 40)
    async with opened(node, **QUIETLY) as (channel, told):
        await channel.history(limit=10)
        live = said(41, sender="e", follows=[HistoryEntry(messages[-1].message_id, None, "b")])
        await node.deliver(live)
        assert told.payloads == [b"e 41"] and channel.log() == ["e-41"]
