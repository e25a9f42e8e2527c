"""The pool as a program sees it, over relays in memory and a clock that jumps."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from strata.protocol import packets
from strata.protocol.errors import Closed, ConnectionFailed, RequestRefused, RequestTimeout, StrataError
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from strata.relays.connection import Options
from strata.relays.connection.dialing import shown
from strata.relays.connection.values import Published
from strata.relays.pool import Copy, PacketPool, PoolOptions, Profile, Standing

from tests.support.simulated_relays import (
    ME,
    Character,
    SimConnection,
    SimStream,
    World,
    packet,
    run_virtually,
    until,
)
from tests.support.virtual_time import START, virtually, wall

QUIET = PoolOptions(presence_delay=None, sweep_interval=None, ping_interval=None, probe_interval=None)
"""Without the pool's own checks."""


def three(first: Character | None = None) -> World:
    return World(1, first or Character(), Character(), Character())


async def take(subscription, count: int) -> list[str]:
    async with asyncio.timeout(600):
        return [(await anext(subscription)).packet.packet_id for _ in range(count)]


def now() -> float:
    return asyncio.get_running_loop().time()


# Heads: where the logs of relays end.


@virtually
async def test_from_the_heads_of_all_readers_nothing_comes_that_they_had_before():
    world = World(1, Character(), Character(latency=0.2), Character(latency=0.2))
    for name in "abc":
        for n in range(5):
            world[name].store(packet(n))
    async with world.pool(QUIET) as pool:  # open with the first relay; the others connect a moment later
        heads = await pool.heads()
        assert len(heads) >= QUIET.readers
        for name in "abc":
            world[name].store(packet(5))
        async with pool.subscribe(positions=heads) as subscription:
            assert await take(subscription, 1) == [packet(5).packet_id]
        assert pool.statistics.packets_merged == 1


@virtually
async def test_neither_a_sweep_nor_a_relay_that_takes_over_goes_back_behind_the_heads():
    world = three()
    for name in "abc":
        for n in range(50):
            world[name].store(packet(n))
    async with world.pool(replace(QUIET, sweep_interval=10.0)) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        async with pool.subscribe(positions=await pool.heads()) as subscription:
            world["c"].store(packet(50))  # at a relay that may be read only by sweeps
            assert await take(subscription, 1) == [packet(50).packet_id]
            await until(lambda: pool.statistics.sweeps >= 6)
            for url in list(subscription.relays):
                world.relays[url].kill()
            (left,) = set(world.relays.values()) - {each for each in world.relays.values() if not each.up}
            left.store(packet(51))
            assert await take(subscription, 1) == [packet(51).packet_id]
            assert pool.statistics.packets_merged == 2, "nothing from before the heads"
            assert pool.statistics.copies_dropped <= 4


@virtually
async def test_a_relay_that_does_not_say_where_it_ends_holds_up_nobody():
    world = World(1, Character(), Character(stalls=1.0), Character(unmarked=1.0))
    async with world.pool(replace(QUIET, readers=3)) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        began_at = now()
        assert list(await pool.heads()) == ["ws://a"]
        assert now() - began_at < 3
        world["b"].kill()
        world["c"].kill()
        await until(lambda: len(pool._relays.connected()) == 1)
        began_at = now()
        assert list(await pool.heads()) == ["ws://a"]
        assert now() - began_at < 1


# Publishing.


@pytest.mark.req("C-270")
@virtually
async def test_a_packet_goes_to_two_relays_and_the_first_ok_is_enough():
    world = three(Character(latency=5.0))
    async with world.pool(QUIET) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        began_at = now()
        published = await pool.publish(packet(1))
        assert now() - began_at < 0.1
        assert sorted(published.copies.values()) == [Copy.PENDING, Copy.STORED]
        await until(lambda: pool.statistics.copies_stored == 2)
    assert len(world["a"].log) + len(world["b"].log) + len(world["c"].log) == 2


@pytest.mark.req("C-272", "C-273")
@virtually
async def test_a_dead_relay_is_waited_for_by_nobody_and_another_takes_its_copy_after_1_s():
    world = three()
    async with world.pool(replace(QUIET, sample_interval=None)) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        for relay in (world["a"], world["b"]):
            relay.character.deaf = True
        assert set(pool._relays.targets[:2]) == {"ws://a", "ws://b"}
        began_at = now()
        published = await pool.publish(packet(1))
        assert 1.0 <= now() - began_at < 1.2, "first after 1 s"
        assert published.copies == {"ws://a": "pending", "ws://b": "pending", "ws://c": "stored"}


@pytest.mark.req("C-273")
@virtually
async def test_a_relay_that_is_away_is_tried_again_after_longer_and_longer_until_it_is_back():
    world = World(1, Character())
    async with world.pool(replace(QUIET, copies=1)) as pool:
        world["a"].kill()
        asyncio.get_running_loop().call_later(10, world["a"].start)
        published = await pool.publish(packet(1))
        assert published.copies == {"ws://a": "stored"} and 10 <= now() < 15


@virtually
async def test_what_a_callback_raises_is_its_callers_and_the_pool_goes_on():
    def fails() -> None:
        raise LookupError("the program's own")

    world = three()
    async with world.pool(QUIET) as pool:
        with pytest.raises(LookupError):
            await pool.publish(packet(0), on_stored=fails)
        await until(lambda: sum(packet(0).packet_id in world[name].ids for name in "abc") == 2)
        assert (await pool.publish(packet(1))).packet_id == packet(1).packet_id
        assert pool.statistics.published == 2


