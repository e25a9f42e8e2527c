"""Channel time: it follows the wall clock through sleep and steps without affecting anything else.

`clock_offset` sets the wall clock of a node while the loop's clock runs on: a step, or the sleep of a laptop.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strata.channels.messaging.values import ConnectionStatus
from strata.channels.persistence import MemoryPersistence
from strata.channels.rate_limit import RateLimiter
from strata.channels.reliable import (
    IrretrievableMessage,
    MessageReceived,
    ReliableMessageDeliveryError,
    SendingMessage,
    configure,
)
from strata.channels.reliable.clock import ChannelClock
from strata.channels.reliable.engine import ChannelEngine
from strata.channels.reliable.outbox import Outbox
from strata_testkit.sim import run_virtually

from tests.support.scripted_node import (
    START,
    START_MS,
    Refusal,
    ScriptedNode,
    chunks,
    elapsed,
    node_off_by,
    opened,
    said,
    settle,
    sync,
)
from tests.support.virtual_time import virtually

HOUR, DAY, YEAR = 3600.0, 86_400.0, 365 * 86_400.0
NOTICED = 6.0
"""Seconds after which a channel has certainly looked at the clock."""


async def set_clock(node: ScriptedNode, by: float) -> None:
    """Set the clock by this many seconds, as a step or a sleep would, and wait until the channel notices."""
    node.clock_offset += by
    await asyncio.sleep(NOTICED)


def wall_ms(node: ScriptedNode) -> float:
    return node.wall() * 1000


# The clock itself.


@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.one_of(st.just(0.0), st.floats(-1e9, 1e9)), st.booleans()),
        max_size=30,
    )
)
def test_it_jumps_only_when_it_is_looked_at_and_is_then_within_a_second_of_the_wall(
    history: list[tuple[float, float, bool]],
) -> None:
    steady, offset = 0.0, 1e9
    clock = ChannelClock(lambda: steady + offset, lambda: steady)
    said_ms, told = clock.now_ms(), 0
    for passes, step, looks in history:
        steady += passes
        offset += step
        # Between two looks time advances as it passes, up to the rounding of a millisecond.
        assert abs(clock.now_ms() - said_ms - 1000 * passes) <= 2
        said_ms = clock.now_ms()
        if looks:
            told = clock.look()
            assert abs(clock.now_ms() - 1000 * (steady + offset)) <= 1002
            assert abs(clock.now_ms() - said_ms - told) <= 2
            assert told == 0 or abs(told) >= 998
            said_ms = clock.now_ms()


# Following the wall.


@virtually
async def test_a_clock_that_was_a_day_behind_is_followed_and_histories_name_what_others_said() -> None:
    node = node_off_by(-25 * HOUR)
    async with opened(node) as (channel, _):
        theirs = said(1)
        await node.deliver(theirs)
        await set_clock(node, 25 * HOUR)
        await channel.send(b"an answer")
        await settle()
        (sent,) = node.sent
        assert sent.sds.lamport_timestamp == pytest.approx(wall_ms(node), abs=2_000)
        assert sent.sds.history_ids == [theirs.message_id]


@virtually
async def test_after_sleep_the_store_is_asked_at_once() -> None:
    node = ScriptedNode()
    async with opened(node):
        asked = len(node.queries)
        assert asked == 1
        await asyncio.sleep(120)
        await set_clock(node, 8 * HOUR)
        assert len(node.queries) == asked + 1
        assert node.queries[-1].since_ms <= START_MS + 120_000, "from before it slept"
        await asyncio.sleep(HOUR)
        assert len(node.queries) == asked + 1


@virtually
async def test_a_second_of_drift_is_no_sleep() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, _):
        await set_clock(node, 1.5)
        assert len(node.queries) == 1
        await channel.send(b"x")
        await settle()
        assert node.sent[0].sds.lamport_timestamp == pytest.approx(wall_ms(node), abs=10)


@pytest.mark.parametrize("by", [8 * HOUR, 56 * YEAR, -8 * HOUR, -YEAR])
@virtually
async def test_a_step_makes_nothing_fail_and_keeps_every_wait(by: float) -> None:
    node = ScriptedNode()
    options: dict[str, Any] = {
        "acknowledgement_timeout_ms": 60_000,
        "max_retransmissions": 2,
        "lost_message_timeout_ms": 600_000,
        "reassembly_timeout_ms": 300_000,
        "sync_min_interval_ms": 30_000,
    }
    async with opened(node, **options) as (channel, told):
        await channel.send(b"nobody is there")
        await asyncio.sleep(1)
        await node.deliver(chunks(100, b"abcdef", 3)[0], said(5, follows=[said(4)]))
        await asyncio.sleep(29)
        node.sent.clear()
        await set_clock(node, by)
        assert told.of(IrretrievableMessage) == [] and told.of(ReliableMessageDeliveryError) == []
        # 60 s after it was sent, independent of the clock.
        contents = [at for at in told.at(SendingMessage)]
        assert contents == [0.0]
        await asyncio.sleep(30)
        assert [round(at) for at in told.at(SendingMessage)][1:] in ([60], [61])
        assert told.of(ReliableMessageDeliveryError) == []
        await asyncio.sleep(180)
        assert len(told.of(ReliableMessageDeliveryError)) == 1
        assert any(sent.sds.content is None for sent in node.sent), "syncs go on"
        partial, missing = told.of(IrretrievableMessage), told.at(IrretrievableMessage)
        assert partial == []
        await asyncio.sleep(600)
        missing = told.at(IrretrievableMessage)
        assert len(missing) == 2
        assert 295 <= missing[0] <= 310 and 595 <= missing[1] <= 625


@pytest.mark.parametrize("by", [-10.0, -HOUR, -YEAR])
@virtually
async def test_a_step_back_freezes_neither_retrieval_nor_the_rate_limit(by: float) -> None:
    node = ScriptedNode()
    options: dict[str, Any] = {
        "messages_per_epoch": 1,
        "epoch_size_ms": 60_000,
        "acknowledgement_timeout_ms": 1_000_000_000,
    }
    async with opened(node, **options) as (channel, _):
        await node.deliver(said(5, follows=[said(4)]))
        await asyncio.sleep(30)
        asked = len(node.fetches) + len(node.queries)
        await set_clock(node, by)
        await channel.send(b"one")
        await channel.send(b"two")
        await asyncio.sleep(200)
        assert len(node.fetches) + len(node.queries) > asked + 1
        assert len(node.sent) == 2


@virtually
async def test_a_mark_of_a_clock_that_was_ahead_does_not_hide_what_was_missed() -> None:
    node, store = node_off_by(YEAR), MemoryPersistence()
    async with opened(node, persistence=store):
        await asyncio.sleep(60)
        await set_clock(node, -YEAR)
        assert node.queries[-1].since_ms <= START_MS - 29 * DAY * 1000
    node = node_off_by(YEAR)
    async with opened(node, persistence=(store := MemoryPersistence())):
        await asyncio.sleep(60)
    node.clock_offset = 0.0
    async with opened(node, persistence=store):
        assert node.queries[-1].since_ms <= START_MS - 29 * DAY * 1000


# Uniqueness and order.


@virtually
async def test_the_same_word_at_the_same_moment_again_is_another_message() -> None:
    node, store = ScriptedNode(), MemoryPersistence()
    seen: list[tuple[str, int]] = []

    async def say(persistence: MemoryPersistence) -> None:
        quiet: dict[str, Any] = {"persistence": persistence, "acknowledgement_timeout_ms": 1_000_000_000}
        async with opened(node, **quiet) as (channel, _):
            for _ in range(3):
                await channel.send(b"ok")
                await settle()
                await set_clock(node, -NOTICED - 0.01)
            seen.extend((sent.sds.message_id, sent.sds.lamport_timestamp or 0) for sent in node.sent)
            node.sent.clear()

    for _ in range(3):
        await say(store)
        node.clock_offset = -elapsed()  # the machine boots at the very same moment again
    assert len({message_id for message_id, _ in seen}) == len(seen)
    lamports = [lamport for _, lamport in dict(seen).items()]
    assert lamports == sorted(set(lamports))


def test_a_program_without_a_store_makes_other_ids_in_its_next_life() -> None:
    """Its device has no clock that survives a restart: it boots at the same moment each time."""
    made = set()
    for life in range(100):
        engine = ChannelEngine(
            "room",
            "alice",
            "/t/1/x/proto",
            configure(None),
            outbox=Outbox(RateLimiter(), "lane"),
            now_ms=30_000,
            random=random.Random(life).random,
        )
        engine.sending.send(b"ok", "request", 31_000)
        made |= set(engine.sds.outgoing())
    assert len(made) == 100


@virtually
async def test_a_device_that_boots_before_its_time_is_set_answers_after_what_it_answers() -> None:
    node = node_off_by(-START + 30.0)
    node.connection_status = ConnectionStatus.DISCONNECTED
    async with opened(node) as (channel, told):
        theirs = said(1, b"a question")
        await node.deliver(theirs)
        await channel.send(b"an answer")
        await channel.send(b"another")
        assert told.payloads == [b"a question"] and node.sent == []
        await set_clock(node, START)
        await node.reconnect()
        await settle()
        sent = [each.sds for each in node.sent]
        assert [each.segment.payload for each in node.sent] == [b"an answer", b"another"]
        assert sent[0].history_ids == [theirs.message_id]
        assert channel.log() == [theirs.message_id, sent[0].message_id, sent[1].message_id]
        await node.deliver(sync(2, follows=[node.sent[0], node.sent[1]]))
        assert channel.sync_status().outstanding == ()


@virtually
async def test_what_is_with_the_transport_when_the_time_is_set_is_not_made_another_message() -> None:
    node = ScriptedNode(answer=lambda sent: 30.0)
    node.clock_offset = -50 * YEAR
    async with opened(node, acknowledgement_timeout_ms=10**8) as (channel, told):
        await channel.send(b"under way")
        await settle()
        await set_clock(node, 50 * YEAR)
        await asyncio.sleep(60)
        assert [sent.segment.payload for sent in node.sent] == [b"under way"]
        assert len(told.of(SendingMessage)) == len(channel.sync_status().outstanding) == 1


@virtually
async def test_what_was_written_at_the_right_time_keeps_its_id_when_the_device_boots_at_a_wrong_one() -> None:
    """It may have been sent before: with another id it could arrive twice."""
    node, store = ScriptedNode(), MemoryPersistence()
    node.answer = lambda sent: None  # it is sent, and the program ends before it gets the outcome
    async with opened(node, persistence=store) as (channel, _):
        await channel.send(b"perhaps")
        await settle()
        (first,) = node.sent
    node.clock_offset = -START + 30.0 - elapsed()
    node.answer = lambda sent: Refusal("timestamp_too_old", True)
    async with opened(node, persistence=store) as (channel, _):
        await settle()
        await set_clock(node, START)
        node.answer = lambda sent: 0.0
        await asyncio.sleep(30)
        assert {sent.sds.message_id for sent in node.sent} == {first.sds.message_id}
        assert len(channel.log()) == 1


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.5, 7.0, 40.0]),
            st.sampled_from([0.0, 0.0, 0.0, 1.2, -1.2, 20.0, -20.0, 9 * HOUR, -9 * HOUR, YEAR, -2 * YEAR]),
            st.sampled_from(["send", "hear", "restart", "nothing"]),
        ),
        min_size=1,
        max_size=10,
    )
)
@example([(0.0, -2 * YEAR, "send"), (0.0, YEAR, "restart"), (0.5, -9 * HOUR, "send")])
@settings(max_examples=40, deadline=None)
def test_no_history_of_a_clock_breaks_order_timers_or_ids(history: list[tuple[float, float, str]]) -> None:
    async def live() -> None:
        node, store = ScriptedNode(), MemoryPersistence()
        sent: dict[str, int] = {}
        heard: list[bytes] = []
        received: list[bytes] = []
        count = 0
        last = 0.0
        runs: list[list[tuple[float, float, str]]] = [[] for _ in range(len(history) + 1)]
        at = 0
        for step in history:
            at += step[2] == "restart"
            runs[at].append(step)
        for run in runs:
            options: dict[str, Any] = {"persistence": store, "sync_min_interval_ms": 30_000}
            options |= {"acknowledgement_timeout_ms": 20_000, "max_retransmissions": 1_000}
            async with opened(node, **options) as (channel, told):
                for passes, by, act in run:
                    await asyncio.sleep(passes)
                    node.clock_offset += by
                    if act == "send":
                        await channel.send(b"ok")
                        count += 1
                    elif act == "hear":
                        await node.deliver(said(len(heard), b"%d" % len(heard)))
                        heard.append(b"%d" % len(heard))
                await asyncio.sleep(60)  # enough for each to be sent, and sent again
                assert channel.sync_status().queued == 0
                for each in node.sent:
                    if each.sds.content:
                        sent[each.sds.message_id] = each.sds.lamport_timestamp or 0
                last = max([last, *(each.at for each in node.sent)])
                if channel.sync_status().outstanding:
                    assert elapsed() - last <= 40, "timers go on"
                assert told.of(ReliableMessageDeliveryError) == []
                received += [event.payload for event in told.of(MessageReceived)]
        assert len(sent) == count
        assert received == heard, "everything once"
        assert list(sent.values()) == sorted(set(sent.values())), "Lamport time only grows"

    run_virtually(live)
