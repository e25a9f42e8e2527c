"""`syncing` and `synced`: what is received, missing and lost, reported when it changes and not otherwise."""

from __future__ import annotations

import asyncio

import pytest
from strata.channels.reliable import (
    CHANNEL_STATUS_EVENTS,
    MessageReceived,
    ReliableChannel,
    Synced,
    Syncing,
)
from strata.channels.reliable.syncing import SyncNews

from tests.support.channel_world import World, content_message, until, virtually


def news(channel: ReliableChannel) -> list[Syncing | Synced]:
    """Collect the sync events of the channel from now on."""
    told: list[Syncing | Synced] = []
    for name in (Syncing.name, Synced.name):
        channel.message_events.on(name, told.append)
    return told


@virtually
async def test_synced_is_told_when_a_message_is_received() -> None:
    world = World()
    alice, bob = await world.pair()
    told = news(bob)
    await alice.send(b"hello")
    await until(lambda: told)
    assert told == [Synced(received=1, missing=0, lost=0)]


@virtually
async def test_syncing_is_told_while_a_message_is_missing_and_synced_when_it_has_come() -> None:
    world = World()
    alice = await world.open("alice", retrieve_frequency_ms=0)
    told = news(alice)
    node = world.node("alice")
    now = int(node.wall() * 1000)
    node.hear(content_message("bob", "b" * 64, b"second", now + 1, follows=["a" * 64]))
    await until(lambda: told)
    assert told == [Syncing(received=1, missing=1, lost=0)]
    await asyncio.sleep(5)
    node.hear(content_message("bob", "a" * 64, b"first", now))
    await until(lambda: len(told) == 2)
    assert told[1] == Synced(received=2, missing=0, lost=0)
    assert alice.sync_status().is_synced


@pytest.mark.req("C-126")
@virtually
async def test_what_is_given_up_is_lost_and_no_longer_missing_until_it_comes_after_all() -> None:
    world = World()
    alice = await world.open("alice", retrieve_frequency_ms=0, lost_message_timeout_ms=60_000)
    told = news(alice)
    node = world.node("alice")
    now = int(node.wall() * 1000)
    node.hear(content_message("bob", "b" * 64, b"second", now + 1, follows=["a" * 64]))
    await until(lambda: isinstance(told[-1:] and told[-1], Synced))
    assert told[-1] == Synced(received=1, missing=0, lost=1)
    await asyncio.sleep(5)
    node.hear(content_message("bob", "a" * 64, b"first, late", now))
    await until(lambda: told[-1] == Synced(received=2, missing=0, lost=0))


@pytest.mark.slow
@virtually
async def test_a_flood_is_told_of_once_a_second_and_to_the_end() -> None:
    world = World()
    alice, bob = await world.pair()
    told = news(bob)
    for n in range(300):
        await alice.send(b"%d" % n)
        await asyncio.sleep(0.01)
    await until(lambda: told and told[-1] == Synced(received=300, missing=0, lost=0))
    assert len(told) < 40
    assert [each.received for each in told] == sorted({each.received for each in told})


@virtually
async def test_an_iterator_that_names_them_hears_them_and_takes_no_message() -> None:
    world = World()
    alice, bob = await world.pair()
    events = bob.events(*CHANNEL_STATUS_EVENTS)
    await alice.send(b"hello")
    async with asyncio.timeout(60):
        assert await anext(events) == Synced(received=1, missing=0, lost=0)
    assert bob.sync_status().inbox == 1
    received = [MessageReceived.name, *CHANNEL_STATUS_EVENTS]
    assert bob.message_events.count(received[0]) == 0


def test_a_change_of_the_standing_is_told_at_once_and_others_when_they_are_due() -> None:
    told = SyncNews()
    assert told.look((0, 0, 0), 1_000) is None
    assert told.look((1, 0, 0), 1_000) == Synced(received=1, missing=0, lost=0)
    assert told.look((2, 0, 0), 1_500) is None and told.at == 2_000
    assert told.look((2, 1, 0), 1_600) == Syncing(received=2, missing=1, lost=0)
    assert told.look((3, 1, 0), 1_700) is None and told.at == 2_600
    assert told.look((3, 1, 0), 2_600) == Syncing(received=3, missing=1, lost=0)
    assert told.at == float("inf")
    assert told.look((4, 1, 0), 100) is not None, "a clock that was set back delays nothing"