@virtually
async def test_too_few_confirmations_in_time_is_a_timeout_and_leaves_nothing_behind():
    world = three()
    async with world.pool(replace(QUIET, confirmations=2)) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        world["b"].character.deaf = world["c"].character.deaf = True
        began_at = now()
        with pytest.raises(RequestTimeout):
            await pool.publish(packet(1), timeout=7)
        assert now() - began_at == pytest.approx(7)
        assert pool.statistics.publish_failures == 1
        await asyncio.sleep(1)
        assert len(pool._publisher) == 0


@virtually
async def test_a_refusal_by_all_is_raised_one_by_some_is_not(monkeypatch):
    world = three()

    def refuse(packet):
        raise RequestRefused("policy_rejected", "not here")

    async with world.pool(QUIET) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        monkeypatch.setattr(world["a"], "receive", refuse)
        published = await pool.publish(packet(1))
        assert "stored" in published.copies.values()
        for name in "bc":
            monkeypatch.setattr(world[name], "receive", refuse)
        with pytest.raises(RequestRefused, match="not here"):
            await pool.publish(packet(2))


@pytest.mark.req("C-274", "R-343")
@virtually
async def test_a_packet_that_a_relay_said_ok_to_and_forgot_is_sent_again():
    world = World(1, Character(forgets=1.0), Character(), Character())
    async with world.pool(PoolOptions(sweep_interval=None)) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        for relay in "bc":
            world[relay].kill()
        published = await pool.publish(packet(1))
        assert published.copies["ws://a"] is Copy.STORED, "so it says"
        assert not world["a"].log
        for relay in "bc":
            world[relay].start()
        await until(lambda: not pool.unsettled)
        assert world["b"].log or world["c"].log
        assert pool.statistics.presence_missing >= 1 and pool.statistics.presence_given_up == 0
        (liar,) = [view for view in pool.relays if view.url == "ws://a"]
        assert liar.score < min(view.score for view in pool.relays if view.url != "ws://a")


@pytest.mark.req("C-274", "R-343")
@virtually
async def test_a_relay_that_says_ok_and_never_answers_what_it_has_counts_for_no_copy():
    """It answers pings, and its OK comes first. Else a packet has one copy where two were asked for."""
    world = World(1, Character(forgets=1.0, endless="silence", latency=0.001), Character(), Character())
    async with world.pool(PoolOptions(sweep_interval=None)) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        for n in range(20):
            await pool.publish(packet(n))
            await asyncio.sleep(30)
        await until(lambda: not pool.unsettled, timeout=3600, step=1)
        assert pool.statistics.presence_thin == pool.statistics.presence_given_up == 0
        assert len(world["b"].log) == len(world["c"].log) == 20
        (liar,) = [view for view in pool.relays if view.url == "ws://a"]
        assert liar.score < min(view.score for view in pool.relays if view.url != "ws://a")


@pytest.mark.req("C-274")
@virtually
async def test_who_publishes_faster_than_can_be_checked_waits():
    world = three()
    async with world.pool(PoolOptions(presence_packets=5, sweep_interval=None)) as pool:
        await asyncio.gather(*(pool.publish(packet(n)) for n in range(40)))
        assert pool.unsettled <= 5 + 256
        await until(lambda: not pool.unsettled)
        assert pool.statistics.presence_thin == pool.statistics.presence_given_up == 0


@virtually
async def test_copies_in_the_background_are_bounded():
    world = three()
    async with world.pool(replace(QUIET, max_background=3)) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        world[pool._relays.targets[0][-1]].character.deaf = True
        for n in range(10):
            await pool.publish(packet(n))
        assert len(pool._publisher) <= 4
        assert pool.statistics.copies_abandoned > 0


@virtually
async def test_an_abandoned_publish_is_counted_once():
    world = three()
    options = replace(QUIET, copies=3, connections=3, max_background=5)
    async with world.pool(options) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        for url in pool._relays.targets[:2]:
            world[url[-1]].character.deaf = True
        for n in range(10):
            await pool.publish(packet(n))
        await asyncio.sleep(0.1)
        # One copy of each is stored; two were under way, until their publish was abandoned.
        assert pool.statistics.copies_abandoned == (20 - len(pool._publisher._background)) / 2 > 0


# Reading.


@pytest.mark.req("C-271", "R-106")
@virtually
async def test_each_packet_comes_once_from_two_relays():
    world = three()
    async with world.pool(QUIET) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        async with pool.subscribe(types=["POST"]) as subscription:
            for n in range(20):
                world["a"].store(packet(n))
            await asyncio.sleep(5)
            for n in reversed(range(20)):
                world["b"].store(packet(n))
            assert len(set(await take(subscription, 20))) == 20
            await until(lambda: pool.statistics.copies_dropped == 20)
            assert sorted(subscription.relays) == ["ws://a", "ws://b"]
            assert subscription.received_at(packet(3).packet_id) == START + int(now()) - 5
            assert dict(subscription.positions).keys() == {"ws://a", "ws://b"}


@pytest.mark.req("C-272", "C-278")
@virtually
async def test_a_spare_takes_over_and_what_came_in_between_is_not_missed():
    world = three()
    async with world.pool(QUIET) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        subscription = pool.subscribe()
        world["a"].store(packet(0))
        assert await take(subscription, 1) == [packet(0).packet_id]
        last_received = START + int(now())
        await asyncio.sleep(400)
        for name in "abc":
            world[name].kill()
        world["c"].store(packet(1))
        await asyncio.sleep(30)
        world["c"].start()
        assert await take(subscription, 1) == [packet(1).packet_id]
        assert pool.statistics.readers_replaced >= 1
        query = world["c"].queries[0]
        assert query.received_since is None or query.received_since <= last_received - 300
        world["c"].store(packet(2))
        assert await take(subscription, 1) == [packet(2).packet_id]
        for name in "ab":
            world[name].start()
        world["a"].store(packet(3))
        world["b"].store(packet(3))
        assert await take(subscription, 1) == [packet(3).packet_id], "each goes on where it stood"


