"""The outcome of a message, as a value: the event that names its request id."""

from __future__ import annotations

import asyncio

import pytest
from strata.channels.messaging import EventEmitter, NodeError, NodeMessageError, NodeMessageSent
from strata.channels.messaging.outcomes import Outcomes
from strata.channels.messaging.values import MESSAGE_EVENTS

from tests.support.virtual_time import virtually


class Talking:
    """The part of a node that reports the outcomes of messages."""

    def __init__(self) -> None:
        self.message_events = EventEmitter(MESSAGE_EVENTS)

    async def send(self) -> str:
        await asyncio.sleep(1)
        return "id"


@virtually
async def test_each_message_resolves_to_the_event_that_names_it():
    node = Talking()
    outcomes = Outcomes(node)  # type: ignore[arg-type]
    first = await outcomes.begin("1", node.send())
    second = await outcomes.begin("2", node.send())
    refused = NodeMessageError("2", None, "no")
    await node.message_events.emit(refused)
    await node.message_events.emit(NodeMessageSent("unknown", b"hash"))
    assert await second == refused and not first.done()
    await node.message_events.emit(NodeMessageSent("1", b"hash"))
    assert await first == NodeMessageSent("1", b"hash")


@virtually
async def test_a_node_may_answer_before_it_returns():
    node = Talking()
    outcomes = Outcomes(node)  # type: ignore[arg-type]

    async def send() -> None:
        await node.message_events.emit(NodeMessageSent("1", b"hash"))

    assert await (await outcomes.begin("1", send())) == NodeMessageSent("1", b"hash")


@virtually
async def test_a_message_that_the_node_refuses_has_no_outcome():
    node = Talking()
    outcomes = Outcomes(node)  # type: ignore[arg-type]

    async def send() -> None:
        raise NodeError("never")

    with pytest.raises(NodeError):
        await outcomes.begin("1", send())
    outcome = await outcomes.begin("1", node.send())
    await node.message_events.emit(NodeMessageSent("1", b"later"))
    assert await outcome == NodeMessageSent("1", b"later")


@virtually
async def test_a_second_attempt_under_one_id_has_the_next_answer():
    node = Talking()
    outcomes = Outcomes(node)  # type: ignore[arg-type]
    first = await outcomes.begin("1", node.send())
    second = await outcomes.begin("1", node.send())
    first.cancel()
    await asyncio.sleep(0)
    await node.message_events.emit(NodeMessageSent("1", b"hash"))
    assert await second == NodeMessageSent("1", b"hash")


@virtually
async def test_closing_leaves_no_handler_and_nobody_waiting():
    node = Talking()
    outcomes = Outcomes(node)  # type: ignore[arg-type]
    outcome = await outcomes.begin("1", node.send())
    outcomes.close()
    assert outcome.cancelled()
    assert not any(node.message_events.count(name) for name in MESSAGE_EVENTS)
