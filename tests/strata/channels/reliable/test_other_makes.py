"""Rooms that channels of other makes share: their messages are payloads without segments.

The messages are those of js-waku's ReliableChannel, recorded; tests/system/test_channels_waku.py is the live
conversation.
"""

from __future__ import annotations

import asyncio
import base64
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from strata.channels.messaging.values import NodeMessageReceived, ReceivedEnvelope
from strata.channels.reliable import ReliableMessageDelivered
from strata.channels.sds import Kind, SdsMessage

from tests.support.channel_world import World, take
from tests.support.scripted_node import TOPIC, ScriptedNode, ephemeral, opened, said, settle, sync, virtually

RECORDED: list[dict[str, str | None]] = json.loads((Path(__file__).parent / "vectors/waku.json").read_text())[
    "messages"
]


def heard(recorded: dict[str, str | None]) -> NodeMessageReceived:
    payload = zlib.decompress(base64.b64decode(recorded["zlib"] or ""))
    message_hash = base64.b64decode(recorded["hash"] or "")
    return NodeMessageReceived(message_hash, ReceivedEnvelope(content_topic=TOPIC, payload=payload))


TEXTS = [each["text"].encode() for each in RECORDED if each["text"] is not None]


@virtually
async def test_what_js_waku_sends_is_handed_over_acknowledged_and_answered_in_its_form() -> None:
    node = ScriptedNode()
    async with opened(node, segmentation="auto", sync_min_interval_ms=1_000) as (channel, told):
        for recorded in RECORDED:
            await node.deliver(heard(recorded))
        assert told.payloads == TEXTS
        await asyncio.sleep(10)
        assert any(sent.sds.kind is Kind.SYNC for sent in node.sent), "they are acknowledged"
        await channel.send("an änswer".encode())
        await settle()
        sent = node.sent[-1].sds
        assert sent.content == "an änswer".encode()
        assert sent.history_ids, "it names theirs"
        await node.deliver(sync(9, sender="js", follows=[node.sent[-1]]))
        assert len(told.of(ReliableMessageDelivered)) == 1


@virtually
async def test_by_default_they_are_counted_and_not_handed_over() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, told):
        for recorded in RECORDED:
            await node.deliver(heard(recorded))
        assert told.payloads == []
        assert channel.statistics.reassembly.invalid.total() == len(TEXTS)


@pytest.mark.parametrize("segmentation", ["auto", "off"])
@virtually
async def test_two_equal_messages_are_told_apart_by_their_request_ids(segmentation: str) -> None:
    node = ScriptedNode()
    async with opened(node, segmentation=segmentation) as (_, told):
        await node.deliver(said(1, content=b"ok"), said(2, content=b"ok"))
        received = [event for _, event in told.events if event.name == "message-received"]
        assert [event.payload for event in received] == [b"ok", b"ok"]
        assert [event.request_id for event in received] == ["bob-1", "bob-2"]
        assert len({event.message_id for event in received}) == 1


@virtually
async def test_ephemeral_messages_have_no_segments_either() -> None:
    node = ScriptedNode()
    async with opened(node, segmentation="auto") as (channel, told):
        await channel.send_ephemeral(b"typing")
        assert node.sent[0].sds.content == b"typing"
        await node.deliver(SdsMessage("js", "one", "room", content=b"typing too"), ephemeral(2, b"segment"))
        assert told.payloads == [b"typing too", b"segment"]


@virtually
async def test_two_of_ours_keep_segments_and_parity_for_what_is_large() -> None:
    world = World()
    options: dict[str, Any] = {
        "segmentation": "auto",
        "segment_size_bytes": 1_000,
        "enable_reed_solomon": True,
    }
    alice, bob = await world.pair(**options)
    large = bytes(range(256)) * 20
    await alice.send(b"small")
    await alice.send(large)
    assert await take(bob, 2) == [b"small", large]
    contents = [each.message.content for each in world.nodes["alice"].contents if each.message is not None]
    assert contents[0] == b"small"
    assert {each.segment.is_parity for each in world.nodes["alice"].contents[1:]} == {False, True}
    await alice.close()
    await bob.close()
