"""Retransmission until somebody has the message or the attempts are used up (channel.md §6)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from strata.channels.reliable import (
    MessageAcknowledged,
    MessagePossiblyAcknowledged,
    MessageSent,
    ReliableMessageDelivered,
    ReliableMessageDeliveryError,
    ReliableMessageSendError,
    ReliableMessageSent,
    SendingMessageIrrecoverableError,
)
from strata.channels.reliable.requests import Requests
from strata.channels.sds import HistoryEntry, OutgoingFull, SdsMessage
from strata_testkit.sim import Faults, Simulation, simulate

from tests.support.scripted_node import (
    START_MS,
    Refusal,
    ScriptedNode,
    Sent,
    named,
    opened,
    said,
    settle,
    sync,
)
from tests.support.virtual_time import virtually


def per_payload(node: ScriptedNode) -> dict[bytes, list[float]]:
    """The times at which each payload was sent."""
    found: dict[bytes, list[float]] = {}
    for sent in node.sent:
        found.setdefault(sent.segment.payload, []).append(round(sent.at, 1))
    return found


@pytest.mark.req("C-083", "C-084", "C-085", "C-086")
@virtually
async def test_in_silence_a_chunk_goes_out_again_at_a_fixed_pace_and_then_fails() -> None:
    node = ScriptedNode()
    async with opened(node, acknowledgement_timeout_ms=4_000, max_retransmissions=3) as (channel, told):
        request_id = await channel.send(b"anybody there?")
        await asyncio.sleep(15.9)
        assert node.times() == [0.0, 4.0, 8.0, 12.0]
        assert told.of(ReliableMessageDeliveryError) == []
        await asyncio.sleep(100)
        # After the timeout of the last attempt, and never again.
        assert len(node.sent) == 4
        assert told.at(ReliableMessageDeliveryError) == told.at(ReliableMessageSendError) == [16.0]
        (error,) = told.of(ReliableMessageSendError)
        assert (error.request_id, error.stage) == (request_id, "delivery")
        (standing,) = channel.sync_status().outstanding
        assert standing.undelivered


@pytest.mark.req("C-086", "C-094")
@virtually
async def test_an_acknowledgement_by_history_ends_it() -> None:
    node = ScriptedNode()
    async with opened(node, acknowledgement_timeout_ms=4_000) as (channel, told):
        request_id = await channel.send(b"hello")
        await asyncio.sleep(5)
        assert len(node.sent) == 2
        await node.deliver(sync(1, follows=[node.sent[0]]))
        assert [event.request_id for event in told.of(ReliableMessageDelivered)] == [request_id]
        assert channel.sync_status().is_synced and channel._session is not None
        assert channel._session.engine.sds.outgoing() == {}
        await asyncio.sleep(100)
        assert len(node.sent) == 2
        assert told.of(ReliableMessageSendError) == []


@pytest.mark.req("C-086")
@virtually
async def test_an_irrecoverable_error_ends_it() -> None:
    node = ScriptedNode(answer=lambda sent: Refusal())
    async with opened(node, acknowledgement_timeout_ms=4_000) as (channel, told):
        await channel.send(b"hello")
        await asyncio.sleep(100)
        assert len(node.sent) == 1
        assert len(told.of(SendingMessageIrrecoverableError)) == 1
        (error,) = told.of(ReliableMessageSendError)
        assert error.stage == "dispatch"
        assert channel.sync_status().outstanding == () and channel.log() == []


@pytest.mark.req("C-086")
@virtually
async def test_a_retransmission_that_is_refused_for_good_ends_it_too() -> None:
    node = ScriptedNode()
    node.answer = lambda sent: Refusal() if len(node.sent) == 2 else 0.0
    async with opened(node, acknowledgement_timeout_ms=4_000) as (channel, told):
        await channel.send(b"hello")
        await asyncio.sleep(100)
        assert len(node.sent) == 2
        assert len(told.of(SendingMessageIrrecoverableError)) == 1
        assert channel.sync_status().outstanding == ()


@pytest.mark.req("C-087", "C-128")
@virtually
async def test_a_possibly_acknowledged_chunk_waits_longer_and_goes_last() -> None:
    node = ScriptedNode()
    async with opened(
        node,
        acknowledgement_timeout_ms=4_000,
        max_retransmissions=1,
        possible_ack_retry_factor=2.0,
        process_task_min_elapse_ms=1_000,
    ) as (channel, told):
        await channel.send(b"seen in a filter")
        await asyncio.sleep(1)
        await node.deliver(sync(1, has=[node.sent[0]]))
        assert [event.possible_ack_count for event in told.of(MessagePossiblyAcknowledged)] == [1]
        await asyncio.sleep(2.5)
        await channel.send(b"earlier")
        await asyncio.sleep(0.8)
        await channel.send(b"unseen")
        await asyncio.sleep(30)
    # The round after that of second 7.5 finds both due: one since 8.0, the other since 8.3.
    times = per_payload(node)
    assert times[b"seen in a filter"] == [0.0, 8.5] and times[b"unseen"] == [4.3, 8.5]
    assert [sent.segment.payload for sent in node.sent[-2:]] == [b"unseen", b"seen in a filter"]


@pytest.mark.req("C-088")
@virtually
async def test_offline_no_attempt_is_made_and_none_counted() -> None:
    node = ScriptedNode()
    async with opened(node, acknowledgement_timeout_ms=4_000, max_retransmissions=2) as (channel, told):
        await channel.send(b"hello")
        await asyncio.sleep(2)
        await node.disconnect()
        await asyncio.sleep(60)
        assert node.times() == [0.0] and told.of(ReliableMessageSendError) == []
        await node.reconnect()
        await asyncio.sleep(30)
    # Two seconds of the first timeout had passed; the other two follow the minute offline.
    assert node.times() == [0.0, 64.0, 68.0]
    assert told.at(ReliableMessageSendError) == [72.0]


@pytest.mark.req("C-088")
@virtually
async def test_what_is_sent_offline_leaves_when_the_node_is_back() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, told):
        await node.disconnect()
        await channel.send(b"later")
        await asyncio.sleep(3600)
        assert node.sent == [] and told.names == []
        await node.reconnect()
        await settle()
        assert [sent.segment.payload for sent in node.sent] == [b"later"]


@pytest.mark.req("C-089")
@virtually
async def test_each_chunk_is_sent_again_on_its_own() -> None:
    node = ScriptedNode()
    options: dict[str, Any] = {
        "segment_size_bytes": 2,
        "acknowledgement_timeout_ms": 4_000,
        "max_retransmissions": 1,
    }
    async with opened(node, **options) as (channel, told):
        await channel.send(b"c0c1c2")
        await settle()
        await node.deliver(sync(1, follows=[node.sent[0], node.sent[2]]))
        await asyncio.sleep(6)
        assert per_payload(node) == {b"c0": [0.0], b"c1": [0.0, 4.0], b"c2": [0.0]}
        await node.deliver(sync(2, follows=[node.sent[1]]))
        assert len(told.of(ReliableMessageDelivered)) == 1


@pytest.mark.req("C-090")
@virtually
async def test_a_retransmission_is_the_same_sds_message_in_a_new_transport_message() -> None:
    node = ScriptedNode()
    async with opened(node, acknowledgement_timeout_ms=4_000, max_retransmissions=2) as (channel, told):
        await node.deliver(said(1))
        await channel.send(b"same")
        # Another message in between changes history, filter and Lamport time of what is wrapped later.
        await asyncio.sleep(1)
        await node.deliver(said(2))
        await channel.send(b"other")
        await asyncio.sleep(10)
    same = [sent for sent in node.sent if sent.segment.payload == b"same"]
    assert len(same) == 3 and len({sent.payload for sent in same}) == 1
    assert len({sent.message_hash for sent in same}) == 3
    # Its events name the same chunk of the same request.
    assert len(told.of(MessageSent)) == 6


@pytest.mark.req("C-091")
@virtually
async def test_near_the_limit_a_retransmission_waits_and_is_not_dropped() -> None:
    node = ScriptedNode()
    options: dict[str, Any] = {
        "segments_per_epoch": 10,
        "epoch_size_ms": 100_000,
        "acknowledgement_timeout_ms": 5_000,
        "max_retransmissions": 1,
    }
    async with opened(node, **options) as (channel, told):
        for n in range(9):
            await channel.send(f"{n}".encode())
        await asyncio.sleep(90)
        # Nine of ten are used. All nine are due again, and wait.
        assert len(node.sent) == 9 and told.of(ReliableMessageSendError) == []
        assert channel.sync_status().queued == 9 and channel.sync_status().rate_limit_utilization == 90
        await channel.send(b"first transmissions may still go")
        await settle()
        assert node.sent[-1].segment.payload == b"first transmissions may still go"
        await asyncio.sleep(210)
    again = [sent for sent in node.sent[10:] if sent.at >= 100]
    assert {sent.segment.payload for sent in again} >= {f"{n}".encode() for n in range(9)}


@pytest.mark.req("C-092")
@virtually
async def test_ones_own_echo_acknowledges_nothing() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, told):
        await channel.send(b"first")
        await channel.send(b"second")
        await settle()
        await node.deliver(*[sent.payload for sent in node.sent])  # the second names the first
        own = SdsMessage(
            "alice", "alice-sync", "room", START_MS + 9, named(*node.sent), node.sent[1].sds.bloom_filter
        )
        await node.deliver(own)
        assert len(channel.sync_status().outstanding) == 2
        assert told.of(MessageAcknowledged) == [] and told.of(MessagePossiblyAcknowledged) == []
        assert told.payloads == []
        await node.deliver(sync(1, follows=node.sent))
        assert channel.sync_status().outstanding == ()


@pytest.mark.req("C-093", "C-296")
def test_one_acknowledgement_ends_retransmission_and_the_others_close_their_own_gaps() -> None:
    async def scenario(run: Simulation) -> None:
        first, _, third = run.participants
        lossy = third.name
        # The third hears nothing at all while the first sends.
        for relay in run.network.relays:
            run.network.cut(lossy, relay)
        for n in range(5):
            await first.send(f"{n}".encode())
        await asyncio.sleep(60)
        assert first.channel is not None
        assert first.channel.sync_status().outstanding == ()
        assert third.received == []
        for relay in run.network.relays:
            run.network.mend(lossy, relay)

    simulate(scenario, seed=3)


@pytest.mark.req("C-094")
@virtually
async def test_acknowledged_chunks_leave_the_outgoing_buffer() -> None:
    node = ScriptedNode()
    async with opened(node, segment_size_bytes=2) as (channel, _):
        await channel.send(b"c0c1c2")
        await settle()
        assert channel._session is not None
        outgoing = channel._session.engine.sds.outgoing
        assert set(outgoing()) == {sent.sds.message_id for sent in node.sent}
        await node.deliver(sync(1, follows=[node.sent[1]]))
        assert set(outgoing()) == {node.sent[0].sds.message_id, node.sent[2].sds.message_id}
        await node.deliver(sync(2, follows=[node.sent[0], node.sent[2]]))
        assert outgoing() == {}


@pytest.mark.req("C-095", "C-300")
@virtually
async def test_what_is_on_its_way_is_bounded() -> None:
    node = ScriptedNode()
    async with opened(node, max_unacknowledged=3) as (channel, told):
        for n in range(3):
            await channel.send(f"{n}".encode())
        with pytest.raises(OutgoingFull):
            await channel.send(b"one more")
        assert len(told.of(SendingMessageIrrecoverableError)) == 1
        await settle()
        await node.deliver(sync(1, follows=[node.sent[0]]))
        await channel.send(b"room again")


@pytest.mark.req("C-095", "C-300")
@virtually
async def test_tracked_missing_messages_are_bounded() -> None:
    node = ScriptedNode()
    async with opened(node, max_missing=50, retrieve_frequency_ms=0) as (channel, _):
        for n in range(100):
            await node.deliver(said(n + 1, follows=[HistoryEntry(f"gone-{n}", None, "bob")]))
        assert len(channel.sync_status().missing) <= 50


@pytest.mark.req("C-095", "C-300")
@virtually
async def test_what_the_transport_has_not_answered_is_bounded() -> None:
    node = ScriptedNode(answer=lambda sent: None)
    async with opened(node, leaves_unsent=True) as (channel, _):
        for n in range(100):
            await channel.send(f"{n}".encode())
        await settle()
        assert len(node.sent) == 64


@pytest.mark.req("C-219")
@virtually
async def test_the_events_suffice_to_show_progress() -> None:
    node = ScriptedNode()
    async with opened(node, segment_size_bytes=2) as (channel, told):
        request_id = await channel.send(b"c0c1c2c3")
        await settle()
        for n, index in enumerate((2, 0, 3, 1)):
            await node.deliver(sync(n, follows=[node.sent[index]]))
        progress = [
            (event.request_id, event.chunks_acknowledged, event.total_chunks)
            for event in told.of(MessageAcknowledged)
        ]
    assert progress == [
        (request_id, (2,), 4),
        (request_id, (0, 2), 4),
        (request_id, (0, 2, 3), 4),
        (request_id, (0, 1, 2, 3), 4),
    ]


@pytest.mark.req("C-297")
@virtually
async def test_every_request_ends_in_delivery_or_an_error() -> None:
    def answer(sent: Sent) -> Refusal | float:
        return Refusal() if sent.segment.payload.startswith(b"refused") else 0.0

    node = ScriptedNode(answer=answer)
    async with opened(node, acknowledgement_timeout_ms=4_000, max_retransmissions=1) as (channel, told):
        requests: dict[str, str] = {}
        for n in range(30):
            kind = ("acknowledged", "refused", "silence", "late")[n % 4]
            requests[await channel.send(f"{kind} {n}".encode())] = kind
        await settle()

        def of_kind(kind: bytes) -> list[Sent]:
            return [sent for sent in node.sent if sent.segment.payload.startswith(kind)]

        await node.deliver(sync(1, follows=of_kind(b"acknowledged")))
        await asyncio.sleep(20)
        await node.deliver(sync(2, follows=of_kind(b"late")))
        ends: dict[str, list[str]] = {request_id: [] for request_id in requests}
        for delivered in told.of(ReliableMessageDelivered):
            ends[delivered.request_id].append("delivered")
        for failed in told.of(ReliableMessageSendError):
            ends[failed.request_id].append("error")
    expected = {
        "acknowledged": ["delivered"],
        "refused": ["error"],
        "silence": ["error"],
        "late": ["delivered", "error"],
    }
    assert {request_id: sorted(found) for request_id, found in ends.items()} == {
        request_id: expected[kind] for request_id, kind in requests.items()
    }


@virtually
async def test_a_late_answer_of_the_transport_comes_after_the_acknowledgement_and_tells_it_once() -> None:
    node = ScriptedNode(answer=lambda sent: 10.0)
    async with opened(node) as (channel, told):
        await channel.send(b"slow answer, quick peer")
        await settle()
        await node.deliver(sync(1, follows=[node.sent[0]]))
        assert told.names == [
            "sending-message",
            "message-sent",
            "reliable:message:sent",
            "message-acknowledged",
            "reliable:message:delivered",
        ]
        await asyncio.sleep(30)
        assert len(told.names) == 5 and len(node.sent) == 1
        assert len(told.of(ReliableMessageSent)) == 1


@virtually
async def test_an_answer_that_never_comes_counts_as_a_failure_that_may_pass() -> None:
    node = ScriptedNode()
    node.answer = lambda sent: None if len(node.sent) == 1 else 0.0
    async with opened(node, acknowledgement_timeout_ms=1_000_000) as (channel, told):
        await channel.send(b"lost on the way")
        await asyncio.sleep(130)
        assert len(node.sent) == 2 and node.sent[1].at >= 120
        assert len(told.of(MessageSent)) == 1
        assert node.sent[0].payload == node.sent[1].payload


@pytest.mark.req("C-296")
def test_a_lossy_network_loses_nothing_in_the_end() -> None:
    async def scenario(run: Simulation) -> None:
        for n in range(10):
            for participant in run.participants:
                await participant.send(f"{participant.name} {n}".encode())
            await asyncio.sleep(3)

    report = simulate(scenario, seed=11, faults=Faults(loss=0.3, duplication=0.2, latency=(0.01, 3.0)))
    assert report.checks.messages == 30


@pytest.mark.req("C-055", "C-095")
def test_a_late_acknowledgement_makes_room_among_what_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.channels.reliable.requests._MAX_UNDELIVERED", 2)
    requests = Requests()
    for name in ("a", "b", "c", "d"):
        requests.add(name, bytes(32), [f"sds {name}"])
        requests.exhausted(f"sds {name}")
        if name == "a":
            requests.acknowledged("sds a")
    assert [request.request_id for request in requests] == ["c", "d"]
