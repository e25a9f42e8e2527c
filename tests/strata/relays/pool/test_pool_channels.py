"""A pool as the basis of channels: finding packets, seats, the first OK, and channels while relays fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from strata.channels.connecting import Pool
from strata.channels.messaging import (
    ConnectionStatus,
    ConnectionStatusChange,
    ContentTopicHealthChange,
    MessageEnvelope,
    NodeMessageError,
    NodeMessagePropagated,
    NodeMessageReceived,
    NodeMessageSent,
    TopicHealth,
)
from strata.channels.messaging.binding import build_packet, build_repair
from strata.channels.sds import SdsMessage
from strata.channels.segmentation import SegmentationConfig, encode_segment, segment_message
from strata.protocol.errors import Closed, RequestRefused, RequestTimeout, StrataError
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from strata.relays.connection.values import Delivery, Published
from strata.relays.pool import PoolOptions

from tests.support.simulated_relays import (
    Character,
    SimConnection,
    SimRelay,
    World,
    packet,
    until,
)
from tests.support.virtual_time import START, virtually, wall

TOPIC = "/chat/1/room/proto"
ALICE, BOB = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
QUIET = PoolOptions(
    presence_delay=None, sweep_interval=None, ping_interval=None, probe_interval=None, sample_interval=None
)


class Connection(SimConnection):
    """A simulated connection that refuses, fails and limits packets as the world specifies."""

    def __init__(self, server: SimRelay, changed: Callable[[], None], peculiarities: Peculiarities) -> None:
        super().__init__(server, changed)
        self.peculiar = peculiarities

    @property
    def max_packet_bytes(self) -> int | None:
        return self.peculiar.limits.get(self.server.url)

    async def publish(self, packet: Packet, *, timeout: float | None = None) -> Published:
        refusal = self.peculiar.refusals.get(self.server.url)
        if refusal is not None:
            await asyncio.sleep(self.server.character.latency)
            raise refusal
        return await super().publish(packet, timeout=timeout)

    async def find(
        self, packet_ids: Iterable[str], *, types: Iterable[str] | str = (), since: int | None = None
    ) -> AsyncGenerator[Delivery, None]:
        self.peculiar.asked.append((self.server.url, tuple(packet_ids)))
        failure = self.peculiar.failures.get(self.server.url)
        if failure is not None:
            raise failure
        async for delivery in super().find(packet_ids, types=types, since=since):
            yield delivery

    async def _is_genuine(self, packet: Packet) -> bool:
        verdict = self.peculiar.verdicts.get(self.server.url, True)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict


class Peculiarities:
    """The special behaviour of the relays of a world, by URL."""

    def __init__(self) -> None:
        self.limits: dict[str, int] = {}
        self.refusals: dict[str, StrataError] = {}
        self.failures: dict[str, Exception] = {}
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.verdicts: dict[str, bool | Exception] = {}
        """The verdicts of a relay's keys on packets inside others."""


class ChannelWorld(World):
    """Relays in memory, and pools over them that channels can use."""

    def __init__(self, *characters: Character) -> None:
        super().__init__(1, *characters)
        self.peculiar = Peculiarities()

    def pool_of(self, identity: Identity | None = ALICE, **options: Any) -> Pool:
        return Pool(
            list(self.relays),
            identity=identity,
            options=replace(QUIET, **options),
            make=lambda url, changed: Connection(self.relays[url], changed, self.peculiar),
            wall=wall,
            random=self.chance.random,
        )


def world_of(relays: int) -> ChannelWorld:
    return ChannelWorld(*(Character() for _ in range(relays)))


def has_connected(pool: Pool, relays: int) -> bool:
    return len(pool._relays.connected()) == relays


def limit_of(pool: Pool) -> int | None:
    return pool.max_packet_bytes


def put(world: ChannelWorld, name: str, *numbers: int) -> None:
    for number in numbers:
        world[name].store(packet(number))


