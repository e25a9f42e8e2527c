"""What a channel reports, when, and with which fields (channel.md §3)."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import fields
from typing import Any

import pytest
from strata.channels.encryption import EncryptionFailed
from strata.channels.messaging.values import MessageEnvelope
from strata.channels.rate_limit import RateLimitConfig
from strata.channels.reliable import (
    EmptyPayload,
    EphemeralMessageDropped,
    EventMessageReceived,
    EventMessageSendError,
    EventMessageSent,
    EventReliableMessageSent,
    FailureStage,
    IrretrievableMessage,
    MessageAcknowledged,
    MessagePossiblyAcknowledged,
    MessageReceived,
    MessageSent,
    MessageTooLarge,
    ReliableChannel,
    ReliableMessageDelivered,
    ReliableMessageDeliveryError,
    ReliableMessageReceived,
    ReliableMessageSendError,
    ReliableMessageSent,
    SendingMessage,
    SendingMessageIrrecoverableError,
)
from strata.channels.sds import HistoryEntry, SdsMessage
from strata.channels.segmentation import PayloadTooLarge, SegmentationConfig, encode_segment, segment_message
from strata.protocol.errors import StrataError
from strata_testkit.sim import Faults

from tests.support.channel_world import (
    SWALLOW,
    Node,
    Recorder,
    Refusal,
    Sending,
    World,
    content_message,
    sync_message,
    unreachable_topic,
    until,
    virtually,
)

HOUR = 3600.0
FIVE = b"0123456789" * 5
"""Five chunks of ten bytes."""

FIELDS = {
    "reliable:message:received": {"request_id", "envelope"},
    "reliable:message:sent": {"request_id"},
    "reliable:message:delivered": {"request_id"},
    "reliable:message:send-error": {"request_id", "error"},
    "reliable:message:delivery-error": {"request_id", "error"},
    "sending-message": {"message_id", "chunk_info"},
    "message-sent": {"message_id", "chunk_info"},
    "message-possibly-acknowledged": {"message_id", "chunk_info", "possible_ack_count"},
    "message-acknowledged": {"message_id", "chunks_acknowledged", "total_chunks"},
    "sending-message-irrecoverable-error": {"message_id", "chunk_info", "error"},
    "message-received": {
        "payload",
        "timestamp",
        "content_topic",
        "pubsub_topic",
        "hash",
        "ephemeral",
        "meta",
    },
    "irretrievable-message": {"message_id", "retrieval_hint", "sender_id", "channel_id", "first_missing_at"},
    "ephemeral-message-dropped": {"message_id", "reason", "rate_limit_utilization"},
}
FROM_OTHERS = {"reliable:message:received", "message-received", "irretrievable-message"}


def lamport(node: Node) -> int:
    """Return a Lamport time slightly later than all before."""
    lamport.last = max(int(node.wall() * 1000), lamport.last) + 1  # type: ignore[attr-defined]
    return lamport.last  # type: ignore[attr-defined, no-any-return]


lamport.last = 0  # type: ignore[attr-defined]


def acknowledge(node: Node, *message_ids: str) -> None:
    """Let Bob send a sync that names these SDS messages."""
    node.hear(sync_message("bob", lamport(node), names=message_ids))


def ids_of(node: Node) -> list[str]:
    """The SDS ids of the content messages sent, in order, each once."""
    return list(dict.fromkeys(each.message.message_id for each in node.contents if each.message))


def chunks(recorder: Recorder, kind: type[Any]) -> list[int]:
    return [event.chunk_info.chunk_index for event in recorder.of(kind)]


async def lone(world: World, **options: Any) -> tuple[ReliableChannel, Recorder, Node]:
    """Open Alice's channel on a node that reports success but reaches nobody."""
    node = world.node("alice")
    node.answer = lambda _: SWALLOW
    alice = await world.open("alice", **{"segment_size_bytes": 10, "sync_min_interval_ms": 0, **options})
    return alice, Recorder(alice), node


# Their fields.


