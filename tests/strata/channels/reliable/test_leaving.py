"""Leaving a channel: what was sent has left, or the program is told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from strata.channels.encryption import GroupKey, GroupKeyEncryption
from strata.channels.messaging.node import NodeError
from strata.channels.persistence import CorruptStore, MemoryPersistence
from strata.channels.persistence.interface import Change, ParticipantKey
from strata.channels.reliable import (
    ChannelFailed,
    ChannelNotOpen,
    MessageSent,
    NotSent,
    NotStarted,
    ReliableMessageSendError,
    SendingMessage,
)
from strata.channels.reliable.client import close_channels
from strata.channels.reliable.departures import Departures
from strata.channels.reliable.hub import Hub
from strata.channels.reliable.requests import Requests

from tests.support.channel_world import (
    SWALLOW,
    Node,
    Recorder,
    Refusal,
    Sending,
    World,
    own_tasks,
    until,
    virtually,
)


def out(node: Node) -> list[bytes]:
    """The payloads of the segments that a node was given, each once."""
    segments = {
        sending.message.message_id: sending.segment.payload for sending in node.contents if sending.message
    }
    return list(segments.values())


def cut_off(world: World, name: str = "alice") -> None:
    world.network.cut(name, world.network.relays[0])


def mend(world: World, name: str = "alice") -> None:
    world.network.mend(name, world.network.relays[0])


# What was sent has left.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"persistence": MemoryPersistence()},
        {"sender_binding": "did"},
        {"encryption": GroupKeyEncryption("room", GroupKey(bytes(32)))},
    ],
    ids=["default", "store", "bound sender", "encrypted"],
)
@pytest.mark.parametrize("size", [1, 300_000])
@virtually
async def test_what_was_sent_is_out_when_the_block_ends(options: Any, size: int) -> None:
    world = World()
    payload = random.Random(1).randbytes(size)
    sender = world.node("alice").transport_identity if "sender_binding" in options else "alice"
    async with world.make("alice", sender=sender, **options) as alice:
        told = Recorder(alice)
        await alice.send(payload)
    assert told.count(MessageSent) == 1 + size // 102_400
    assert own_tasks() == set()
    bob = await world.open("bob", **{key: options[key] for key in options if key == "encryption"})
    assert (await anext(bob)).payload == payload
    await bob.close()


@pytest.mark.parametrize("way", ["close", "stop", "drain"])
@virtually
async def test_each_way_of_leaving_waits_until_all_is_out(way: str) -> None:
    world = World()
    alice = await world.open("alice", segment_size_bytes=2)
    sent = [b"%04d" % number for number in range(50)]
    for payload in sent:
        await alice.send(payload)
    await getattr(alice, way)()
    assert b"".join(out(world.node("alice"))) == b"".join(sent)
    if way == "drain":
        await alice.drain(timeout=0)
        await alice.send(b"more")
    if way != "close":
        await alice.close()


@virtually
async def test_several_channels_of_a_node_are_drained_by_closing_the_node() -> None:
    world = World()
    rooms = [await world.open("alice", f"room {n}", f"/test/1/{n}/proto") for n in range(3)]
    for room in rooms:
        await room.send(room.channel_id.encode())
    await close_channels(world.node("alice"))
    assert sorted(out(world.node("alice"))) == [b"room 0", b"room 1", b"room 2"]
    for room in rooms:
        await room.close()  # it is closed already: closing it once more is not an error
        with pytest.raises(ChannelNotOpen):
            await room.close()
    assert own_tasks() == set()


@virtually
async def test_a_relay_that_comes_back_in_time_gets_everything() -> None:
    world = World()
    cut_off(world)
    async with world.make("alice") as alice:
        await alice.send(b"hello")
        asyncio.get_running_loop().call_later(7, mend, world)
    assert out(world.node("alice")) == [b"hello"]


@virtually
async def test_while_a_channel_leaves_it_takes_no_further_message() -> None:
    world = World()
    cut_off(world)
    alice = await world.open("alice")
    await alice.send(b"first")
    stopping = asyncio.create_task(alice.stop())
    await asyncio.sleep(1)
    with pytest.raises(NotStarted):
        await alice.send(b"second")
    mend(world)
    await stopping
    assert out(world.node("alice")) == [b"first"]
    await alice.close()


# What cannot leave is reported.


@pytest.mark.parametrize("purge", [False, True])
@virtually
async def test_what_cannot_go_out_is_raised_or_stays_in_the_store(purge: bool) -> None:
    world, store = World(), MemoryPersistence()
    cut_off(world)
    for persistence in (None, store):
        alice = await world.open("alice", persistence=persistence)
        requests = [await alice.send(b"%d" % number) for number in range(3)]
        before = world.now
        if persistence is None or purge:
            with pytest.raises(NotSent, match="3 messages have not gone out") as caught:
                await alice.close(purge=purge)
            assert caught.value.requests == tuple(requests) and caught.value.refused == {}
            assert requests[0] in str(caught.value)
        else:
            await alice.close()
        assert world.now - before == pytest.approx(10, abs=0.1)
        assert own_tasks() == set()
    mend(world)
    async with world.make("alice", persistence=store):
        pass
    assert out(world.node("alice")) == ([] if purge else [b"0", b"1", b"2"])


@virtually
async def test_the_deadline_is_a_setting_and_an_argument() -> None:
    world = World()
    cut_off(world)
    for how, seconds in (({"drain_timeout_ms": 3_000}, 3), ({"drain_timeout_ms": 0}, 0), ({}, 20)):
        alice = await world.open("alice", **how)
        await alice.send(b"hello")
        before = world.now
        with pytest.raises(NotSent):
            await (alice.close() if how else alice.close(timeout=20))
        assert world.now - before == pytest.approx(seconds, abs=0.1)
    with pytest.raises(ValueError):
        world.make("alice", drain_timeout_ms=-1)


@virtually
async def test_draining_says_what_is_not_out_and_changes_nothing() -> None:
    world = World()
    alice = await world.open("alice")
    cut_off(world)
    late = await alice.send(b"late")
    with pytest.raises(NotSent) as caught:
        await alice.drain(timeout=5)
    assert caught.value.requests == (late,)
    draining = asyncio.create_task(alice.drain())
    await asyncio.sleep(3600)
    assert not draining.done()
    after = await alice.send(b"after the call")
    mend(world)
    await draining
    await alice.drain()
    assert out(world.node("alice")) == [b"late", b"after the call"] and late != after
    await alice.close()
    with pytest.raises(ChannelNotOpen):
        await alice.drain()


@virtually
async def test_a_stopped_channel_cannot_drain_and_closing_it_tells() -> None:
    world = World()
    cut_off(world)
    alice = await world.open("alice")
    request = await alice.send(b"hello")
    draining = asyncio.create_task(alice.drain())
    await alice.stop()
    with pytest.raises(NotSent):
        await draining
    before = world.now
    with pytest.raises(NotSent):
        await alice.drain()
    with pytest.raises(NotSent) as caught:
        await alice.close()
    assert caught.value.requests == (request,) and world.now == before


def refuse(sending: Sending) -> Any:
    return Refusal("policy_rejected") if sending.segment.payload.startswith(b"bad") else None


@pytest.mark.parametrize("late", [False, True])
@virtually
async def test_a_refusal_that_nobody_heard_of_is_raised_at_the_end(late: bool) -> None:
    world = World()
    world.node("alice").answer = refuse
    alice = await world.open("alice", persistence=MemoryPersistence())
    bad = await alice.send(b"bad")
    await alice.send(b"good")
    if late:
        await asyncio.sleep(60)
    with pytest.raises(NotSent, match="1 messages were refused") as caught:
        await alice.close()
    assert caught.value.requests == () and caught.value.refused == {bad: "the test said no"}


@virtually
async def test_a_refusal_that_a_handler_heard_of_is_not_told_twice() -> None:
    world = World()
    world.node("alice").answer = refuse
    async with world.make("alice") as alice:
        told = Recorder(alice)
        await alice.send(b"bad")
        await until(lambda: told.count(ReliableMessageSendError) == 1)
        await alice.drain()


async def test_whoever_waits_for_a_message_hears_of_no_other_that_is_refused() -> None:
    requests = Requests()
    departures = Departures(requests)
    requests.add("good", bytes(32), ["m1"])
    draining = asyncio.create_task(departures.drain(60))
    await asyncio.sleep(0)
    requests.add("bad", bytes(32), ["m2"])
    requests.failed("m2", "no", "refused")
    departures.note(requests.events(), heard=True)
    requests.sent("m1")
    departures.note(requests.events(), heard=True)
    await draining


@virtually
async def test_whoever_waits_hears_of_what_it_waits_for_and_of_refusals_that_nobody_heard_of() -> None:
    requests = Requests()
    departures = Departures(requests)
    requests.add("before", bytes(32), ["m1"])
    requests.failed("m1", "no", "refused")
    departures.note(requests.events(), heard=False)
    with pytest.raises(NotSent) as caught:
        await departures.drain(1)
    assert caught.value.refused == {"before": "no"}
    await departures.drain(1)  # it was told
    requests.add("late", bytes(32), ["m2"])
    requests.add("refused", bytes(32), ["m3"])
    draining = asyncio.create_task(departures.drain(1))
    await asyncio.sleep(0.5)
    requests.add("after the call", bytes(32), ["m4"])
    requests.failed("m3", "no", "refused")
    departures.note(requests.events(), heard=True)
    with pytest.raises(NotSent) as caught:
        await draining
    assert (caught.value.requests, caught.value.refused) == (("late",), {"refused": "no"})


def test_of_refusals_that_nobody_heard_of_the_last_ones_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    requests = Requests()
    departures = Departures(requests)
    for number in range(1_100):
        requests.add(f"{number}", bytes(32), [f"m{number}"])
        requests.failed(f"m{number}", "no", "refused")
        departures.note(requests.events(), heard=False)
    assert list(departures.take_refused()) == [f"{number}" for number in range(76, 1_100)]
    assert departures.take_refused() == {}
    # The log has the others.
    assert len(caplog.messages) == 76
    assert caplog.messages[-1] == "message 75 was refused, and nobody asked: no"


@virtually
async def test_a_node_that_never_answers_is_told_as_not_out() -> None:
    world = World()
    world.node("alice").send = hold  # type: ignore[method-assign, assignment]
    alice = await world.open("alice")
    request = await alice.send(b"hello")
    with pytest.raises(NotSent) as caught:
        await alice.close()
    assert caught.value.requests == (request,) and own_tasks() == set()


async def hold(*_: Any, request_id: str | None = None) -> str:
    return request_id or ""


@virtually
async def test_what_the_relay_has_and_nobody_acknowledged_is_out() -> None:
    world = World()
    world.node("alice").answer = lambda _: SWALLOW
    before = world.now
    async with world.make("alice") as alice:
        await alice.send(b"hello")
    assert world.now - before < 5


@virtually
async def test_a_store_that_fails_for_good_ends_the_wait() -> None:
    class Failing(MemoryPersistence):
        broken = False

        async def apply(self, *arguments: Any) -> None:
            if self.broken:
                raise CorruptStore("the disk is gone")
            await super().apply(*arguments)

    world, store = World(), Failing()
    cut_off(world)
    alice = await world.open("alice", persistence=store)
    await alice.send(b"hello")
    draining = asyncio.create_task(alice.drain())
    await asyncio.sleep(1)
    store.broken = True
    sending = asyncio.create_task(alice.send(b"another"))
    for task in (draining, sending):
        with pytest.raises(CorruptStore):
            await task
    with pytest.raises(CorruptStore):
        await alice.close()


# Exceptions and cancellation.


@virtually
async def test_an_exception_in_the_block_is_not_hidden() -> None:
    world = World()
    cut_off(world)
    with pytest.raises(ZeroDivisionError) as caught:
        async with world.make("alice") as alice:
            request = await alice.send(b"hello")
            raise ZeroDivisionError
    (note,) = caught.value.__notes__
    assert "1 messages have not gone out" in note and request in note


@virtually
async def test_cancelling_the_block_lets_messages_out_and_a_second_time_ends_the_wait() -> None:
    world = World()
    entered = asyncio.Event()
    alice = world.make("alice")

    async def program() -> None:
        async with alice:
            await alice.send(b"hello")
            entered.set()
            await asyncio.Event().wait()

    running = asyncio.create_task(program())
    await entered.wait()
    cut_off(world)
    running.cancel()
    await asyncio.sleep(2)
    assert not running.done()
    before = world.now
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert world.now - before < 6 and own_tasks() == set()


@virtually
async def test_cancelling_a_drain_stops_the_wait_alone() -> None:
    world = World()
    cut_off(world)
    alice = await world.open("alice")
    await alice.send(b"hello")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await alice.drain()
    with pytest.raises(NotSent):
        await alice.drain(timeout=1)
    assert alice._session is not None and alice._session._departures._waits == [], "each is forgotten"
    mend(world)
    await alice.drain()
    assert out(world.node("alice")) == [b"hello"]
    await alice.close()


@pytest.mark.parametrize("trouble", ["cancelled", "failed", "with its node"])
@virtually
async def test_what_is_to_be_purged_is_purged_however_the_closing_ends(trouble: str) -> None:
    world, store = World(), MemoryPersistence()
    cut_off(world)
    alice = await world.open("alice", persistence=store)
    await alice.send(b"hello")
    if trouble == "cancelled":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await alice.close(purge=True)
    elif trouble == "failed":
        assert alice._session is not None
        alice._session.fail("a test", RuntimeError("of its own"))
        with pytest.raises(ChannelFailed):
            await alice.close(purge=True)
    else:
        await close_channels(world.node("alice"))
        await alice.close(purge=True)
    assert await store.participants() == [] and own_tasks() == set()


@pytest.mark.parametrize("purge", [True, False])
@pytest.mark.parametrize("seconds", [0.1, 0.9, 1.1])
@virtually
async def test_what_a_slow_store_has_yet_to_write_is_awaited_where_the_closing_was_cancelled(
    seconds: float, purge: bool
) -> None:
    class Slow(MemoryPersistence):
        seconds = 0.0

        async def apply(self, participant: ParticipantKey, changes: Sequence[Change]) -> None:
            await asyncio.sleep(self.seconds)
            await super().apply(participant, changes)

    world, store = World(), Slow()
    alice = await world.open("alice", persistence=store)
    await asyncio.sleep(1)
    store.seconds = 1.0
    sending = [asyncio.create_task(alice.send(b"one"))]
    await asyncio.sleep(0.5)
    sending.append(asyncio.create_task(alice.send(b"two")))  # waits until the first is stored
    await asyncio.sleep(0)
    cut_off(world)
    closing = asyncio.create_task(alice.close(purge=purge, timeout=0))
    await asyncio.sleep(seconds)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    if purge:
        await asyncio.gather(*sending, return_exceptions=True)
        await asyncio.sleep(10)
        assert await store.participants() == []
    else:
        mend(world)
        async with world.make("alice", persistence=store):
            pass
        assert out(world.node("alice")) == [b"one", b"two"]
        await asyncio.gather(*sending, return_exceptions=True)
    assert own_tasks() == set()


@pytest.mark.parametrize("seconds", [0.0, 0.05, 1.5, 4.0])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("slow", ["handler", "node"])
@virtually
async def test_cancelling_the_closing_wherever_it_waits_leaves_nothing_open(
    slow: str, times: int, seconds: float
) -> None:
    world = World()
    alice = await world.open("alice")
    node = world.node("alice")
    if slow == "handler":  # for the events reported while the channel closes
        for name in (SendingMessage.name, MessageSent.name):
            alice.message_events.on(name, lambda _: asyncio.sleep(3))
    else:
        node.send = hold  # type: ignore[assignment]
    await alice.send(b"hello")
    closing = asyncio.create_task(alice.close(timeout=0))
    for _ in range(times):
        await asyncio.sleep(seconds)
        closing.cancel()
    await asyncio.wait([closing])
    await asyncio.sleep(0)
    assert own_tasks() == set() and Hub.existing(node) is None
    assert node.unsubscribed == node.subscribed
    await (await world.open("alice")).close()


@pytest.mark.parametrize("turns", [1, 2, 3, 10])
@virtually
async def test_cancelling_the_closing_of_all_channels_closes_them(turns: int) -> None:
    world = World()
    cut_off(world)
    alice = await world.open("alice")
    await alice.send(b"hello")
    closing = asyncio.create_task(close_channels(world.node("alice")))
    for _ in range(turns):
        await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert own_tasks() == set() and Hub.existing(world.node("alice")) is None


@pytest.mark.parametrize("busy", ["starting", "stopping"])
@virtually
async def test_a_closing_that_is_cancelled_before_its_turn_leaves_nothing_open(busy: str) -> None:
    world = World()
    alice = await world.open("alice", persistence=MemoryPersistence())
    node = world.node("alice")
    if busy == "starting":
        await alice.stop()
        node.subscribe_gate.clear()
        other: asyncio.Task[Any] = asyncio.create_task(alice.start())
    else:
        cut_off(world)
        await alice.send(b"hello")
        other = asyncio.create_task(alice.stop(timeout=10))
    await asyncio.sleep(1)
    draining = asyncio.create_task(alice.drain())
    closing = asyncio.create_task(alice.close())
    await asyncio.sleep(1)
    closing.cancel()
    await asyncio.gather(closing, draining, return_exceptions=True)
    node.subscribe_gate.set()
    await asyncio.wait([other])
    assert isinstance(other.exception(), ChannelNotOpen) == (busy == "starting")
    await asyncio.sleep(0)
    assert own_tasks() == set() and Hub.existing(node) is None
    assert node.unsubscribed == node.subscribed


@pytest.mark.parametrize("way", ["close", "stop", "all", "task"])
@virtually
async def test_a_handler_may_leave(way: str) -> None:
    world = World()
    alice = await world.open("alice")
    left = asyncio.Event()

    async def leave(_: Any) -> None:
        if way == "stop":
            await alice.stop()
        elif way == "all":  # as closing the relay does
            await close_channels(world.node("alice"))
        else:
            await (alice.close() if way == "close" else asyncio.create_task(alice.close()))
        left.set()

    alice.message_events.on("sending-message", leave)
    await alice.send(b"hello")
    async with asyncio.timeout(60):
        await left.wait()
    assert out(world.node("alice")) == [b"hello"]
    if way in ("stop", "all"):
        await alice.close()
    await asyncio.sleep(0)
    assert own_tasks() == set()


@virtually
async def test_an_opening_that_fails_raises_why_and_not_what_waits() -> None:
    world, store = World(), MemoryPersistence()
    cut_off(world)
    alice = await world.open("alice", persistence=store)
    await alice.send(b"hello")
    await alice.close(timeout=0)
    world.node("alice").subscribe_error = NodeError("no such topic")
    with pytest.raises(NodeError, match="no such topic"):
        await world.open("alice", persistence=store)
    assert own_tasks() == set()