@pytest.mark.req("C-278", "R-369")
@pytest.mark.parametrize("received_at", [START + 86_400, 2**53 - 1])
def test_a_relay_whose_clock_is_ahead_leads_no_other_relay_into_the_future(received_at):
    async def scenario() -> None:
        world = World(1, Character(), Character())
        async with world.pool(replace(QUIET, readers=1)) as pool:
            await until(lambda: len(pool._relays.connected()) == 2)
            subscription = pool.subscribe()
            (ahead,) = (world.relays[url] for url in subscription.relays)
            (other,) = (relay for relay in world.relays.values() if relay is not ahead)
            ahead.log.append((packet(0), received_at))
            ahead._tell()
            assert await take(subscription, 1) == [packet(0).packet_id]
            ahead.kill()
            other.store(packet(1))
            assert await take(subscription, 1) == [packet(1).packet_id]

    run_virtually(scenario())


@pytest.mark.req("C-275")
@virtually
async def test_a_live_event_withheld_by_all_readers_arrives_all_the_same():
    world = World(1, *[Character(withholds=1.0)] * 2, Character())
    options = replace(QUIET, sweep_interval=60.0)
    async with world.pool(options) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        subscription = pool.subscribe()
        await until(lambda: set(subscription.relays) == {"ws://a", "ws://b"})
        for name in "abc":
            world[name].store(packet(1))
        began_at = now()
        assert await take(subscription, 1) == [packet(1).packet_id]
        assert now() - began_at <= 61 and pool.statistics.packets_recovered == 1


@pytest.mark.req("C-276", "C-275")
@virtually
async def test_the_sweep_after_an_outage_spans_it():
    world = World(1, Character(withholds=0.0))
    options = replace(QUIET, sweep_interval=300.0, copies=1, readers=1, overlap=60)
    async with world.pool(options) as pool:
        subscription = pool.subscribe()
        await until(lambda: pool.statistics.sweeps == 1)
        last_success = START + int(now())
        world["a"].kill()
        await asyncio.sleep(600)
        world["a"].queries.clear()
        world["a"].start()
        await until(lambda: pool.statistics.sweeps == 2)
        sweep = next(query for query in world["a"].queries if not query.live)
        assert sweep.received_since is not None and sweep.received_since <= last_success - 60
        await subscription.aclose()


@pytest.mark.req("C-277")
@virtually
async def test_two_missed_pings_and_the_subscription_is_made_elsewhere():
    world = three()
    options = replace(QUIET, ping_interval=60.0)
    async with world.pool(options) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        subscription = pool.subscribe()
        await until(lambda: set(subscription.relays) == {"ws://a", "ws://b"})
        await until(lambda: pool._checks._ping_at.keys() == {"ws://a", "ws://b", "ws://c"})
        await asyncio.sleep(5)
        world["a"].character.latency = 1000.0  # connected, and silent
        hung_at = now()
        replaced_at = await until(lambda: "ws://c" in subscription.relays)
        assert pool.statistics.pings_failed == 2
        assert 60 <= replaced_at - hung_at <= 2 * 60 + 11


@pytest.mark.slow
@pytest.mark.req("R-342", "R-344")
@virtually
async def test_a_relay_that_tampers_is_blacklisted_and_not_contacted_again():
    world = World(1, Character(tampers=1.0), Character(), Character())
    async with world.pool(QUIET) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        subscription = pool.subscribe()
        for n in range(5):
            for name in "ab":
                world[name].store(packet(n))
        assert len(set(await take(subscription, 5))) == 5
        await until(lambda: pool.relays[-1].standing is Standing.BLACKLISTED)
        assert pool.relays[-1].url == "ws://a" and pool.relays[-1].blacklisted_until is not None
        await until(lambda: world["a"].clients == 0)
        asked = len(world["a"].queries), len(world["a"].publishes)
        await pool.publish(packet(9))
        await asyncio.sleep(3000)
        assert asked == (len(world["a"].queries), len(world["a"].publishes))
        await until(lambda: pool.relays[-1].standing is not Standing.BLACKLISTED, timeout=4000, step=1)


@pytest.mark.req("R-343", "R-344")
@virtually
async def test_random_probes_find_a_relay_that_denies_what_it_had():
    world = three()
    options = replace(QUIET, probe_interval=20.0)
    async with world.pool(options) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        for n in range(10):
            await pool.publish(packet(n))
        await until(lambda: pool.statistics.copies_stored == 20)
        target = world[pool._relays.targets[0][-1]]
        target.log.clear()  # it has forgotten all packets to which it said OK
        await until(lambda: pool.statistics.relays_blacklisted == 1, timeout=3600, step=1)
        assert pool.relays[-1].url == target.url and pool.statistics.probes_missed >= 3


HONEST_FAULTS = {
    "down for minutes": (Character(), Character()),
    "dies after each OK": (Character(dies=1.0), Character(dies=1.0)),
    "stalls": (Character(), Character(stalls=1.0)),
    "stalls, and had no manifest": (Character(unmarked=1.0), Character(unmarked=1.0, stalls=1.0)),
    "slower than silence lasts": (Character(unmarked=0.5), Character(unmarked=0.5, latency=8.0)),
    "breaks off in the middle": (Character(cuts=1.0), Character(cuts=1.0)),
}
"""How a relay behaves while it says OK, and how when the packets are requested."""