@pytest.mark.req("C-037")
@virtually
async def test_every_event_carries_the_fields_of_the_documents() -> None:
    world = World()
    alice, bob = await world.pair()
    told = [Recorder(alice), Recorder(bob)]
    request_id = await alice.send(b"hello")
    await until(lambda: told[0].count(ReliableMessageDelivered))

    world.node("carol").answer = lambda _: SWALLOW
    limits = RateLimitConfig(messages_per_epoch=2, epoch_size_ms=10**9)
    options: dict[str, Any] = {"lost_message_timeout_ms": 1000, "max_retransmissions": 0}
    carol = await world.open("carol", "room", "/test/1/carol/proto", **options, **as_options(limits))
    told.append(Recorder(carol))
    node = world.node("carol")
    unheard = await carol.send(b"unheard")
    await until(lambda: node.contents)
    node.hear(sync_message("bob", lamport(node), holds=ids_of(node)), carol.content_topic)
    await until(lambda: told[2].count(ReliableMessageDeliveryError))
    lost = content_message("bob", "b" * 64, b"x", lamport(node), follows=["a" * 64])
    node.hear(lost, carol.content_topic)
    await until(lambda: told[2].count(IrretrievableMessage))
    await carol.send(b"the budget")
    dropped = await carol.send_ephemeral(b"dropped")
    with pytest.raises(EmptyPayload):
        await carol.send(b"")

    events = [event for each in told for event in each.events]
    await until(lambda: told[2].count(EphemeralMessageDropped))
    events = [event for each in told for event in each.events]
    assert {event.name for event in events} == set(FIELDS)
    known = {
        request_id: alice.get_message_id(b"hello"),
        unheard: alice.get_message_id(b"unheard"),
        dropped: alice.get_message_id(b"dropped"),
    }
    seen = set()
    for event in events:
        has = {each.name for each in fields(event)}
        assert FIELDS[event.name] <= has, event.name
        if event.name not in FROM_OTHERS:
            assert {"request_id", "message_id"} <= has, event.name
        if (found := getattr(event, "request_id", None)) in known and "message_id" in has:
            assert event.message_id == known[found]  # type: ignore[union-attr]
            seen.add(found)
    assert seen == set(known)


def as_options(limits: RateLimitConfig) -> dict[str, Any]:
    return {each.name: getattr(limits, each.name) for each in fields(limits)}


@pytest.mark.req("C-047")
@virtually
async def test_received_events_carry_no_chunk_information() -> None:
    world = World()
    alice, bob = await world.pair(segment_size_bytes=10)
    heard = Recorder(bob)
    await alice.send(FIVE)
    await until(lambda: heard.count(MessageReceived) and heard.count(ReliableMessageReceived))
    for event in heard.events:
        names = {each.name for each in fields(event)}
        if isinstance(event, ReliableMessageReceived):
            names |= {each.name for each in fields(event.envelope)}
            names |= {each.name for each in fields(event.envelope.message_envelope)}
        assert not {name for name in names if "chunk" in name or "segment" in name}


@pytest.mark.req("C-060")
def test_two_names_are_one_type() -> None:
    assert EventReliableMessageSent is EventMessageSent is ReliableMessageSent
    assert EventMessageReceived is ReliableMessageReceived
    assert EventMessageSendError is ReliableMessageSendError


# Each chunk.


@pytest.mark.req("C-038", "C-039")
@virtually
async def test_each_chunk_is_told_when_it_begins_and_when_it_is_sent_and_again_when_sent_again() -> None:
    world = World()
    alice, told, node = await lone(world)
    await alice.send(FIVE)
    await until(lambda: told.count(MessageSent) == 5)
    assert chunks(told, SendingMessage) == chunks(told, MessageSent) == [0, 1, 2, 3, 4]
    assert {event.chunk_info.total_chunks for event in told.of(SendingMessage)} == {5}
    ids = ids_of(node)
    acknowledge(node, *ids[:2], *ids[3:])
    await until(lambda: told.count(MessageSent) == 6)
    assert chunks(told, SendingMessage) == chunks(told, MessageSent) == [0, 1, 2, 3, 4, 2]
    assert [each.segment.index for each in node.contents] == [0, 1, 2, 3, 4, 2]
    acknowledge(node, ids[2])
    await asyncio.sleep(HOUR)
    assert told.count(SendingMessage) == told.count(MessageSent) == 6


