"""What a channel does by itself while its program is idle, and what it makes of SDS events."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from strata.channels.rate_limit import RateLimiter
from strata.channels.reliable import configure
from strata.channels.reliable.engine import ChannelEngine
from strata.channels.reliable.outbox import Outbox
from strata.channels.sds import (
    AckedBy,
    Acknowledged,
    Delivered,
    HistoryEntry,
    Kind,
    MissingFound,
    PossiblyAcknowledged,
    SdsConfig,
)
from strata.channels.segmentation import SegmentationConfig, encode_segment, segment_message

from tests.support.channel_world import Recorder, Sending, World, content_message, until, virtually


@pytest.mark.req("C-139")
@virtually
async def test_an_idle_program_still_retransmits_syncs_asks_and_gives_up() -> None:
    world = World()
    alice = await world.open("alice", lost_message_timeout_ms=300_000)
    node, told = world.nodes["alice"], Recorder(alice)
    await alice.send(b"nobody is there")
    node.hear(content_message("eve", "theirs", b"one that follows", 1, follows=("gone",)))
    # From here on the program does nothing.
    await until(lambda: "irretrievable-message" in told.names)
    assert len(node.contents) >= 3  # the outgoing sweep
    assert any(each.kind is Kind.SYNC for each in node.sendings)
    asked = [each for each in node.sendings if each.message is not None and each.message.repair_request]
    assert asked  # the repair buffer
    await until(lambda: "message-received" in told.names)  # the incoming sweep: what waited is delivered
    await alice.close()


@pytest.mark.req("C-140")
def test_each_sds_event_becomes_the_channels_own() -> None:
    """SDS is replaced by a list of events, and the channel's events are read."""
    engine = ChannelEngine(
        "room",
        "alice",
        "/t/1/x/proto",
        configure(None),
        outbox=Outbox(RateLimiter(), "lane"),
        now_ms=1_000_000,
        random=random.Random(1).random,
    )
    engine.sending.send(b"hello", "request", 1_000_000)
    (message_id,) = engine.sds.outgoing()
    (segment,) = segment_message(b"an answer", SegmentationConfig())
    queued: list[Any] = []
    engine.sds.events = lambda: [queued.pop(0)] if queued else []  # type: ignore[method-assign]

    def told(event: Any) -> list[str]:
        queued.append(event)
        engine._settle(1_000_000)
        return [each.name for each in engine.events()]

    engine.sending.dispatched(engine.outbox.heads()[0], 1_000_000, None)
    assert [each.name for each in engine.events()] == ["message-sent", "reliable:message:sent"]
    assert told(PossiblyAcknowledged(message_id, 1)) == ["message-possibly-acknowledged"]
    acknowledged = told(Acknowledged(message_id, AckedBy.HISTORY, "bob"))
    assert acknowledged == ["message-acknowledged", "reliable:message:delivered"]
    told(MissingFound((HistoryEntry("gone"),)))
    assert engine.retrieval.at < 1_010_000
    told(Delivered("theirs", "bob", encode_segment(segment), 5, None))
    (received,) = engine.inbox
    assert received.message.payload == b"an answer"


@pytest.mark.req("C-140")
@virtually
async def test_received_content_starts_the_sync_anew() -> None:
    world = World()
    alice, bob = await world.pair()
    await asyncio.sleep(1000)
    node = world.nodes["bob"]
    node.sendings.clear()
    began_at = world.now
    at: list[float] = []

    def note(sending: Sending) -> None:
        at.append(world.now - began_at)

    node.answer = note
    await alice.send(b"hello")
    await until(lambda: at)
    assert at[0] <= 2.5 + 1.5  # half the acknowledgement timeout, on a tick of a second at most
    await bob.close()
    await alice.close()


@pytest.mark.req("C-146")
def test_the_times_of_repair_are_those_of_the_document() -> None:
    config = SdsConfig()
    assert config.repair_t_min_ms >= 30_000
    assert 120_000 <= config.repair_t_max_ms <= 600_000
    with pytest.raises(ValueError, match="repair_t_max_ms"):
        SdsConfig(repair_t_min_ms=200_000)


@virtually
async def test_syncs_are_kept_by_stores_for_an_hour_and_content_as_long_as_they_like() -> None:
    world = World()
    alice, bob = await world.pair()
    short = await world.open("short", sender="short", retention_seconds=60)
    await alice.send(b"hello")
    await asyncio.sleep(300)
    every = [each for name in ("alice", "bob") for each in world.nodes[name].sendings]
    assert {each.envelope.retention_seconds for each in every if each.kind is Kind.CONTENT} == {None}
    assert {each.envelope.retention_seconds for each in every if each.kind is Kind.SYNC} == {3600}
    await short.send(b"gone soon")
    await asyncio.sleep(300)
    assert {each.envelope.retention_seconds for each in world.nodes["short"].sendings} == {60}
    for channel in (bob, short):
        await channel.close()
    await alice.send(b"nobody hears this")
    await asyncio.sleep(60)
    repeated = [each for each in world.nodes["alice"].sendings if each.kind is Kind.CONTENT][2:]
    assert repeated and {each.envelope.retention_seconds for each in repeated} == {30 * 86_400}, (
        "a repeat is kept for as long as anybody reads back"
    )
    await alice.close()
