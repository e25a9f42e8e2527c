"""Sent once, to those who listen now (channel.md §9)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from strata.channels.messaging.binding import build_packet
from strata.channels.messaging.values import (
    MessageEnvelope,
    NodeMessageError,
    NodeMessageReceived,
    NodeMessageSent,
)
from strata.channels.reliable import (
    EphemeralMessageDropped,
    MessageReceived,
    MessageSent,
    MessageTooLarge,
    ReliableClient,
    ReliableEnvelope,
    ReliableMessageReceived,
    SendingMessageIrrecoverableError,
    make_channel,
)
from strata.channels.reliable.sizes import largest_ephemeral
from strata.channels.sds import HistoryEntry, Kind, SdsMessage
from strata.protocol import ids

from tests.support.scripted_node import (
    START,
    TOPIC,
    Refusal,
    Reversing,
    ScriptedNode,
    chunks,
    ephemeral,
    filter_of,
    opened,
    said,
    settle,
)
from tests.support.virtual_time import virtually

W5 = bytes.fromhex(
    "0a05616c6963651240356534346462343131643831383235393764666534393930393263383336656362373736303361"
    "656164366663366564333465633466326430383264303835621a06726f6f6d2d31a201310a208b21b2b925bbac93c5c8"
    "e100229d278e1042c002b56d23934ee712f4427be8c41801220b68656c6c6f2072656c6179"
)


def envelope(payload: bytes, *, channel_id: str = "", **inner: Any) -> ReliableEnvelope:
    made = MessageEnvelope(payload=payload, **{"content_topic": TOPIC, **inner})
    return ReliableEnvelope(message_envelope=made, channel_id=channel_id)


@pytest.mark.req("C-176", "C-178")
@virtually
async def test_an_envelope_without_a_channel_travels_bare() -> None:
    node = ScriptedNode()
    async with opened(node, encryption=Reversing(), segment_size_bytes=4) as (channel, told):
        request_id = await ReliableClient(node).send(envelope(b"for whoever hears it"))
        await asyncio.sleep(600)
        (sent,) = node.sent  # not segmented, and never repeated
        assert sent.payload == b"for whoever hears it"  # no SDS, no hook
        assert sent.envelope.ephemeral and sent.request_id == request_id
        assert channel.log() == [] and channel.sync_status().is_synced and told.events == []


@pytest.mark.req("C-177")
@virtually
async def test_both_ways_into_a_channel_send_an_sds_ephemeral_message_under_its_hook() -> None:
    node, hook = ScriptedNode(), Reversing()
    async with opened(node, encryption=hook) as (channel, told):
        first = await channel.send_ephemeral(b"typing")
        inner = envelope(b"typing too", channel_id="room", ephemeral=True)
        second = await ReliableClient(node).send(inner)
        await settle()
        assert [sent.request_id for sent in node.sent] == [first, second]
        for sent, payload in zip(node.sent, (b"typing", b"typing too"), strict=True):
            assert sent.envelope.ephemeral and payload not in sent.payload
            message = SdsMessage.decode(hook.decrypt(sent.payload))
            assert message is not None and message.kind is Kind.EPHEMERAL
            assert message.content is not None and payload in message.content
            assert (message.channel_id, message.sender_id) == ("room", "alice")
        assert [event.request_id for event in told.of(MessageSent)] == [first, second]


@pytest.mark.req("C-178")
@virtually
async def test_an_ephemeral_message_has_the_bytes_of_the_document() -> None:
    node = ScriptedNode()
    channel = make_channel(node, "room-1", TOPIC, "alice", options={"send_request_id": False})
    async with channel:  # at the exact second of the vector
        await channel.send_ephemeral(b"hello relay")
    assert node.sent[0].payload == W5


@pytest.mark.req("C-178")
@virtually
async def test_an_ephemeral_message_is_one_segment_however_small_segments_are() -> None:
    node = ScriptedNode()
    async with opened(node, segment_size_bytes=4) as (channel, _):
        await channel.send_ephemeral(b"more than four bytes")
        await settle()
    (sent,) = node.sent
    assert sent.segment.payload == b"more than four bytes"
    assert (sent.segment.data_segment_index, sent.segment.data_segment_count) == (0, 1)
    assert (sent.sds.lamport_timestamp, sent.sds.causal_history, sent.sds.bloom_filter) == (None, (), None)


@pytest.mark.req("C-179")
@virtually
async def test_an_ephemeral_message_too_large_for_one_packet_is_refused() -> None:
    node = ScriptedNode(largest=30_000)
    most = largest_ephemeral(30_000, "room", "alice", hook_overhead=0)
    assert most is not None
    async with opened(node, segment_size_bytes=100) as (channel, told):
        with pytest.raises(MessageTooLarge) as refusal:
            await channel.send_ephemeral(bytes(most + 1))
        assert (refusal.value.size_bytes, refusal.value.max_bytes) == (most + 1, most)
        (error,) = told.of(SendingMessageIrrecoverableError)
        assert error.code == "MessageTooLarge" and (error.chunk_info.total_chunks) == 1
        assert node.sent == []
        await channel.send_ephemeral(bytes(most))
        await settle()
        assert len(node.sent) == 1 and len(node.sent[0].payload) <= 30_000
        with pytest.raises(MessageTooLarge):
            await ReliableClient(node).send(envelope(bytes(30_001)))


@pytest.mark.req("C-180")
@virtually
async def test_an_ephemeral_message_leaves_no_trace_at_the_sender() -> None:
    node = ScriptedNode()
    async with opened(node, acknowledgement_timeout_ms=1_000) as (channel, told):
        await channel.send_ephemeral(b"gone")
        await settle()
        fleeting = node.sent[0].sds.message_id
        await channel.send(b"stays")
        await settle()
        assert fleeting not in channel.log() and len(channel.log()) == 1
        assert len(channel.sync_status().outstanding) == 1
        assert node.sent[1].sds.causal_history == ()
        await asyncio.sleep(60)
        assert [sent.sds.message_id for sent in node.sent].count(fleeting) == 1
        assert told.names.count("message-sent") == len(node.sent)


@pytest.mark.req("C-181", "C-182", "C-228", "C-057", "C-229")
@pytest.mark.parametrize(
    ("used", "threshold", "reason"),
    [
        (89, 0.9, None),
        (90, 0.9, "rate_limit_approached"),
        (95, 0.9, "rate_limit_approached"),
        (100, 0.9, "rate_limit_reached"),
        (49, 0.5, None),
        (50, 0.5, "rate_limit_approached"),
    ],
)
@virtually
async def test_near_the_limit_an_ephemeral_message_is_dropped_at_once(
    used: int, threshold: float, reason: str | None
) -> None:
    node = ScriptedNode()
    options: dict[str, Any] = {
        "messages_per_epoch": 100,
        "approach_threshold": threshold,
        "max_retransmissions": 0,
    }
    async with opened(node, **options) as (channel, told):
        for n in range(used):
            await channel.send(f"{n}".encode())
        await settle()
        assert len(node.sent) == used
        request_id = await channel.send_ephemeral(b"perhaps")
        await settle()
        dropped = told.of(EphemeralMessageDropped)
        if reason is None:
            assert dropped == [] and len(node.sent) == used + 1
            return
        assert [(each.request_id, each.reason, each.rate_limit_utilization) for each in dropped] == [
            (request_id, reason, used)
        ]
        assert channel.sync_status().queued == 0
        await asyncio.sleep(1200)  # two epochs later, it is still dropped
        assert len(node.sent) == used


@pytest.mark.req("C-181")
@virtually
async def test_outside_channels_too_the_limit_drops_ephemeral_messages() -> None:
    node = ScriptedNode()
    failures: list[NodeMessageError] = []
    node.message_events.on(NodeMessageError.name, failures.append)
    async with opened(node, messages_per_epoch=1) as (channel, _):
        await channel.send(b"uses it up")
        await settle()
        request_id = await ReliableClient(node).send(envelope(b"dropped"))
        await settle()
        assert len(node.sent) == 1
        assert [(each.request_id, each.code) for each in failures] == [(request_id, "rate_limit_reached")]


@pytest.mark.req("C-183", "C-138")
@virtually
async def test_an_ephemeral_message_is_received_at_once_and_leaves_no_trace() -> None:
    node = ScriptedNode()
    async with opened(node, retrieve_frequency_ms=0) as (channel, told):
        # Another message waits for its dependency; the ephemeral message does not.
        held = said(2, follows=[HistoryEntry("bob-1", None, "bob")])
        await node.deliver(held)
        await node.deliver(ephemeral(3, b"typing"))
        (received,) = told.of(MessageReceived)
        assert (received.payload, received.sender_id, received.ephemeral) == (b"typing", "bob", True)
        assert len(told.of(ReliableMessageReceived)) == 1
        assert told.of(ReliableMessageReceived)[0].envelope.message_envelope.ephemeral
        assert channel.log() == []
        await channel.send(b"mine")
        await settle()
        sent = node.sent[0].sds
        assert sent.causal_history == ()
        assert sent.bloom_filter == filter_of(held)  # the ephemeral one is not acknowledged


@pytest.mark.req("C-183")
@virtually
async def test_an_ephemeral_message_overtakes_what_is_still_partial() -> None:
    node = ScriptedNode()
    async with opened(node) as (_, told):
        first, second = chunks(1, b"in two parts", 8)
        await node.deliver(first, ephemeral(1, b"quick"), second)
        assert told.payloads == [b"quick", b"in two parts"]


@pytest.mark.req("C-184")
@virtually
async def test_an_ephemeral_message_of_no_channel_is_heard_on_the_node_alone() -> None:
    node = ScriptedNode()
    heard: list[NodeMessageReceived] = []
    node.message_events.on(NodeMessageReceived.name, heard.append)
    async with opened(node) as (channel, told):
        await node.deliver(b"for whoever hears it")
        assert [event.message.payload for event in heard] == [b"for whoever hears it"]
        assert told.events == [] and channel.log() == []


@pytest.mark.req("C-185", "C-290")
@virtually
async def test_an_ephemeral_message_expires_at_relays_after_a_minute() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, _):
        await channel.send_ephemeral(b"soon gone")
        await ReliableClient(node).send(envelope(b"soon gone too"))
        await channel.send(b"stays")
        await settle()
    signer = ids.Identity.from_seed(bytes(range(32)))
    packets = [
        build_packet(signer, sent.envelope, now=START, nonce="0x" + "00" * 16).value for sent in node.sent
    ]
    assert [packet.get("expires_at") for packet in packets] == [START + 60, START + 60, None]
    contents = [packet["content"] for packet in packets]
    assert [isinstance(each, dict) and each.get("ephemeral") for each in contents] == [True, True, None]


@pytest.mark.req("C-186")
@virtually
async def test_an_ephemeral_message_from_two_relays_is_delivered_once() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, told):
        message = ephemeral(1, b"once")
        await node.deliver(message, message)
        assert told.payloads == [b"once"]
        assert channel.statistics.ephemerals_repeated == 1
        # Equal contents in a new message are not a repetition.
        await node.deliver(ephemeral(2, b"once"))
        assert told.payloads == [b"once", b"once"]


@virtually
async def test_ones_own_ephemeral_message_does_not_come_back() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, told):
        await channel.send_ephemeral(b"mine")
        await settle()
        await node.deliver(node.sent[0].payload)
        assert told.payloads == []


@virtually
async def test_a_refused_ephemeral_message_fails_once_and_is_not_tried_again() -> None:
    node = ScriptedNode(answer=lambda sent: Refusal("busy", recoverable=True))
    async with opened(node) as (channel, told):
        request_id = await channel.send_ephemeral(b"bad luck")
        await asyncio.sleep(600)
        assert len(node.sent) == 1
        assert [(event.request_id, event.code) for event in told.of(SendingMessageIrrecoverableError)] == [
            (request_id, "busy")
        ]
        assert told.names == ["sending-message-irrecoverable-error"]


@virtually
async def test_ephemeral_messages_make_room_and_are_the_only_ones_that_do() -> None:
    node = ScriptedNode()
    async with opened(node, max_inbox_messages=3, take=False) as (channel, _):
        await node.deliver(said(1))
        for n in range(2):
            await node.deliver(ephemeral(n, f"fleeting {n}".encode()))
        # Full: another ephemeral message waits with the reader, and replaces an older one.
        flood = asyncio.create_task(node.deliver(ephemeral(3, b"newest"), said(2)))
        await settle()
        assert channel.sync_status().inbox == 3
        taken = [(await anext(channel)).payload for _ in range(5)]
        await flood
    assert taken == [b"bob 1", b"fleeting 0", b"fleeting 1", b"newest", b"bob 2"]


@virtually
async def test_an_answer_about_an_ephemeral_message_counts_once() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, told):
        request_id = await channel.send_ephemeral(b"once")
        await settle()
        await node.message_events.emit(NodeMessageSent(request_id, bytes(32)))
        await settle()
        assert told.names == ["message-sent"]