def ids(*numbers: int) -> list[str]:
    return [packet(number).packet_id for number in numbers]


# Finding.


@pytest.mark.req("C-285")
@virtually
async def test_each_relay_is_asked_for_what_the_ones_before_it_did_not_have():
    world = world_of(3)
    put(world, "a", 1, 2)
    put(world, "b", 2, 3)
    put(world, "c", 3, 4)
    async with world.pool_of() as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        order = pool._relays.connected()
        found = [each.packet.packet_id async for each in pool.find([*ids(1, 2, 3, 4, 5), *ids(1)])]
    assert sorted(found) == sorted(ids(1, 2, 3, 4)), "each once"
    assert [url for url, _ in world.peculiar.asked] == order
    had: set[str] = set()
    for url, asked in world.peculiar.asked:
        assert set(asked) == {*ids(1, 2, 3, 4, 5)} - had
        had |= world.relays[url].ids


@virtually
async def test_once_everything_is_found_nobody_else_is_asked():
    world = world_of(3)
    for name in "abc":
        put(world, name, 1)
    async with world.pool_of() as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        assert [each.packet.packet_id async for each in pool.find(ids(1))] == ids(1)
        assert [each async for each in pool.find([])] == []
    assert len(world.peculiar.asked) == 1


@virtually
async def test_a_relay_that_cannot_answer_is_passed_over():
    world = world_of(2)
    put(world, "b", 1)
    world.peculiar.failures["ws://a"] = RequestTimeout("SUBSCRIBE", 30)
    async with world.pool_of() as pool:
        await until(lambda: len(pool._relays.connected()) == 2)
        assert [each.packet.packet_id async for each in pool.find(ids(1, 2))] == ids(1)


@virtually
async def test_only_if_no_relay_could_answer_finding_fails():
    world = world_of(2)
    async with world.pool_of() as pool:
        await until(lambda: len(pool._relays.connected()) == 2)
        world.peculiar.failures = {url: OSError("no route") for url in world.relays}
        with pytest.raises(OSError, match="no route"):
            await anext(pool.find(ids(1)))
    with pytest.raises(Closed):
        await anext(pool.find(ids(1)))


@virtually
async def test_finding_nothing_because_no_relay_is_there_is_told_from_finding_nothing_at_all():
    world = world_of(2)
    async with world.pool_of() as pool:
        await until(lambda: len(pool._relays.connected()) == 2)
        for name in "ab":
            world[name].kill()
        await until(lambda: not pool._relays.connected())
        with pytest.raises(StrataError):
            await anext(pool.find(ids(1)))


# What a node needs from a pool.


@virtually
async def test_seats_are_the_relays_connected_of_as_many_as_packets_go_to():
    world = world_of(3)
    async with world.pool_of(copies=2, replace_after=3_600.0) as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        assert pool.seats == (3, 2)
        for left, name in enumerate("abc"):
            world[name].kill()
            await until(partial(has_connected, pool, 2 - left))
            assert pool.seats == (2 - left, 2)
    lonely = world_of(1)
    async with lonely.pool_of(copies=2) as pool:
        assert pool.seats == (1, 1), "no more can be had than are known"


@pytest.mark.req("C-289")
@virtually
async def test_the_limit_of_a_pool_is_the_smallest_that_a_connected_relay_has_told():
    world = world_of(3)
    async with world.pool_of() as pool:
        await until(lambda: len(pool._relays.connected()) == 3)
        assert limit_of(pool) is None
        world.peculiar.limits |= {"ws://a": 20_480, "ws://b": 262_144}
        assert limit_of(pool) == 20_480
        world["a"].kill()
        await until(lambda: "ws://a" not in pool._relays.connected())
        assert limit_of(pool) == 262_144


