"""Simulated worlds: relays that read from each other converge, through all troubles, and then fall silent."""

from __future__ import annotations

import os

import pytest

from tests.support.simulated_federation import SimulatedWorld

SEEDS = int(os.environ.get("RELAYD_TEST_FEDERATION_SEEDS", "6"))
WORLDS = int(os.environ.get("RELAYD_TEST_FEDERATION_WORLDS", "300"))
"""Small worlds that compare sets."""


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
    for relay in world.relays.values():  # each shows the time at which the first relay received a packet
        for row in relay.log:
            assert row.told_at == row.packet.timestamp


@pytest.mark.req("R-373", "R-374")
def test_a_backlog_comes_once_too():
    """Everything was published before the relays knew of each other."""
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


@pytest.mark.req("R-364")
@pytest.mark.parametrize("unnoticed", [0.0, 30.0])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_a_relay_published_before_it_died_for_good_comes_from_the_others(seed, unnoticed):
    """All end up with what one survivor has, though one is killed while it waits for the dead one, or while
    it does not know yet that the dead one is gone."""
    world = SimulatedWorld(seed, 4, unnoticed=unnoticed)
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
        if unnoticed and world.random.random() < 0.2:
            world.relays[world.random.choice(rest)].start()
        elif unnoticed and world.random.random() < 0.2:
            one, other = world.random.sample(rest, 2)
            world.relays[one].mesh.lost(other, world.now)
            world.relays[one].link(other)
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
    """It invents packets and times. Nobody stores the inventions, and each bars it; the others converge."""
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


def troubled(seed: int) -> tuple[SimulatedWorld, str | None]:
    """A world in which everything goes wrong for a while, packets are lost although cursors pass them, and
    sets are compared; and its liar, if it has one. All trouble has ended."""
    lies = seed % 3 == 0
    world = SimulatedWorld(seed, 4 if lies else 3 + seed % 2, tick=20.0, compares_each=300.0, loss=0.05)
    liar = world.dids[0] if lies else None
    if liar is not None:
        world.relays[liar].lies = True
    for _ in range(10):
        for _ in range(world.random.randrange(4)):
            world.publish(world.random.choice(world.dids[1:] if lies else world.dids))
        match world.random.randrange(8):
            case 0 | 1:
                world.trouble()
            case 2:
                world.step_clock()
        world.run(world.random.choice((20, 20, 60, 140)))
    world.heal()
    return world, liar


@pytest.mark.req("R-364", "R-373", "R-374", "R-381")
@pytest.mark.parametrize("part", range(5))
def test_what_was_lost_on_the_way_is_found_by_comparing(part):
    """Two comparisons after all is well, the honest members hold the same, all of it, and fall silent."""
    received = sent_once = 0
    for seed in range(part, WORLDS, 5):
        world, liar = troubled(seed)
        world.run(1500)
        honest = {did: relay for did, relay in world.relays.items() if did != liar}
        everything = set(range(1, world.published + 1))
        assert world.sets(but=liar) == [everything] * len(honest), seed
        transfers = world.published * (len(world.dids) - 1)
        assert world.received <= 4 * transfers + 20, (
            f"seed {seed}: what a cut or a kill brings twice is bounded"
        )
        received, sent_once = received + world.received, sent_once + transfers
        if liar is None:
            before = world.received
            world.run(200)
            assert world.received == before, f"seed {seed}: a converged world is silent"
            for did in world.dids:  # from then on each packet goes once to each, and nothing comes back
                world.publish(did)
            world.run(60)
            assert world.received == before + len(world.dids) * (len(world.dids) - 1), seed
        else:
            number = world.dids.index(liar)
            for _ in range(20):  # it takes four comparisons, and a cut or a kill may intervene
                if all(relay.standings.barred_until(number) for relay in honest.values()):
                    break
                world.run(300)
            else:
                pytest.fail(f"seed {seed}: nobody may lie for ever")
    assert received < 1.6 * sent_once


