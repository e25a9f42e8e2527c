"""Rooms shared with channels of other implementations, whose messages are payloads without segments.

The messages were recorded from js-waku's ReliableChannel; tests/system/test_channels_waku.py has the live
conversation.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
import zlib
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
from strata.channels.messaging.values import NodeMessageReceived, ReceivedEnvelope
from strata.channels.reliable import ReliableMessageDelivered, configure
from strata.channels.sds import (
    Acknowledged,
    BloomFilter,
    BloomParameters,
    DeliveryFailed,
    HistoryEntry,
    Kind,
    Participant,
    Retransmit,
    SdsConfig,
    SdsMessage,
    SendSync,
)

from tests.support.channel_world import World, take
from tests.support.scripted_node import (
    START_MS,
    TOPIC,
    ScriptedNode,
    ephemeral,
    opened,
    said,
    settle,
    sync,
)
from tests.support.virtual_time import virtually

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


class SilentListener:
    """A participant of js-waku that sends only syncs: each reception postpones the next one."""

    def __init__(self, config: SdsConfig, chance: random.Random) -> None:
        self._filter = BloomFilter(BloomParameters(config.bloom_filter_size, config.bloom_filter_error_rate))
        self._chance = chance
        self._has: dict[str, None] = {}
        self.sync_at = START_MS + chance.random() * 30_000

    def receive(self, data: bytes, now: int) -> None:
        message = SdsMessage.decode(data)
        assert message is not None
        if message.content and message.message_id not in self._has:
            self._has[message.message_id] = None
            self._filter.insert(message.message_id)
        self.sync_at = now + self._chance.random() * (15_000 if message.content else 30_000)

    def sync(self, now: int) -> bytes:
        self.sync_at = now + self._chance.random() * 30_000
        last = tuple(HistoryEntry(each) for each in list(self._has)[-2:])
        return SdsMessage("js", f"sync {now}", "room", now, last, self._filter.to_bytes()).encode()


def told_beside_a_silent_listener(config: SdsConfig, seed: int) -> Counter[type]:
    """Count the events of a participant that sends sixty messages, three a second, to such a listener."""
    chance = random.Random(seed)
    alice = Participant("room", "alice", config, now_ms=START_MS, random=chance.random, receipts=True)
    listener = SilentListener(config, chance)
    to_say = deque(range(START_MS, START_MS + 60 * 300, 300))
    told: Counter[type] = Counter()
    now = START_MS
    while to_say or (alice.outgoing() and now < START_MS + 600_000):
        now = math.ceil(min(alice.get_timer(), listener.sync_at, *list(to_say)[:1]))
        if to_say and to_say[0] <= now:
            message = alice.wrap(b"%d" % len(to_say), now, to_say.popleft())
            alice.dispatched(message.message_id, now)
            listener.receive(message.encode(), now)
        if listener.sync_at <= now:
            alice.receive(listener.sync(now), now)
        alice.handle_timer(now)
        for event in alice.events():
            told[type(event)] += 1
            if isinstance(event, Retransmit):
                alice.dispatched(event.message_id, now)
            if isinstance(event, Retransmit | SendSync):
                listener.receive(event.data, now)
    assert not alice.outgoing(), "all is acknowledged in the end"
    return told


@pytest.mark.slow
def test_beside_a_silent_listener_of_js_waku_its_profile_has_no_false_error_and_few_repeats() -> None:
    chosen = configure(None, profile="js-waku").sds
    assert chosen is not None
    default, pace = (
        [told_beside_a_silent_listener(config, seed) for seed in range(20)]
        for config in (SdsConfig(), chosen)
    )
    for told in (default, pace):
        assert all(each[Acknowledged] == 60 for each in told), "with either, nothing is lost"
    assert sum(each[DeliveryFailed] for each in pace) == 0
    assert sum(each[DeliveryFailed] for each in default) > 0, "else this listener is no such listener"
    assert max(each[Retransmit] for each in pace) <= 60, "at most one for each message"
    assert sum(each[Retransmit] for each in pace) * 4 < sum(each[Retransmit] for each in default)
