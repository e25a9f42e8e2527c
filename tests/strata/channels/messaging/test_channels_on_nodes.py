"""Channels on messaging nodes over relays in memory: what the binding of section 15 promises a channel."""

from __future__ import annotations

import asyncio
import base64
from contextlib import asynccontextmanager
from functools import partial
from operator import contains
from typing import Any

import pytest
from strata.channels.messaging import InvalidContentTopic, MessagingNode, RelayNode
from strata.channels.messaging.binding import build_packet, original_of
from strata.channels.messaging.values import MessageEnvelope
from strata.channels.persistence import MemoryPersistence
from strata.channels.reliable import ReliableChannel, SegmentDoesNotFit, make_channel
from strata.channels.sds import SdsMessage
from strata.protocol.errors import RequestRefused, RequestTimeout
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet

from tests.support.made_relays import (
    ALICE,
    BOB,
    CAROL,
    MALLORY,
    TOPIC,
    Log,
    MadeRelays,
    MarkedRelays,
    until,
)
from tests.support.virtual_time import START, virtually, wall


class Talker:
    """A participant, its relays, and the events it got."""

    def __init__(self, log: Log, identity: Identity, name: str | None = None, **options: Any) -> None:
        self.relays = MadeRelays(log)
        self.node = RelayNode(self.relays, identity=identity, wall=wall)
        self.channel: ReliableChannel = make_channel(self.node, "room", TOPIC, name, options=options)
        self.taken: list[bytes] = []
        self.events: list[Any] = []
        for each in self.channel.message_events.names:
            self.channel.message_events.on(each, self.events.append)
        self.channel.message_events.on("message-received", lambda event: self.taken.append(event.payload))

    def told(self, name: str) -> list[Any]:
        return [event for event in self.events if event.name == name]

    async def __aenter__(self) -> Talker:
        await self.channel.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.node.close()


@asynccontextmanager
async def two(log: Log, **options: Any):
    async with Talker(log, ALICE, "alice", **options) as alice, Talker(log, BOB, "bob", **options) as bob:
        yield alice, bob


def sds_of(packet: Packet) -> SdsMessage:
    original = original_of(packet)
    assert original is not None
    message = SdsMessage.decode(base64.b64decode(str(original.content["payload"])))
    assert message is not None
    return message


def contents(packets: list[Packet]) -> list[SdsMessage]:
    return [message for message in map(sds_of, packets) if message.content]


class Only:
    """A node that allows access only to what `MessagingNode` names."""

    def __init__(self, node: RelayNode) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name == "receipts":  # optional according to the interface
            raise AttributeError(name)
        assert name in vars(MessagingNode), f"a channel asked its node for {name}"
        return getattr(self._node, name)


@pytest.mark.req("C-259")
@virtually
async def test_a_channel_asks_a_node_for_nothing_but_what_the_interface_names():
    log = Log()
    nodes = [RelayNode(MadeRelays(log), identity=each, wall=wall) for each in (ALICE, BOB)]
    alice, bob = (
        make_channel(Only(node), "room", TOPIC, name)
        for node, name in zip(nodes, ("alice", "bob"), strict=True)
    )
    taken: list[bytes] = []
    bob.message_events.on("message-received", lambda event: taken.append(event.payload))
    async with alice, bob:
        await alice.send(b"hello")
        await alice.send_ephemeral(b"for now")
        await until(lambda: len(taken) == 2 and alice.sync_status().is_synced)
    for node in nodes:
        await node.close()


@pytest.mark.req("C-283")
@virtually
async def test_messages_name_the_ones_before_by_the_bytes_of_their_packet_ids():
    log = Log()
    async with two(log) as (alice, bob):
        await alice.channel.send(b"first")
        await until(lambda: bob.taken == [b"first"] and alice.told("message-sent"))
        await bob.channel.send(b"second, which names another's")
        await until(lambda: len(alice.taken) == 1 and bob.told("message-sent"))
        await bob.channel.send(b"third, which names one's own")
        await until(lambda: len(alice.taken) == 2)
    packet_of = {sds_of(packet).message_id: packet for packet, _ in log.packets}
    named = [entry for message in contents(log.by(BOB)) for entry in message.causal_history]
    assert len({entry.message_id for entry in named}) == 2
    for entry in named:
        assert entry.retrieval_hint == bytes.fromhex(packet_of[entry.message_id].packet_id[2:])


