"""The functions of a channel: creating, opening, sending, starting, stopping, closing (channel.md §1)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from strata.channels.encryption import EncryptionFailed
from strata.channels.messaging.node import InvalidContentTopic, NodeError
from strata.channels.messaging.values import MessageEnvelope, NodeMessageReceived
from strata.channels.persistence import MemoryPersistence, PersistenceError
from strata.channels.reliable import (
    CHANNEL_EVENTS,
    AlreadyOpen,
    ChannelNotOpen,
    EmptyPayload,
    InvalidEnvelope,
    MessageAcknowledged,
    MessageReceived,
    MessageSent,
    MessageTooLarge,
    NotStarted,
    ReliableChannel,
    ReliableChannelConfig,
    ReliableClient,
    ReliableEnvelope,
    ReliableMessageDelivered,
    ReliableMessageReceived,
    ReliableMessageSent,
    SegmentDoesNotFit,
    SendingMessage,
    SendingMessageIrrecoverableError,
    UnknownChannel,
    close_channel,
    create_reliable_channel,
    send,
)
from strata.channels.sds import Kind, OutgoingFull, SdsMessage
from strata.channels.segmentation import PayloadTooLarge
from strata.protocol.errors import StrataError
from strata_testkit.sim import Faults
from strata_testkit.sim.disk import Disk, SimStore

from tests.support.channel_world import (
    SWALLOW,
    TOPIC,
    Recorder,
    Refusal,
    World,
    own_tasks,
    take,
    unreachable_topic,
    until,
    virtually,
)

HELLO_RELAY = "8b21b2b925bbac93c5c8e100229d278e1042c002b56d23934ee712f4427be8c4"


class Mirror:
    """A hook that anyone can undo, but whose output nobody can read by accident."""

    overhead = 1

    def encrypt(self, content: bytes) -> bytes:
        return b"~" + content[::-1]

    def decrypt(self, payload: bytes) -> bytes:
        if payload[:1] != b"~":
            raise ValueError("not of this hook")
        return payload[:0:-1]


class Quotes:
    """An encoder and decoder in one, with its own topic."""

    overhead = 2
    content_topic = "/quoted/1/room/proto"

    def encode(self, payload: bytes) -> bytes:
        return b"<" + payload + b">"

    def decode(self, payload: bytes) -> bytes | None:
        return payload[1:-1] if payload[:1] == b"<" else None


def payloads(recorder: Recorder) -> list[bytes]:
    return [event.payload for event in recorder.of(MessageReceived)]


# Creating channels.


@pytest.mark.req("C-001")
@virtually
async def test_creating_sets_up_all_four_parts_and_subscribes_the_topic() -> None:
    world = World()
    options: dict[str, Any] = {
        "segment_size_bytes": 10,
        "messages_per_epoch": 1,
        "epoch_size_ms": 60_000,
        "encryption": Mirror(),
    }
    alice, bob = await world.pair(**options)
    heard = Recorder(bob)
    assert world.node("bob").subscribed == [TOPIC]

    for payload in (b"one, cut into three pieces", b"two, an epoch later"):
        await alice.send(payload)
    await until(lambda: len(payloads(heard)) == 1)
    first = [each for each in world.node("alice").sendings if each.envelope.payload[:1] == b"~"]
    assert first == world.node("alice").sendings  # encryption
    chunks = [SdsMessage.decode(Mirror().decrypt(each.envelope.payload)) for each in first]
    assert len({each.message_id for each in chunks if each and each.kind is Kind.CONTENT}) == 3
    assert world.now < 30  # so far, the second one waits for the next epoch
    await asyncio.sleep(90)
    assert payloads(heard) == [b"one, cut into three pieces", b"two, an epoch later"]
    await until(lambda: not alice.sync_status().outstanding)  # SDS


@pytest.mark.req("C-002")
@virtually
async def test_node_channel_topic_and_sender_are_required_and_checked() -> None:
    world = World()
    node = world.node("alice")
    long = "é" * 128 + "x"
    for bad in (
        (None, "room", TOPIC, "alice"),
        (node, None, TOPIC, "alice"),
        (node, "", TOPIC, "alice"),
        (node, long, TOPIC, "alice"),
        (node, "room", None, "alice"),
        (node, "room", "", "alice"),
        (node, "room", "/" + "t" * 256, "alice"),
        (node, "room", TOPIC, ""),
        (node, "room", TOPIC, long),
    ):
        with pytest.raises(ValueError):
            await create_reliable_channel(*bad)
    assert own_tasks() == set()
    channel = await create_reliable_channel(node, "é" * 128, "/" + "t" * 255, "é" * 128)
    await channel.close()


@pytest.mark.req("C-011")
@pytest.mark.parametrize(
    "bad",
    [
        {"channel_id": ""},
        {"sender_id": "s" * 257},
        {"content_topic": "chat"},
        {"options": {"no_such_option": 1}},
        {"options": {"retry_interval_ms": 1, "acknowledgement_timeout_ms": 2}},
        {"options": {"acknowledgement_timeout_ms": -1}},
        {"profile": "1999"},
    ],
    ids=lambda bad: next(iter(bad)),
)
@virtually
async def test_what_cannot_be_created_is_an_error_of_the_one_tree(bad: Any) -> None:
    node = World().node("alice")
    arguments: dict[str, Any] = {"channel_id": "room", "content_topic": TOPIC, "sender_id": "alice"}
    with pytest.raises(StrataError):
        await create_reliable_channel(node, **(arguments | bad))


@pytest.mark.req("C-011")
@virtually
async def test_a_second_rate_limit_on_one_node_is_an_error_of_the_one_tree() -> None:
    world = World()
    await world.open("alice", messages_per_epoch=5)
    with pytest.raises(StrataError):
        await world.open("alice", "other", "/test/1/other/proto", messages_per_epoch=6)


@pytest.mark.req("C-004")
@virtually
async def test_a_configuration_alone_makes_a_channel() -> None:
    world = World()
    heard = []
    for name in ("alice", "bob"):
        config = ReliableChannelConfig(node=world.node(name), channel_id="room", content_topic=TOPIC)
        channel = await create_reliable_channel(config, name)
        assert (channel.channel_id, channel.content_topic, channel.sender_id) == ("room", TOPIC, name)
        heard.append((channel, Recorder(channel)))
    await heard[0][0].send(b"hello")
    await until(lambda: payloads(heard[1][1]) == [b"hello"])
    assert heard[1][1].of(MessageReceived)[0].sender_id == "alice"
    config = ReliableChannelConfig(node=world.node("carol"), channel_id="room", content_topic=TOPIC)
    carol = await create_reliable_channel(config=config)
    assert 0 < len(carol.sender_id) <= 256
    with pytest.raises(ValueError):
        await create_reliable_channel(config, "carol", TOPIC)


@pytest.mark.req("C-005", "C-008")
@virtually
async def test_two_channels_on_one_topic_hear_only_themselves() -> None:
    world = World()
    red, blue = await world.open("alice", "red"), await world.open("bob", "blue")
    red_too = await world.open("carol", "red")
    red_heard, blue_heard = Recorder(red_too), Recorder(blue)
    for number in range(5):
        await red.send(b"red %d" % number)
    await red.send_ephemeral(b"red and gone")
    await until(lambda: len(payloads(red_heard)) == 6)
    await asyncio.sleep(600)
    assert blue_heard.events == []
    assert blue.log() == [] and blue.sync_status().missing == ()
    assert red.log() == red_too.log() and len(red.log()) == 5


@pytest.mark.req("C-006")
@virtually
async def test_a_sender_id_that_was_made_is_the_same_after_a_restart() -> None:
    world, store = World(), MemoryPersistence()
    seen = []
    for channel_id in ("room", "room", "other"):
        channel = await create_reliable_channel(
            world.node("alice"), channel_id, TOPIC, options={"persistence": store}
        )
        seen.append(channel.sender_id)
        await channel.close()
    assert seen[0] == seen[1] != seen[2]
    elsewhere = await create_reliable_channel(world.node("bob"), "room", TOPIC)
    assert elsewhere.sender_id not in seen


@pytest.mark.req("C-007")
@virtually
async def test_two_channels_of_a_node_on_one_topic_are_warned_about(caplog: Any) -> None:
    world = World()
    with caplog.at_level(logging.WARNING, "strata.reliable"):
        await world.open("alice", "red")
        await world.open("alice", "green", "/test/1/green/proto")
        assert caplog.records == []
        await world.open("alice", "blue")
    assert TOPIC in caplog.text


@pytest.mark.req("C-009")
@virtually
async def test_a_participant_opens_a_channel_once_on_a_node() -> None:
    world = World()
    alice, bob = await world.pair()
    with pytest.raises(AlreadyOpen) as caught:
        await world.open("alice")
    assert (caught.value.channel_id, caught.value.sender_id) == ("room", "alice")
    heard = Recorder(bob)
    await alice.send(b"still here")
    await until(lambda: payloads(heard) == [b"still here"])
    another = await world.open("alice", sender="alice's other half")
    await another.close()
    await alice.close()
    await world.open("alice")


@pytest.mark.req("C-009")
@virtually
async def test_of_two_openings_at_once_one_is_refused() -> None:
    world = World()
    stores = [SimStore(Disk(), Faults(disk_delay=(1, 1)), random.Random(1), Counter()) for _ in range(2)]
    openings = [world.open("alice", persistence=store) for store in stores]
    results = await asyncio.gather(*openings, return_exceptions=True)
    refused = [each for each in results if isinstance(each, AlreadyOpen)]
    opened = [each for each in results if isinstance(each, ReliableChannel)]
    assert len(refused) == len(opened) == 1
    await opened[0].close()
    assert own_tasks() == set()


@pytest.mark.req("C-010")
@virtually
async def test_an_encoder_and_decoder_of_ones_own_go_around_everything() -> None:
    world = World()
    options: dict[str, Any] = {"encoder": Quotes(), "decoder": Quotes(), "encryption": Mirror()}
    alice, bob = await world.pair(**options)
    assert alice.content_topic == Quotes.content_topic
    heard = Recorder(bob)
    await alice.send(b"x" * 250_000)
    await alice.send_ephemeral(b"gone")
    await until(lambda: len(payloads(heard)) == 2)
    await until(lambda: not alice.sync_status().outstanding)
    sendings = [*world.node("alice").sendings, *world.node("bob").sendings]
    assert len(sendings) >= 5
    for each in sendings:
        assert each.envelope.content_topic == Quotes.content_topic
        wire = each.envelope.payload
        assert wire[:2] == b"<~" and wire[-1:] == b">"  # outside the hook
        assert SdsMessage.decode(Mirror().decrypt(wire[1:-1])) is not None
    world.node("bob").hear(b"no quotes", Quotes.content_topic)
    await until(lambda: bob.statistics.undecodable == 1)


@virtually
async def test_an_encoder_without_its_decoder_is_refused() -> None:
    with pytest.raises(ValueError):
        World().make("alice", encoder=Quotes())


@pytest.mark.req("C-028")
@virtually
async def test_a_channel_says_which_it_is() -> None:
    channel = await World().open("alice", "lobby", "/chat/1/lobby/proto", sender="did:strata:alice")
    assert channel.channel_id == "lobby"
    assert channel.content_topic == "/chat/1/lobby/proto"
    assert channel.sender_id == "did:strata:alice"


# Errors.


@pytest.mark.req("C-011")
@virtually
async def test_every_refused_call_raises_its_own_error_with_data() -> None:
    world = World()
    with pytest.raises(SegmentDoesNotFit) as too_large:
        world.node("small", largest=30_000)
        await world.open("small", segment_size_bytes=102_401)
    assert too_large.value.segment_size_bytes == 102_401
    assert 0 < too_large.value.largest < 30_000 and str(too_large.value.largest) in str(too_large.value)

    node = world.node("alice", largest=200_000)
    with pytest.raises(InvalidContentTopic) as topic:
        await world.open("alice", "room", "chat")
    assert topic.value.topic == "chat"

    node.answer = lambda _: SWALLOW
    alice = await world.open("alice", max_unacknowledged=300)
    with pytest.raises(EmptyPayload):
        await alice.send(b"")
    with pytest.raises(PayloadTooLarge) as payload:
        await alice.send(b"x" * (255 * 102_400 + 1))
    assert (payload.value.payload_bytes, payload.value.max_bytes) == (255 * 102_400 + 1, 255 * 102_400)
    with pytest.raises(MessageTooLarge) as message:
        await alice.send_ephemeral(b"x" * 200_000)
    assert message.value.size_bytes == 200_000 and 199_000 < message.value.max_bytes < 200_000

    client = ReliableClient(node)
    inner = MessageEnvelope(content_topic="", payload=b"x")
    with pytest.raises(UnknownChannel) as unknown:
        await client.send(ReliableEnvelope(message_envelope=inner, channel_id="nowhere"))
    assert unknown.value.channel_id == "nowhere"
    with pytest.raises(InvalidEnvelope):
        elsewhere = replace(inner, content_topic="/test/1/else/proto")
        await client.send(ReliableEnvelope(message_envelope=elsewhere, channel_id="room"))
    await alice.stop()
    with pytest.raises(NotStarted):
        await alice.send(b"x")
    await alice.close()
    with pytest.raises(ChannelNotOpen):
        await alice.send(b"x")
    for call in (alice.start, alice.stop, alice.close):
        with pytest.raises(ChannelNotOpen):
            await call()
    for look in (alice.sync_status, alice.log, alice.events, lambda: alice.statistics):
        with pytest.raises(ChannelNotOpen):
            look()
    assert issubclass(EmptyPayload, StrataError) and issubclass(ChannelNotOpen, StrataError)


@pytest.mark.req("C-011")
@virtually
async def test_with_too_much_outstanding_sending_is_refused_whole() -> None:
    world = World()
    world.node("alice").answer = lambda _: SWALLOW
    alice = await world.open("alice", max_unacknowledged=2, segment_size_bytes=10)
    told = Recorder(alice)
    await alice.send(b"one")
    with pytest.raises(OutgoingFull):
        await alice.send(b"two pieces, one too many")
    await alice.send(b"fits")
    with pytest.raises(OutgoingFull):
        await alice.send(b"no more")
    assert told.count(SendingMessageIrrecoverableError) == 2
    await until(lambda: told.count(MessageSent) == 2)
    assert {each.segment.payload for each in world.node("alice").contents} == {b"one", b"fits"}


@pytest.mark.req("C-011")
@virtually
async def test_a_store_that_fails_at_opening_says_so_and_leaves_nothing() -> None:
    class Broken(MemoryPersistence):
        async def load(self, participant: Any) -> Any:
            raise PersistenceError("the disk is gone")

    world = World()
    with pytest.raises(PersistenceError, match="the disk is gone"):
        await world.open("alice", persistence=Broken())
    assert own_tasks() == set()
    assert ReliableClient(world.node("alice")).channels == ()


@pytest.mark.req("C-011")
@virtually
async def test_what_fails_later_arrives_as_an_event() -> None:
    # A background task that raises would fail this test: the virtual loop reports unhandled exceptions.
    class Mute(Mirror):
        def encrypt(self, content: bytes) -> bytes:
            raise OSError("no key")

    world = World()
    alice = await world.open("alice", encryption=Mute())
    told = Recorder(alice)
    request_id = await alice.send(b"hello")
    await until(lambda: told.count(SendingMessageIrrecoverableError) == 1)
    assert told.of(SendingMessageIrrecoverableError)[0].request_id == request_id
    with pytest.raises(EncryptionFailed):
        await alice.send_ephemeral(b"hello")
    await alice.close()


# Sending.


@pytest.mark.req("C-012")
@virtually
async def test_send_returns_at_once_with_an_id_of_its_own() -> None:
    world = World()
    alice, bob = await world.pair()
    told, heard = Recorder(alice), Recorder(bob)
    world.network.cut("alice", world.network.relays[0])
    before = world.now
    ids = [await alice.send(b"the same"), await send(alice, b"the same")]
    assert world.now == before and len(set(ids)) == 2
    assert told.events == []
    world.network.mend("alice", world.network.relays[0])
    await until(lambda: told.count(ReliableMessageDelivered) == 2)
    kinds: tuple[Any, ...] = (SendingMessage, MessageSent, MessageAcknowledged, ReliableMessageSent)
    for kind in kinds:
        assert {event.request_id for event in told.of(kind)} == set(ids), kind
    assert [event.request_id for event in heard.of(MessageReceived)] == ids


@pytest.mark.req("C-013")
@virtually
async def test_an_envelope_goes_through_the_channel_it_names() -> None:
    world = World()
    alice, bob = await world.pair()
    other = await world.open("alice", "other", "/test/1/other/proto")
    heard = Recorder(bob)
    client = ReliableClient(world.node("alice"))
    assert set(client.channels) == {alice, other}
    inner = MessageEnvelope(content_topic=TOPIC, payload=b"through the room")
    request_id = await client.send(ReliableEnvelope(message_envelope=inner, channel_id="room"))
    await until(lambda: heard.count(MessageReceived))
    (received,) = heard.of(MessageReceived)
    assert (received.payload, received.request_id) == (b"through the room", request_id)
    assert not received.ephemeral and len(alice.log()) == 1 and other.log() == []

    await client.send(ReliableEnvelope(message_envelope=replace(inner, ephemeral=True), channel_id="room"))
    await until(lambda: heard.count(MessageReceived) == 2)
    assert heard.of(MessageReceived)[1].ephemeral and len(alice.log()) == 1

    sent = len(world.node("alice").sendings)
    with pytest.raises(UnknownChannel):
        await client.send(ReliableEnvelope(message_envelope=inner, channel_id="nowhere"))
    await other.close()
    with pytest.raises(UnknownChannel):
        await client.send(ReliableEnvelope(message_envelope=inner, channel_id="other"))
    assert len(world.node("alice").sendings) == sent


@pytest.mark.req("C-013")
@virtually
async def test_an_envelope_without_a_channel_is_ephemeral_and_of_none() -> None:
    world = World()
    alice, bob = await world.pair()
    told, heard = Recorder(alice), Recorder(bob)
    arrived: list[NodeMessageReceived] = []
    world.node("bob").message_events.on(NodeMessageReceived.name, arrived.append)
    inner = MessageEnvelope(content_topic=TOPIC, payload=b"bare")
    request_id = await ReliableClient(world.node("alice")).send(ReliableEnvelope(message_envelope=inner))
    await until(lambda: arrived)
    assert (arrived[0].message.payload, arrived[0].message.ephemeral) == (b"bare", True)
    (sending,) = world.node("alice").sendings
    assert (sending.envelope.payload, sending.request_id) == (b"bare", request_id)
    await asyncio.sleep(600)
    assert told.events == heard.events == [] and alice.log() == bob.log() == []
    with pytest.raises(EmptyPayload):
        empty = MessageEnvelope(content_topic=TOPIC, payload=b"")
        await ReliableClient(world.node("alice")).send(ReliableEnvelope(message_envelope=empty))
    assert len(world.node("alice").contents) == 0


@pytest.mark.req("C-014")
@virtually
async def test_an_envelopes_topic_is_empty_or_the_channels() -> None:
    world = World()
    alice, bob = await world.pair()
    told, heard = Recorder(alice), Recorder(bob)
    client = ReliableClient(world.node("alice"))
    for topic in ("", TOPIC):
        inner = MessageEnvelope(content_topic=topic, payload=b"to " + topic.encode())
        await client.send(ReliableEnvelope(message_envelope=inner, channel_id="room"))
    await until(lambda: payloads(heard) == [b"to ", b"to " + TOPIC.encode()])
    await until(lambda: told.count(ReliableMessageDelivered) == 2)
    told.events.clear()
    sent = len(world.node("alice").sendings)
    log = alice.log()
    for ephemeral in (False, True):
        inner = MessageEnvelope(content_topic="/test/1/else/proto", payload=b"x", ephemeral=ephemeral)
        with pytest.raises(InvalidEnvelope):
            await client.send(ReliableEnvelope(message_envelope=inner, channel_id="room"))
    assert len(world.node("alice").sendings) == sent and alice.log() == log
    assert not told.count(SendingMessage)


@pytest.mark.req("C-015")
@pytest.mark.parametrize("function", ["send", "send_ephemeral"])
@virtually
async def test_an_empty_payload_is_refused_with_one_event_and_no_packet(function: Any) -> None:
    world = World()
    alice = await world.open("alice")
    told = Recorder(alice)
    with pytest.raises(EmptyPayload):
        await getattr(alice, function)(b"")
    await asyncio.sleep(600)
    (event,) = told.events
    assert isinstance(event, SendingMessageIrrecoverableError)
    assert event.message_id == "c5d2460186f7233c927e7db2dcc703c0e500b653ca82273b7bfad8045d85a470"
    assert world.node("alice").sendings == [] and alice.log() == []


@pytest.mark.req("C-016")
@pytest.mark.parametrize("function", ["send", "send_ephemeral"])
@virtually
async def test_sending_before_start_and_after_close_is_an_error_and_an_event(function: Any) -> None:
    world = World()
    alice = world.make("alice", auto_start=False)
    told = Recorder(alice)

    async def refused(kind: type[StrataError]) -> None:
        told.events.clear()
        with pytest.raises(kind) as caught:
            await getattr(alice, function)(b"hello")
        (event,) = told.events
        assert isinstance(event, SendingMessageIrrecoverableError)
        assert event.message_id == alice.get_message_id(b"hello") and event.request_id
        assert event.error == str(caught.value)

    await refused(ChannelNotOpen)
    await alice.open()
    await refused(NotStarted)
    await alice.start()
    await alice.stop()
    await refused(NotStarted)
    await alice.start()
    await alice.close()
    await refused(ChannelNotOpen)
    assert world.node("alice").sendings == []


@pytest.mark.req("C-017")
@virtually
async def test_an_ephemeral_message_leaves_no_trace_and_is_never_sent_again() -> None:
    world = World()
    alice, bob = await world.pair()
    heard = Recorder(bob)
    world.node("alice").answer = lambda each: SWALLOW if each.segment.payload == b"unheard" else None
    ids = [await alice.send_ephemeral(b"heard"), await alice.send_ephemeral(b"unheard")]
    assert len(set(ids)) == 2
    assert alice.sync_status().outstanding == () and alice.log() == []
    await asyncio.sleep(600)
    assert [(each.payload, each.request_id) for each in heard.of(MessageReceived)] == [(b"heard", ids[0])]
    assert len(world.node("alice").sendings) == 2
    for sending in world.node("alice").sendings:
        message = sending.message
        assert message is not None and message.kind is Kind.EPHEMERAL and sending.envelope.ephemeral
        assert (message.lamport_timestamp, message.causal_history, message.bloom_filter) == (None, (), None)


@pytest.mark.req("C-018")
@virtually
async def test_the_message_id_is_known_before_sending() -> None:
    assert ReliableChannel.get_message_id(b"hello relay") == HELLO_RELAY
    assert ReliableChannel.getMessageId(b"hello relay") == HELLO_RELAY
    world = World()
    alice, bob = await world.pair()
    told, heard = Recorder(alice), Recorder(bob)
    await alice.send(b"hello relay")
    await until(lambda: told.count(ReliableMessageDelivered))
    events: list[Any] = [*told.events, *heard.of(MessageReceived)]
    assert {event.message_id for event in events} == {HELLO_RELAY}


# Opening and closing.


@pytest.mark.req("C-019")
@virtually
async def test_closing_leaves_no_task_no_subscription_and_no_handler() -> None:
    world = World()
    node = world.node("alice")
    alice = await world.open("alice", encryption=Mirror())
    bob = await world.open("bob", encryption=Mirror())
    events = alice.events()
    for number in range(20):
        await alice.send(b"%d" % number)
    await asyncio.sleep(0.05)
    assert own_tasks()
    await close_channel(alice)
    await bob.close()
    assert own_tasks() == set()
    assert node.unsubscribed == [TOPIC] and not node.hears(TOPIC)
    for emitter in (node.message_events, node.health_events):
        assert not any(map(emitter.count, emitter.names))
    assert ReliableClient(node).channels == ()
    assert not alice.is_started()
    assert all([event.name in CHANNEL_EVENTS async for event in events])  # and then the iterator ends
    assert [message async for message in alice] == []
    with pytest.raises(ChannelNotOpen):
        await close_channel(alice)


@pytest.mark.req("C-019")
@virtually
async def test_a_topic_stays_subscribed_while_another_channel_uses_it() -> None:
    world = World()
    red, blue = await world.open("alice", "red"), await world.open("alice", "blue")
    bob = await world.open("bob", "blue")
    heard = Recorder(blue)
    await red.close()
    assert world.node("alice").unsubscribed == []
    await bob.send(b"still heard")
    await until(lambda: payloads(heard) == [b"still heard"])
    await blue.close()
    assert world.node("alice").unsubscribed == [TOPIC]


@virtually
async def test_a_channel_is_opened_once() -> None:
    alice = await World().open("alice")
    with pytest.raises(RuntimeError):
        await alice.open()
    await alice.close()
    with pytest.raises(RuntimeError):
        await alice.open()


@virtually
async def test_leaving_the_context_closes_and_closing_inside_is_no_fault() -> None:
    world = World()
    async with world.make("alice") as alice:
        assert alice.is_started()
    assert not alice.is_started() and own_tasks() == set()
    async with world.make("alice") as alice:
        await alice.close()
    assert own_tasks() == set()


@pytest.mark.req("C-020")
@virtually
async def test_what_was_not_acknowledged_goes_on_after_the_next_opening() -> None:
    world, store = World(), MemoryPersistence()
    world.node("alice").answer = lambda _: SWALLOW
    alice = await world.open("alice", persistence=store, segment_size_bytes=10)
    request_id = await alice.send(b"three pieces of a message")
    await until(lambda: len(world.node("alice").contents) == 3)
    await alice.close()
    first = {each.message.message_id for each in world.node("alice").contents if each.message}

    world.node("alice").answer = lambda _: None
    world.node("alice").sendings.clear()
    bob = await world.open("bob")
    heard = Recorder(bob)
    alice = await world.open("alice", persistence=store)
    told = Recorder(alice)
    (outstanding,) = alice.sync_status().outstanding
    assert (outstanding.request_id, outstanding.total_chunks) == (request_id, 3)
    await until(lambda: told.count(ReliableMessageDelivered) == 1)
    assert payloads(heard) == [b"three pieces of a message"]
    assert {each.message.message_id for each in world.node("alice").contents if each.message} == first
    assert told.of(ReliableMessageDelivered)[0].request_id == request_id


@pytest.mark.req("C-020")
@virtually
async def test_purging_forgets_what_was_stored() -> None:
    world, store = World(), MemoryPersistence()
    world.node("alice").answer = lambda _: SWALLOW
    alice = await world.open("alice", persistence=store)
    await alice.send(b"hello")
    await alice.close(purge=True)
    world.node("alice").sendings.clear()
    alice = await world.open("alice", persistence=store)
    assert alice.log() == [] and alice.sync_status().outstanding == ()
    await asyncio.sleep(600)
    assert world.node("alice").sendings == []


@virtually
async def test_what_was_received_and_not_taken_is_there_after_the_next_opening() -> None:
    world, store = World(), MemoryPersistence()
    alice, bob = await world.open("alice"), await world.open("bob", persistence=store)
    for number in range(3):
        await alice.send(b"%d" % number)
    await until(lambda: bob.sync_status().inbox == 3)
    assert await take(bob) == [b"0"]
    await bob.close()
    bob = await world.open("bob", persistence=store)
    assert await take(bob, 2) == [b"1", b"2"]


# An opening that fails.


@pytest.mark.req("C-022")
@virtually
async def test_an_opening_whose_topic_cannot_be_subscribed_leaves_nothing_behind() -> None:
    world = World()
    node = world.node("alice")
    node.subscribe_error = unreachable_topic()
    alice = world.make("alice")
    with pytest.raises(NodeError):
        await alice.open()
    assert not alice.is_started()
    with pytest.raises(ChannelNotOpen):
        await alice.start()
    assert own_tasks() == set()
    assert ReliableClient(node).channels == () and not node.message_events.count(NodeMessageReceived.name)
    node.subscribe_error = None
    alice = await world.open("alice")
    assert alice.is_started()


@pytest.mark.req("C-022")
@virtually
async def test_a_start_that_fails_leaves_the_channel_stopped_and_can_be_repeated() -> None:
    world = World()
    node = world.node("alice")
    alice = await world.open("alice", auto_start=False)
    node.subscribe_error = unreachable_topic()
    for _ in range(2):
        with pytest.raises(NodeError):
            await alice.start()
        assert not alice.is_started()
    with pytest.raises(NotStarted):
        await alice.send(b"hello")
    await until(lambda: own_tasks() == {"strata-events room", "strata-channel-sender"}, within=1)
    node.subscribe_error = None
    assert await alice.start() is True and alice.is_started()
    assert node.subscribed == [TOPIC]


@pytest.mark.parametrize("failure", ["refused", "twice", "segments"])
@virtually
async def test_a_failed_opening_does_not_disturb_the_other_channels_of_the_node(failure: Any) -> None:
    world = World()
    node = world.node("alice", largest=150_000)
    alice, bob = await world.pair()
    heard = Recorder(bob)
    await asyncio.sleep(1)
    before = own_tasks()
    if failure == "refused":
        node.subscribe_error = unreachable_topic()
    options = {"segment_size_bytes": 150_000} if failure == "segments" else {}
    with pytest.raises(StrataError):
        channel_id = "room" if failure == "twice" else "other"
        await world.open("alice", channel_id, "/test/1/other/proto", **options)
    assert own_tasks() == before
    assert ReliableClient(node).channels == (alice,)
    await alice.send(b"undisturbed")
    await until(lambda: payloads(heard) == [b"undisturbed"])


@virtually
async def test_a_cancelled_opening_leaves_nothing_behind() -> None:
    world = World()
    node = world.node("alice")
    node.subscribe_gate.clear()
    opening = asyncio.create_task(world.open("alice"))
    await asyncio.sleep(1)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert own_tasks() == set()
    assert ReliableClient(node).channels == ()
    node.subscribe_gate.set()
    await world.open("alice")


@pytest.mark.parametrize("milliseconds", range(0, 60, 4))
@virtually
async def test_opening_can_be_cancelled_at_any_moment(milliseconds: Any) -> None:
    world = World()
    store = SimStore(Disk(), Faults(disk_delay=(0.01, 0.01)), random.Random(1), Counter())
    node = world.node("alice")
    node.subscribe_delay = 0.01
    opening = asyncio.create_task(
        create_reliable_channel(node, "room", TOPIC, options={"persistence": store})
    )
    await asyncio.sleep(milliseconds / 1000)
    if opening.done():
        assert milliseconds > 35
        await (await opening).close()
    else:
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
    await until(lambda: own_tasks() == set(), within=1)
    assert ReliableClient(node).channels == ()


# Starting and stopping.


@pytest.mark.req("C-021")
@virtually
async def test_starting_twice_subscribes_once_and_is_true_both_times() -> None:
    world = World()
    alice = await world.open("alice", auto_start=False)
    world.node("alice").subscribe_gate.clear()
    both = [asyncio.create_task(alice.start()) for _ in range(2)]
    await asyncio.sleep(1)
    world.node("alice").subscribe_gate.set()
    assert await asyncio.gather(*both) == [True, True]
    assert await alice.start() is True
    assert world.node("alice").subscribed == [TOPIC]
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert sum(name.startswith("strata-timers") for name in names) == 1


@pytest.mark.req("C-021")
@virtually
async def test_starting_begins_to_listen_to_sync_and_to_retrieve() -> None:
    world = World()
    alice = await world.open("alice", max_retransmissions=0)
    told = Recorder(alice)
    await alice.send(b"long before")
    await until(lambda: world.network.relays[0].stored)
    await asyncio.sleep(60)
    bob = await world.open("bob", auto_start=False)
    heard = Recorder(bob)
    await asyncio.sleep(600)
    assert heard.events == [] and world.node("bob").sendings == []
    assert await bob.start()
    await until(lambda: payloads(heard) == [b"long before"], within=10)  # retrieved from the store
    await until(lambda: told.count(ReliableMessageDelivered), within=60)  # acknowledged by a sync
    assert {each.kind for each in world.node("bob").sendings} == {Kind.SYNC}
    await alice.send(b"now")
    await until(lambda: payloads(heard) == [b"long before", b"now"], within=5)  # it listens


@pytest.mark.req("C-023")
@virtually
async def test_a_stopped_channel_does_nothing_until_it_is_started() -> None:
    world = World()
    world.node("alice").answer = lambda _: SWALLOW
    alice, bob = await world.pair()
    await alice.send(b"to be sent again")
    await until(lambda: world.node("alice").contents)
    await alice.stop()
    await alice.stop()
    assert not world.node("alice").hears(TOPIC)
    assert world.node("alice").unsubscribed == [TOPIC]
    running = {name for name in own_tasks() if name.endswith("room")}
    assert running == {
        "strata-events room",
        "strata-timers room",
        "strata-store-queries room",
    }  # the last two are Bob's
    sent = len(world.node("alice").sendings)
    told, heard = Recorder(alice), Recorder(bob)
    await bob.send(b"while you were away")
    await asyncio.sleep(3600)
    assert len(world.node("alice").sendings) == sent
    assert told.events == [] and alice.statistics.sds.received == 0

    world.node("alice").answer = lambda _: None
    assert await alice.start() is True
    await until(lambda: told.count(MessageReceived) == 1)
    await until(lambda: payloads(heard) == [b"to be sent again"])
    await until(lambda: told.count(ReliableMessageDelivered) == 1)


@pytest.mark.req("C-023")
@virtually
async def test_stopping_waits_for_what_is_on_its_way() -> None:
    world = World()
    alice = await world.open("alice")
    told = Recorder(alice, received=False)
    await alice.send(b"on its way")
    await until(lambda: world.node("alice").contents)
    assert told.count(MessageSent) == 0
    await alice.stop()
    await asyncio.sleep(0)
    assert told.count(MessageSent) == 1


@pytest.mark.req("C-023")
@virtually
async def test_stopping_gives_up_on_a_node_that_does_not_answer_and_sends_again_later() -> None:
    world = World()
    alice, bob = await world.pair()
    heard = Recorder(bob)
    silent = True

    async def hold(envelope: MessageEnvelope, *, request_id: str | None = None) -> str:
        if silent:
            return request_id or ""
        return await type(node).send(node, envelope, request_id=request_id)

    node = world.node("alice")
    node.send = hold  # type: ignore[method-assign]
    await alice.send(b"unanswered")
    await asyncio.sleep(1)
    before = world.now
    await alice.stop()
    assert 0 < world.now - before <= 10
    silent = False
    await alice.start()
    await until(lambda: payloads(heard) == [b"unanswered"])


@pytest.mark.req("C-023")
@virtually
async def test_stopping_and_starting_during_traffic_loses_nothing() -> None:
    world = World()
    alice, bob = await world.pair()
    heard = Recorder(bob)
    sent = []

    async def talk() -> None:
        for number in range(100):
            await until(alice.is_started)
            sent.append(b"%d" % number)
            await alice.send(sent[-1])
            await asyncio.sleep(0.3)

    talking = asyncio.create_task(talk())
    for number in range(10):
        channel = (alice, bob)[number % 2]
        await asyncio.sleep(2.5)
        await channel.stop()
        await asyncio.sleep(3)
        await channel.start()
    await talking
    await until(lambda: len(payloads(heard)) == 100)
    await until(lambda: not alice.sync_status().outstanding)
    assert payloads(heard) == sent and alice.log() == bob.log()


@pytest.mark.req("C-024")
@virtually
async def test_is_started_tells_the_state() -> None:
    alice = World().make("alice", auto_start=False)
    assert alice.is_started() is False
    await alice.open()
    assert alice.is_started() is False
    await alice.start()
    assert alice.is_started() is True
    await alice.stop()
    assert alice.is_started() is False
    await alice.start()
    assert alice.is_started() is True
    await alice.close()
    assert alice.is_started() is False


@pytest.mark.req("C-025")
@virtually
async def test_only_auto_start_starts_a_channel() -> None:
    world = World()
    alice = await world.open("alice")
    assert alice.is_started()
    bob = await world.open("bob", auto_start=False, query_on_connect=False)
    heard = Recorder(bob)
    await alice.send(b"too early")
    await asyncio.sleep(60)
    assert not bob.is_started() and heard.events == [] and bob.statistics.sds.received == 0
    assert world.node("bob").subscribed == []
    await bob.start()
    await alice.send(b"in time")
    await until(lambda: b"in time" in payloads(heard))


# Handlers and iterators.


@pytest.mark.req("C-026")
@virtually
async def test_handlers_come_and_go_by_the_names_of_the_documents(caplog: Any) -> None:
    assert set(CHANNEL_EVENTS) == {
        "reliable:message:received",
        "reliable:message:sent",
        "reliable:message:delivered",
        "reliable:message:send-error",
        "reliable:message:delivery-error",
        "sending-message",
        "message-sent",
        "message-possibly-acknowledged",
        "message-acknowledged",
        "sending-message-irrecoverable-error",
        "message-received",
        "irretrievable-message",
        "history-gap",
        "ephemeral-message-dropped",
        "inbox-full",  # an addition that is in no document
    }
    world = World()
    alice, bob = await world.pair()
    assert set(alice.message_events.names) == set(CHANNEL_EVENTS)
    for call in (alice.message_events.on, alice.message_events.off):
        with pytest.raises(ValueError):
            call("message_sent", print)

    def broken(event: Any) -> None:
        raise RuntimeError("a fault of the program")

    async def broken_too(event: Any) -> None:
        raise RuntimeError("another")

    seen: list[Any] = []
    for name in CHANNEL_EVENTS:
        for channel in (alice, bob):
            channel.message_events.on(name, broken)
            channel.message_events.on(name, broken_too)
            channel.message_events.on(name, seen.append)
    with caplog.at_level(logging.ERROR, "strata.events"):
        await alice.send(b"first")
        await until(lambda: {"message-received", "reliable:message:delivered"} <= {e.name for e in seen})
    assert "a handler of message-received raised" in caplog.text
    for name in CHANNEL_EVENTS:
        alice.message_events.off(name, seen.append)
        bob.message_events.off(name, seen.append)
    count = len(seen)
    received = Recorder(bob)
    await alice.send(b"second")
    await until(lambda: payloads(received) == [b"second"])
    await until(lambda: not alice.sync_status().outstanding)
    assert len(seen) == count


@pytest.mark.req("C-027")
@virtually
async def test_iterating_events_yields_what_handlers_hear() -> None:
    world = World()
    alice, bob = await world.pair(segment_size_bytes=10)
    for channel in (alice, bob):
        channel.recorder = Recorder(channel)  # type: ignore[attr-defined]
    iterated: dict[str, list[Any]] = {"alice": [], "bob": [], "some": []}

    async def follow(name: str, events: Any) -> None:
        async for event in events:
            iterated[name].append(event)

    tasks = [
        asyncio.create_task(follow("alice", alice.events())),
        asyncio.create_task(follow("bob", bob.events())),
        asyncio.create_task(follow("some", alice.events("message-sent", "reliable:message:delivered"))),
    ]
    await alice.send(b"a message of three pieces")
    await bob.send(b"an answer")
    await alice.send_ephemeral(b"bye")
    with pytest.raises(EmptyPayload):
        await alice.send(b"")
    await until(lambda: not alice.sync_status().outstanding and not bob.sync_status().outstanding)
    await asyncio.sleep(1)
    await alice.close()
    await bob.close()
    await asyncio.gather(*tasks)  # they end with the channels
    assert iterated["alice"] == alice.recorder.events  # type: ignore[attr-defined]
    assert iterated["bob"] == bob.recorder.events  # type: ignore[attr-defined]
    assert {"message-received", "message-acknowledged"} <= {event.name for event in iterated["alice"]}
    chosen = ("message-sent", "reliable:message:delivered")
    assert iterated["some"] == [event for event in iterated["alice"] if event.name in chosen]
    assert len(iterated["some"]) == 5


@virtually
async def test_iterating_an_event_that_is_not_is_refused() -> None:
    alice = await World().open("alice")
    with pytest.raises(ValueError):
        alice.events("message-sent", "message_sent")
    assert not any(map(alice.message_events.count, CHANNEL_EVENTS))


@virtually
async def test_a_refused_message_of_the_node_is_told_and_harms_no_other() -> None:
    world = World()
    alice, bob = await world.pair()
    told, heard = Recorder(alice), Recorder(bob)
    world.node("alice").answer = lambda each: Refusal() if each.segment.payload == b"bad" else None
    for payload in (b"good", b"bad", b"better"):
        await alice.send(payload)
    await until(lambda: payloads(heard) == [b"good", b"better"])
    assert told.count(SendingMessageIrrecoverableError) == 1
    assert isinstance(heard.events[1], ReliableMessageReceived)


@virtually
async def test_the_documents_names_of_functions_work_too() -> None:
    from strata.channels import reliable

    assert reliable.createReliableChannel is create_reliable_channel
    assert reliable.closeChannel is close_channel
    assert ReliableChannel.sendEphemeral is ReliableChannel.send_ephemeral
    assert ReliableChannel.isStarted is ReliableChannel.is_started