@pytest.mark.req("R-344", "C-274")
@pytest.mark.parametrize("fault", HONEST_FAULTS)
@virtually
async def test_an_honest_relay_is_never_blacklisted_whatever_befalls_it(fault):
    first, then = HONEST_FAULTS[fault]
    world = three(replace(first))
    options = PoolOptions(
        copies=3,
        connections=3,
        presence_delay=9.0,
        sweep_interval=5.0,
        ping_interval=60.0,
        probe_interval=5.0,
    )
    async with world.pool(options) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        subscription = pool.subscribe()
        for n in range(20):
            await pool.publish(packet(n), timeout=600)
            await asyncio.sleep(0.4)
        assert len(set(await take(subscription, 20))) == 20
        world["a"].character = replace(then)
        if fault == "down for minutes":
            world["a"].kill()
            await asyncio.sleep(300)
            world["a"].start()
        else:
            await asyncio.sleep(60)
        world["a"].character = Character()
        await until(lambda: not pool.unsettled)
        assert pool.statistics.relays_blacklisted == 0
        await until(lambda: len(pool._relays.connected()) == 3)


@pytest.mark.req("C-274", "R-190")
@virtually
async def test_a_relay_may_keep_back_what_it_queued_and_gets_it_again_all_the_same(monkeypatch):
    world = three()
    receive = world["a"].receive

    def queue(packet):
        world["a"].ids.discard(packet.packet_id)
        answer = receive(packet)
        world["a"].log.clear()  # it does not serve packets without effect
        return replace(answer, queued=True)

    monkeypatch.setattr(world["a"], "receive", queue)
    async with world.pool(replace(QUIET, presence_delay=2.0, copies=3, connections=3)) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        for n in range(20):
            await pool.publish(packet(n))
        await until(lambda: not pool.unsettled)
        assert pool.statistics.presence_missing >= 20 and len(world["a"].publishes) >= 40
        assert pool.statistics.relays_blacklisted == 0


@pytest.mark.req("C-274", "R-113")
@virtually
async def test_a_relay_is_not_asked_for_a_packet_that_only_repeats_one_it_has(monkeypatch):
    """A publisher that restarts attests again; the relay stores neither that packet nor a lie."""
    world = three()

    def repeats(it):
        return Published(it.packet_id, START, duplicate=True, duplicate_of="0x2")

    def attestation(n):
        content = {"type": "ATTESTATION", "attestation": {"attestation_id": "1"}, "target_packet": "0x1"}
        return packets.build(ME, content, timestamp=START + n)

    for relay in world.relays.values():
        monkeypatch.setattr(relay, "receive", repeats)
    async with world.pool(replace(QUIET, presence_delay=2.0, copies=3, connections=3)) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        for n in range(4):
            await pool.publish(attestation(n))
        await until(lambda: pool.statistics.copies_stored == 12 and not pool.unsettled)
        assert pool.statistics.presence_missing == pool.statistics.relays_blacklisted == 0
        await pool.publish(packet(1))  # it repeats nothing, so this answer is no excuse
        await until(lambda: pool.statistics.presence_missing > 0)


@pytest.mark.req("C-274", "R-344")
@virtually
async def test_one_packet_that_an_operator_removes_is_denied_once(monkeypatch):
    """The relay knows its id and answers `duplicate` from then on, whoever sends it."""
    world = three()
    receive = world["a"].receive

    def remove(packet):
        answer = receive(packet)
        world["a"].log.clear()
        return answer

    monkeypatch.setattr(world["a"], "receive", remove)
    options = replace(QUIET, presence_delay=2.0, probe_interval=20.0, copies=3, connections=3)
    async with world.pool(options) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        await pool.publish(packet(1))
        await until(lambda: pool.statistics.copies_stored == 3 and not pool.unsettled)
        assert pool.statistics.presence_missing >= 3
        await until(lambda: pool.statistics.probes >= 60, timeout=3600, step=1)
        assert pool.statistics.relays_blacklisted == 0


@pytest.mark.req("R-343", "R-344")
@virtually
async def test_a_relay_that_removes_what_strangers_published_is_not_blacklisted():
    world = three()
    async with world.pool(replace(QUIET, probe_interval=20.0)) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        subscription = pool.subscribe()
        for relay in world.relays.values():
            for n in range(20):
                relay.store(packet(n))
        await take(subscription, 20)
        for relay in world.relays.values():
            relay.log.clear()  # its operator has banned the author
        await until(lambda: pool.statistics.probes_missed >= 20, timeout=3600, step=1)
        assert pool.statistics.relays_blacklisted == 0
        assert pool.relays[-1].score < 0.4, "it may also be that it withholds them"


@pytest.mark.req("R-343", "R-344")
@virtually
async def test_what_a_stranger_publishes_at_all_relays_but_one_counts_against_nobody():
    world = World(1, *[Character()] * 4)
    stranger = Identity.generate()
    spam = [packets.build(stranger, {"type": "POST", "n": n}, timestamp=START) for n in range(40)]
    async with world.pool(replace(QUIET, readers=4, probe_interval=20.0)) as pool:
        await until(lambda: len(pool._relays.connected()) == 4)
        subscription = pool.subscribe()
        for name in "abcd":
            for each in spam[:1] if name == "a" else spam:
                world[name].store(each)
        await take(subscription, 40)
        await until(lambda: pool.statistics.probes >= 60, timeout=3600, step=1)
        assert pool.statistics.probes_missed == 0
        assert {view.standing for view in pool.relays} == {Standing.ACTIVE}


@pytest.mark.slow
@pytest.mark.req("C-279")
@virtually
async def test_every_check_can_be_switched_off():
    world = three()
    async with world.pool(replace(QUIET, sample_interval=None)) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        await pool.publish(packet(1))
        subscription = pool.subscribe()
        await take(subscription, 1)
        await asyncio.sleep(7200)
        assert sum(len(relay.queries) for relay in world.relays.values()) == 2, "the two readers' alone"