@pytest.mark.req("C-269")
@virtually
async def test_what_was_sent_while_a_node_was_down_arrives_after_it_starts():
    log = Log()
    async with Talker(log, ALICE, "alice") as alice:
        for number in range(3):
            await alice.channel.send(b"%d" % number)
        await until(lambda: len(alice.told("message-sent")) == 3)
    await asyncio.sleep(3 * 86_400)  # longer than a new subscription looks back
    async with Talker(log, BOB, "bob") as bob:
        await until(lambda: bob.taken == [b"0", b"1", b"2"])


@pytest.mark.req("C-284")
@virtually
async def test_a_channel_reads_its_topic_and_nothing_else():
    log = Log()
    async with two(log) as (_, bob):
        await until(lambda: len(bob.relays.queries) >= 2)
        assert {query["types"] for query in bob.relays.queries} == {TOPIC}


@pytest.mark.req("C-288")
@virtually
async def test_the_members_of_a_channel_are_the_authors_it_subscribes_to():
    log = Log()
    members = (ALICE.did, BOB.did)
    async with (
        Talker(log, MALLORY, "mallory") as mallory,
        Talker(log, ALICE, "alice", members=members) as alice,
        Talker(log, BOB, "bob", members=members) as bob,
    ):
        await mallory.channel.send(b"let me in")
        await until(lambda: mallory.told("message-sent"))
        await alice.channel.send(b"hello")
        await until(lambda: bob.taken)
        await asyncio.sleep(120)
        assert bob.taken == [b"hello"]
        assert {query["authors"] for query in bob.relays.queries} == {members}


@pytest.mark.req("C-281")
@pytest.mark.parametrize("topic", ["chat", "/a\x00b", "/\ud800", "", "/"], ids=ascii)
@virtually
async def test_a_channel_on_what_is_no_topic_is_refused_when_it_is_made(topic):
    async with RelayNode(MadeRelays(Log()), identity=ALICE, wall=wall) as node:
        with pytest.raises(InvalidContentTopic):
            make_channel(node, "room", topic, "alice")


# Sizes.


@pytest.mark.req("C-289")
@pytest.mark.parametrize("binding", ["off", "did"])
@virtually
async def test_the_largest_segment_of_a_channel_fits_the_smallest_relay_and_a_larger_one_is_refused(binding):
    log = Log()
    options = {"sender_binding": binding, "bloom_filter_size": 100}
    talker = Talker(log, ALICE, **options, segment_size_bytes=20_000)
    talker.relays.max_packet_bytes = 20_480
    with pytest.raises(SegmentDoesNotFit) as refused:
        await talker.channel.open()
    most = refused.value.largest
    assert 4_000 < most < 15_000
    async with (
        Talker(log, ALICE, **options, segment_size_bytes=most) as alice,
        Talker(log, BOB, **options, segment_size_bytes=most) as bob,
    ):
        alice.relays.max_packet_bytes = bob.relays.max_packet_bytes = 20_480
        for number in range(4):
            payload = bytes([number]) * (5 * most)
            await alice.channel.send(payload)
            await until(partial(contains, bob.taken, payload))
            await bob.channel.send(payload[::-1] + b"x")
        await until(lambda: len(alice.taken) == 4 and alice.channel.sync_status().is_synced)
        sizes = [packet.size_bytes for packet, _ in log.packets]
        assert max(sizes) <= 20_480
        assert not alice.told("sending-message-irrecoverable-error")


# Ephemeral messages and retention.


@pytest.mark.req("C-185", "C-290")
@virtually
async def test_an_ephemeral_message_asks_the_relay_to_serve_it_for_a_minute():
    log = Log()
    async with two(log) as (alice, bob):
        await alice.channel.send_ephemeral(b"typing")
        await until(lambda: bob.taken == [b"typing"])
        (packet,) = log.by(ALICE)
        assert packet.content["ephemeral"] is True
        assert packet.value["expires_at"] == packet.timestamp + 60
        assert sds_of(packet).lamport_timestamp is None


@pytest.mark.req("C-295")
@virtually
async def test_a_channel_with_a_retention_of_an_hour_has_all_its_packets_expire_in_an_hour():
    log = Log()
    async with two(log, retention_seconds=3600) as (alice, bob):
        await alice.channel.send(b"hello")
        await until(lambda: alice.channel.sync_status().is_synced and bob.taken)
        assert len(log.packets) >= 2, "the message, and the sync that acknowledges it"
        for packet, _ in log.packets:
            assert packet.value["expires_at"] == packet.timestamp + 3600


