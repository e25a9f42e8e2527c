"""Two programs with one sender id: each notices, no one else suffers, and no false alarm is raised."""

from __future__ import annotations

import asyncio

import pytest
from strata.channels.persistence import MemoryPersistence
from strata.channels.reliable import MessageReceived, ReliableChannel, SenderIdConflict
from strata.channels.reliable.conflicts import Conflicts
from strata.channels.sds import Origin, SenderShared
from strata_testkit.sim import Faults

from tests.support.channel_world import Recorder, World, until, virtually


def conflicts(channel: ReliableChannel) -> list[SenderIdConflict]:
    """Collect the conflicts that the channel reports from now on."""
    told: list[SenderIdConflict] = []
    channel.message_events.on(SenderIdConflict.name, told.append)
    return told


async def twins(world: World, *names: str) -> list[ReliableChannel]:
    """Open channels on separate nodes, all with the sender id `alice`."""
    return [await world.open(name, sender="alice") for name in names]


@pytest.mark.req("C-006")
@virtually
async def test_two_programs_with_one_sender_id_notice_within_seconds_and_others_lose_nothing() -> None:
    world = World(Faults(loss=0.1))
    one, other = await twins(world, "desk", "cellar")
    told = conflicts(one), conflicts(other)
    bob = await world.open("bob")
    heard = Recorder(bob)
    began = world.now
    await one.send(b"from the desk")
    await until(lambda: told[0] and told[1])
    assert world.now - began < 15
    for n in range(20):
        await one.send(b"desk %d" % n)
        await other.send(b"cellar %d" % n)
    await until(lambda: heard.count(MessageReceived) == 41)
    await asyncio.sleep(120)
    payloads = [each.payload for each in heard.of(MessageReceived)]
    assert len(payloads) == len(set(payloads)) == 41
    assert not heard.of(SenderIdConflict) and bob.health.sender_conflict is None
    for channel, events, author in ((one, told[0], "cellar"), (other, told[1], "desk")):
        (event,) = events
        assert event.sender_id == "alice" and event.author == author
        assert "another program" in event.reason and author in event.reason
        assert channel.health.sender_conflict == event
        await until(lambda channel=channel: channel.sync_status().is_synced)  # type: ignore[misc]
    await other.close()
    await asyncio.sleep(700)
    assert one.health.sender_conflict is None, "it is over"


@pytest.mark.req("C-006")
@virtually
async def test_two_that_only_listen_notice_by_their_syncs() -> None:
    world = World()
    one, other = await twins(world, "desk", "cellar")
    told = conflicts(one), conflicts(other)
    bob = await world.open("bob")
    await bob.send(b"hello, whoever you are")
    await until(lambda: told[0] and told[1], within=60)


@pytest.mark.req("C-006")
@pytest.mark.parametrize("offset", [-7_200.0, 7_200.0])
@virtually
async def test_clocks_that_differ_by_hours_hide_no_twin(offset: float) -> None:
    world = World()
    world.node("cellar", clock_offset=offset)
    one, other = await twins(world, "desk", "cellar")
    told = conflicts(one), conflicts(other)
    await world.open("bob")
    for n in range(3):
        await one.send(b"desk %d" % n)
        await other.send(b"cellar %d" % n)
        await asyncio.sleep(5)
    await until(lambda: told[0] and told[1], within=60)


@pytest.mark.req("C-006")
@virtually
async def test_a_program_that_has_forgotten_everything_takes_itself_for_nobody_else() -> None:
    world = World()
    world.node("eve", clock_offset=3_600)  # her clock moves everybody's Lamport time an hour ahead
    eve = await world.open("eve")
    await eve.send(b"from the future")
    for life in range(3):
        (channel,) = await twins(world, "alice")
        told = conflicts(channel)
        heard = Recorder(channel)
        await until(lambda heard=heard: heard.count(MessageReceived))  # type: ignore[misc]
        for n in range(5):
            await channel.send(b"life %d, %d" % (life, n))
            await asyncio.sleep(7)
        await channel.send_ephemeral(b"and this")
        await asyncio.sleep(100)
        assert not told and channel.health.sender_conflict is None
        await channel.close()


@pytest.mark.req("C-006")
@virtually
async def test_a_restart_and_an_echo_are_no_conflict() -> None:
    world, store = World(Faults(duplication=0.5)), MemoryPersistence()
    bob = await world.open("bob")
    for turn in range(3):
        alice = await world.open("alice", persistence=store)
        told = conflicts(alice)
        await alice.send(b"turn %d" % turn)
        await bob.send(b"to turn %d" % turn)
        await until(lambda alice=alice: alice.sync_status().is_synced)  # type: ignore[misc]
        await asyncio.sleep(90)
        assert not told
        await alice.close()


def shared(
    sent_at: int | None, lamport: int, *, follows: bool = False, author: str = "other"
) -> SenderShared:
    return SenderShared("m", lamport, follows, Origin(author, sent_at))


@pytest.mark.req("C-006")
@pytest.mark.parametrize(
    ("message", "is_one"),
    [
        (shared(1_001, 1_000_500), True),
        (shared(999, 1_000_500), False),  # sent before the start
        (shared(1_001, 999_999), False),  # created before the start, repeated after it
        (shared(1_200, 1_200_000), False),  # from a clock that is ahead
        (shared(None, 1_000_500), False),  # sent at an unknown time
        (shared(None, 5, follows=True), True),
        (shared(500, 5, follows=True), True),
    ],
)
def test_what_counts_as_another_program(message: SenderShared, is_one: bool) -> None:
    watch = Conflicts("alice", "me", 1_000_000)
    assert (watch.heard(message, 1_010_000) is not None) is is_one
    assert (watch.current(1_010_000) is not None) is is_one


@pytest.mark.req("C-302")
def test_a_flood_of_forged_messages_is_told_of_once_for_each_author() -> None:
    watch = Conflicts("alice", "me", 1_000_000)
    told = [watch.heard(shared(1_001, 1_000_500), 1_010_000 + n) for n in range(100)]
    assert [each is not None for each in told] == [True] + [False] * 99
    many = [watch.heard(shared(1_001, 1_000_500, author=f"{n}"), 1_010_100 + n) for n in range(100)]
    assert many == [None] * 100, "whoever has many names is no louder"
    mine = watch.heard(shared(1_001, 1_000_500, author="me"), 1_080_000)
    assert mine is not None and "of this identity" in mine.reason


@pytest.mark.req("C-006")
def test_each_of_several_other_programs_is_told_of_once_while_it_is_there() -> None:
    watch = Conflicts("alice", "me", 1_000_000)
    told = [
        watch.heard(shared(1_001, 1_000_500, author=author), 1_010_000 + 30_000 * turn)
        for turn in range(60)
        for author in ("cellar", "attic")
    ]
    assert [each.author for each in told if each is not None] == ["cellar", "attic"]
    later = watch.heard(shared(1_001, 1_000_500, author="cellar"), 10_000_000)
    assert later is not None, "it was away"


@pytest.mark.req("C-302")
def test_authors_that_were_told_of_are_bounded() -> None:
    watch = Conflicts("alice", "me", 1_000_000)
    for number in range(100):
        assert watch.heard(shared(1_001, 1_000_500, author=f"{number}"), 1_010_000 + 60_000 * number)
    assert len(watch._told) <= 16
