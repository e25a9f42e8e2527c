"""Every name in the three documents exists, in its spelling: types, fields, options, functions."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_type_hints

import pytest
import strata.channels.reliable as names
from strata.channels.messaging.values import MessageEnvelope, NodeMessageReceived, ReceivedEnvelope
from strata.channels.persistence import MemoryPersistence
from strata.channels.rate_limit import RateLimitConfig
from strata.channels.reliable import (
    ReliableChannel,
    ReliableChannelConfig,
    ReliableEnvelope,
    configure,
    make_channel,
)
from strata.channels.sds import SdsConfig
from strata.channels.segmentation import SegmentationConfig
from strata.channels.spelling import camel_case, snake_case

from tests.support.scripted_node import TOPIC, ScriptedNode, opened, said
from tests.support.virtual_time import virtually

TYPES: dict[str, str] = {
    # The first document.
    "ReliableChannel": "",
    "ReliableChannelOptions": "sync_min_interval_ms retry_interval_ms max_retry_attempts "
    "retrieve_frequency_ms sweep_in_buf_interval_ms query_on_connect auto_start process_task_min_elapse_ms "
    "causal_history_size bloom_filter_size",
    "ChannelId": "",
    "SenderId": "",
    "MessageId": "",
    "DecodedMessage": "payload timestamp content_topic pubsub_topic hash ephemeral meta",
    "DefaultReliableChannelOptions": "sync_min_interval_ms retry_interval_ms max_retry_attempts",
    "ReliableChannelEvents": "",
    "PossibleAcknowledgment": "message_id possible_ack_count chunk_info",
    "MessageError": "message_id error chunk_info",
    "HistoryEntry": "",
    # 2025.
    "MessagePayload": "",
    "ContentTopic": "",
    "ChunkInfo": "chunk_index total_chunks",
    "SendingMessageEvent": "message_id chunk_info",
    "MessageSentEvent": "message_id chunk_info",
    "MessageAcknowledgedEvent": "message_id chunks_acknowledged total_chunks",
    "EphemeralDropReason": "reason rate_limit_utilization",
    "EphemeralMessageDropped": "reason rate_limit_utilization",
    # 2026.
    "IEncryption": "encrypt decrypt",
    "IPersistence": "",
    "MessageEnvelope": "contentTopic payload ephemeral",
    "ReliableEnvelope": "messageEnvelope channelId",
    "ReliableChannelConfig": "segmentationConfig sdsConfig rateLimitConfig encryption",
    "SdsConfig": "persistence acknowledgementTimeoutMs maxRetransmissions causalHistorySize",
    "RateLimitConfig": "enabled epochSizeMs",
    "DefaultRateLimitConfig": "enabled epochSizeMs",
    "SegmentationConfig": "segmentSizeBytes enableReedSolomon",
    "EventMessageReceived": "requestId envelope",
    "EventReliableMessageSent": "requestId",
    "EventMessageSent": "requestId",
    "EventMessageSendError": "requestId error",
    "MessageEvents": "",
    "RequestId": "",
}
"""Each type, with its fields as its document spells them."""

IN_OPTIONS = {"retry_interval_ms", "max_retry_attempts"}
"""Older names: accepted as options, and read under the newer name."""


@pytest.mark.parametrize("name", TYPES)
def test_each_type_is_there_with_each_of_its_fields(name: str) -> None:
    kind = getattr(names, name)
    for field in TYPES[name].split():
        if name == "ReliableChannelOptions":
            assert field in get_type_hints(kind)
            configure(None, options={field: 1})
        elif name == "DefaultReliableChannelOptions":
            assert field in IN_OPTIONS or hasattr(kind, field) or hasattr(kind.sds, field)
        else:
            own = {each.name for each in fields(kind)} if is_dataclass(kind) else set()
            assert field in own or hasattr(kind, field), field


@pytest.mark.parametrize("name", names.__all__)
def test_each_exported_name_is_there(name: str) -> None:
    assert hasattr(names, name)


@pytest.mark.req("C-030")
@pytest.mark.parametrize(
    ("name", "section", "field"),
    [
        (camel_case(each.name), section, each.name)
        for section, kind in (
            ("sds", SdsConfig),
            ("segmentation", SegmentationConfig),
            ("rate_limit", RateLimitConfig),
        )
        for each in fields(kind)
        if camel_case(each.name) != each.name
    ],
)
def test_each_setting_is_an_option_in_camel_case_too(name: str, section: str, field: str) -> None:
    chosen = configure(None)
    value = getattr(getattr(chosen, section), field)
    assert configure(None, options={name: value}) == chosen
    for within in (section, camel_case(section), f"{camel_case(section)}Config", f"{section}_config"):
        assert configure(None, options={f"{within}.{name}": value}) == chosen
    with pytest.raises(ValueError, match="given twice"):
        configure(None, options={name: value, field: "another"})


def test_a_configuration_is_made_with_the_names_of_2026() -> None:
    store = MemoryPersistence()
    written = ReliableChannelConfig(
        sdsConfig=SdsConfig(persistence=store, acknowledgementTimeoutMs=7, causalHistorySize=3),  # type: ignore[call-arg]
        segmentation_config=SegmentationConfig(segmentSizeBytes=100),  # type: ignore[call-arg]
        rateLimitConfig=RateLimitConfig(epochSizeMs=5),  # type: ignore[call-arg]
    )
    plain = ReliableChannelConfig(
        sds=SdsConfig(persistence=store, acknowledgement_timeout_ms=7, causal_history_size=3),
        segmentation=SegmentationConfig(segment_size_bytes=100),
        rate_limit=RateLimitConfig(epoch_size_ms=5),
    )
    assert written == plain
    assert written.sdsConfig is written.sds  # type: ignore[attr-defined]
    assert configure(written).persistence is store
    assert configure(None, defaults=written).persistence is store
    other = ReliableChannelConfig(sds=SdsConfig(persistence=store), persistence=MemoryPersistence())
    with pytest.raises(ValueError, match="given twice"):
        configure(other)
    with pytest.raises(TypeError, match="given twice"):
        SdsConfig(causalHistorySize=3, causal_history_size=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SdsConfig(causalHistoryLength=3)  # type: ignore[call-arg]
    envelope = ReliableEnvelope(
        messageEnvelope=MessageEnvelope(contentTopic=TOPIC, payload=b"x"),  # type: ignore[call-arg]
        channelId="room",
    )
    assert envelope.message_envelope.content_topic == TOPIC and envelope.channel_id == "room"
    assert envelope.messageEnvelope is envelope.message_envelope  # type: ignore[attr-defined]


def test_a_spelling_leads_back_to_the_other() -> None:
    for name in ("a", "causal_history_size", "query_on_connect", "name2_of"):
        assert snake_case(camel_case(name)) == name == snake_case(name)


@pytest.mark.req("C-004")
@virtually
async def test_functions_take_the_parameters_of_each_document() -> None:
    node, create = ScriptedNode(), names.create_reliable_channel
    plain = make_channel(node, "room", TOPIC, "alice")
    whole = replace(plain.config, node=node, channel_id="room", content_topic=TOPIC)
    calls: list[dict[str, Any]] = [
        {"waku_node": node, "channel_id": "room", "sender_id": "alice", "content_topic": TOPIC},
        {"wakuNode": node, "channelId": "room", "senderId": "alice", "contentTopic": TOPIC},
    ]
    calls += [
        {"channelConfig": whole, "senderId": "alice"},
        {"channel_config": whole, "sender_id": "alice"},
    ]
    for given in calls:
        channel = await create(**given)
        assert (channel.channel_id, channel.content_topic, channel.sender_id) == ("room", TOPIC, "alice")
        assert replace(channel.config, node=None, channel_id=None, content_topic=None) == plain.config
        await channel.close()
    assert inspect.iscoroutinefunction(create) and inspect.iscoroutinefunction(ReliableChannel.send)
    with pytest.raises(TypeError, match="node is given twice, as waku_node too"):
        make_channel(node=node, waku_node=node, channel_id="room")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="node"):
        make_channel(node, wakuNode=node)  # type: ignore[call-arg]
    with pytest.raises(names.InvalidConfiguration):
        make_channel(node, "room", TOPIC, nodeOfWaku=node)  # type: ignore[call-arg]


@virtually
async def test_what_is_sent_is_a_payload_or_a_message_payload() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, _):
        send: Any = channel.send
        assert await send(message_payload=b"one", requestId="order 1") == "order 1"
        assert await send(messagePayload=b"one", request_id="order 1") == "order 1"
        ephemeral: Any = channel.sendEphemeral
        await ephemeral(message_payload=b"two")
        function: Any = names.send
        assert await function(channel, message=b"one", requestId="order 1") == "order 1"
        identify: Any = ReliableChannel.getMessageId
        assert identify(message_payload=b"one") == ReliableChannel.get_message_id(b"one")
        with pytest.raises(TypeError):
            await send(b"one", message_payload=b"one")


@virtually
async def test_the_store_of_the_sds_section_is_the_channels_own() -> None:
    node, store = ScriptedNode(), MemoryPersistence()
    config = ReliableChannelConfig(sds=SdsConfig(persistence=store))
    for _ in range(2):
        channel = make_channel(node, "room", TOPIC, "alice", config)
        async with channel:
            if not channel.log():
                await channel.send(b"kept")
            assert len(channel.log()) == 1
            assert channel.channelId == "room" and channel.messageEvents is channel.message_events


@virtually
async def test_a_received_message_carries_the_transports_meta() -> None:
    node = ScriptedNode()
    async with opened(node) as (_, told):
        envelope = ReceivedEnvelope(content_topic=TOPIC, payload=said(1).encode(), meta=b"proof")
        await node.deliver(NodeMessageReceived(bytes(32), envelope), said(2))
        received = [event for _, event in told.events if event.name == "message-received"]
        assert [event.meta for event in received] == [b"proof", None]
        assert received[0].requestId == received[0].request_id