@pytest.mark.req("C-295")
@virtually
async def test_without_a_retention_packets_do_not_expire():
    log = Log()
    async with two(log) as (alice, bob):
        await alice.channel.send(b"hello")
        await until(lambda: bob.taken)
        assert all(packet.value.get("expires_at") is None for packet, _ in log.packets)


# What relays answer.


@pytest.mark.req("C-292")
@pytest.mark.parametrize(
    ("error", "least"),
    [
        (RequestRefused("rate_limited", "slow down", retry_after=9), 9.0),
        (RequestRefused("internal_error", "oh"), 0.1),
        (RequestTimeout("PUBLISH", 30), 0.1),
    ],
    ids=["rate_limited", "internal_error", "timeout"],
)
@virtually
async def test_a_passing_refusal_is_waited_out_and_is_no_error_and_no_attempt(error, least):
    log = Log()
    async with two(log) as (alice, bob):
        await asyncio.sleep(1)
        alice.relays.answers = [error, error]
        began_at = asyncio.get_running_loop().time()
        await alice.channel.send(b"hello")
        assert await until(lambda: bob.taken == [b"hello"]) - began_at >= 2 * least
        await until(lambda: alice.told("reliable:message:delivered"))
        assert len(alice.told("message-sent")) == 1
        assert not alice.told("sending-message-irrecoverable-error")
        assert alice.channel.statistics.sds.retransmissions == 0


@pytest.mark.req("C-088")
@virtually
async def test_a_message_sent_while_the_relay_is_away_for_a_moment_waits_for_no_other():
    async with two(Log(), sync_min_interval_ms=0) as (alice, bob):
        await asyncio.sleep(10.1)
        alice.relays.connect(0)
        await alice.channel.send(b"hello")
        await asyncio.sleep(0.05)  # the node checks its relays four times a second, and does not notice this
        alice.relays.connect(1)
        await until(lambda: bob.taken == [b"hello"], timeout=5)


@pytest.mark.req("C-292")
@virtually
async def test_a_final_refusal_fails_the_message_and_the_next_one_goes_out():
    log = Log()
    async with two(log) as (alice, bob):
        await asyncio.sleep(1)
        alice.relays.answers = [RequestRefused("blocked_author", "not you")]
        await alice.channel.send(b"refused")
        await until(lambda: alice.told("sending-message-irrecoverable-error"))
        (failed,) = alice.told("sending-message-irrecoverable-error")
        assert failed.code == "blocked_author"
        await alice.channel.send(b"taken")
        await until(lambda: bob.taken == [b"taken"])
        assert not bob.channel.sync_status().missing


@pytest.mark.req("C-282", "C-293")
@virtually
async def test_what_is_sent_again_after_two_days_is_a_new_packet_of_today_around_the_same_bytes():
    log = Log()
    store = MemoryPersistence()
    async with Talker(log, ALICE, "alice", persistence=store) as alice:
        await alice.channel.send(b"anybody?")
        await until(lambda: alice.told("message-sent"))
    (first,) = log.by(ALICE)
    await asyncio.sleep(2 * 86_400)
    async with Talker(log, ALICE, "alice", persistence=store), Talker(log, BOB, "bob") as bob:
        await until(lambda: len(log.by(ALICE)) > 1)
        again = log.by(ALICE)[1]
        assert again.content["payload"] == first.content["payload"]
        assert again.packet_id != first.packet_id
        assert again.timestamp == pytest.approx(START + 2 * 86_400, abs=30)
        await until(lambda: bob.taken == [b"anybody?"])
        await asyncio.sleep(60)
        assert bob.taken == [b"anybody?"]


# Who sends it.


@pytest.mark.req("C-287")
@virtually
async def test_a_message_in_the_name_of_another_is_dropped_and_counted_where_senders_are_bound():
    log = Log()
    async with (
        Talker(log, ALICE, ALICE.did, sender_binding="did") as alice,
        Talker(log, BOB, sender_binding="did") as bob,
        Talker(log, MALLORY, ALICE.did) as mallory,  # her own signature, Alice's name
        Talker(log, CAROL, "carol") as carol,  # does not bind senders
    ):
        assert alice.channel.sender_id == ALICE.did
        await mallory.channel.send(b"I am Alice")
        await until(lambda: carol.taken == [b"I am Alice"])
        await alice.channel.send(b"no, I am")
        await until(lambda: bob.taken == [b"no, I am"])
        await asyncio.sleep(60)
        assert bob.taken == [b"no, I am"]
        assert bob.channel.statistics.senders_forged > 0
        assert carol.channel.statistics.senders_forged == 0