@pytest.mark.req("C-038", "C-039")
@virtually
async def test_a_message_that_cannot_leave_yet_is_not_told_to_be_sent() -> None:
    world = World()
    node = world.node("alice")
    alice, bob = await world.pair()
    told = Recorder(alice)
    world.network.cut("alice", world.network.relays[0])
    await alice.send(b"offline")
    await asyncio.sleep(HOUR)
    assert told.events == [] and node.sendings == []
    world.network.mend("alice", world.network.relays[0])
    await until(lambda: told.count(ReliableMessageDelivered))
    assert (told.count(SendingMessage), told.count(MessageSent)) == (1, 1)
    assert bob.sync_status().inbox == 1


@pytest.mark.req("C-039")
@virtually
async def test_a_chunk_that_the_node_could_not_send_was_not_sent() -> None:
    world = World()
    alice, told, node = await lone(world)
    node.answer = lambda _: Refusal("busy", recoverable=True)
    await alice.send(b"x")
    await until(lambda: told.count(SendingMessage) >= 3)
    assert told.count(MessageSent) == 0
    node.answer = lambda _: SWALLOW
    await until(lambda: told.count(MessageSent) == 1)
    assert told.count(ReliableMessageSendError) == 0


@pytest.mark.req("C-040")
@pytest.mark.parametrize("seed", range(4))
@virtually
async def test_a_chunk_is_begun_before_it_is_sent_and_sent_before_it_is_acknowledged(seed: Any) -> None:
    world = World(Faults(loss=0.25, duplication=0.2, latency=(0.0, 2.0)), seed=seed)
    options: dict[str, Any] = {"segment_size_bytes": 10, "max_retransmissions": 100}
    alice, bob = await world.pair(**options)
    told = Recorder(alice)
    requests = [await alice.send(FIVE + b"%d" % number) for number in range(5)]
    await until(lambda: told.count(ReliableMessageDelivered) == 5, within=10 * HOUR)
    assert len(bob.log()) == 30
    stages: dict[tuple[str, int], list[str]] = defaultdict(list)
    acknowledged: dict[str, set[int]] = defaultdict(set)
    for event in told.events:
        match event:
            case SendingMessage() | MessageSent() | MessagePossiblyAcknowledged():
                stages[event.request_id, event.chunk_info.chunk_index].append(event.name)
            case MessageAcknowledged():
                for index in set(event.chunks_acknowledged) - acknowledged[event.request_id]:
                    stages[event.request_id, index].append(event.name)
                acknowledged[event.request_id] |= set(event.chunks_acknowledged)
    assert set(stages) == {(request, index) for request in requests for index in range(6)}
    for names in stages.values():
        begun = sent = 0
        for name in names:
            begun += name == SendingMessage.name
            sent += name == MessageSent.name
            assert sent <= begun
            if name in (MessagePossiblyAcknowledged.name, MessageAcknowledged.name):
                assert sent
        assert names.count(MessageAcknowledged.name) == 1


@pytest.mark.req("C-040")
@virtually
async def test_an_acknowledgement_that_overtakes_the_nodes_answer_waits_for_word_that_it_was_sent() -> None:
    world = World()
    alice, told, node = await lone(world)
    node.send = unanswered(node)  # type: ignore[method-assign]
    await alice.send(b"x")
    await until(lambda: node.contents)
    acknowledge(node, *ids_of(node))
    await until(lambda: told.count(ReliableMessageDelivered))
    assert told.names == [
        "sending-message",
        "message-sent",
        "reliable:message:sent",
        "message-acknowledged",
        "reliable:message:delivered",
    ]


def unanswered(node: Node) -> Any:
    async def send(envelope: MessageEnvelope, *, request_id: str) -> str:
        node.sendings.append(Sending(envelope, request_id))
        return request_id

    return send


