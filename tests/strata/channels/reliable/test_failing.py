"""A task that ends with an error closes its channel, and everyone waiting on the channel gets the error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from strata.channels.persistence import MemoryPersistence
from strata.channels.reliable import ChannelFailed, ReliableChannel
from strata.channels.reliable.hub import Hub
from strata.channels.reliable.session import ChannelSession

from tests.support.channel_world import Node, Recorder, World, own_tasks, take, until, virtually


class Boom(Exception):
    """The fault that a test injects."""


def boom(*_: Any, **__: Any) -> Any:
    raise Boom


def session_of(channel: ReliableChannel) -> ChannelSession:
    session = channel._session
    assert session is not None
    return session


# Ways to break a session. Each takes effect at the next event.


def timers(session: ChannelSession) -> None:
    session.engine.handle_timer = boom  # type: ignore[method-assign]


def store_queries(session: ChannelSession) -> None:
    session.engine.catching_up.is_due = boom  # type: ignore[method-assign]
    session._queries._connected = True
    session._queries.wake()


def teller(session: ChannelSession) -> None:
    session.handover.drain = boom  # type: ignore[method-assign]
    session.handover.wake()


def receiving(session: ChannelSession) -> None:
    session.engine.receive = boom  # type: ignore[method-assign]


def ready(session: ChannelSession) -> None:
    session._payloads.is_ready = boom  # type: ignore[method-assign]


def planning(session: ChannelSession) -> None:
    session.engine.sending.plan = boom  # type: ignore[method-assign]


def noting_success(session: ChannelSession) -> None:
    session.engine.sending.dispatched = boom  # type: ignore[method-assign]


def status(session: ChannelSession) -> None:
    session._queries.connected = boom  # type: ignore[method-assign]


def written(session: ChannelSession) -> None:
    session.writer._on_written = boom


def writing(session: ChannelSession) -> None:
    session.writer._next_batch = boom  # type: ignore[method-assign]


def hook(session: ChannelSession) -> None:
    session._payloads._keep = boom  # type: ignore[method-assign]


def hook_cancelled(session: ChannelSession) -> None:
    async def cancelled(*_: Any) -> Any:
        never = asyncio.get_running_loop().create_future()
        never.cancel()
        await never

    session._payloads.make = cancelled  # type: ignore[method-assign, assignment]


WAYS: list[Callable[[ChannelSession], None]] = [
    timers,
    store_queries,
    teller,
    receiving,
    ready,
    planning,
    noting_success,
    status,
    written,
    writing,
    hook,
    hook_cancelled,
]


class Plain:
    """A hook that changes nothing, but is a coroutine."""

    async def encrypt(self, content: bytes, /) -> bytes:
        return content

    async def decrypt(self, payload: bytes, /) -> bytes:
        return payload


async def outcome(work: Any) -> BaseException | None:
    try:
        await work
    except Exception as error:
        return error
    return None


async def read(events: Any) -> None:
    async for _ in events:
        pass


@pytest.mark.parametrize("break_", WAYS)
@virtually
async def test_an_error_in_any_task_closes_the_channel_and_everyone_gets_it(
    break_: Callable[[ChannelSession], None], caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    node: Node = world.node("alice")
    alice = await world.open("alice", encryption=Plain())
    other = await world.open("alice", "hall", "/test/1/hall/proto")
    bob = await world.open("bob", encryption=Plain())
    world.network.cut("alice", world.network.relays[0])
    await asyncio.sleep(1)
    await alice.send(b"waits")
    waiting = [
        asyncio.create_task(outcome(each))
        for each in (alice.drain(), anext(alice), read(alice.events()), read(alice.events("message-sent")))
    ]
    await asyncio.sleep(1)
    assert not any(task.done() for task in waiting)
    break_(session_of(alice))
    world.network.mend("alice", world.network.relays[0])
    if break_ is receiving:
        await bob.send(b"something to receive")
    await until(lambda: alice.health.error is not None)
    drained, *waiting = waiting
    if await drained is None:
        assert node.contents, "the message was out before that"
    else:
        waiting.append(drained)
    for task in waiting:
        async with asyncio.timeout(60):
            error = await task
        assert isinstance(error, ChannelFailed)
        assert isinstance(error.error, RuntimeError if break_ is hook_cancelled else Boom)
        assert error.__cause__ is error.error
    assert not alice.is_started()
    for call in (alice.send(b"x"), alice.send_ephemeral(b"x"), alice.drain(), alice.start(), anext(alice)):
        with pytest.raises(ChannelFailed):
            await call
    with pytest.raises(ChannelFailed):
        alice.events()
    with pytest.raises(ChannelFailed):
        await alice.close()
    assert "room: the channel is closed, because" in caplog.text
    # Only this channel fails.
    told = Recorder(other)
    await other.send(b"still here")
    await other.drain()
    await until(lambda: "message-sent" in told.names)
    assert other.health.error is None
    again = await world.open("alice", encryption=Plain())
    await again.send(b"as new")
    await again.drain()
    for channel in (again, other, bob):
        await channel.close()
    assert own_tasks() == set() and node.hub is None


@pytest.mark.parametrize("how", ["limiter", "cancelled inside"])
@virtually
async def test_an_error_of_the_nodes_sender_closes_every_channel_of_the_node(how: str) -> None:
    world = World()
    channels = [await world.open("alice", f"room {n}", f"/test/1/{n}/proto") for n in range(3)]
    bob = await world.open("bob", "room 0", "/test/1/0/proto")
    world.network.cut("alice", world.network.relays[0])
    await asyncio.sleep(1)
    for channel in channels:
        await channel.send(b"waits")
    waiting = [asyncio.create_task(outcome(channel.drain())) for channel in channels]
    hub = Hub.existing(world.node("alice"))
    assert hub is not None and hub._limiter is not None
    if how == "limiter":
        hub._limiter.take = boom  # type: ignore[method-assign]
    else:

        async def cancelled(*_: Any) -> None:
            raise asyncio.CancelledError

        hub._dispatch = cancelled  # type: ignore[method-assign, assignment]
    world.network.mend("alice", world.network.relays[0])
    for task in waiting:
        assert isinstance(await task, ChannelFailed)
    again = await world.open("alice", "room 0", "/test/1/0/proto")
    await again.send(b"by a new sender")
    assert await take(bob) == [b"by a new sender"]
    for channel in channels:
        with pytest.raises(ChannelFailed, match="the sender of the node failed"):
            await channel.close()
    assert Hub.existing(world.node("alice")) is not None
    await again.close()
    await bob.close()
    assert own_tasks() == set()


@virtually
async def test_an_error_while_the_clock_is_followed_closes_its_channel_and_the_others_follow_on() -> None:
    world = World()
    alice = await world.open("alice")
    other = await world.open("alice", "hall", "/test/1/hall/proto")
    followed: list[int] = []
    session_of(alice).engine.clock_stepped = boom  # type: ignore[method-assign]
    follow = session_of(other).engine.clock_stepped

    def note(by_ms: int, now_ms: int) -> None:
        followed.append(by_ms)
        follow(by_ms, now_ms)

    session_of(other).engine.clock_stepped = note  # type: ignore[method-assign]
    world.node("alice").clock_offset += 3_600
    await until(lambda: alice.health.error is not None)
    with pytest.raises(ChannelFailed, match="following the clock"):
        await alice.close()
    assert [round(by / 1000) for by in followed] == [3_600] and other.health.error is None
    await other.close()
    assert own_tasks() == set()


@virtually
async def test_a_send_that_waits_for_the_store_gets_the_error_too() -> None:
    class Slow(MemoryPersistence):
        slow = False

        async def apply(self, *arguments: Any) -> None:
            if self.slow:
                await asyncio.sleep(1000)
            await super().apply(*arguments)

    world, store = World(), Slow()
    alice = await world.open("alice", persistence=store)
    await asyncio.sleep(1)
    store.slow = True
    sending = asyncio.create_task(outcome(alice.send(b"hello")))
    await asyncio.sleep(1)
    before = world.now
    teller(session_of(alice))
    assert isinstance(await sending, ChannelFailed) and world.now - before < 1
    with pytest.raises(ChannelFailed):
        await alice.close()
    # The message was stored in the end: the next opening sends it.
    store.slow = False
    async with world.make("alice", persistence=store):
        pass
    assert [each.segment.payload for each in world.node("alice").contents] == [b"hello"]


@virtually
async def test_what_was_handed_over_before_cannot_be_acknowledged_and_comes_again() -> None:
    world, store = World(), MemoryPersistence()
    alice = await world.open("alice", persistence=store, hand_over="at_least_once")
    bob = await world.open("bob")
    await bob.send(b"hello")
    message = await anext(alice)
    teller(session_of(alice))
    await until(lambda: alice.health.error is not None)
    with pytest.raises(ChannelFailed):
        await message.ack()
    with pytest.raises(ChannelFailed):
        await alice.close()
    again = await world.open("alice", persistence=store, hand_over="at_least_once")
    assert (await anext(again)).payload == b"hello"
    await again.close()
    await bob.close()


@virtually
async def test_after_a_step_that_broke_off_nothing_more_is_stored() -> None:
    world, store = World(), MemoryPersistence()
    alice = await world.open("alice", persistence=store)
    bob = await world.open("bob")
    session = session_of(alice)
    settle = session.engine._settle

    def half(now_ms: int) -> None:
        settle(now_ms)
        raise Boom

    session.engine._settle = half  # type: ignore[method-assign]
    await bob.send(b"hello")
    await until(lambda: alice.health.error is not None)
    with pytest.raises(ChannelFailed):
        await alice.close()
    again = await world.open("alice", persistence=store)
    assert await take(again) == [b"hello"], "the step left no trace, and the message is fetched again"
    await again.close()
    await bob.close()


@virtually
async def test_the_error_of_a_block_is_raised_once() -> None:
    world = World()
    with pytest.raises(ChannelFailed) as caught:
        async with world.make("alice") as alice:
            teller(session_of(alice))
            async for _ in alice:
                pass
    assert isinstance(caught.value.error, Boom) and not hasattr(caught.value, "__notes__")
    with pytest.raises(ChannelFailed):
        async with world.make("alice") as alice:
            teller(session_of(alice))
            await asyncio.sleep(1)
    assert own_tasks() == set()


@virtually
async def test_a_handler_that_waits_for_something_cancelled_ends_no_task() -> None:
    world = World()
    alice, bob = await world.pair()
    heard: list[Any] = []

    async def careless(event: Any) -> None:
        heard.append(event)
        never = asyncio.get_running_loop().create_future()
        never.cancel()
        await never

    bob.message_events.on("message-received", careless)
    for number in range(3):
        await alice.send(b"%d" % number)
    await until(lambda: len(heard) == 3)
    assert bob.health.error is None
    for channel in (alice, bob):
        await channel.close()


def test_a_loop_that_ends_with_an_open_channel_ends_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    @virtually
    async def forgets() -> None:
        world = World()
        alice = await world.open("alice")
        await alice.send(b"hello")
        assert session_of(alice).started

    forgets()
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]