@pytest.mark.req("R-364", "R-374")
@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_three_relays_of_which_each_reads_the_next_one_alone(loss):
    """Each ends up holding, once, every packet that can reach it, and then there is silence: a packet goes
    round the loop once. A packet that one has erased does not come back; one that a relay refuses does not
    pass through it."""
    for seed in range(3 * SEEDS):
        world = SimulatedWorld(seed, 3, tick=20.0, compares_each=300.0, loss=loss, is_ring=True)
        a, b, c = world.dids
        author = dict[int, str]()
        world.relays[b].refuses = lambda packet_id: packet_id % 5 == 0
        for _ in range(20):
            for _ in range(world.random.randrange(4)):
                did = world.random.choice(world.dids)
                world.publish(did)
                author.setdefault(world.published, did)
            if world.random.random() < 0.3:
                world.trouble()
            world.run(world.random.choice((20, 20, 60, 140)))
        world.heal()
        author.pop(0, None)
        world.run(2400)
        by_b = {n for n, did in author.items() if n % 5 or did == b}
        by_a = by_b | {n for n, did in author.items() if did == a}
        for did, held in ((a, by_a), (b, by_b), (c, set(author))):
            relay = world.relays[did]
            assert relay.known.keys() == held and len(relay.log) == len(held), seed
            assert all(row.told_at == row.packet.timestamp for row in relay.log), seed
        received = world.received
        world.run(900)
        assert world.received == received, f"seed {seed}: a converged world is silent"
        world.relays[a].erased.update(world.random.sample(sorted(by_a), min(3, len(by_a))))
        world.relays[a].cursors.clear()
        world.relays[a].start()  # it will read all of its peer's log again
        world.run(900)
        assert world.received <= received + len(by_b) and len(world.relays[a].log) == len(by_a), seed
        received = world.received
        world.publish(a)
        world.run(900)
        assert world.received == received + 3 - (world.published % 5 == 0), f"seed {seed}: once round"


def refusing(world: SimulatedWorld) -> None:
    """Have each relay refuse some packets for their type, author or size, and others as repeats."""
    for relay in world.relays.values():
        some, other = world.random.sample(range(7), 2)
        relay.refuses = lambda packet_id, some=some: packet_id % 7 == some  # type: ignore[misc]
        relay.repeats = lambda packet_id, other=other: packet_id % 7 == other  # type: ignore[misc]


@pytest.mark.req("R-364", "R-374", "R-381")
@pytest.mark.parametrize("part", range(5))
def test_a_relay_that_is_restored_accuses_nobody_and_nobody_accuses_it(part):
    """Whichever side has lost its end, whatever was refused before; and nobody lacks what it may have."""
    for seed in range(part, WORLDS, 5):
        world = SimulatedWorld(seed, 2 + seed % 3, tick=20.0, compares_each=300.0, is_ring=seed % 2 == 0)
        refusing(world)
        for _ in range(10):
            for _ in range(world.random.randrange(6)):
                world.publish(world.random.choice(world.dids))
            relay = world.relays[world.random.choice(world.dids)]
            match world.random.randrange(6):
                case 0 | 1:
                    relay.back_up()
                case 2 if relay.up and relay.kept is not None:
                    relay.restore(guarded=world.random.random() < 0.5)
                case 3:
                    world.trouble()
            world.run(world.random.choice((20, 60, 140, 400)))
        world.heal()
        world.run(2400)
        assert world.accusations == 0, seed
        held = {did: relay.known.keys() for did, relay in world.relays.items()}
        for did, relay in world.relays.items():
            served = set().union(*(held[other] for other in world.dids if world.reads(did, other)))
            lacked = served - held[did]
            assert all(relay.refuses(n) or relay.repeats(n) for n in lacked), seed
        received = world.received
        world.run(900)
        assert world.received == received, f"seed {seed}: what is refused is not fetched again and again"
