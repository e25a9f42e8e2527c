"""Made worlds: relays that read from each other converge, through whatever happens, and then fall silent."""

from __future__ import annotations

import os

import pytest

from tests.support.simulated_federation import SimulatedWorld

SEEDS = int(os.environ.get("RELAYD_TEST_FEDERATION_SEEDS", "6"))


@pytest.mark.req("R-373", "R-374")
@pytest.mark.parametrize("count", [2, 3, 7])
def test_where_all_is_well_each_packet_is_sent_once_to_each_relay(count):
    world = SimulatedWorld(1, count)
    world.run(60)
    for _ in range(100):
        world.publish(world.random.choice(world.dids))
        world.run(5)
    world.run(60)
    assert world.sets() == [set(range(1, world.published + 1))] * count
    assert world.received == world.published * (count - 1)
    for relay in world.relays.values():  # each shows when the first relay received a packet
        for row in relay.log:
            assert row.told_at == row.packet.timestamp


@pytest.mark.req("R-373", "R-374")
def test_a_backlog_comes_once_too():
    """Everything was published before the relays had heard of each other."""
    world = SimulatedWorld(2, 5)
    for _ in range(300):
        world.publish(world.random.choice(world.dids))
    world.run(600)
    assert world.sets() == [set(range(1, 301))] * 5
    assert world.received == 300 * 4


@pytest.mark.req("R-364")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_cuts_kills_and_absences(seed):
    world = SimulatedWorld(seed, (3, 4, 7)[seed % 3])
    for _ in range(150):
        for _ in range(world.random.randrange(4)):
            world.publish(world.random.choice(world.dids))
        if world.random.random() < 0.15:
            world.trouble()
        world.run(world.random.choice([5, 5, 20, 100]))
    world.heal()
    world.run(1500)
    everything = set(range(1, world.published + 1))
    assert world.sets() == [everything] * len(world.dids)
    received = world.received
    world.run(600)
    assert world.received == received, "a converged world is silent"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_a_relay_published_before_it_died_for_good_comes_from_the_others(seed):
    """What a survivor has, all have in the end, though one is killed while it waits for the dead one."""
    world = SimulatedWorld(seed, 4)
    gone, *rest = world.dids
    for _ in range(30):
        world.publish(world.random.choice(world.dids))
        world.run(world.random.choice([5, 15]))
    for did in world.random.sample(rest, world.random.randrange(1, 3)):
        world.cuts[frozenset((gone, did))] = float("inf")
    for _ in range(world.random.randrange(1, 9)):
        world.publish(gone)
        world.publish(world.random.choice(rest))
        world.run(5)
    world.relays[gone].up = False
    for _ in range(world.random.randrange(12)):
        world.publish(world.random.choice(rest))
        if world.random.random() < 0.2:
            world.relays[world.random.choice(rest)].start()
        world.run(world.random.choice([5, 20]))
    world.run(400)
    held = world.sets(but=gone)
    assert held == [set.union(*held)] * len(rest)
    received = world.received
    world.run(300)
    assert world.received == received


@pytest.mark.parametrize("seed", range(SEEDS // 3))
def test_clocks_an_hour_apart(seed):
    world = SimulatedWorld(seed, 3, skews=(0, 3600, -3600))
    for _ in range(60):
        world.publish(world.random.choice(world.dids))
        world.run(20)
    world.run(3 * 3600)
    assert world.sets() == [set(range(1, world.published + 1))] * 3


@pytest.mark.req("R-369", "R-381")
@pytest.mark.parametrize("seed", range(SEEDS // 3))
def test_one_member_lies(seed):
    """It invents packets and times. Nobody stores what it invents, and each bars it; the others converge."""
    world = SimulatedWorld(seed, 4)
    liar = world.dids[0]
    world.relays[liar].lies = True
    honest = world.dids[1:]
    published = set()
    for _ in range(80):
        world.publish(liar)
        world.publish(world.random.choice(honest))
        published.add(world.published)
        world.run(10)
    world.run(600)
    for did in honest:
        relay = world.relays[did]
        assert published <= set(relay.known)
        assert all(packet_id > 0 for packet_id in relay.known)
        assert all(abs(row.told_at - row.packet.timestamp) <= 86_400 for row in relay.log)
        assert relay.standings.barred_until(world.dids.index(liar)) > 0


@pytest.mark.req("R-370")
def test_a_backlog_of_six_days_comes_and_one_of_eight_does_not():
    world = SimulatedWorld(3, 2)
    a, b = world.dids
    world.relays[b].up = False
    world.publish(a)
    world.now += 2 * 86_400
    world.publish(a)
    world.now += 6 * 86_400
    world.heal()
    world.run(600)
    assert set(world.relays[b].known) == {2}
    assert world.relays[b].log[0].told_at == world.relays[b].log[0].packet.timestamp
