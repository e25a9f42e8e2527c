"""Nodes from one configuration: sizes, limits, listings. What a node does is tested in `messaging`."""

from __future__ import annotations

import asyncio
import json

import pytest
from strata import Identity
from strata.channels.connecting import connect_pool
from strata.channels.messaging import MessageEnvelope, NodeError
from strata.channels.nodes import Node, NodeConfig, parse_size
from strata.channels.reliable import InvalidConfiguration, ReliableChannelConfig
from strata.channels.sds import SdsConfig

ME = Identity.from_seed(bytes(32))
TOPIC = "/test/1/room/proto"


def node(**settings):
    config = NodeConfig(relays=("ws://127.0.0.1:1/strata",), identity=ME, **settings)
    return Node(config, connect_pool(config.relays, identity=ME))


@pytest.mark.req("C-267")
@pytest.mark.parametrize(
    ("text", "size"),
    [("150 KiB", 153_600), ("150KB", 150_000), ("7 B", 7), ("7", 7), (" 1 KiB ", 1024), (42, 42)],
)
def test_sizes_are_read_with_their_units(text, size):
    assert parse_size(text) == size


@pytest.mark.req("C-267")
@pytest.mark.parametrize("text", ["", "1.5 KiB", "150 MiB", "-1 B", "0", 0, "KiB", "15０ KiB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@pytest.mark.req("C-267")
async def test_the_limit_holds_for_payloads_below_what_a_packet_takes():
    small = node(max_message_size="1 KiB")
    assert small.largest_payload(TOPIC) == 1024
    with pytest.raises(NodeError, match="1025"):
        await small.send(MessageEnvelope(content_topic=TOPIC, payload=bytes(1025)))
    assert small.topics == ()
    with pytest.raises(ValueError, match="segment"):
        await small.channel("room", topic=TOPIC).open()


@pytest.mark.req("C-267")
def test_on_relays_the_packet_limit_applies_instead():
    without = node().largest_payload(TOPIC)
    assert 190_000 < without < 196_608
    assert node(max_message_size="1000 KiB").largest_payload(TOPIC) == without


@pytest.mark.req("C-267")
def test_a_configuration_with_a_wrong_size_is_refused():
    with pytest.raises(ValueError, match="not a size"):
        NodeConfig(relays=(), identity=ME, max_message_size="150 MiB")


@pytest.mark.req("C-031")
def test_a_node_gives_its_channels_defaults():
    channels = ReliableChannelConfig(sds=SdsConfig(max_retransmissions=9), retrieve_frequency_ms=1)
    room = node(channel=channels).channel("room", topic=TOPIC)
    assert room.config.sds.max_retransmissions == 9
    own = node(channel=channels).channel("room", topic=TOPIC, max_retransmissions=1)
    assert own.config.sds.max_retransmissions == 1
    with pytest.raises(InvalidConfiguration):
        node(channel=channels).channel("room", topic=TOPIC, max_retransmissions=-1)


@pytest.mark.req("C-268")
def test_listings_are_json_and_hold_no_key():
    mine = node(max_message_size="1 KiB")
    info, config = json.loads(json.dumps(mine.info())), json.loads(json.dumps(mine.config()))
    assert info["identity"] == ME.did
    assert info["status"] == "Disconnected"
    assert info["relays"][0]["url"] == "ws://127.0.0.1:1/strata"
    assert config["max_message_size"] == "1 KiB"
    assert config["pool"]["copies"] == 2
    assert ME.seed.hex() not in json.dumps([info, config])


async def test_a_node_whose_closing_is_cancelled_closes_its_connections_all_the_same(monkeypatch):
    mine, closed = node(), asyncio.Event()
    await mine.subscribe([TOPIC])

    async def close():
        closed.set()

    monkeypatch.setattr(mine._pool, "close", close)
    closing = asyncio.create_task(mine.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert closed.is_set()