@pytest.mark.slow
@pytest.mark.req("R-345")
@virtually
async def test_relays_not_in_use_are_tried_from_time_to_time():
    world = World(1, *[Character() for _ in range(6)])
    options = PoolOptions(connections=2, sample_interval=120.0)
    async with world.pool(options) as pool:
        await until(lambda: len(pool._relays.connected()) == 2)
        for _ in range(50):
            await asyncio.sleep(60)
            assert len(pool._relays.connected()) <= 3
        assert all(relay.visits for relay in world.relays.values())
        assert 15 <= pool.statistics.relays_sampled <= 50


# Queries that end.


@virtually
async def test_history_is_the_union_of_what_the_readers_have():
    world = three()
    for n in range(30):
        world["a" if n % 2 else "b"].store(packet(n))
    world["a"].store(packet(4))
    async with world.pool(QUIET) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        found = [d.packet.packet_id async for d in pool.fetch()]
        assert sorted(found) == sorted(packet(n).packet_id for n in range(30))
        assert len([d async for d in pool.fetch(limit=7)]) == 7


@virtually
async def test_ids_that_cannot_be_looked_up_end_the_subscription_and_nothing_else(monkeypatch):
    world = three()
    async with world.pool(replace(QUIET, dedup_packets=1)) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        subscription = pool.subscribe()
        for n in range(300):
            world["a"].store(packet(n))
        await take(subscription, 300)
        monkeypatch.setattr("strata.relays.pool.older_ids.OlderIdsOnDisk.__contains__", _unreadable)
        world["b"].store(packet(0))
        with pytest.raises(StrataError, match="cannot be read"):
            await anext(subscription)
        await pool.publish(packet(301))


def _unreadable(self, digest):
    raise OSError("packet ids kept on disk cannot be read: disk on fire")


@virtually
async def test_a_relay_lost_amid_history_is_replaced():
    world = World(1, Character(latency=1.0), Character(), Character())
    for n in range(30):
        for name in "abc":
            world[name].store(packet(n))
    async with world.pool(replace(QUIET, readers=1)) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        subscription = pool.fetch()
        first = await take(subscription, 3)
        for name in "ab":
            world[name].kill()
        rest = [d.packet.packet_id async for d in subscription]
        assert sorted(first + rest) == sorted(packet(n).packet_id for n in range(30))


@virtually
async def test_get_takes_the_first_answer_and_none_only_if_all_deny():
    world = three(Character(latency=3.0))
    for name in "ac":
        world[name].store(packet(1))
    async with world.pool(QUIET) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        began_at = now()
        found = await pool.get(packet(1).packet_id)
        assert found is not None and found.packet == packet(1) and now() - began_at < 1
        assert await pool.get(packet(2).packet_id) is None
        world["a"].character.latency = 1000.0
        with pytest.raises(RequestTimeout):
            await pool.get(packet(2).packet_id, timeout=5)


@virtually
async def test_positions_go_on_in_another_session():
    world = three()
    for n in range(10):
        for name in "abc":
            world[name].store(packet(n))
    async with world.pool(replace(QUIET, readers=3)) as pool:
        subscription = pool.fetch()
        seen = [d.packet.packet_id async for d in subscription]
        positions = subscription.positions
    for name in "abc":
        world[name].store(packet(10))
    async with world.pool(replace(QUIET, readers=3)) as pool:
        again = [d.packet.packet_id async for d in pool.fetch(positions=positions)]
    assert len(seen) == 10 and again == [packet(10).packet_id]


# Profiles.


@pytest.mark.req("R-404", "R-405")
@virtually
async def test_shielded_publishes_with_jitter_and_asks_for_more_than_it_wants():
    world = three()
    options = replace(QUIET, profile=Profile.SHIELDED, copies=1, readers=1)
    async with world.pool(options) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        for n in range(20):
            began_at = now()
            published = await pool.publish(packet(n))
            assert 0.2 <= now() - began_at <= 1.25
            assert len(published.copies) >= 2, "no publish rests on one relay"
        stranger = packets.build(_other(), {"type": "POST", "text": "x"}, timestamp=START)
        for name in "abc":
            world[name].store(stranger)
        subscription = pool.subscribe(authors=[ME.did], types=["POST"], since=START + 7)
        expected = [n for n in range(20) if n % 50 >= 7]
        assert set(await take(subscription, len(expected))) == {packet(n).packet_id for n in expected}
        assert len(subscription.relays) == 2, "no feed rests on one relay"
        queries = [query for relay in world.relays.values() for query in relay.queries]
        assert len(queries) == 2
        for query in queries:
            assert query.authors == () and query.since is not None and query.since % 3600 == 0


def _other():
    from strata.protocol.ids import Identity

    return Identity.from_seed(bytes(range(1, 33)))


@pytest.mark.req("R-406", "R-407", "R-408")
@virtually
async def test_hardened_without_a_proxy_is_shielded_and_stays_stored():
    world = three()
    async with world.pool(replace(QUIET, profile=Profile.HARDENED)) as pool:
        assert (pool.profile.stored, pool.profile.profile) == (Profile.HARDENED, Profile.SHIELDED)
        assert "proxy" in pool.profile.notice
    proxied = replace(QUIET, profile=Profile.HARDENED, relay=Options(proxy="socks5://127.0.0.1:9050"))
    async with world.pool(proxied) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        assert pool.profile.profile is Profile.HARDENED
        began_at = now()
        assert len((await pool.publish(packet(1))).copies) == 3
        assert 0.8 <= now() - began_at <= 2.55