@pytest.mark.req("C-262")
@virtually
async def test_the_first_ok_is_told_once_and_before_the_others_are_there():
    world = ChannelWorld(Character(latency=0.1), Character(latency=4.0))
    async with world.pool_of(copies=2, confirmations=2, retry_interval=60.0) as pool:
        await until(lambda: len(pool._relays.connected()) == 2)
        told: list[float] = []
        began_at = asyncio.get_running_loop().time()
        await pool.publish(packet(1), on_stored=lambda: told.append(asyncio.get_running_loop().time()))
        assert len(told) == 1 and told[0] - began_at < 0.5
        assert asyncio.get_running_loop().time() - began_at >= 4


@virtually
async def test_a_packet_that_is_refused_by_all_was_never_stored():
    world = world_of(2)
    async with world.pool_of() as pool:
        await until(lambda: len(pool._relays.connected()) == 2)
        world.peculiar.refusals = {url: RequestRefused("blocked_author", "no") for url in world.relays}
        told: list[bool] = []
        with pytest.raises(RequestRefused):
            await pool.publish(packet(1), on_stored=lambda: told.append(True))
        assert told == []


# The node over a pool.


class Told:
    def __init__(self, node: Any) -> None:
        self.events: list[Any] = []
        for emitter in (node.message_events, node.health_events):
            for name in emitter.names:
                emitter.on(name, self.events.append)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def envelope(payload: bytes = b"hello") -> MessageEnvelope:
    return MessageEnvelope(content_topic=TOPIC, payload=payload)


@pytest.mark.req("C-262")
@virtually
async def test_propagated_is_the_first_of_two_relays_and_sent_the_second():
    world = ChannelWorld(Character(latency=0.1), Character(latency=4.0))
    async with world.pool_of(copies=2, confirmations=2, retry_interval=60.0) as pool, pool.node as node:
        await until(lambda: len(pool._relays.connected()) == 2)
        told = Told(node)
        await node.send(envelope())
        first = await until(lambda: told.of(NodeMessagePropagated))
        assert sum(len(relay.log) for relay in world.relays.values()) == 1
        assert await until(lambda: told.of(NodeMessageSent)) - first > 1


@pytest.mark.req("C-262")
@virtually
async def test_by_default_one_relay_is_enough_for_a_message_to_be_sent():
    world = ChannelWorld(Character(latency=0.1), Character(latency=30.0))
    async with world.pool_of() as pool, pool.node as node:
        await until(lambda: len(pool._relays.connected()) >= 1)
        told = Told(node)
        began_at = asyncio.get_running_loop().time()
        await node.send(envelope())
        assert await until(lambda: told.of(NodeMessageSent)) - began_at < 3


@pytest.mark.req("C-291")
@virtually
async def test_the_same_packet_is_at_both_relays_and_comes_once():
    world = world_of(2)
    async with (
        world.pool_of(ALICE) as writing,
        world.pool_of(BOB) as reading,
        writing.node as alice,
        reading.node as bob,
    ):
        await until(lambda: len(writing._relays.connected()) == len(reading._relays.connected()) == 2)
        told = Told(bob)
        await bob.subscribe([TOPIC])
        await alice.send(envelope())
        await until(lambda: world["a"].log and world["b"].log and told.of(NodeMessageReceived))
        await asyncio.sleep(60)
        assert world["a"].ids == world["b"].ids and len(world["a"].ids) == 1
        assert len(told.of(NodeMessageReceived)) == 1


@pytest.mark.req("C-292")
@virtually
async def test_one_relay_that_refuses_for_good_does_not_fail_a_message_all_of_them_do():
    world = world_of(2)
    async with world.pool_of() as pool, pool.node as node:
        await until(lambda: len(pool._relays.connected()) == 2)
        told = Told(node)
        world.peculiar.refusals = {"ws://a": RequestRefused("blocked_author", "not here")}
        await node.send(envelope(), request_id="one")
        await until(lambda: told.of(NodeMessageSent))
        assert not told.of(NodeMessageError)
        world.peculiar.refusals["ws://b"] = RequestRefused("blocked_author", "nor here")
        await node.send(envelope(), request_id="both")
        await until(lambda: told.of(NodeMessageError))
        (error,) = told.of(NodeMessageError)
        assert error.request_id == "both" and not error.recoverable and error.code == "blocked_author"


