"""Request ids that a program chooses: its own retry sends nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from strata.channels.messaging.values import MessageEnvelope
from strata.channels.persistence.interface import Change, StoredState
from strata.channels.persistence.memory import MemoryPersistence
from strata.channels.persistence.records import RequestName, read_records
from strata.channels.reliable import (
    InvalidEnvelope,
    MessageReceived,
    ReliableClient,
    ReliableEnvelope,
    ReliableMessageDelivered,
    RequestIdInUse,
    SendingMessageIrrecoverableError,
)
from strata.channels.reliable.client import send
from strata.channels.reliable.request_names import RequestNames

from tests.support.channel_world import TOPIC, Recorder, Refusal, World, take, until, virtually


@virtually
async def test_the_same_id_and_payload_again_sends_nothing_more() -> None:
    world = World()
    alice, bob = await world.pair()
    told = Recorder(alice)
    assert [await alice.send(b"hello", request_id="order 7") for _ in range(3)] == ["order 7"] * 3
    await until(lambda: told.count(ReliableMessageDelivered) == 1)
    assert await send(alice, b"hello", request_id="order 7") == "order 7"
    assert await alice.send(b"hello") != "order 7"
    assert await take(bob, 2) == [b"hello"] * 2
    await asyncio.sleep(600)
    assert bob.sync_status().inbox == 0
    message = [each.request_id for each in told.of(ReliableMessageDelivered)]
    assert message.count("order 7") == 1 and len(message) == 2


@pytest.mark.parametrize("delivered", [False, True])
@virtually
async def test_a_retry_after_a_restart_sends_nothing_more(delivered: bool) -> None:
    world, store = World(), MemoryPersistence()
    bob = await world.open("bob")
    if not delivered:
        world.network.cut("alice", world.network.relays[0])
    alice = await world.open("alice", persistence=store)
    await alice.send(b"hello", request_id="order 7")
    if delivered:
        await until(lambda: alice.sync_status().is_synced)
    await alice.close(timeout=0)
    world.network.mend("alice", world.network.relays[0])
    alice = await world.open("alice", persistence=store)
    await alice.send(b"hello", request_id="order 7")
    assert await take(bob) == [b"hello"]
    await asyncio.sleep(600)
    assert bob.sync_status().inbox == 0
    with pytest.raises(RequestIdInUse):
        await alice.send(b"goodbye", request_id="order 7")
    await alice.close()


@virtually
async def test_the_same_id_for_another_payload_is_an_error() -> None:
    world = World()
    alice, bob = await world.pair()
    told = Recorder(alice)
    given = await alice.send(b"hello", request_id="order 7")
    with pytest.raises(RequestIdInUse, match="'order 7' was given to a message with another content"):
        await alice.send(b"goodbye", request_id="order 7")
    made = await alice.send(b"one more")
    with pytest.raises(RequestIdInUse):
        await alice.send(b"goodbye", request_id=made)
    assert [each.code for each in told.of(SendingMessageIrrecoverableError)] == ["RequestIdInUse"] * 2
    assert await take(bob, 2) == [b"hello", b"one more"] and given == "order 7"
    for bad in ("", "x" * 129):
        with pytest.raises(ValueError, match="1 to 128 bytes"):
            await alice.send(b"hello", request_id=bad)


@virtually
async def test_concurrent_and_cancelled_calls_send_one_message() -> None:
    world = World()
    alice, bob = await world.pair()
    first = asyncio.create_task(alice.send(b"hello", request_id="a"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(*(alice.send(b"hello", request_id="a") for _ in range(5)))
    assert await take(bob) == [b"hello"]
    await asyncio.sleep(600)
    assert bob.sync_status().inbox == 0


@virtually
async def test_a_refused_message_may_be_sent_again_under_its_id() -> None:
    world = World()
    node = world.node("alice")
    alice, bob = await world.pair()
    told = Recorder(alice)
    node.answer = lambda sending: Refusal()
    await alice.send(b"hello", request_id="a")
    await until(lambda: told.count(SendingMessageIrrecoverableError) == 1)
    node.answer = lambda sending: None
    await alice.send(b"hello", request_id="a")
    assert await take(bob) == [b"hello"]


@virtually
async def test_an_envelope_is_sent_once_under_the_id_that_the_program_chose() -> None:
    world = World()
    alice, bob = await world.pair()
    heard, client = Recorder(bob), ReliableClient(world.node("alice"))

    def envelope(payload: bytes, channel_id: str = "room", **form: Any) -> ReliableEnvelope:
        inner = MessageEnvelope(content_topic=TOPIC, payload=payload, **form)
        return ReliableEnvelope(message_envelope=inner, channel_id=channel_id)

    for _ in range(3):
        assert await client.send(envelope(b"hello"), request_id="order 7") == "order 7"
    assert await alice.send(b"hello", request_id="order 7") == "order 7"
    await until(lambda: not alice.sync_status().outstanding)
    assert len(world.node("alice").contents) == 1 and heard.count(MessageReceived) == 1
    with pytest.raises(RequestIdInUse):
        await client.send(envelope(b"goodbye"), request_id="order 7")
    for ephemeral in (envelope(b"hello", ephemeral=True), envelope(b"hello", "")):
        with pytest.raises(InvalidEnvelope):
            await client.send(ephemeral, request_id="order 8")
    assert len(world.node("alice").sendings) == len(world.node("alice").contents)


@virtually
async def test_two_channels_may_use_one_id_at_once() -> None:
    world = World()
    topics = {"red": "/test/1/red/proto", "blue": "/test/1/blue/proto"}
    alice = [await world.open("alice", *each) for each in topics.items()]
    bob = [await world.open("bob", *each) for each in topics.items()]
    for channel in alice:
        await channel.send(channel.channel_id.encode(), request_id="order 7")
    for channel in alice:
        async with asyncio.timeout(60):
            await channel.drain()
    for channel in bob:
        assert await take(channel) == [channel.channel_id.encode()]
    assert len({each.request_id for each in world.node("alice").contents}) == 2


def apply(state: StoredState, changes: Iterable[Change]) -> list[RequestName]:
    state.apply(changes)
    return list(read_records(RequestName, state.records.get(RequestName.KIND, {})).values())


def test_the_last_ten_thousand_ids_are_remembered() -> None:
    state, names = StoredState(), RequestNames()
    stored: list[RequestName] = []
    for number in range(10_002):
        names.add(f"{number}", b"%032d" % number)
        if number % 1_000 == 1:
            stored = apply(state, names.changes_to_store())
    assert len(stored) == 10_000
    for remembered in (names, RequestNames(stored)):
        assert not remembered.is_repeated("1", bytes(32))
        assert remembered.is_repeated("2", b"%032d" % 2)
        with pytest.raises(RequestIdInUse):
            remembered.is_repeated("2", bytes(32))
    names.forget("2")
    names.forget("unknown")
    assert len(apply(state, names.changes_to_store())) == 9_999
