"""The rate limit as a channel meets it (channel.md §11)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from strata.channels.messaging.values import MessageEnvelope
from strata.channels.persistence import Change, MemoryPersistence, ParticipantKey
from strata.channels.rate_limit import RateLimitConfig, RateLimiter, SendQueueFull
from strata.channels.reliable import (
    EphemeralMessageDropped,
    MessageSent,
    ReliableChannelConfig,
    ReliableClient,
    ReliableEnvelope,
    ReliableMessageSendError,
    SendingMessageIrrecoverableError,
    make_channel,
)
from strata.channels.sds import Kind, OutgoingFull, SdsConfig

from tests.support.scripted_node import (
    TOPIC,
    Refusal,
    ScriptedNode,
    Sent,
    opened,
    said,
    settle,
    sync,
)
from tests.support.virtual_time import virtually

EPOCH: dict[str, Any] = {"epoch_size_ms": 100_000, "acknowledgement_timeout_ms": 100_000_000}
"""The test starts at the beginning of an epoch, and nothing is retransmitted."""


def texts(node: ScriptedNode) -> list[bytes]:
    return [sent.segment.payload for sent in node.sent]


@pytest.mark.req("C-220", "C-226")
@virtually
async def test_what_exceeds_the_limit_waits_for_the_next_epoch() -> None:
    node = ScriptedNode()
    async with opened(node, messages_per_epoch=10, **EPOCH) as (channel, told):
        for n in range(11):
            await channel.send(f"{n}".encode())
        await asyncio.sleep(99)
        # Up to the limit exactly; the eleventh is queued and not lost.
        assert texts(node) == [f"{n}".encode() for n in range(10)]
        assert channel.sync_status().queued == 1
        await asyncio.sleep(2)
        assert node.times()[-1] == 100.0 and len(node.sent) == 11
        assert len(told.of(MessageSent)) == 11


@pytest.mark.req("C-220")
@pytest.mark.parametrize("options", [{"enabled": False, "messages_per_epoch": 1}, {}])
@virtually
async def test_disabled_or_without_a_known_limit_nothing_waits(options: dict[str, Any]) -> None:
    node = ScriptedNode()
    async with opened(node, **options, **EPOCH) as (channel, _):
        for n in range(20):
            await channel.send(f"{n}".encode())
        await settle()
        assert len(node.sent) == 20


@pytest.mark.req("C-221", "C-225")
@virtually
async def test_a_limit_that_the_transport_declares_is_kept_by_default() -> None:
    node = ScriptedNode(limit=(3, 10_000))
    async with opened(node, acknowledgement_timeout_ms=100_000_000) as (channel, _):
        for n in range(9):
            await channel.send(f"{n}".encode())
        await asyncio.sleep(60)
    times = node.times()
    assert len(times) == 9
    for at in times:
        assert sum(at <= other < at + 10 for other in times) <= 3
    assert times[-1] < 25  # and no more slowly than necessary


@pytest.mark.req("C-223")
@virtually
async def test_further_chunks_of_a_message_are_exempt() -> None:
    node = ScriptedNode()
    async with opened(node, messages_per_epoch=1, segment_size_bytes=2, **EPOCH) as (channel, _):
        await channel.send(b"a0a1a2a3a4")
        await channel.send(b"b0")
        await asyncio.sleep(99)
        assert texts(node) == [b"a0", b"a1", b"a2", b"a3", b"a4"]
        await asyncio.sleep(2)
        assert texts(node)[-1] == b"b0"


@pytest.mark.req("C-224")
@virtually
async def test_every_chunk_counts_if_told() -> None:
    node = ScriptedNode()
    options: dict[str, Any] = {"messages_per_epoch": 1, "segment_size_bytes": 2, "chunk_accounting": "each"}
    async with opened(node, **options, **EPOCH) as (channel, _):
        await channel.send(b"a0a1a2a3a4")
        await asyncio.sleep(500)
    assert node.times() == [0.0, 100.0, 200.0, 300.0, 400.0]


@pytest.mark.req("C-225")
@virtually
async def test_chunks_never_exceed_the_limit_of_the_transport_whatever_the_accounting() -> None:
    node = ScriptedNode()
    options: dict[str, Any] = {"segments_per_epoch": 2, "segment_size_bytes": 2, "chunk_accounting": "first"}
    async with opened(node, **options, **EPOCH) as (channel, _):
        await channel.send(b"a0a1a2a3a4")
        await asyncio.sleep(300)
    assert node.times() == [0.0, 0.0, 100.0, 100.0, 200.0]


@pytest.mark.req("C-227")
@virtually
async def test_a_full_queue_is_an_error_and_what_waits_survives_a_restart_in_order() -> None:
    store = MemoryPersistence()
    options: dict[str, Any] = {
        "messages_per_epoch": 1,
        "max_queued": 3,
        "max_unacknowledged": 3,
        "persistence": store,
        **EPOCH,
    }
    first = ScriptedNode()
    async with opened(first, **options) as (channel, told):
        await channel.send(b"0")
        await settle()
        await channel.send(b"1")
        await channel.send(b"2")
        assert texts(first) == [b"0"] and channel.sync_status().queued == 2
    again = ScriptedNode()
    again.clock_offset = 30.0
    async with opened(again, **options) as (channel, told):
        assert channel.sync_status().queued == 2
        await asyncio.sleep(400)
        assert texts(again) == [b"1", b"2"]
        assert [event.chunk_info.total_chunks for event in told.of(MessageSent)] == [1, 1]


@pytest.mark.req("C-227")
@virtually
async def test_a_channel_that_is_opened_again_sends_what_waited_once() -> None:
    node, options = ScriptedNode(), {"messages_per_epoch": 1, "persistence": MemoryPersistence(), **EPOCH}
    async with opened(node, channel_id="hall", topic="/test/1/hall/proto", **options):
        async with opened(node, **options) as (channel, _):
            for text in (b"0", b"1", b"2"):
                await channel.send(text)
        async with opened(node, **options) as (channel, _):
            await asyncio.sleep(500)
            assert texts(node) == [b"0", b"1", b"2"]


@pytest.mark.req("C-227", "C-257")
@pytest.mark.parametrize("ticks", range(8))
@virtually
async def test_a_channel_that_opens_while_the_last_one_closes_knows_what_was_sent(
    ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, store, left = ScriptedNode(), SlowToCount(), asyncio.Event()
    close_lane = RateLimiter.close_lane

    def leave(limiter: RateLimiter, lane: str) -> None:
        close_lane(limiter, lane)
        left.set()

    monkeypatch.setattr(RateLimiter, "close_lane", leave)
    options: dict[str, Any] = {"messages_per_epoch": 1, "persistence": store, **EPOCH}
    first = contextlib.AsyncExitStack()
    channel, _ = await first.enter_async_context(opened(node, **options))
    await channel.send(b"0")
    await settle()
    closing = asyncio.create_task(first.aclose())
    await left.wait()
    for _ in range(ticks):
        await asyncio.sleep(0)
    async with opened(node, channel_id="hall", topic="/test/1/hall/proto", **options) as (hall, _):
        await hall.send(b"1")
        await asyncio.sleep(20)
        assert texts(node) == [b"0"], "one message an epoch"
        await asyncio.sleep(200)
    await closing
    assert texts(node) == [b"0", b"1"]


@pytest.mark.req("C-110")
@virtually
async def test_what_was_made_ahead_is_made_again_where_what_it_names_is_refused() -> None:
    node = ScriptedNode(answer=lambda sent: Refusal() if sent.segment.payload == b"refused" else 0.0)
    async with opened(node, messages_per_epoch=1, **EPOCH) as (channel, _):
        await asyncio.gather(*map(channel.send, (b"refused", b"waits")))
        await asyncio.sleep(150)
        assert texts(node) == [b"refused", b"waits"]
        assert node.sent[1].sds.causal_history == ()


@pytest.mark.req("C-223", "C-257")
@virtually
async def test_further_chunks_that_were_under_way_are_exempt_after_a_restart_too() -> None:
    options: dict[str, Any] = {"messages_per_epoch": 1, "persistence": MemoryPersistence(), **EPOCH}
    silent, node = ScriptedNode(answer=lambda sent: None), ScriptedNode()
    async with opened(silent, segment_size_bytes=2, **options) as (channel, _):
        await channel.send(b"a0a1a2")
        await settle()
        assert len(silent.sent) == 3
    await asyncio.sleep(100)
    async with opened(node, segment_size_bytes=2, **options):
        await asyncio.sleep(50)
        assert texts(node) == [b"a0", b"a1", b"a2"]


@pytest.mark.req("C-110", "C-257")
@virtually
async def test_what_waits_through_a_restart_names_no_message_that_was_refused_before_it() -> None:
    options: dict[str, Any] = {"messages_per_epoch": 1, "persistence": MemoryPersistence(), **EPOCH}
    strict, kind = ScriptedNode(answer=lambda sent: Refusal()), ScriptedNode()
    async with opened(strict, **options) as (channel, told):
        await asyncio.gather(*map(channel.send, (b"refused", b"one", b"two")))  # each names those before it
        await settle()
        assert len(told.of(SendingMessageIrrecoverableError)) == 1
    async with opened(kind, **options):
        await asyncio.sleep(300)
        assert texts(kind) == [b"one", b"two"]
        one, two = (sent.sds for sent in kind.sent)
        assert one.causal_history == () and [each.message_id for each in two.causal_history] == [
            one.message_id
        ]


@pytest.mark.req("C-292")
@virtually
async def test_refusals_are_waited_out_longer_and_longer_until_a_message_has_gone_out() -> None:
    busy = Refusal("busy", recoverable=True)
    script: list[Refusal | float] = [*[busy] * 8, 0.0, busy, 0.0]
    node = ScriptedNode(answer=lambda sent: script.pop(0))
    async with opened(node, **EPOCH) as (channel, _):
        await channel.send(b"one")
        await asyncio.sleep(100)
        times = node.times()
        assert [round(later - at, 1) for at, later in pairwise(times)] == [0.3, 0.5, 1, 2, 4, 8, 10, 10]
        await channel.send(b"two")
        await asyncio.sleep(100)
        assert node.sent[-1].at - node.sent[-2].at < 1


@pytest.mark.req("C-227")
@virtually
async def test_a_message_that_does_not_fit_the_queue_is_refused_whole() -> None:
    node = ScriptedNode()
    options: dict[str, Any] = {
        "max_queued": 4,
        "max_unacknowledged": 4,
        "segment_size_bytes": 2,
        "messages_per_epoch": 1,
    }
    async with opened(node, leaves_unsent=True, **options, **EPOCH) as (channel, told):
        await channel.send(b"a0a1")
        await settle()
        await node.deliver(sync(1, follows=node.sent))
        await channel.send(b"b0b1b2")
        with pytest.raises((OutgoingFull, SendQueueFull)):
            await channel.send(b"c0c1")
        assert len(told.of(SendingMessageIrrecoverableError)) == 1
        assert channel.sync_status().queued == 3 and len(channel.log()) == 5


def test_the_queue_has_a_typed_error() -> None:
    error = SendQueueFull("room", 4, 4)
    assert (error.lane, error.waiting, error.max_queued) == ("room", 4, 4)


@pytest.mark.req("C-230", "C-091")
@virtually
async def test_first_transmissions_precede_retransmissions_precede_syncs() -> None:
    node = ScriptedNode()
    options: dict[str, Any] = {
        "segments_per_epoch": 4,
        "approach_threshold": 1.0,
        "epoch_size_ms": 100_000,
        "acknowledgement_timeout_ms": 50_000,
        "max_retransmissions": 1,
        "sync_min_interval_ms": 60_000,
    }
    async with opened(node, **options) as (channel, _):
        for n in range(4):  # uses up the epoch
            await channel.send(f"{n}".encode())
        await node.deliver(said(1))  # which a sync must acknowledge
        await asyncio.sleep(90)
        assert len(node.sent) == 4
        for n in range(4, 6):
            await channel.send(f"{n}".encode())
        await asyncio.sleep(309)
    kinds = [
        "sync"
        if sent.sds.kind is Kind.SYNC
        else ("first" if sent.sds.message_id not in {s.sds.message_id for s in node.sent[:i]} else "again")
        for i, sent in enumerate(node.sent)
    ]
    second_epoch = [kind for kind, sent in zip(kinds, node.sent, strict=True) if 100 <= sent.at < 200]
    # The sync yields, although it has waited longest; it counts against the hard limit like everything else.
    assert second_epoch == ["first", "first", "again", "again"]
    fourth_epoch = [kind for kind, sent in zip(kinds, node.sent, strict=True) if sent.at >= 300]
    assert "sync" in fourth_epoch and "sync" not in kinds[: -len(fourth_epoch)]
    for epoch in range(4):
        assert sum(100 * epoch <= sent.at < 100 * (epoch + 1) for sent in node.sent) <= 4


@pytest.mark.req("C-231")
@virtually
async def test_a_limit_of_the_transport_that_never_yields_surfaces_as_an_event() -> None:
    node = ScriptedNode(answer=lambda sent: Refusal("rate_limited", recoverable=False))
    async with opened(node) as (channel, told):
        request_id = await channel.send(b"unwanted")
        await settle()
        (error,) = told.of(ReliableMessageSendError)
        assert (error.request_id, error.code, error.stage) == (request_id, "rate_limited", "dispatch")


@pytest.mark.req("C-231")
@virtually
async def test_a_limit_of_ones_own_surfaces_as_an_event_for_what_it_drops() -> None:
    node = ScriptedNode()
    async with opened(node, messages_per_epoch=1, **EPOCH) as (channel, told):
        await channel.send(b"all there is")
        await settle()
        await channel.send_ephemeral(b"dropped")
        await settle()
        assert len(told.of(EphemeralMessageDropped)) == 1


@pytest.mark.req("C-232")
@virtually
async def test_rate_limited_pauses_everything_and_costs_no_attempt() -> None:
    node = ScriptedNode()

    def answer(sent: Sent) -> Refusal | float:
        return Refusal("rate_limited", True, 30_000) if sent.at < 20 else 0.0

    node.answer = answer
    options: dict[str, Any] = {"acknowledgement_timeout_ms": 5_000, "max_retransmissions": 1}
    async with opened(node, **options) as (channel, told):
        await channel.send(b"one")
        await asyncio.sleep(10)
        await channel.send(b"two")
        await asyncio.sleep(60)
    # Nothing is sent during the pause; then each is sent as often as without it.
    assert node.times() == [0.0, 30.0, 30.0, 35.0, 35.0]
    assert texts(node) == [b"one", b"one", b"two", b"one", b"two"]
    assert told.at(ReliableMessageSendError) == [40.0, 40.0]
    assert len(told.of(MessageSent)) == 4


@pytest.mark.req("C-233")
@virtually
async def test_the_utilisation_can_be_read() -> None:
    node = ScriptedNode()
    async with opened(node, messages_per_epoch=10, **EPOCH) as (channel, _):
        assert channel.sync_status().rate_limit_utilization == 0
        for n in range(5):
            await channel.send(f"{n}".encode())
        await settle()
        assert channel.sync_status().rate_limit_utilization == 50
        await asyncio.sleep(101)
        assert channel.sync_status().rate_limit_utilization == 0


@pytest.mark.req("C-234")
@virtually
async def test_channels_of_one_node_share_the_budget() -> None:
    node = ScriptedNode()
    other = "/test/1/hall/proto"
    options: dict[str, Any] = {"messages_per_epoch": 3, **EPOCH}
    async with (
        opened(node, **options) as (room, _),
        opened(node, channel_id="hall", topic=other, **options) as (hall, _),
    ):
        for n in range(3):
            await room.send(f"room {n}".encode())
            await hall.send(f"hall {n}".encode())
        await settle()
        assert len(node.sent) == 3
        assert {sent.sds.channel_id for sent in node.sent} == {"room", "hall"}
        assert room.sync_status().rate_limit_utilization == hall.sync_status().rate_limit_utilization == 100
        await asyncio.sleep(100)
        assert len(node.sent) == 6


@pytest.mark.req("C-234")
@virtually
async def test_channels_of_one_node_cannot_disagree_about_the_limit() -> None:
    node = ScriptedNode()
    async with opened(node, messages_per_epoch=3):
        other = make_channel(node, "hall", TOPIC, "alice", options={"messages_per_epoch": 4})
        with pytest.raises(ValueError, match="share one rate limit"):
            await other.open()


@pytest.mark.req("C-235")
@virtually
async def test_the_count_of_the_epoch_survives_a_restart() -> None:
    store = MemoryPersistence()
    options: dict[str, Any] = {"messages_per_epoch": 3, "persistence": store, **EPOCH}
    node = ScriptedNode()
    async with opened(node, **options) as (channel, _):
        await channel.send(b"0")
        await channel.send(b"1")
        await settle()
    async with opened(node, **options) as (channel, _):
        assert channel.sync_status().rate_limit_utilization == 66
        await channel.send(b"2")
        await channel.send(b"3")
        await settle()
        assert texts(node) == [b"0", b"1", b"2"]
        await asyncio.sleep(100)
        assert texts(node)[3:] == [b"3"]


class SlowToCount(MemoryPersistence):
    """A store that takes 5 s to write how much was sent in an epoch."""

    async def apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
        if not participant.channel_id:
            await asyncio.sleep(5)
        await super().apply(participant, changes)


@pytest.mark.req("C-235")
@virtually
async def test_a_count_that_is_still_being_written_is_waited_for() -> None:
    node, options = ScriptedNode(), {"messages_per_epoch": 1, "persistence": SlowToCount(), **EPOCH}
    async with opened(node, **options) as (channel, _):
        await channel.send(b"0")
        await settle()
        closing = asyncio.create_task(channel.close())
        await asyncio.sleep(1)
        closing.cancel()
        await asyncio.wait([closing])
    async with opened(node, **options) as (channel, _):
        await channel.send(b"1")
        await asyncio.sleep(50)
        assert texts(node) == [b"0"]
        await asyncio.sleep(50)
        assert texts(node) == [b"0", b"1"]


@pytest.mark.req("C-235")
@virtually
async def test_ephemeral_messages_count_after_a_restart_too() -> None:
    options: dict[str, Any] = {"messages_per_epoch": 10, "persistence": MemoryPersistence(), **EPOCH}
    node = ScriptedNode()
    async with opened(node, **options) as (channel, _):
        for _ in range(3):
            await channel.send_ephemeral(b"typing")
    async with opened(node, **options) as (channel, _):
        assert channel.sync_status().rate_limit_utilization == 30
        outside = ReliableEnvelope(message_envelope=MessageEnvelope(content_topic=TOPIC, payload=b"hello"))
        await ReliableClient(node).send(outside)
    async with opened(node, **options) as (channel, _):
        assert channel.sync_status().rate_limit_utilization == 40


@pytest.mark.req("C-236")
@virtually
async def test_every_transmission_carries_its_proof() -> None:
    node = ScriptedNode()
    made: list[bytes] = []

    async def prove(message: bytes) -> bytes:
        made.append(message)
        await asyncio.sleep(0.1)
        return b"proof %d" % len(made)

    options: dict[str, Any] = {
        "segment_size_bytes": 2,
        "acknowledgement_timeout_ms": 5_000,
        "max_retransmissions": 1,
    }
    async with opened(node, proof_provider=prove, **options) as (channel, _):
        await channel.send(b"a0a1a2")
        await asyncio.sleep(8)
    assert len(node.sent) == 6
    # Each proof is for exactly the bytes that it is sent with; a retransmission gets a new one.
    assert [sent.payload for sent in node.sent] == made
    assert [sent.envelope.meta for sent in node.sent] == [b"proof %d" % (n + 1) for n in range(6)]


@pytest.mark.req("C-236")
@virtually
async def test_a_proof_is_kept_for_what_has_to_wait_though_others_overtake_it() -> None:
    node = ScriptedNode()
    options: dict[str, Any] = {"messages_per_epoch": 1, "sync_min_interval_ms": 10_000, **EPOCH}

    def prove(message: bytes) -> bytes:
        return b"proof of " + message[-20:]

    async with opened(node, proof_provider=prove, **options) as (channel, _):
        await channel.send(b"goes at once")
        await channel.send(b"waits for the next epoch")
        await settle()
        await node.deliver(said(1))
        await asyncio.sleep(150)
    assert b"waits for the next epoch" in [sent.segment.payload for sent in node.sent if sent.sds.content]
    assert any(sent.sds.kind is Kind.SYNC and sent.at < 100 for sent in node.sent)
    assert [sent.envelope.meta for sent in node.sent] == [prove(sent.payload) for sent in node.sent]


@pytest.mark.req("C-236", "C-044")
@pytest.mark.parametrize("is_cut", [False, True])
@virtually
async def test_a_proof_that_cannot_be_made_fails_that_message_alone(is_cut: bool) -> None:
    """The same holds if something that the proof provider awaits was cancelled."""
    node = ScriptedNode()

    async def prove(message: bytes) -> bytes:
        if b"unprovable" in message:
            raise asyncio.CancelledError if is_cut else RuntimeError("no proof")
        return b"proof"

    async with opened(node, proof_provider=prove) as (channel, told):
        bad = await channel.send(b"unprovable")
        await channel.send(b"fine")
        await settle()
        assert texts(node) == [b"fine"]
        (error,) = told.of(SendingMessageIrrecoverableError)
        assert (error.request_id, error.code) == (bad, "ProofFailed")


@pytest.mark.req("C-236")
@virtually
async def test_an_ephemeral_message_carries_a_proof_too() -> None:
    node = ScriptedNode()
    async with opened(node, proof_provider=lambda message: b"proof of " + message[:4]) as (channel, _):
        await channel.send_ephemeral(b"fleeting")
        await settle()
        (sent,) = node.sent
        assert sent.envelope.meta == b"proof of " + sent.payload[:4]


def test_a_limit_of_zero_is_no_limit_and_refused() -> None:
    for name in ("messages_per_epoch", "segments_per_epoch", "epoch_size_ms", "max_queued"):
        with pytest.raises(ValueError, match="at least 1"):
            RateLimitConfig(**{name: 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_queued"):
        ReliableChannelConfig(rate_limit=RateLimitConfig(max_queued=10), sds=SdsConfig())