@pytest.mark.req("C-265", "C-266")
@virtually
async def test_relays_that_stop_one_by_one_change_the_status_in_order_and_fail_no_message():
    world = world_of(2)
    async with world.pool_of(revive_after=3_600.0) as pool, pool.node as node:
        await until(lambda: len(pool._relays.connected()) == 2)
        told = Told(node)
        await node.subscribe([TOPIC])
        await asyncio.sleep(2)
        for name in "ab":
            world[name].kill()
            await asyncio.sleep(2)
        await node.send(envelope(b"into the dark"))
        for name in "ab":
            world[name].start()
            await asyncio.sleep(5)
        await until(lambda: told.of(NodeMessageSent) and told.of(NodeMessageReceived))
        assert not told.of(NodeMessageError)
        statuses = [event.status for event in told.of(ConnectionStatusChange)]
        full, part, none = (
            ConnectionStatus.CONNECTED,
            ConnectionStatus.PARTIALLY_CONNECTED,
            ConnectionStatus.DISCONNECTED,
        )
        assert statuses == [full, part, none, part, full]
        healths = [event.health for event in told.of(ContentTopicHealthChange)]
        good, less, bad = (
            TopicHealth.SUFFICIENTLY_HEALTHY,
            TopicHealth.MINIMALLY_HEALTHY,
            TopicHealth.UNHEALTHY,
        )
        assert healths == [good, less, bad, less, good]


@virtually
async def test_a_pool_without_an_identity_carries_no_channels():
    pool = world_of(1).pool_of(None)
    with pytest.raises(ValueError, match="identity"):
        _ = pool.node


# Channels over a pool.


class Talker:
    """A channel over a pool, and the messages it took."""

    def __init__(self, pool: Pool, name: str, **options: Any) -> None:
        self.channel = pool.channel("room", topic=TOPIC, sender_id=name, **options)
        self.taken: list[bytes] = []
        self.channel.message_events.on("message-received", lambda event: self.taken.append(event.payload))


@pytest.mark.req("C-270", "C-271", "C-291")
@virtually
async def test_two_talk_over_two_relays_without_one_needless_retransmission():
    world = world_of(2)
    async with world.pool_of(ALICE) as first, world.pool_of(BOB) as second:
        alice, bob = Talker(first, "alice"), Talker(second, "bob")
        async with alice.channel, bob.channel:
            for number in range(20):
                await alice.channel.send(b"a%d" % number)
                await bob.channel.send(b"b%d" % number)
                await asyncio.sleep(0.5)
            await until(lambda: len(alice.taken) == len(bob.taken) == 20)
            await until(lambda: alice.channel.sync_status().is_synced and bob.channel.sync_status().is_synced)
            assert alice.taken == [b"b%d" % number for number in range(20)]
            assert bob.taken == [b"a%d" % number for number in range(20)]
            for talker in (alice, bob):
                assert talker.channel.statistics.sds.retransmissions == 0
        await first.node.close()
        await second.node.close()


@virtually
async def test_a_newcomer_over_a_pool_is_given_nothing_from_before_that_a_sweep_finds_at_another_relay():
    world = world_of(3)
    (segment,) = segment_message(b"of old", SegmentationConfig(), request_id="0" * 32)
    old = SdsMessage("carol", "old", "room", 1000 * START, (), content=encode_segment(segment))
    envelope = MessageEnvelope(content_topic=TOPIC, payload=old.encode())
    world["c"].store(build_packet(BOB, envelope, now=START, nonce="0x" + "00" * 16))
    await asyncio.sleep(10)
    options = {"connections": 3, "readers": 1, "sweep_interval": 5.0}
    async with world.pool_of(ALICE, **options) as first, world.pool_of(BOB) as second:
        newcomer, other = Talker(first, "alice", join="now"), Talker(second, "bob")
        async with newcomer.channel, other.channel:
            await until(lambda: first.statistics.sweeps >= 3)
            await other.channel.send(b"now")
            await until(lambda: newcomer.taken)
            assert newcomer.taken == [b"now"]
        await first.node.close()
        await second.node.close()