@pytest.mark.req("R-404", "R-407")
@virtually
async def test_a_profile_falls_back_when_relays_are_lost_to_the_blacklist_and_comes_back():
    world = World(1, Character(tampers=1.0), Character())
    async with world.pool(replace(QUIET, profile=Profile.SHIELDED)) as pool:
        assert pool.profile.profile is Profile.SHIELDED
        subscription = pool.subscribe()
        for n in range(5):
            for name in "ab":
                world[name].store(packet(n))
        await take(subscription, 5)
        await until(lambda: pool.profile.profile is Profile.STANDARD)
        assert pool.profile.stored is Profile.SHIELDED and pool.profile.warnings
        pool.add("ws://c")
        world.relays["ws://c"] = world["b"]
        await until(lambda: pool.profile.profile is Profile.SHIELDED)


@virtually
async def test_a_relay_that_has_refused_is_asked_again_when_it_has_come_back():
    world = World(1, Character(), Character())
    refusing = True

    class Refusing(SimConnection):
        def subscribe(self, **options):
            if refusing and self.server.url == "ws://b":
                raise RequestRefused("unauthenticated", "it was too busy to let us in")
            return super().subscribe(**options)

    def make(url, changed):
        return Refusing(world.relays[url], changed)

    async with PacketPool(list(world.relays), options=QUIET, make=make, wall=wall) as pool:
        await until(lambda: len(pool._relays.connected()) == 2)
        subscription = pool.subscribe()
        await asyncio.sleep(5)
        assert subscription.relays == ["ws://a"]
        refusing = False
        await asyncio.sleep(60)
        assert subscription.relays == ["ws://a"], "it has refused for as long as the connection lasts"
        world["b"].cut()
        await until(lambda: len(pool._relays.connected()) == 2)
        world["b"].store(packet(1))
        assert await take(subscription, 1) == [packet(1).packet_id]
        assert sorted(subscription.relays) == ["ws://a", "ws://b"]


@virtually
async def test_a_relay_that_is_removed_and_added_at_once_is_in_use_again():
    world = World(1, Character(), Character())
    async with world.pool(QUIET) as pool:
        await until(lambda: len(pool._relays.connected()) == 2)
        pool.remove("ws://b")
        pool.add("ws://b")
        await until(lambda: pool._relays.connected() == ["ws://a", "ws://b"], timeout=60)
        assert pool._relays.targets[:2] == ["ws://a", "ws://b"]
        assert world["b"].clients == 1


# Opening and closing.


@virtually
async def test_opening_needs_one_relay_and_says_so():
    world = three()
    for name in "abc":
        world[name].kill()
    with pytest.raises(ConnectionFailed, match="none"):
        await world.pool().open()
    assert now() == pytest.approx(10)
    with pytest.raises(ConnectionFailed, match="at least one"):
        await World(1).pool(urls=[]).open()
    world["b"].start()
    async with world.pool() as pool:
        assert pool._relays.connected() == ["ws://b"] and pool.is_connected


@virtually
async def test_a_file_that_cannot_be_read_for_a_while_costs_one_relay_and_not_the_pool():
    world = World(1, Character(), Character())
    failing = True

    class Unreadable(SimConnection):
        async def open(self) -> None:
            if failing:
                raise PermissionError(13, "the file of pins cannot be read")
            await super().open()

    def make(url, changed):
        return (Unreadable if url == "ws://b" else SimConnection)(world.relays[url], changed)

    async with PacketPool(list(world.relays), options=QUIET, make=make, wall=wall) as pool:
        await asyncio.sleep(10)
        assert pool._relays.connected() == ["ws://a"]
        failing = False
        await until(lambda: len(pool._relays.connected()) == 2)


@pytest.mark.req("C-272")
@pytest.mark.parametrize("count, latency", [(10, 3.0), (6, 6.0), (5, 6.0)])
def test_relays_that_are_far_away_do_not_take_turns_for_ever(count, latency):
    """For example over an anonymising proxy: connecting takes longer than the wait for a dead relay."""

    async def scenario() -> None:
        world = World(1, *(Character(latency=latency) for _ in range(count)))
        async with world.pool(QUIET) as pool:
            await until(lambda: len(pool._relays.connected()) == QUIET.connections, timeout=60)
            seated = set(pool._relays.connected())
            await asyncio.sleep(60)
            assert set(pool._relays.connected()) == seated

    run_virtually(scenario())


@pytest.mark.parametrize("moment", [0.0, 0.01, 1.0])
@virtually
async def test_closing_ends_an_opening_at_once(moment):
    world = three()
    for name in "abc":
        world[name].kill()
    pool = world.pool(QUIET)
    opening = asyncio.create_task(pool.open())
    await asyncio.sleep(moment)
    await pool.close()
    closed_at = now()
    with pytest.raises(Closed):
        await opening
    assert now() == closed_at and len(asyncio.all_tasks()) == 1


@virtually
async def test_a_subscription_that_is_left_after_its_pool_stops():
    async with three().pool(QUIET) as pool:
        subscription = pool.subscribe()
    await subscription.aclose()
    assert await anext(subscription, None) is None


@virtually
async def test_a_pool_that_was_closed_cannot_be_opened():
    pool = three().pool(QUIET)
    await pool.close()
    with pytest.raises(Closed):
        await pool.open()
    assert now() == 0 and len(asyncio.all_tasks()) == 1


async def test_a_pool_that_is_closed_while_it_reads_its_scores_connects_to_nothing(tmp_path, monkeypatch):
    loads = asyncio.Event()
    pool = PacketPool(["ws://127.0.0.1:1/strata"], options=replace(QUIET, scores=tmp_path / "scores.db"))
    load = pool._relays.load

    async def slow(path):
        await load(path)
        await loads.wait()

    monkeypatch.setattr(pool._relays, "load", slow)
    first = asyncio.create_task(pool.open())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="once"):
        await pool.open()
    await pool.close()
    loads.set()
    with pytest.raises(Closed):
        await first
    assert len(asyncio.all_tasks()) == 1
    log = pool._relays._scores._log
    assert log is not None
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        log._file._database.execute("SELECT 1")