@pytest.mark.req("C-041")
@virtually
async def test_a_filter_that_newly_has_a_chunk_possibly_acknowledges_it() -> None:
    world = World()
    alice, told, node = await lone(world, possible_acks_threshold=3)
    request_id = await alice.send(FIVE)
    await until(lambda: told.count(MessageSent) == 5)
    ids = ids_of(node)
    first = sync_message("bob", lamport(node), holds=[ids[1]])
    node.hear(first)
    await until(lambda: told.count(MessagePossiblyAcknowledged))
    node.hear(first)
    await asyncio.sleep(1)
    (event,) = told.of(MessagePossiblyAcknowledged)
    assert (event.chunk_info.chunk_index, event.chunk_info.total_chunks) == (1, 5)
    assert (event.possible_ack_count, event.request_id) == (1, request_id)
    assert event.message_id == alice.get_message_id(FIVE)
    assert told.count(MessageAcknowledged) == 0
    node.hear(sync_message("carol", lamport(node), holds=[ids[1], ids[4]]))
    await until(lambda: told.count(MessagePossiblyAcknowledged) == 3)
    counts = Counter((e.chunk_info.chunk_index, e.possible_ack_count) for e in told.of(type(event)))
    assert counts == {(1, 1): 1, (1, 2): 1, (4, 1): 1}


@pytest.mark.req("C-042", "C-043")
@virtually
async def test_each_further_acknowledgement_lists_all_so_far_and_none_comes_twice() -> None:
    world = World()
    alice, told, node = await lone(world)
    await alice.send(FIVE)
    await until(lambda: told.count(MessageSent) == 5)
    ids = ids_of(node)
    expected: list[tuple[int, ...]] = []
    for index in (3, 0, 1, 4, 2):
        expected.append(tuple(sorted({index, *(expected[-1] if expected else ())})))
        replayed = sync_message("bob", lamport(node), names=[ids[index]])
        node.hear(replayed)
        await until(lambda: told.count(MessageAcknowledged) == len(expected))
        node.hear(replayed)
        acknowledge(node, ids[index])
        node.hear(sync_message("carol", lamport(node), names=[ids[index]], holds=[ids[index]]))
        await asyncio.sleep(0.1)
    assert [event.chunks_acknowledged for event in told.of(MessageAcknowledged)] == expected
    assert {event.total_chunks for event in told.of(MessageAcknowledged)} == {5}
    assert told.count(MessagePossiblyAcknowledged) == 0
    assert told.count(ReliableMessageDelivered) == 1


# What can never be sent.


class Hook:
    """A hook that fails at its nth encryption."""

    def __init__(self, *failing: int) -> None:
        self.failing = failing
        self.calls = -1

    def encrypt(self, content: bytes) -> bytes:
        self.calls += 1
        if self.calls in self.failing:
            raise OSError("the key store is locked")
        return content

    def decrypt(self, payload: bytes) -> bytes:
        return payload


class BrokenCodec:
    """Cannot encode anything."""

    content_topic = "/broken/1/room/proto"

    def encode(self, payload: bytes) -> bytes:
        raise KeyError("no such shape")

    def decode(self, payload: bytes) -> bytes | None:
        return payload


def no_proof(_: bytes) -> bytes:
    raise RuntimeError("no proof to be had")


IRRECOVERABLE: dict[str, dict[str, Any]] = {
    "encoding": {"encoder": BrokenCodec(), "decoder": BrokenCodec()},
    "encryption": {"encryption": Hook(0)},
    "proof": {"proof_provider": no_proof},
    "refused": {},
    "raised": {},
}


@pytest.mark.req("C-044", "C-045", "C-059")
@pytest.mark.parametrize("reason", sorted(IRRECOVERABLE))
@virtually
async def test_what_can_never_be_sent_is_told_once_and_not_tried_again(reason: Any) -> None:
    world = World()
    options = dict(IRRECOVERABLE[reason])
    if reason == "encryption":
        options = {"encryption": Hook(0)}
    alice, told, node = await lone(world, **options)
    if reason == "refused":
        node.answer = lambda _: Refusal("invalid_schema")
    elif reason == "raised":
        node.answer = lambda _: unreachable_topic()
    request_id = await alice.send(b"never")
    await until(lambda: told.count(SendingMessageIrrecoverableError))
    await asyncio.sleep(2 * HOUR)
    (event,) = told.of(SendingMessageIrrecoverableError)
    assert (event.chunk_info.chunk_index, event.chunk_info.total_chunks) == (0, 1)
    assert (event.request_id, event.message_id) == (request_id, alice.get_message_id(b"never"))
    assert type(event.error) is str and event.error and type(event.code) is str and event.code
    (error,) = told.of(ReliableMessageSendError)
    assert error.stage == "dispatch" and error.error == event.error
    assert told.count(SendingMessage) <= 1
    assert len(node.sendings) == (1 if reason in ("refused", "raised") else 0)
    assert told.count(MessageSent) == told.count(ReliableMessageDeliveryError) == 0
    assert alice.sync_status().outstanding == () and alice.sync_status().queued == 0