@pytest.mark.req("C-287")
@virtually
async def test_a_sender_that_is_no_did_is_heard_whoever_signs():
    log = Log()
    async with Talker(log, ALICE, "alice") as alice, Talker(log, BOB, sender_binding="did") as bob:
        await alice.channel.send(b"hello")
        await until(lambda: bob.taken == [b"hello"])
        assert bob.channel.statistics.senders_forged == 0


@asynccontextmanager
async def one_who_missed_it(log: Log, binding: str, **options: Any):
    """Alice has sent a message and left; Bob has it; Carol and her relays do not."""
    options |= {"sender_binding": binding, "repair_t_min_ms": 2_000, "repair_t_max_ms": 8_000}
    async with Talker(log, BOB, **options) as bob, Talker(log, CAROL, **options) as carol:
        carol.relays.hides = lambda packet: packet.author_id == ALICE.did
        async with Talker(log, ALICE, **options) as alice:
            await alice.channel.send(b"said by alice")
            await until(lambda: bob.taken == [b"said by alice"])
            await until(lambda: alice.channel.sync_status().is_synced)
        await bob.channel.send(b"did you hear that?")
        await until(
            lambda: any(original_of(each) is not each for each in log.by(BOB)) or len(carol.taken) == 2
        )
        yield bob, carol


@pytest.mark.req("C-287", "C-294")
@virtually
async def test_a_bound_channel_accepts_a_repair_that_embeds_what_the_sender_signed():
    log = Log()
    async with one_who_missed_it(log, "did") as (_, carol):
        await until(lambda: carol.taken == [b"said by alice", b"did you hear that?"])
        (said,) = [each for each in log.by(ALICE) if sds_of(each).content]
        (repair,) = [each for each in log.by(BOB) if "original" in each.content]
        assert repair.content["original"] == said.value and "payload" not in repair.content
        assert carol.channel.statistics.senders_forged == 0


@pytest.mark.req("C-294")
@virtually
async def test_an_unbound_channel_repairs_with_a_packet_of_ones_own_around_the_same_sds_message():
    log = Log()
    async with one_who_missed_it(log, "off") as (bob, carol):
        await until(lambda: sorted(carol.taken) == sorted([b"said by alice", b"did you hear that?"]))
        (said,) = [each for each in log.by(ALICE) if sds_of(each).content]
        repairs = [each for each in log.by(BOB) if each.content["payload"] == said.content["payload"]]
        assert len(repairs) == 1 and repairs[0].packet_id != said.packet_id
        assert sds_of(repairs[0]).sender_id == sds_of(said).sender_id != bob.channel.sender_id


@pytest.mark.req("C-295")
@pytest.mark.parametrize("binding", ["off", "did"])
@virtually
async def test_a_repair_lives_no_longer_than_the_channel_lets_its_messages(binding):
    log = Log()
    async with one_who_missed_it(log, binding, retention_seconds=3600) as (_, carol):
        await until(lambda: len(carol.taken) == 2)
        assert len(log.by(BOB)) >= 2
        for packet in log.by(BOB):
            expires_at = packet.value["expires_at"]
            assert isinstance(expires_at, int) and expires_at <= packet.timestamp + 3600


@pytest.mark.req("C-287")
@virtually
async def test_a_forged_repair_is_dropped_where_senders_are_bound():
    log = Log()
    async with Talker(log, BOB, sender_binding="did") as bob:
        message = SdsMessage(
            message_id="ab" * 32,
            channel_id="room",
            sender_id=ALICE.did,
            lamport_timestamp=int(wall() * 1000),
            content=b"never said",
        )
        envelope = MessageEnvelope(content_topic=TOPIC, payload=message.encode())
        await asyncio.sleep(1)
        log.store(build_packet(MALLORY, envelope, now=int(wall()), nonce="0x" + "00" * 16))
        await until(lambda: bob.channel.statistics.senders_forged == 1)
        assert bob.channel.log() == []


# Where live reading begins.


@pytest.mark.parametrize("reads", [True, False])
@virtually
async def test_only_a_channel_that_reads_the_store_leaves_the_past_to_that(reads: bool) -> None:
    log = Log()
    relays = MarkedRelays(log)
    node = RelayNode(relays, identity=ALICE, wall=wall)
    async with node, make_channel(node, "room", TOPIC, "alice", options={"query_on_connect": reads}):
        await until(lambda: relays.reading)
        (live,) = [query for query in relays.queries if query.get("live", True)]
        assert ("cursor" in live, "received_since" in live) == (reads, not reads)