@virtually
async def test_closing_ends_everything_that_waits_and_leaves_nothing_behind():
    world = three()
    pool = await world.pool().open()
    subscription = pool.subscribe()
    for relay in world.relays.values():
        relay.character.deaf = True
    waiting = [asyncio.create_task(pool.publish(packet(1))), asyncio.create_task(anext(subscription))]
    await asyncio.sleep(1)
    await pool.close()
    await pool.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [Closed, Closed]
    with pytest.raises(Closed):
        await pool.publish(packet(2))
    with pytest.raises(Closed):
        pool.subscribe()
    assert all(relay.clients == 0 for relay in world.relays.values())
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtually
async def test_closing_ends_a_publish_that_has_no_copy_under_way():
    world = World(1, Character(), Character())
    pool = await world.pool(replace(QUIET, copies=1)).open()
    for relay in world.relays.values():
        relay.kill()
    await until(lambda: not pool.is_connected)
    await asyncio.sleep(70)  # connecting is given up
    waiting = asyncio.create_task(pool.publish(packet(1)))
    await asyncio.sleep(0.5)
    assert not waiting.done() and not len(pool._publisher), "it waits to try again"
    began_at = now()
    await pool.close()
    with pytest.raises(Closed):
        await waiting
    assert now() - began_at < 1
    await asyncio.sleep(5)  # and there are no further attempts


@virtually
async def test_closing_stops_the_copies_that_were_to_go_out_after_a_confirmed_publish():
    world = World(1, Character(), Character())
    pool = await world.pool(QUIET).open()
    world["b"].kill()
    await until(lambda: pool._relays.connected() == ["ws://a"])
    await asyncio.sleep(70)
    assert (await pool.publish(packet(1))).copies["ws://a"] is Copy.STORED
    await asyncio.sleep(0.5)
    await pool.close()
    await asyncio.sleep(5)


@virtually
async def test_closing_ends_a_publish_that_waits_for_room_in_the_checks():
    world = World(1, Character(), Character())
    options = PoolOptions(presence_packets=1, presence_delay=1000.0, sweep_interval=None, publish_timeout=500)
    pool = await world.pool(options).open()
    await pool.publish(packet(1))
    waiting = asyncio.create_task(pool.publish(packet(2)))
    await asyncio.sleep(0.5)
    began_at = now()
    await pool.close()
    with pytest.raises(Closed):
        await waiting
    assert now() - began_at < 1


@virtually
async def test_a_subscription_left_by_break_ends_by_itself():
    world = three()
    async with world.pool() as pool:
        for name in "abc":
            world[name].store(packet(1))
        async for _ in pool.subscribe():
            break
        await asyncio.sleep(0.1)
        assert not pool._readings
        assert not [task for task in asyncio.all_tasks() if "reader" in task.get_name()]


@virtually
async def test_cancelling_at_any_time_loses_no_packet():
    world = three()
    async with world.pool(replace(QUIET, queue_packets=2)) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        subscription = pool.subscribe()
        for n in range(60):
            for name in "abc":
                world[name].store(packet(n))
        received: list[str] = []
        step = 0
        while len(received) < 60:
            step += 1
            waiting = asyncio.ensure_future(anext(subscription))
            for _ in range(step % 4):
                await asyncio.sleep(0)
            if waiting.done():
                received.append(waiting.result().packet.packet_id)
            else:
                waiting.cancel()
                await asyncio.wait([waiting])
                if not waiting.cancelled():
                    received.append(waiting.result().packet.packet_id)
            await asyncio.sleep(0.01)
        assert len(set(received)) == 60


@pytest.mark.parametrize(
    "wrong",
    [
        {"copies": 0},
        {"confirmations": 3},
        {"connections": 1},
        {"retry_interval": -1.0},
        {"overlap": -1},
        {"profile": "x"},
    ],
)
def test_options_that_cannot_work_are_refused(wrong):
    with pytest.raises(ValueError):
        PoolOptions(**wrong)


def test_a_profile_may_be_given_by_its_name():
    assert PoolOptions(profile="SHIELDED").profile is Profile.SHIELDED  # type: ignore[arg-type]


def test_urls_in_logs_carry_no_secrets():
    assert shown("wss://me:secret@relay/strata?token=x") == "wss://relay/strata"


@pytest.mark.parametrize("limit", [None, 3])
def test_what_was_not_handed_on_comes_in_the_next_session(limit):
    async def scenario() -> None:
        world = three()
        for n in range(10):
            for name in "abc":
                world[name].store(packet(n))
        seen: list[str] = []
        async with world.pool(replace(QUIET, readers=3)) as pool:
            async with pool.subscribe(live=False, limit=limit) as subscription:
                async for delivery in subscription:
                    seen.append(delivery.packet.packet_id)
                    await asyncio.sleep(1)  # the others have arrived and wait
                    if len(seen) == 3:
                        break
            positions = subscription.positions
        async with world.pool(replace(QUIET, readers=3)) as pool:
            seen += [d.packet.packet_id async for d in pool.fetch(positions=positions)]
        assert set(seen) == {packet(n).packet_id for n in range(10)}

    run_virtually(scenario())