@pytest.mark.req("C-044")
@pytest.mark.parametrize(
    ("function", "payload", "error"),
    [
        ("send", b"", EmptyPayload),
        ("send", b"x" * 2551, PayloadTooLarge),
        ("send_ephemeral", b"", EmptyPayload),
        ("send_ephemeral", b"x" * 50_000, MessageTooLarge),
    ],
)
@virtually
async def test_an_empty_or_too_large_payload_is_an_irrecoverable_error(
    function: Any, payload: Any, error: Any
) -> None:
    world = World()
    world.node("alice", largest=50_000)
    alice, told, node = await lone(world)
    with pytest.raises(error) as caught:
        await getattr(alice, function)(payload)
    await asyncio.sleep(HOUR)
    (event,) = told.events
    assert isinstance(event, SendingMessageIrrecoverableError)
    assert event.error == str(caught.value) and event.message_id == alice.get_message_id(payload)
    assert node.sendings == []


@pytest.mark.req("C-044")
@virtually
async def test_of_a_message_the_chunk_that_failed_is_named_and_the_others_stay_where_they_are() -> None:
    world = World()
    alice, told, node = await lone(world, encryption=Hook(2))
    heard = Recorder(await world.open("bob", encryption=Hook()))
    node.answer = lambda _: None
    await alice.send(FIVE)
    await alice.send(b"the next")
    await until(lambda: told.count(SendingMessageIrrecoverableError))
    assert chunks(told, SendingMessageIrrecoverableError) == [2]
    assert told.of(SendingMessageIrrecoverableError)[0].chunk_info.total_chunks == 5
    await until(lambda: heard.count(MessageReceived))
    await asyncio.sleep(HOUR)
    assert [event.payload for event in heard.of(MessageReceived)] == [b"the next"]
    assert set(chunks(told, MessageSent)) <= {0, 1} and told.count(ReliableMessageSendError) == 1
    assert told.count(ReliableMessageDelivered) == 1


# What was received.


@pytest.mark.slow
@pytest.mark.req("C-046")
@pytest.mark.parametrize("seed", range(3))
@virtually
async def test_each_message_is_received_once_whatever_is_repeated_and_never_ones_own(seed: Any) -> None:
    world = World(Faults(duplication=0.5, loss=0.3, latency=(0.0, 3.0)), seed=seed)
    options: dict[str, Any] = {"segment_size_bytes": 10, "max_retransmissions": 100}
    alice, bob = await world.pair(**options)
    told = {"alice": Recorder(alice), "bob": Recorder(bob)}
    sent: dict[str, list[bytes]] = {"alice": [], "bob": []}
    for number in range(10):
        for channel in (alice, bob):
            sent[channel.sender_id].append(FIVE + b"%s %d" % (channel.sender_id.encode(), number))
            await channel.send(sent[channel.sender_id][-1])
        await asyncio.sleep(3)
    await until(
        lambda: all(
            each.count(ReliableMessageReceived) + each.count(ReliableMessageDelivered) >= 20
            for each in told.values()
        ),
        within=10 * HOUR,
    )
    await asyncio.sleep(600)
    assert world.network.counts["duplicates"] and world.network.counts["lost_messages"]
    for name, other in (("alice", "bob"), ("bob", "alice")):
        received = told[name].of(MessageReceived)
        assert sorted(event.payload for event in received) == sorted(sent[other])
        assert {event.sender_id for event in received} == {other}
        inside = [each.envelope.message_envelope.payload for each in told[name].of(ReliableMessageReceived)]
        assert inside == [event.payload for event in received]


