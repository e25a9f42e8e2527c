"""What a received message says about itself: who, when, and its place among all the others."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest
from strata.channels.messaging.values import NodeMessageReceived, ReceivedEnvelope
from strata.channels.persistence import MemoryPersistence
from strata.channels.persistence.interface import Put
from strata.channels.persistence.records import InboxMessage, SentChunk, read_records
from strata.channels.reliable import (
    MessageReceived,
    MessageSent,
    ReliableMessageReceived,
    ReliableMessageSent,
)
from strata.channels.reliable.clock import date_of_sending
from strata.channels.reliable.inbox import MessageInbox
from strata.channels.reliable.requests import Requests
from strata.channels.sds.state import WaitingRecord
from strata_testkit.sim import Faults

from tests.support.channel_world import TOPIC, Node, Recorder, World, content_message, until, virtually


@pytest.mark.slow
@pytest.mark.req("C-118", "C-141")
@virtually
async def test_all_participants_can_sort_by_one_order_received_messages_and_their_own() -> None:
    world = World(Faults(loss=0.2, latency=(0.01, 3.0)), seed=3)
    names = ("ann", "bob", "cyd")
    rooms = {name: await world.open(name, segment_size_bytes=10) for name in names}
    told = {name: Recorder(room) for name, room in rooms.items()}
    chance = random.Random(5)
    sent: dict[str, bytes] = {}
    for n in range(30):
        name = chance.choice(names)
        payload = b"%d" % n * chance.randint(1, 15)  # up to three chunks
        sent[await rooms[name].send(payload)] = payload
        await asyncio.sleep(chance.random())
    await until(lambda: all(len(_placed(each)) == 30 for each in told.values()))
    orders = [_placed(each) for each in told.values()]
    assert orders[0] == orders[1] == orders[2], "the same place for everybody, the sender among them"
    in_order = [request_id for request_id, _ in sorted(orders[0].items(), key=lambda item: item[1])]
    await until(lambda: rooms["ann"].log() == rooms["bob"].log() == rooms["cyd"].log())
    at = {sds_id: place for place, sds_id in enumerate(rooms["ann"].log())}
    places = [at[orders[0][request_id][1]] for request_id in in_order]
    assert places == sorted(places), "and it is the order of the log"
    for name, recorder in told.items():
        for each in recorder.of(MessageReceived):
            assert each.author != name and each.payload == sent[each.request_id]


def _placed(recorder: Recorder) -> dict[str, tuple[int, str]]:
    """The order of each message that one participant knows of, by request id."""
    received = {each.request_id: each.order for each in recorder.of(MessageReceived)}
    own = {each.request_id: each.order for each in recorder.of(ReliableMessageSent)}
    return {name: order for name, order in (received | own).items() if order is not None}


@virtually
async def test_a_message_says_who_signed_it_and_when_it_was_sent() -> None:
    world = World()
    world.node("bob", clock_offset=-90.0)
    alice, bob = await world.pair()
    told, sends = Recorder(alice), Recorder(bob)
    await bob.send(b"by a clock that is behind")
    await until(lambda: told.count(MessageReceived))
    (received,) = told.of(MessageReceived)
    assert received.author == "bob" and received.device is None
    assert received.sent_at is not None
    assert abs(received.sent_at - (received.timestamp - 90_000)) < 2_000
    assert received.lamport_timestamp == received.sent_at
    assert received.sds_id == sends.of(MessageSent)[0].sds_id == alice.log()[-1]


@virtually
async def test_when_a_message_was_sent_is_not_what_a_strange_clock_has_made_of_the_lamport_time() -> None:
    world = World()
    world.node("eve", clock_offset=7_200.0)
    alice, bob = await world.pair()
    eve = await world.open("eve")
    told = Recorder(alice)
    await eve.send(b"two hours from now")
    await until(lambda: told.count(MessageReceived))
    await asyncio.sleep(1)
    await bob.send(b"now")
    await until(lambda: told.count(MessageReceived) == 2)
    early, late = sorted(told.of(MessageReceived), key=lambda each: each.order or (0, ""))
    assert [early.payload, late.payload] == [b"two hours from now", b"now"]
    assert late.sent_at is not None and late.lamport_timestamp is not None
    assert abs(late.sent_at - late.timestamp) < 2_000 < late.lamport_timestamp - late.sent_at


@pytest.mark.slow
@virtually
async def test_what_was_written_offline_says_when_it_was_written_and_not_when_it_left() -> None:
    world = World()
    alice, bob = await world.pair()
    told = Recorder(bob)
    for relay in world.network.relays:
        relay.up = False
    await asyncio.sleep(1)
    written = world.node("alice").wall() * 1000
    await alice.send(b"on the train")
    await asyncio.sleep(4 * 3600)
    for relay in world.network.relays:
        relay.up = True
    await until(lambda: told.count(MessageReceived), within=3600)
    (received,) = told.of(MessageReceived)
    assert received.sent_at is not None and abs(received.sent_at - written) < 1_000
    assert received.timestamp - written > 3 * 3_600_000


@virtually
async def test_an_ephemeral_message_has_an_author_and_no_place() -> None:
    world = World()
    alice, bob = await world.pair()
    told = Recorder(bob)
    await alice.send_ephemeral(b"typing")
    await until(lambda: told.count(MessageReceived))
    (received,) = told.of(MessageReceived)
    assert received.ephemeral and received.author == "alice" and received.sent_at is not None
    assert received.order is None and received.sds_id is None and received.lamport_timestamp is None


@pytest.mark.req("C-049")
@virtually
async def test_both_generations_of_the_event_say_who_and_when() -> None:
    world = World()
    alice, bob = await world.pair()
    told = Recorder(bob)
    await alice.send(b"hello")
    await until(lambda: told.count(ReliableMessageReceived))
    (older,), (newer,) = told.of(MessageReceived), told.of(ReliableMessageReceived)
    assert newer.message == older and newer.envelope.message_envelope.payload == older.payload


NOW_S = 1_760_000_000
NOW = NOW_S * 1000


@pytest.mark.req("C-302")
@pytest.mark.parametrize(
    ("lamport", "transmitted_at", "sent_at"),
    [
        (NOW - 500, NOW_S - 1, NOW - 500),
        (NOW + 900, NOW_S, NOW + 900),
        (NOW + 1_000, NOW_S, NOW),  # Lamport time is ahead
        (NOW - 3_600_000, NOW_S, NOW - 3_600_000),  # written long before it left
        (17, NOW_S, NOW),  # a counter of another implementation
        (17, None, None),
        (None, NOW_S, NOW),
        (NOW + 5_000, None, NOW + 5_000),
        (2**64 - 1, None, None),
        (2**64 - 1, 2**53, None),
        (None, None, None),
    ],
)
def test_the_time_of_sending_is_the_earlier_of_two_and_never_nonsense(
    lamport: int | None, transmitted_at: int | None, sent_at: int | None
) -> None:
    assert date_of_sending(lamport, transmitted_at, NOW) == sent_at


# Across restarts, and from earlier versions.


def hear(node: Node, payload: bytes, author: str, sent_at: int) -> None:
    """Let a message of this author arrive at one node only."""
    message = ReceivedEnvelope(content_topic=TOPIC, payload=payload, author=author, timestamp=sent_at)
    node.arrives(NodeMessageReceived(node.network.hash_of(payload), message))


@pytest.mark.req("C-248")
@virtually
async def test_who_sent_it_and_when_outlives_a_wait_for_dependencies_and_in_the_inbox() -> None:
    world, store = World(), MemoryPersistence()
    options: dict[str, Any] = {"persistence": store, "retrieve_frequency_ms": 0}
    alice = await world.open("alice", **options)
    node = world.node("alice")
    now = int(node.wall())
    first = content_message("bob", "a" * 64, b"first", now * 1000)
    second = content_message("bob", "b" * 64, b"second", now * 1000 + 1, follows=["a" * 64])
    hear(node, second, "did:bob", now + 1)
    await asyncio.sleep(10)
    await alice.close()
    alice = await world.open("alice", **options)
    hear(node, first, "did:bob", now)
    await until(lambda: alice.sync_status().inbox == 2)
    await alice.close()
    alice = await world.open("alice", **options)
    received = [await anext(alice) for _ in range(2)]
    assert [(each.payload, each.author, each.sent_at, each.order) for each in received] == [
        (b"first", "did:bob", now * 1000, (now * 1000, "a" * 64)),
        (b"second", "did:bob", now * 1000 + 1, (now * 1000 + 1, "b" * 64)),
    ]


def stored_as(kind: str, key: str, values: list[Any]) -> Put:
    """A record as written by a version that had only these fields."""
    return Put(kind, key, msgspec.msgpack.encode(values))


@pytest.mark.req("C-248")
def test_inbox_records_of_an_earlier_version_are_read() -> None:
    old = stored_as("inbox", "1", [1, "r", b"\x01" * 32, "bob", b"hello", 1_700_000_000_000, b"\x02" * 32])
    records = read_records(InboxMessage, {old.key: old.value})
    inbox = MessageInbox(TOPIC, max_messages=5, max_bytes=100, stored=records.values())
    first = inbox.first()
    assert first is not None
    assert first.message.payload == b"hello" and first.message.timestamp == 1_700_000_000_000
    assert first.message.author is None and first.message.order is None and first.message.sent_at is None


@pytest.mark.req("C-248")
def test_other_records_of_an_earlier_version_are_read() -> None:
    chunk = stored_as("sent_chunk", "m", ["m", "r", b"\x01" * 32, 0, 2, True, True])
    requests = Requests(stored=read_records(SentChunk, {chunk.key: chunk.value}).values())
    found = requests.find("m")
    assert found is not None and found[0].acknowledged == (0,) and found[0].acknowledged_by == ()
    waiting = {
        "type": "waiting",
        "message_id": "m",
        "sender_id": "bob",
        "lamport": 5,
        "unmet": ["a"],
        "retrieval_hint": None,
        "received_at": 7,
        "body": [b"head", b"tail", None, b""],
    }
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(waiting), type=WaitingRecord)
    assert read.author is None and read.sent_at is None


@pytest.mark.req("C-042")
def test_who_acknowledged_a_chunk_is_known_after_a_restart() -> None:
    requests = Requests(bound=True)
    requests.add("r", b"\x01" * 32, ["m1", "m2"])
    requests.acknowledged("m1", "did:x:bob#phone")
    changes = requests.changes_to_store()
    records = {each.key: each.value for each in changes if isinstance(each, Put)}
    later = Requests(bound=True, stored=read_records(SentChunk, records).values())
    later.acknowledged("m2", "did:x:bob#laptop")
    delivered = later.events()[-1]
    assert delivered.name == "reliable:message:delivered"
    assert delivered.acknowledged_by == ("did:x:bob#phone", "did:x:bob#laptop")  # type: ignore[union-attr]
    assert delivered.people == ("did:x:bob",)  # type: ignore[union-attr]
