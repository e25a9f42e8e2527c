"""What the channels of a node share belongs to the node as long as it has channels."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from strata.channels.messaging.node import NodeError
from strata.channels.persistence import MemoryPersistence
from strata.channels.reliable import (
    AlreadyOpen,
    InvalidConfiguration,
    MessageSent,
    ReliableChannel,
    make_channel,
)
from strata.channels.reliable.hub import Hub

from tests.support.scripted_node import (
    TOPIC,
    ScriptedNode,
    Sent,
    opened,
    settle,
)
from tests.support.virtual_time import virtually


class Wrapped:
    """A node that forwards everything to another, as one that simulates losses would."""

    def __init__(self, node: ScriptedNode) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def room(node: Any, sender_id: str = "alice") -> ReliableChannel:
    return make_channel(node, "room", TOPIC, sender_id, rng=random.Random(1))


@virtually
async def test_the_node_holds_its_hub_from_the_first_channel_to_the_last() -> None:
    node = ScriptedNode()
    assert Hub.existing(node) is None
    async with opened(node):
        hub = Hub.existing(node)
        assert hub is not None and vars(node)["hub"] is hub
        async with opened(node, channel_id="hall", topic="/test/1/hall/proto"):
            assert Hub.existing(node) is hub and len(hub.members) == 2
        assert Hub.existing(node) is hub
    assert Hub.existing(node) is None and vars(node)["hub"] is None
    async with opened(node):
        assert Hub.existing(node) is not hub


@virtually
async def test_a_node_around_another_has_a_hub_of_its_own() -> None:
    node = ScriptedNode()
    outer = Wrapped(node)
    async with room(node) as inside, room(outer) as outside:
        assert Hub.existing(node) is not Hub.existing(outer)
        assert inside.is_started() and outside.is_started()
        with pytest.raises(AlreadyOpen):
            await room(outer).open()


@pytest.mark.req("C-009", "C-257")
@virtually
async def test_a_participant_opens_a_channel_once_on_a_store_whatever_the_node() -> None:
    store = MemoryPersistence()
    rooms = [
        make_channel(ScriptedNode(), "room", TOPIC, "alice", options={"persistence": store}) for _ in range(4)
    ]
    opened_one, refused = await asyncio.gather(*(each.open() for each in rooms[:2]), return_exceptions=True)
    assert opened_one is rooms[0] and isinstance(refused, AlreadyOpen)
    with pytest.raises(AlreadyOpen, match="close it first"):
        await rooms[2].open()
    await rooms[0].close()
    async with rooms[3]:
        pass


@virtually
async def test_lanes_of_participants_with_like_names_are_apart() -> None:
    node = ScriptedNode()
    async with (
        opened(node, channel_id="a', 'b", sender_id="c"),
        opened(node, channel_id="a", sender_id="b', 'c"),
    ):
        hub = Hub.existing(node)
        assert hub is not None and len(hub.members) == 2


@virtually
async def test_a_node_that_answers_late_is_waited_for_and_then_asked_again() -> None:
    node = ScriptedNode()
    late = iter((None,))
    node.answer = lambda sent: next(late, 0.0)
    async with opened(node, acknowledgement_timeout_ms=10**9) as (channel, told):
        await channel.send(b"hello")
        await settle()
        assert len(node.sent) == 1 and not told.of(MessageSent)
        await asyncio.sleep(130)
        first, second = node.sent
        assert isinstance(first, Sent) and second.request_id == first.request_id
        assert round(second.at) == 120 and len(told.of(MessageSent)) == 1


class SlowToSubscribe(ScriptedNode):
    """Takes a second to subscribe; the first attempt then fails."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tries = 0

    async def subscribe(self, topics: Sequence[str], *, authors: Iterable[str] = ()) -> None:
        self.tries += 1
        failing = self.tries == 1
        await asyncio.sleep(1)
        if failing:
            raise NodeError("not now")
        await super().subscribe(topics, authors=authors)


@pytest.mark.parametrize("cancelled", [False, True])
@virtually
async def test_a_channel_subscribes_where_the_one_before_it_on_the_topic_failed_to(cancelled: bool) -> None:
    node = SlowToSubscribe()
    first = asyncio.create_task(room(node).open())
    await settle()
    second = asyncio.create_task(room(node, "bob").open())
    await settle()
    if cancelled:
        first.cancel()
    await asyncio.wait([first, second])
    assert first.cancelled() if cancelled else isinstance(first.exception(), NodeError)
    opened_one = second.result()
    assert opened_one.is_started() and node.topics == [TOPIC]
    async with room(node, "carol"):
        assert node.topics == [TOPIC]
    await opened_one.close()
    assert node.topics == [] and node.tries == 2


@virtually
async def test_channels_on_one_topic_hear_the_same_members_or_the_second_is_refused() -> None:
    node = ScriptedNode()

    def heard_by(sender_id: str, *members: str) -> ReliableChannel:
        return make_channel(node, "room", TOPIC, sender_id, rng=random.Random(1), members=members)

    async with heard_by("alice", "did:x:a", "did:x:b"):
        for members in ((), ("did:x:a",), ("did:x:a", "did:x:c")):
            with pytest.raises(InvalidConfiguration, match="members"):
                await heard_by("bob", *members).open()
        async with heard_by("bob", "did:x:b", "did:x:a"):
            assert node.topics == [TOPIC]
        other = make_channel(node, "hall", "/test/1/hall/proto", "bob", rng=random.Random(1))
        async with other:
            assert other.is_started()
    async with heard_by("bob"):
        assert node.topics == [TOPIC]
    assert node.topics == []


class Stuck:
    """A hook that encrypts one message, and then never returns."""

    def __init__(self) -> None:
        self.calls = 0

    async def encrypt(self, content: bytes) -> bytes:
        self.calls += 1
        if self.calls > 1:
            await asyncio.Event().wait()
        return content

    def decrypt(self, payload: bytes) -> bytes:
        return payload


@pytest.mark.req("C-082", "C-226")
@virtually
async def test_a_message_leaves_in_the_next_epoch_though_another_channel_is_not_ready_to_send() -> None:
    node = ScriptedNode()
    options: dict[str, Any] = {"messages_per_epoch": 1, "epoch_size_ms": 10_000}
    async with (
        opened(node, encryption=Stuck(), segment_size_bytes=4, leaves_unsent=True, **options) as (stuck, _),
        opened(node, channel_id="hall", topic="/test/1/hall/proto", **options) as (hall, told),
    ):
        await stuck.send(b"two parts")
        await hall.send(b"hello")
        await settle()
        assert told.of(MessageSent) == []
        await asyncio.sleep(10)
        assert len(told.of(MessageSent)) == 1
        await stuck.stop(timeout=0)