@pytest.mark.req("C-048", "C-049")
@virtually
async def test_the_whole_payload_is_handed_over_and_nothing_else() -> None:
    world = World()
    alice, bob = await world.pair()
    heard = Recorder(bob)
    sent = [bytes([number % 256]) * size for number, size in enumerate((1, 102_400, 102_401, 250_000))]
    for payload in sent:
        await alice.send(payload)
    await until(lambda: heard.count(ReliableMessageReceived) == 4)
    assert [event.payload for event in heard.of(MessageReceived)] == sent
    for event, payload in zip(heard.of(ReliableMessageReceived), sent, strict=True):
        assert event.envelope.channel_id == "room"
        assert event.envelope.message_envelope.payload == payload
        assert event.envelope.message_envelope.content_topic == bob.content_topic
    before = int(world.node("bob").wall() * 1000)
    for message in heard.of(MessageReceived):
        assert message.content_topic == bob.content_topic and message.pubsub_topic == ""
        assert before - 60_000 < message.timestamp <= before
        assert message.hash in world.network.relays[0].stored


@pytest.mark.req("C-050")
@virtually
async def test_the_senders_request_id_is_told_or_else_the_logical_message_id() -> None:
    world = World()
    alice, bob = await world.open("alice"), await world.open("bob")
    carol = await world.open("carol", send_request_id=False)
    heard = Recorder(bob)
    request_id = await alice.send(b"with")
    await carol.send(b"without")
    await until(lambda: heard.count(ReliableMessageReceived) == 2)
    expected = {b"with": request_id, b"without": carol.get_message_id(b"without")}
    assert {event.payload: event.request_id for event in heard.of(MessageReceived)} == expected
    for event in heard.of(ReliableMessageReceived):
        assert event.request_id == expected[event.envelope.message_envelope.payload]


# The whole message.


@pytest.mark.req("C-051")
@pytest.mark.parametrize("on", ["network", "participants"])
@virtually
async def test_a_message_is_sent_when_all_of_it_is_with_the_network_or_with_participants(on: Any) -> None:
    world = World()
    alice, told, node = await lone(world, sent_event_on=on, max_retransmissions=1000)
    node.answer = lambda each: Refusal("busy", recoverable=True) if each.segment.index == 4 else SWALLOW
    request_id = await alice.send(FIVE)
    await until(lambda: told.count(MessageSent) >= 4)
    await asyncio.sleep(60)
    assert told.count(ReliableMessageSent) == 0
    node.answer = lambda _: SWALLOW
    await until(lambda: 4 in chunks(told, MessageSent))
    await asyncio.sleep(60)
    assert told.count(ReliableMessageSent) == (1 if on == "network" else 0)
    acknowledge(node, *ids_of(node)[:4])
    await asyncio.sleep(60)
    assert told.count(ReliableMessageSent) == (1 if on == "network" else 0)
    acknowledge(node, *ids_of(node)[4:])
    await asyncio.sleep(HOUR)
    assert [event.request_id for event in told.of(ReliableMessageSent)] == [request_id]


@pytest.mark.req("C-052")
@pytest.mark.parametrize("on", ["network", "participants"])
@virtually
async def test_a_message_is_delivered_once_when_all_of_it_is_acknowledged_and_after_it_was_sent(
    on: Any,
) -> None:
    world = World()
    alice, told, node = await lone(world, sent_event_on=on)
    request_id = await alice.send(FIVE)
    await until(lambda: told.count(MessageSent) == 5)
    ids = ids_of(node)
    acknowledge(node, *ids[:4])
    await until(lambda: told.count(MessageAcknowledged) == 4)
    await asyncio.sleep(1)
    assert told.count(ReliableMessageDelivered) == 0
    acknowledge(node, ids[4])
    acknowledge(node, *ids)
    await until(lambda: told.count(ReliableMessageDelivered))
    await asyncio.sleep(HOUR)
    (event,) = told.of(ReliableMessageDelivered)
    assert event.request_id == request_id
    assert told.names.index("reliable:message:sent") < told.names.index("reliable:message:delivered")
    assert told.names[-1] == "reliable:message:delivered"


