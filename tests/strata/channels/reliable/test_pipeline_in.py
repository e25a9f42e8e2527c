"""From the transport to the application: decrypt, SDS, reassemble, emit (channel.md §5)."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import pytest
from strata.channels.rate_limit import SendQueueFull
from strata.channels.reliable import (
    IrretrievableMessage,
    MessageReceived,
    ReliableMessageReceived,
    SendingMessage,
)
from strata.channels.sds import HistoryEntry, OutgoingFull

from tests.support.scripted_node import (
    START_MS,
    ScriptedNode,
    chunks,
    opened,
    said,
    settle,
    sync,
)
from tests.support.virtual_time import virtually


class Xor:
    """A hook with a one-byte key; with another key it fails."""

    def __init__(self, key: int, trace: list[str] | None = None) -> None:
        self.key = key
        self.trace = trace if trace is not None else []

    def encrypt(self, content: bytes) -> bytes:
        return bytes([self.key]) + bytes(byte ^ self.key for byte in content)

    def decrypt(self, payload: bytes) -> bytes:
        self.trace.append("decrypt")
        if payload[:1] != bytes([self.key]):
            raise ValueError("another key")
        return bytes(byte ^ self.key for byte in payload[1:])


@pytest.mark.req("C-072", "C-078", "C-240")
@virtually
async def test_each_chunk_is_decrypted_then_ordered_then_joined_then_told() -> None:
    node, hook = ScriptedNode(), Xor(7)
    async with opened(node, encryption=hook) as (channel, told):
        first, second = chunks(1, b"abcdefgh", 4, chained=True)
        await node.deliver(hook.encrypt(second.encode()))
        # Decrypted and held by SDS: neither logged nor reported.
        assert hook.trace == ["decrypt"] and channel.log() == [] and told.events == []
        await node.deliver(hook.encrypt(first.encode()))
        assert hook.trace == ["decrypt"] * 2
        assert channel.log() == [first.message_id, second.message_id]
        assert told.payloads == [b"abcdefgh"]


@pytest.mark.req("C-072")
@virtually
async def test_bytes_reach_sds_only_after_the_hook_is_done() -> None:
    node = ScriptedNode()
    release = asyncio.Event()

    class Slow(Xor):
        async def decrypt(self, payload: bytes) -> bytes:  # type: ignore[override]
            await release.wait()
            return super().decrypt(payload)

    hook = Slow(7)
    async with opened(node, encryption=hook) as (channel, told):
        arriving = asyncio.create_task(node.deliver(hook.encrypt(said(1).encode())))
        await asyncio.sleep(10)
        assert channel.log() == []
        release.set()
        await arriving
        assert channel.log() == ["bob-1"] and told.payloads == [b"bob 1"]


@pytest.mark.req("C-073", "C-246")
@virtually
async def test_what_does_not_decrypt_is_counted_and_changes_nothing() -> None:
    node = ScriptedNode()
    mine, other = Xor(7), Xor(8)
    async with opened(node, encryption=mine) as (channel, told):
        await channel.send(b"mine")
        await settle()
        # If it were read, it would acknowledge a message and reveal a gap.
        own = HistoryEntry(channel.log()[0], None, "alice")
        unread = said(1, follows=[own, HistoryEntry("unknown", None, "bob")])
        before = len(told.events)
        await node.deliver(other.encrypt(unread.encode()))
        status = channel.sync_status()
        assert channel.statistics.undecryptable == 1
        assert channel.statistics.sds.received == 0
        assert status.missing == () and [each.acknowledged for each in status.outstanding] == [0]
        assert len(channel.log()) == 1 and told.events[before:] == []
        # The right key still works.
        await node.deliver(mine.encrypt(said(2).encode()))
        assert told.payloads == [b"bob 2"]


@pytest.mark.req("C-074")
@virtually
async def test_what_is_no_sds_message_or_no_segment_is_dropped_and_counted() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, told):
        await node.deliver(b"", b"\xff\xff\xff", b"not protobuf at all")
        assert channel.statistics.sds.undecodable == 3
        assert channel.log() == [] and told.events == []
        await node.deliver(said(1, content=b"\xff no segment"))
        assert sum(channel.statistics.reassembly.invalid.values()) == 1
        assert told.events == []
        await node.deliver(said(2))
        assert told.payloads == [b"bob 2"]


@pytest.mark.req("C-075")
@virtually
async def test_another_channel_on_the_same_topic_is_not_ours() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, told):
        foreign = said(1, channel="hall", follows=[HistoryEntry("unknown", None, "bob")])
        await node.deliver(foreign)
        assert channel.log() == [] and told.events == [] and channel.sync_status().missing == ()
        assert channel.statistics.sds.other_channels == 1


@pytest.mark.req("C-075")
@virtually
async def test_messages_of_another_topic_are_not_ours() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, told):
        await node.deliver(said(1), topic="/test/1/other/proto")
        assert channel.log() == [] and told.events == []


@pytest.mark.req("C-076", "C-298")
@virtually
async def test_a_chunk_acknowledges_reveals_gaps_and_waits_for_what_it_follows() -> None:
    node = ScriptedNode()
    async with opened(node, retrieve_frequency_ms=0) as (channel, told):
        await channel.send(b"mine")
        await settle()
        first, second = said(1), said(2, follows=[said(1), node.sent[0]])
        await node.deliver(second)
        status = channel.sync_status()
        assert status.outstanding == ()  # acknowledged, although the message itself must wait
        assert [each.message_id for each in status.missing] == ["bob-1"]
        assert told.payloads == []
        await node.deliver(first)
        assert told.payloads == [b"bob 1", b"bob 2"]
        assert channel.sync_status().missing == ()


@pytest.mark.req("C-077", "C-126", "C-167")
@virtually
async def test_a_gap_is_asked_for_and_given_up_in_the_end() -> None:
    node = ScriptedNode()
    options: dict[str, Any] = {"lost_message_timeout_ms": 30_000, "retrieve_frequency_ms": 10_000}
    async with opened(node, query_on_connect=False, **options) as (channel, told):
        gone = HistoryEntry("bob-1", bytes(32), "bob")
        await node.deliver(said(2, follows=[gone]))
        await asyncio.sleep(1)
        assert node.fetches and node.fetches[0][1] == (bytes(32),)
        assert told.of(IrretrievableMessage) == [] and told.payloads == []
        await asyncio.sleep(40)
        (lost,) = told.of(IrretrievableMessage)
        assert (lost.message_id, lost.retrieval_hint, lost.sender_id) == ("bob-1", bytes(32), "bob")
        assert lost.channel_id == "room" and abs(lost.first_missing_at - START_MS) < 100
        # The message that waited for it waits no longer.
        assert told.payloads == [b"bob 2"] and channel.sync_status().missing == ()


@pytest.mark.req("C-078")
@virtually
async def test_chunks_are_joined_by_index_whatever_order_they_come_in() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, told):
        parts = chunks(1, b"abcdefghij", 4)
        await node.deliver(parts[2], parts[0])
        assert told.payloads == [] and channel.sync_status().partial_messages == 1
        await node.deliver(parts[1], parts[1])
        assert told.payloads == [b"abcdefghij"]
        assert channel.sync_status().partial_messages == 0
        assert len(told.of(ReliableMessageReceived)) == 1


@pytest.mark.req("C-079")
@virtually
async def test_a_partial_message_is_dropped_after_its_timeout_and_told() -> None:
    node = ScriptedNode()
    async with opened(node, reassembly_timeout_ms=20_000) as (channel, told):
        parts = chunks(1, b"abcdefgh", 4)
        await node.deliver(parts[0])
        await asyncio.sleep(19)
        assert channel.sync_status().partial_messages == 1 and told.of(IrretrievableMessage) == []
        await asyncio.sleep(2)
        assert channel.sync_status().partial_messages == 0
        (lost,) = told.of(IrretrievableMessage)
        assert lost.message_id == channel.get_message_id(b"abcdefgh") and lost.sender_id == "bob"
        # All its segments were acknowledged when they came, so the rest still completes it.
        await node.deliver(parts[1])
        assert told.payloads == [b"abcdefgh"]


@pytest.mark.req("C-088", "C-209")
@pytest.mark.parametrize("stops", [False, True])
@virtually
async def test_the_time_of_a_partial_message_runs_only_while_the_rest_can_come(stops: bool) -> None:
    node = ScriptedNode()
    async with opened(node, reassembly_timeout_ms=20_000) as (channel, told):
        parts = chunks(1, b"abcdefgh", 4)
        await node.deliver(parts[0])
        await asyncio.sleep(15)
        await (channel.stop() if stops else node.disconnect())
        await asyncio.sleep(3_600)
        await (channel.start() if stops else node.reconnect())
        await asyncio.sleep(4)
        assert told.of(IrretrievableMessage) == []
        await asyncio.sleep(2)
        assert len(told.of(IrretrievableMessage)) == 1


@pytest.mark.req("C-079")
@pytest.mark.parametrize(
    ("options", "kept"),
    [({"max_partial_messages_per_sender": 3}, 3), ({"max_partial_bytes_per_sender": 10}, 2)],
)
@virtually
async def test_partial_messages_are_bounded_in_number_and_bytes(options: dict[str, Any], kept: int) -> None:
    node = ScriptedNode()
    async with opened(node, **options) as (channel, told):
        for n in range(5):
            await node.deliver(chunks(10 * n, f"{n}234WXYZ".encode(), 4)[0])
        assert channel.sync_status().partial_messages == kept
        assert len(told.of(IrretrievableMessage)) == 5 - kept
        # The newest were kept.
        await node.deliver(chunks(40, b"4234WXYZ", 4)[1])
        assert told.payloads == [b"4234WXYZ"]


@pytest.mark.req("C-080")
@virtually
async def test_what_is_due_is_done_in_rounds_and_none_of_it_is_lost() -> None:
    node = ScriptedNode()
    async with opened(
        node,
        process_task_min_elapse_ms=5_000,
        acknowledgement_timeout_ms=700,
        max_retransmissions=2,
    ) as (channel, _):
        for n in range(10):
            await channel.send(f"{n}".encode())
            await asyncio.sleep(0.3)
        await asyncio.sleep(60)
    seen: Counter[str] = Counter()
    rounds: set[float] = set()
    for sent in node.sent:
        if seen[sent.sds.message_id]:
            rounds.add(round(sent.at, 1))
        seen[sent.sds.message_id] += 1
    # They came due every 300 ms, and were sent together in rounds at least the configured time apart.
    assert len(rounds) >= 3
    assert all(later - earlier >= 4.9 for earlier, later in itertools.pairwise(sorted(rounds)))
    assert len(seen) == 10 and set(seen.values()) == {3}


@pytest.mark.req("C-080")
@virtually
async def test_a_burst_of_a_thousand_messages_comes_out_whole_and_in_order() -> None:
    node = ScriptedNode()
    async with opened(node, process_task_min_elapse_ms=1_000) as (channel, told):
        previous = None
        for n in range(1_000):
            message = said(n, follows=[previous] if previous else ())
            await node.message_events.emit(node.packed(message))
            previous = message
        await asyncio.sleep(5)
        assert told.payloads == [f"bob {n}".encode() for n in range(1_000)]
        assert len(channel.log()) == 1_000


@pytest.mark.req("C-081")
@virtually
async def test_the_incoming_buffer_is_swept_by_the_clock_and_not_by_what_arrives() -> None:
    node = ScriptedNode()
    async with opened(
        node,
        sweep_in_buf_interval_ms=7_000,
        lost_message_timeout_ms=1_000,
        retrieve_frequency_ms=0,
    ) as (_, told):
        await node.deliver(said(2, follows=[HistoryEntry("bob-1", None, "bob")]))
        for n in range(6):
            await asyncio.sleep(1)
            await node.deliver(said(10 + n))
        # The timeout has long passed, but only a sweep gives up.
        assert told.of(IrretrievableMessage) == []
        await asyncio.sleep(1.5)
        assert told.at(IrretrievableMessage) == [7.0]
        assert told.payloads[-1] == b"bob 2"


@pytest.mark.req("C-082")
@virtually
async def test_a_channel_whose_queue_is_full_hinders_no_other() -> None:
    node = ScriptedNode(answer=lambda sent: 0.0 if sent.sds.channel_id == "hall" else None)
    options: dict[str, Any] = {"max_unacknowledged": 4}
    elsewhere = "/test/1/hall/proto"
    async with (
        opened(node, leaves_unsent=True, **options) as (full, _),
        opened(node, channel_id="hall", topic=elsewhere, **options) as (free, told),
    ):
        for n in range(4):
            await full.send(f"{n}".encode())
        with pytest.raises((OutgoingFull, SendQueueFull)):
            await full.send(b"too many")
        await free.send(b"still fine")
        await node.deliver(said(1, channel="hall"), topic=elsewhere)
        assert told.payloads == [b"bob 1"]
        assert [event.chunk_info.chunk_index for event in told.of(SendingMessage)] == [0]
        # Neither has messages of the other.
        assert len(full.log()) == 4 and len(free.log()) == 2
        assert free.sync_status().missing == () and len(free.sync_status().outstanding) == 1


@pytest.mark.req("C-082")
@virtually
async def test_a_channel_whose_inbox_nobody_empties_hinders_no_other() -> None:
    node = ScriptedNode()
    elsewhere = "/test/1/hall/proto"
    async with (
        opened(node, max_inbox_messages=2, take=False) as (full, _),
        opened(node, channel_id="hall", topic=elsewhere) as (_, told),
    ):
        flood = asyncio.create_task(node.deliver(*[said(n) for n in range(5)]))
        await settle()
        assert full.sync_status().inbox == 2 and not flood.done()
        await node.deliver(said(1, channel="hall"), topic=elsewhere)
        assert told.payloads == [b"bob 1"]
        # It continues as soon as somebody takes a message.
        taken = [(await anext(full)).payload for _ in range(5)]
        await flood
        assert taken == [f"bob {n}".encode() for n in range(5)]


@pytest.mark.req("C-008", "C-082")
@virtually
async def test_on_a_shared_topic_too_a_full_inbox_hinders_no_other_channel() -> None:
    node = ScriptedNode()
    async with (
        opened(node, max_inbox_messages=2, take=False),
        opened(node, channel_id="hall") as (_, told),
    ):
        flood = asyncio.create_task(node.deliver(*[said(n) for n in range(5)], said(1, channel="hall")))
        await asyncio.sleep(60)
        flood.cancel()
        assert told.payloads == [b"bob 1"]


@pytest.mark.req("C-298")
@virtually
async def test_a_reply_is_never_told_before_what_it_answers() -> None:
    node = ScriptedNode()
    async with opened(node, retrieve_frequency_ms=0) as (_, told):
        question = said(1, b"question", sender="bob")
        answer = said(2, b"answer", sender="carol", follows=[question])
        thanks = said(3, b"thanks", sender="bob", follows=[question, answer])
        # A smaller Lamport time does not move it to the front.
        hasty = said(4, b"hasty", sender="dave", follows=[thanks], lamport=1)
        await node.deliver(hasty, thanks, answer)
        assert told.payloads == []
        await node.deliver(question)
        assert told.payloads == [b"question", b"answer", b"thanks", b"hasty"]


@virtually
async def test_a_sync_without_news_tells_nothing() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, told):
        first = said(1)
        await node.deliver(first, sync(2, follows=[first]))
        assert [event.name for _, event in told.events] == ["message-received", "reliable:message:received"]
        assert channel.log() == ["bob-1"]


@virtually
async def test_a_received_event_tells_what_the_transport_knew() -> None:
    node = ScriptedNode()
    async with opened(node) as (_, told):
        event = node.packed(said(1))
        await node.deliver(event)
        (received,) = told.of(MessageReceived)
        assert received.hash == event.message_hash and received.sender_id == "bob"
        assert received.timestamp == START_MS + 10 and not received.ephemeral
