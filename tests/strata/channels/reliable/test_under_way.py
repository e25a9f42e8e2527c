"""What a node has not answered yet is bounded, and is removed when it is answered or given up."""

from __future__ import annotations

from typing import Any

from strata.channels.messaging.outcomes import Outcome
from strata.channels.messaging.values import MessageEnvelope
from strata.channels.reliable.ephemerals import Ephemeral
from strata.channels.reliable.under_way import Consignment, UnderWay

from tests.support.scripted_node import TOPIC, ScriptedNode
from tests.support.virtual_time import virtually

MIB = 1 << 20


@virtually
async def test_messages_under_way_are_bounded_by_their_number_and_by_their_bytes() -> None:
    node = ScriptedNode(answer=lambda sent: None)
    told: list[Outcome] = []
    under_way = UnderWay(node, on_outcome=lambda _, outcome: told.append(outcome), on_ended=lambda: None)
    member: Any = object()

    async def hand(count: int, size_bytes: int) -> list[Consignment]:
        handed = []
        for number in range(count):
            assert not under_way.is_full
            handed.append(Consignment(member, Ephemeral(f"{number}", "", b""), size_bytes))
            name = under_way.free_name("request")
            sending = node.send(MessageEnvelope(content_topic=TOPIC, payload=b"x"), request_id=name)
            await under_way.hand_to_node(handed[-1], name, sending)
        return handed

    first, *_ = await hand(4, MIB)
    assert under_way.is_full
    assert under_way.end(first) and not under_way.end(first)
    await hand(1, MIB)
    assert under_way.is_full
    left = await under_way.settled(member, 1.0)
    assert len(left) == 4 and told == []
    for _ in range(3):
        await hand(64, 1)
        assert under_way.is_full
        under_way.give_up()
    assert len({sent.request_id for sent in node.sent[-64:]}) == 64, "each request to the node has its name"
    under_way.stop_listening()