@pytest.mark.req("C-053", "C-054", "C-059")
@virtually
async def test_a_message_that_nobody_acknowledges_fails_once_in_delivery() -> None:
    world = World()
    alice, told, node = await lone(world)
    request_id = await alice.send(FIVE)
    await until(lambda: told.count(MessageSent) == 5)
    for _ in range(20):  # a peer has one of the five, which does not save the message
        acknowledge(node, ids_of(node)[0])
    await asyncio.sleep(2 * HOUR)
    assert Counter(each.segment.index for each in node.contents) == {0: 1, 1: 6, 2: 6, 3: 6, 4: 6}
    (error,), (failure,) = told.of(ReliableMessageSendError), told.of(ReliableMessageDeliveryError)
    assert error.stage == "delivery" and isinstance(error.stage, FailureStage)
    for event in (error, failure):
        assert event.request_id == request_id and event.message_id == alice.get_message_id(FIVE)
        assert type(event.error) is str and event.error and type(event.code) is str and event.code
    assert told.count(SendingMessageIrrecoverableError) == 0
    (outstanding,) = alice.sync_status().outstanding
    assert outstanding.undelivered and outstanding.acknowledged == 1


@pytest.mark.req("C-053")
@virtually
async def test_a_message_that_cannot_be_dispatched_fails_once_in_dispatch() -> None:
    world = World()
    alice, told, node = await lone(world)
    node.answer = lambda _: Refusal("invalid_schema")
    await alice.send(FIVE)
    await asyncio.sleep(2 * HOUR)
    (error,) = told.of(ReliableMessageSendError)
    assert error.stage == FailureStage.DISPATCH and error.code == "invalid_schema"
    assert told.count(ReliableMessageDeliveryError) == 0


@pytest.mark.req("C-055")
@virtually
async def test_an_acknowledgement_after_the_error_still_counts() -> None:
    world = World()
    alice, told, node = await lone(world, max_retransmissions=0)
    request_id = await alice.send(b"ten bytes!ten bytes!")
    await until(lambda: told.count(ReliableMessageDeliveryError))
    await asyncio.sleep(HOUR)
    told.events.clear()
    ids = ids_of(node)
    acknowledge(node, ids[1])
    await until(lambda: told.events)
    acknowledge(node, ids[0])
    await until(lambda: told.count(ReliableMessageDelivered))
    await asyncio.sleep(HOUR)
    assert told.names == ["message-acknowledged", "message-acknowledged", "reliable:message:delivered"]
    assert [event.chunks_acknowledged for event in told.of(MessageAcknowledged)] == [(1,), (0, 1)]
    assert told.of(ReliableMessageDelivered)[0].request_id == request_id
    assert alice.sync_status().outstanding == ()


@pytest.mark.req("C-056")
@virtually
async def test_a_message_that_never_comes_is_given_up_and_what_follows_it_delivered() -> None:
    world = World()
    alice, told, node = await lone(world, lost_message_timeout_ms=60_000, enable_repair=False)
    entry = HistoryEntry("a" * 64, b"h" * 32, "carol")
    message = SdsMessage(
        "bob",
        "b" * 64,
        "room",
        lamport(node),
        (entry,),
        None,
        content=encode_segment(next(segment_message(b"a reply", SegmentationConfig()))),
    )
    await asyncio.sleep(5)
    found_at = int(node.wall() * 1000)
    node.hear(message.encode())
    await asyncio.sleep(50)
    assert told.events == []
    (missing,) = alice.sync_status().missing
    assert (missing.message_id, missing.sender_id, missing.retrieval_hint) == ("a" * 64, "carol", b"h" * 32)
    assert abs(missing.since - found_at) < 100
    await until(lambda: told.count(MessageReceived), within=30)
    await asyncio.sleep(HOUR)
    (event,) = told.of(IrretrievableMessage)
    assert (event.message_id, event.retrieval_hint, event.sender_id) == ("a" * 64, b"h" * 32, "carol")
    assert event.channel_id == "room" and abs(event.first_missing_at - found_at) < 100
    assert [each.payload for each in told.of(MessageReceived)] == [b"a reply"]