@pytest.mark.parametrize("endless", ["pages", "silence"])
@pytest.mark.parametrize("readers", [2, 3])
def test_a_relay_whose_history_never_ends_holds_up_nobody_who_reads_from_others(endless, readers):
    async def scenario() -> None:
        world = World(5, Character(endless=endless), Character(), Character())
        for n in range(10):
            for name in "abc":
                world[name].store(packet(n))
        async with world.pool(replace(QUIET, readers=readers)) as pool:
            await until(lambda: all(world[name].clients for name in "abc"))
            async with asyncio.timeout(300):
                subscription = pool.fetch()
                seen = [d.packet.packet_id async for d in subscription]
        assert sorted(seen) == sorted(packet(n).packet_id for n in range(10))
        (left,) = subscription.unfinished.items()
        assert subscription.finished == {"ws://b", "ws://c"}, "another one takes its place"
        assert left[0] == "ws://a" and isinstance(left[1], RequestTimeout)

    run_virtually(scenario())


def refused_by(url: str) -> Callable[..., SimStream]:
    """The subscriptions of connections, if this relay refuses all of them."""
    subscribe = SimConnection.subscribe

    def refuse(connection: SimConnection, **options: Any) -> SimStream:
        if connection.server.url == url:
            raise RequestRefused("policy_rejected", "not here")
        return subscribe(connection, **options)

    return refuse


@pytest.mark.req("C-272")
def test_a_relay_that_refuses_a_subscription_leaves_its_place_to_another_one(monkeypatch):
    async def scenario() -> None:
        world = World(5, Character(), Character())
        async with world.pool(replace(QUIET, readers=1)) as pool:
            await until(lambda: all(world[name].clients for name in "ab"))
            (first,) = pool._relays.readers([])
            (other,) = {"ws://a", "ws://b"} - {first}
            monkeypatch.setattr(SimConnection, "subscribe", refused_by(first))
            world[other[-1]].store(packet(1))
            async with pool.subscribe() as subscription:
                assert await take(subscription, 1) == [packet(1).packet_id]
                world[other[-1]].store(packet(2))
                assert await take(subscription, 1) == [packet(2).packet_id]
                assert subscription.relays == [other]

    run_virtually(scenario())


def test_what_takes_the_place_of_a_relay_is_read_from_the_beginning():
    """Else packets that are older, and that the first one lacked, would be missing without a word."""

    async def scenario() -> None:
        world = World(5, Character(latency=1.0), Character(latency=1.0), Character())
        world["c"].store(packet(100))
        await asyncio.sleep(1000)
        for n in range(10):
            world["a"].store(packet(n))
            world["b"].store(packet(n))
        async with world.pool(QUIET) as pool:
            await until(lambda: all(world[name].clients for name in "abc"))
            async with pool.fetch() as subscription:
                first = await take(subscription, 1)
                for url in subscription.relays:
                    world[url[-1]].kill()
                seen = [*first, *[d.packet.packet_id async for d in subscription]]
        assert subscription.finished == {"ws://c"}
        assert packet(100).packet_id in seen

    run_virtually(scenario())


@pytest.mark.parametrize("fate", ["answers", "refuses", "goes away"])
def test_a_reader_knows_which_relays_it_has_not_read_to_the_end(monkeypatch, fate):
    """Packets that only such a relay has may be missing."""

    async def scenario() -> None:
        world = World(5, Character(latency=1.0), Character())
        for n in range(10):
            world["a"].store(packet(n))
        async with world.pool(replace(QUIET, connections=2)) as pool:
            await until(lambda: all(world[name].clients for name in "ab"))
            if fate == "refuses":
                monkeypatch.setattr(SimConnection, "subscribe", refused_by("ws://a"))
            async with asyncio.timeout(300), pool.fetch() as subscription:
                if fate == "goes away":
                    await asyncio.sleep(0.5)
                    world["a"].kill()
                seen = [d.packet.packet_id async for d in subscription]
                unfinished = dict(subscription.unfinished)
        if fate == "answers":
            assert (len(seen), unfinished) == (10, {})
            assert subscription.finished == {"ws://a", "ws://b"}
        else:
            assert not seen and list(unfinished) == ["ws://a"]
            assert subscription.finished == {"ws://b"}

    run_virtually(scenario())


def test_if_no_relay_ends_its_history_the_reader_hears_of_it():
    async def scenario() -> None:
        world = World(5, *[Character(endless="silence")] * 3)
        async with world.pool(QUIET) as pool:
            async with asyncio.timeout(600):
                with pytest.raises(RequestTimeout):
                    [d async for d in pool.fetch()]

    run_virtually(scenario())


@pytest.mark.parametrize("endless", ["pages", "silence"])
def test_a_relay_that_never_comes_to_an_end_hides_no_packet_that_another_has(endless):
    async def scenario() -> None:
        world = World(5, Character(endless=endless), Character())
        world["b"].store(packet(1))
        async with world.pool(QUIET) as pool:
            await until(lambda: all(world[name].clients for name in "ab"))
            async with asyncio.timeout(120):
                found = [d.packet async for d in pool.find([packet(1).packet_id, packet(2).packet_id])]
        assert found == [packet(1)]

    run_virtually(scenario())


def test_a_relay_that_finds_a_packet_now_and_then_holds_up_those_that_another_has():
    async def scenario() -> None:
        world = World(5, Character(drips=29.0), Character())
        for n in range(100):
            for name in "ab":
                world[name].store(packet(n))
        async with world.pool(QUIET) as pool:
            await until(lambda: all(world[name].clients for name in "ab"))
            began = now()
            found = [d.packet async for d in pool.find([packet(n).packet_id for n in range(100)])]
        assert sorted(found, key=packet_number) == [packet(n) for n in range(100)]
        assert now() - began < 60

    run_virtually(scenario())


def packet_number(each: Packet) -> int:
    return int(str(each.content["text"]).split()[1])