@pytest.mark.req("C-272", "C-278")
@virtually
async def test_relays_that_die_by_turns_lose_nothing_and_double_nothing():
    world = world_of(3)
    options = {"connections": 3, "replace_after": 1.0, "revive_after": 10.0, "reconnect_cap": 5.0}
    async with world.pool_of(ALICE, **options) as first, world.pool_of(BOB, **options) as second:
        alice, bob = Talker(first, "alice"), Talker(second, "bob")
        async with alice.channel, bob.channel:
            for number in range(60):
                if number % 10 == 0:
                    for name in "abc":
                        world[name].start()
                    world["abc"[number // 10 % 3]].kill()
                await alice.channel.send(b"a%d" % number)
                await bob.channel.send(b"b%d" % number)
                await asyncio.sleep(world.chance.uniform(0.0, 1.0))
            for name in "abc":
                world[name].start()
            await until(lambda: alice.channel.sync_status().is_synced and bob.channel.sync_status().is_synced)
            await asyncio.sleep(60)
            assert sorted(alice.taken) == sorted(b"b%d" % number for number in range(60))
            assert sorted(bob.taken) == sorted(b"a%d" % number for number in range(60))
            assert alice.channel.log() == bob.channel.log()
        await first.node.close()
        await second.node.close()


@pytest.mark.req("C-285")
@virtually
async def test_a_message_withheld_from_every_stream_is_found_by_its_hint():
    world = ChannelWorld(Character(), Character())
    async with world.pool_of(ALICE) as first, world.pool_of(BOB) as second:
        alice = Talker(first, "alice")
        bob = Talker(second, "bob", enable_repair=False)
        async with alice.channel, bob.channel:
            await asyncio.sleep(1)
            for relay in world.relays.values():
                relay.character.withholds = 1.0
            await alice.channel.send(b"withheld")
            await until(lambda: all(relay.log for relay in world.relays.values()))
            await asyncio.sleep(1)
            for relay in world.relays.values():
                relay.character.withholds = 0.0
            await alice.channel.send(b"which follows it")
            await until(lambda: bob.taken == [b"withheld", b"which follows it"])
            assert bob.channel.statistics.retrievals > 0
            assert world.peculiar.asked
        await first.node.close()
        await second.node.close()


# Packets inside other packets.


@pytest.mark.req("C-294")
@pytest.mark.parametrize(
    ("verdicts", "heard"),
    [
        ([True, True], True),
        ([False, True], True),
        ([RequestTimeout("keys", 1), True], True),
        ([False, False], False),
        ([False, RequestTimeout("keys", 1)], False),
        ([RequestTimeout("keys", 1), RequestTimeout("keys", 1)], False),
    ],
)
@virtually
async def test_a_repair_is_believed_if_any_relay_knows_keys_that_signed_it(verdicts, heard):
    world = world_of(2)
    world.peculiar.verdicts = dict(zip(world.relays, verdicts, strict=True))
    original = build_packet(BOB, envelope(), now=int(wall()), nonce="0x" + "01" * 16)
    async with world.pool_of() as pool, pool.node as node:
        await until(partial(has_connected, pool, 2))
        received: list[NodeMessageReceived] = []
        node.message_events.on(NodeMessageReceived.name, received.append)
        await node.subscribe([TOPIC])
        await asyncio.sleep(1)
        again = build_repair(ALICE, original, now=int(wall()), nonce="0x" + "02" * 16)
        next(iter(world.relays.values())).store(again)
        await asyncio.sleep(30)
        assert [each.message.author for each in received] == [BOB.did] * heard
        assert node.dropped == (not heard)