@pytest.mark.req("C-056")
@virtually
async def test_a_message_whose_chunks_never_all_come_is_given_up() -> None:
    world = World()
    alice, told, node = await lone(world, reassembly_timeout_ms=60_000)
    first, *_ = segment_message(FIVE, SegmentationConfig(segment_size_bytes=10))
    found_at = int(node.wall() * 1000)
    node.hear(
        SdsMessage("bob", "b" * 64, "room", lamport(node), (), None, content=encode_segment(first)).encode()
    )
    await until(lambda: alice.sync_status().partial_messages == 1)
    await until(lambda: told.count(IrretrievableMessage), within=90)
    assert node.network.time() > 59
    (event,) = told.events
    assert isinstance(event, IrretrievableMessage)
    assert event.message_id == alice.get_message_id(FIVE) and event.sender_id == "bob"
    assert event.channel_id == "room" and abs(event.first_missing_at - found_at) < 100
    assert alice.sync_status().partial_messages == 0


# Ephemeral messages.


@pytest.mark.req("C-057")
@virtually
async def test_an_ephemeral_message_is_dropped_when_the_rate_limit_is_approached_and_when_it_is_reached() -> (
    None
):
    world = World()
    alice, told, node = await lone(world, messages_per_epoch=10, epoch_size_ms=10**9)
    for number in range(8):
        await alice.send(b"%d" % number)
    await until(lambda: told.count(MessageSent) == 8)
    await alice.send_ephemeral(b"the last that may")
    await until(lambda: told.count(MessageSent) == 9)
    assert told.count(EphemeralMessageDropped) == 0
    approached = await alice.send_ephemeral(b"approached")
    await alice.send(b"the tenth")
    await until(lambda: told.count(MessageSent) == 10)
    reached = await alice.send_ephemeral(b"reached")
    await until(lambda: told.count(EphemeralMessageDropped) == 2)
    first, second = told.of(EphemeralMessageDropped)
    assert (first.reason, first.rate_limit_utilization) == ("rate_limit_approached", 90)
    assert (second.reason, second.rate_limit_utilization) == ("rate_limit_reached", 100)
    assert [first.request_id, second.request_id] == [approached, reached]
    assert first.message_id == alice.get_message_id(b"approached")
    assert b"approached" not in [each.segment.payload for each in node.sendings]


@pytest.mark.req("C-058")
@pytest.mark.parametrize("fate", ["sent", "dropped", "refused", "raised", "hook", "encoder"])
@virtually
async def test_of_an_ephemeral_message_one_event_is_told(fate: Any) -> None:
    world = World()
    options: dict[str, Any] = {}
    if fate == "dropped":
        options = {"messages_per_epoch": 1, "epoch_size_ms": 10**9}
    elif fate == "hook":
        options = {"encryption": Hook(0)}
    elif fate == "encoder":
        options = {"encoder": BrokenCodec(), "decoder": BrokenCodec()}
    alice, told, node = await lone(world, **options)
    await world.open("bob", topic=alice.content_topic)
    if fate == "sent":
        node.answer = lambda _: None
    elif fate == "refused":
        node.answer = lambda _: Refusal("busy", recoverable=True)
    elif fate == "raised":
        node.answer = lambda _: unreachable_topic()
    elif fate == "dropped":
        await alice.send(b"x")
        await until(lambda: told.count(MessageSent))
        told.events.clear()
    if fate in ("raised", "hook", "encoder"):
        with pytest.raises(StrataError) as caught:
            await alice.send_ephemeral(b"longer than a chunk of ten bytes")
        assert fate != "hook" or isinstance(caught.value, EncryptionFailed)
    else:
        await alice.send_ephemeral(b"longer than a chunk of ten bytes")
    await asyncio.sleep(5 if fate == "dropped" else HOUR)
    events = [event for event in told.events if event.message_id != alice.get_message_id(b"x")]  # type: ignore[union-attr]
    (event,) = events
    expected = {"sent": MessageSent, "dropped": EphemeralMessageDropped}
    assert isinstance(event, expected.get(fate, SendingMessageIrrecoverableError))
    if not isinstance(event, EphemeralMessageDropped):
        assert (event.chunk_info.chunk_index, event.chunk_info.total_chunks) == (0, 1)  # type: ignore[union-attr]
