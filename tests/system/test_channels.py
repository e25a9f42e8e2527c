"""Channels over real relays and real sockets: processes die on either side, and the conversation goes on."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import random
import secrets
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import strata
from strata.channels.encryption import GroupKey, GroupKeyEncryption
from strata.channels.messaging import MessageEnvelope, RelayNode
from strata.channels.messaging.binding import build_packet, build_repair
from strata.channels.reliable import ReliableChannel, make_channel
from strata.channels.sds import SdsMessage
from strata.channels.segmentation.messages import encode_segment
from strata.channels.segmentation.splitting import SegmentationConfig, segment_message
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet
from strata.relays.pool import PoolOptions

from benches.channel_absence import publish_all, written
from tests.support.faulty_relay import faulty_relay
from tests.support.forks import STRATA, ForkedProcess
from tests.support.ports import free_port
from tests.support.relay_process import RelayProcess, environment, running
from tests.support.waiting import until

MENDING = strata.Options(backoff_base=0.05, backoff_cap=0.5, connect_timeout=30.0)
KILLS = 3


def longer(taken: list[bytes], count: int) -> bool:
    return len(taken) > count


class Talker:
    """An open channel, and its events."""

    def __init__(self, channel: ReliableChannel) -> None:
        self.channel = channel
        self.taken: list[bytes] = []
        self.events: list[Any] = []
        for name in channel.message_events.names:
            channel.message_events.on(name, self.events.append)
        channel.message_events.on("message-received", lambda event: self.taken.append(event.payload))

    def told(self, name: str) -> list[Any]:
        return [event for event in self.events if event.name == name]

    @property
    def synced(self) -> bool:
        return self.channel.sync_status().is_synced

    async def send(self, payload: bytes) -> str:
        return await self.channel.send(payload)


@contextlib.asynccontextmanager
async def talking(
    url: str,
    topic: str,
    name: str | None = None,
    *,
    identity: Identity | None = None,
    options: strata.Options = MENDING,
    **settings: Any,
) -> AsyncIterator[Talker]:
    """A participant with its own connection."""
    async with strata.connect(url, identity=identity or Identity.generate(), options=options) as relay:
        talker = Talker(relay.channel("room", topic=topic, sender_id=name, **settings))
        async with talker.channel:
            yield talker
        await relay.node.close()


async def stored(url: str, topic: str) -> list[Packet]:
    """Every packet of a topic that a relay serves."""
    async with strata.connect(url) as relay, relay.fetch(types=topic) as found:
        return [delivery.packet async for delivery in found]


def assert_exactly(taken: list[bytes], sent: list[bytes]) -> None:
    assert len(taken) == len(set(taken)), "nothing twice"
    assert set(taken) == set(sent), "nothing lost"


# A quiet relay.


@pytest.mark.req("C-259", "C-280")
async def test_two_exchange_and_acknowledge_without_one_needless_retransmission(
    relay: RelayProcess, topic: str
) -> None:
    async with (
        talking(relay.ws, topic, "alice", options=strata.Options()) as alice,
        talking(relay.ws, topic, "bob", options=strata.Options()) as bob,
    ):
        theirs, ours = ([b"%s %d" % (name, n) for n in range(50)] for name in (b"alice", b"bob"))
        for hers, his in zip(theirs, ours, strict=True):
            await asyncio.gather(alice.send(hers), bob.send(his))
        await until(lambda: len(alice.told("reliable:message:delivered")) == 50, "Bob has all")
        await until(lambda: len(bob.told("reliable:message:delivered")) == 50, "Alice has all")
        assert bob.taken == theirs and alice.taken == ours, "each once, in the order they were sent in"
        for talker in (alice, bob):
            assert talker.channel.statistics.sds.retransmissions == 0
            assert not talker.told("reliable:message:send-error")
        await until(lambda: alice.channel.log() == bob.channel.log(), "one log")


@pytest.mark.req("C-269")
async def test_who_comes_later_reads_what_was_said_before(relay: RelayProcess, topic: str) -> None:
    said = [b"%d" % number for number in range(20)]
    async with talking(relay.ws, topic, "alice") as alice:
        for each in said:
            await alice.send(each)
        await until(lambda: len(alice.told("reliable:message:sent")) == 20, "the relay has all")
    async with talking(relay.ws, topic, "bob") as bob:
        await until(lambda: len(bob.taken) == 20, "Bob has read it")
        assert bob.taken == said


@pytest.mark.parametrize("ahead", [1_500, -1_500])
async def test_a_program_with_a_wrong_clock_hears_and_reads_as_others_do(
    relay: RelayProcess, topic: str, ahead: int
) -> None:
    async with talking(relay.ws, topic, "alice") as alice, strata.connect(relay.ws) as other:
        await alice.send(b"before")
        await until(lambda: alice.told("reliable:message:sent"), "the relay has it")
        node = RelayNode(other, identity=Identity.generate(), wall=lambda: time.time() + ahead)
        bob = Talker(make_channel(node, "room", topic, "bob"))
        async with node, bob.channel:
            await until(lambda: bob.taken == [b"before"], "it is read")
            told = node.store_time()
            assert told is not None and abs(told - time.time()) < 600, "by the challenge"
            await alice.send(b"live")
            await until(lambda: bob.taken == [b"before", b"live"], "it is heard")
            assert not bob.told("history-gap")


@pytest.mark.req("C-280")
async def test_a_relay_without_any_extension_carries_a_channel(topic: str) -> None:
    quick = replace(MENDING, idle_timeout=0.5)
    small: dict[str, Any] = {"bloom_filter_size": 100, "segment_size_bytes": 4_000, "options": quick}
    async with (
        faulty_relay(extensions=[]) as url,
        talking(url, topic, "alice", **small) as alice,
        talking(url, topic, "bob", **small) as bob,
    ):
        sent = [random.Random(number).randbytes(10_000) for number in range(5)]
        for each in sent:
            await alice.send(each)
        await bob.send(b"hello")
        await until(lambda: len(bob.taken) == 5 and alice.taken == [b"hello"], "all of it")
        await until(lambda: alice.synced and bob.synced, "all acknowledged")
        assert bob.taken == sent
        async with talking(url, topic, "carol", **small) as carol:
            await until(lambda: len(carol.taken) == 6, "Carol reads it afterwards")
            assert_exactly(carol.taken, [*sent, b"hello"])


# Relays die.


@pytest.mark.req("C-296")
async def test_a_relay_killed_amid_a_conversation_loses_nothing_and_doubles_nothing(
    tmp_path: Path, topic: str
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with running(RelayProcess(tmp_path / "relay", port=free_port())) as relay:
        async with talking(relay.ws, topic, "alice") as alice, talking(relay.ws, topic, "bob") as bob:
            sent: dict[str, list[bytes]] = {"alice": [], "bob": []}
            kills = 0

            async def talk(talker: Talker, name: str) -> None:
                while kills < KILLS or len(sent[name]) < 60:
                    payload = f"{name} {len(sent[name])}".encode()
                    await talker.send(payload)
                    sent[name].append(payload)
                    await asyncio.sleep(chance.uniform(0.0, 0.2))  # spreads them over the kills

            talks = asyncio.gather(talk(alice, "alice"), talk(bob, "bob"))
            for _ in range(KILLS):
                enough = len(bob.taken) + chance.randrange(3, 15)
                await until(partial(longer, bob.taken, enough), "it goes on")
                await asyncio.to_thread(relay.kill)
                await asyncio.to_thread(relay.start)
                kills += 1
            await talks
            await until(lambda: alice.synced and bob.synced, "all acknowledged")
            await until(lambda: len(alice.taken) >= len(sent["bob"]), "Alice has received all")
            await until(lambda: len(bob.taken) >= len(sent["alice"]), "Bob has received all")
            assert_exactly(alice.taken, sent["bob"])
            assert_exactly(bob.taken, sent["alice"])
            assert not alice.told("reliable:message:send-error") + bob.told("reliable:message:send-error")


@pytest.mark.req("C-270", "C-271", "C-272", "C-291")
async def test_one_of_two_relays_of_a_pool_dies_for_good_and_nothing_is_lost(
    tmp_path: Path, topic: str
) -> None:
    first, second = RelayProcess(tmp_path / "first"), RelayProcess(tmp_path / "second")
    options = PoolOptions(relay=MENDING, connections=2, replace_after=0.5, reconnect_cap=1.0)
    try:
        await asyncio.gather(*(asyncio.to_thread(each.start) for each in (first, second)))
        urls = [first.ws, second.ws]
        async with (
            strata.connect_pool(urls, identity=Identity.generate(), options=options) as hers,
            strata.connect_pool(urls, identity=Identity.generate(), options=options) as his,
        ):
            await until(lambda: hers.seats[0] == his.seats[0] == 2, "both at both")
            alice = Talker(hers.channel("room", topic=topic, sender_id="alice"))
            bob = Talker(his.channel("room", topic=topic, sender_id="bob"))
            async with alice.channel, bob.channel:
                sent = [f"alice {number}".encode() for number in range(60)]
                for number, payload in enumerate(sent):
                    await alice.send(payload)
                    await bob.send(payload[::-1])
                    if number == 20:
                        await until(lambda: len(bob.taken) > 5, "it has begun")
                        both = [{p.packet_id for p in await stored(url, topic)} for url in urls]
                        assert both[0] & both[1], "the same packets are at both"
                        await asyncio.to_thread(first.kill)
                await until(lambda: alice.synced and bob.synced, "all acknowledged")
                await until(lambda: len(alice.taken) >= 60 and len(bob.taken) >= 60, "all received")
                assert_exactly(bob.taken, sent)
                assert_exactly(alice.taken, [payload[::-1] for payload in sent])
            await hers.node.close()
            await his.node.close()
    finally:
        first.kill()
        second.kill()


# Programs die.


class Program:
    """One life of `channel_participant.py`."""

    def __init__(self, process: ForkedProcess) -> None:
        self.process = process
        self.sent: list[str] = []
        self.synced = False
        self.ready = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, **settings: Any) -> Program:
        settings = {"store": None, "options": {}, "seed": "07" * 32, "name": "child", **settings}
        process = ForkedProcess(
            STRATA,
            [json.dumps(settings, default=str)],
            env=environment({}),
            module="tests.support.channel_participant",
            stdin=subprocess.PIPE,
            stderr=2,
        )
        program = cls(process)
        async with asyncio.timeout(60):
            await program.ready.wait()
        return program

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await asyncio.to_thread(self.process.stdout.readline):
            kind, *rest = json.loads(line)
            if kind == "ready":
                self.ready.set()
            elif kind == "sent":
                self.sent.append(rest[0])
            elif kind == "synced":
                self.synced = rest[0]
        self.ready.set()

    def tell(self, *command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    async def kill(self) -> None:
        """kill -9; its output until then is read."""
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        await self._reader
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


def has_recorded(record: Path, count: int) -> bool:
    return len(recorded(record)) >= count


def recorded(record: Path) -> list[dict[str, Any]]:
    if not record.exists():
        return []
    # A kill may cut the last line short, though never an earlier one.
    return [json.loads(line) for line in record.read_text().split("\n")[:-1]]


@pytest.mark.req("C-255", "C-257")
@pytest.mark.parametrize("hand_over", ["once", "again"])
async def test_a_program_killed_and_started_again_on_its_store_loses_nothing_and_repeats_nothing(
    relay: RelayProcess, topic: str, tmp_path: Path, hand_over: str
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    record = tmp_path / "record"
    settings = {
        "url": relay.ws,
        "topic": topic,
        "store": tmp_path / "store",
        "record": record,
        "options": {"hand_over": hand_over},
    }
    boundaries: list[int] = []
    async with talking(relay.ws, topic, "anchor") as anchor:
        ours: list[str] = []

        async def talk() -> None:
            while len(boundaries) < KILLS:
                ours.append(f"anchor {len(ours)}")
                await anchor.send(ours[-1].encode())
                await asyncio.sleep(chance.uniform(0.0, 0.05))

        talking_on = asyncio.create_task(talk())
        asked: list[str] = []
        confirmed: list[str] = []
        program = await Program.start(**settings)
        try:
            for _ in range(KILLS):
                seen = len(recorded(record))
                enough = seen + chance.randrange(5, 25)
                for _ in range(10):
                    asked.append(f"child {len(asked)}")
                    program.tell("send", asked[-1])
                await until(partial(has_recorded, record, enough), "it received")
                await program.kill()
                confirmed += program.sent
                boundaries.append(len(recorded(record)))
                program = await Program.start(**settings)
            await talking_on
            program.tell("send", "the end")
            await until(lambda: "the end" in program.sent, "it sends again")
            confirmed.append("the end")
            await until(lambda: b"the end" in anchor.taken and anchor.synced, "all is acknowledged")
            enough = len(ours) - (KILLS if hand_over == "once" else 0)
            await until(lambda: len({each["text"] for each in recorded(record)}) >= enough, "all is received")
        finally:
            await program.kill()
        # What it sent: all confirmed messages came, nothing twice, and nothing that was never requested.
        heard = [payload.decode() for payload in anchor.taken]
        assert len(heard) == len(set(heard)), "nothing twice"
        assert set(confirmed) <= set(heard) <= {*asked, "the end"}
        # What it received. The message being processed when it died is the program's own concern.
        lines = [each["text"] for each in recorded(record)]
        if hand_over == "once":
            assert len(lines) == len(set(lines)), "nothing twice"
            assert len(set(ours) - set(lines)) <= KILLS
        else:
            for boundary in reversed(boundaries):
                if boundary < len(lines) and lines[boundary] == lines[boundary - 1]:
                    del lines[boundary]
            assert lines == ours
        assert set(lines) <= set(ours)


def without_the_one_at_work(lines: list[str], boundaries: list[int]) -> list[str]:
    """The recorded lines, without the first message of a life if the previous one was killed handling it."""
    repeated = {at for at in boundaries if 0 < at < len(lines) and lines[at] == lines[at - 1]}
    return [line for at, line in enumerate(lines) if at not in repeated]


async def killed_twice(record: Path, at: tuple[int, int], count: int, **settings: Any) -> list[int]:
    """Run a program until it has recorded a number of lines, kill it, and again; the third life takes all
    `count`.

    Returns the number of lines at each kill.
    """
    boundaries: list[int] = []
    for enough in at:
        program = await Program.start(record=record, **settings)
        try:
            await until(partial(has_recorded, record, enough), "it takes messages")
        finally:
            await program.kill()
        boundaries.append(len(recorded(record)))
    program = await Program.start(record=record, **settings)
    try:
        await until(lambda: len({each["text"] for each in recorded(record)}) >= count, "it has taken all")
        await asyncio.sleep(0.2)  # a repetition would arrive now
    finally:
        await program.kill()
    return boundaries


@pytest.mark.req("C-255", "C-257")
@pytest.mark.parametrize(
    ("hand_over", "takes"),
    [("at_most_once", "handlers"), ("at_least_once", "handlers"), ("at_least_once", "acks")],
)
async def test_a_program_killed_amid_its_handlers_loses_nothing_and_repeats_only_what_it_worked_on(
    relay: RelayProcess, topic: str, tmp_path: Path, hand_over: str, takes: str
) -> None:
    said, record = [f"order {number}" for number in range(40)], tmp_path / "record"
    async with talking(relay.ws, topic, "anchor") as anchor:
        for each in said:
            await anchor.send(each.encode())
        boundaries = await killed_twice(
            record,
            (7, 25),
            len(said) - (2 if hand_over == "at_most_once" else 0),
            url=relay.ws,
            topic=topic,
            store=tmp_path / "store",
            takes=takes,
            works=0.01,
            options={"hand_over": hand_over, "auto_ack": takes != "acks"},
        )
    lines = recorded(record)
    begun = [each["text"] for each in lines if "acknowledged" not in each]
    if hand_over == "at_most_once":
        assert len(begun) == len(set(begun)), "nothing twice"
        assert set(begun) <= set(said) and len(begun) >= len(said) - 2, "at most the one at work is lost"
    elif takes == "handlers":
        assert without_the_one_at_work(begun, boundaries) == said
    else:
        done = {each["text"]: at for at, each in enumerate(lines) if "acknowledged" in each}
        assert list(dict.fromkeys(begun)) == said
        assert not [each for at, each in enumerate(lines) if done.get(each["text"], at) < at]
        assert len(begun) <= len(said) + len(boundaries)


@pytest.mark.req("C-257", "C-269")
@pytest.mark.parametrize("hand_over", ["at_most_once", "at_least_once"])
async def test_a_program_killed_while_it_reads_a_long_absence_goes_on_where_it_stood(
    relay: RelayProcess, topic: str, tmp_path: Path, hand_over: str
) -> None:
    count, record = 300, tmp_path / "record"
    await publish_all(relay.ws, written(count, topic, filter_ids=100))
    boundaries = await killed_twice(
        record,
        (40, 150),
        count - (2 if hand_over == "at_most_once" else 0),
        url=relay.ws,
        topic=topic,
        store=tmp_path / "store",
        # A full inbox pauses the reading: each kill comes in the middle of it.
        options={"hand_over": hand_over, "bloom_filter_size": 100, "max_inbox_messages": 20},
    )
    assert len(boundaries) == 2 and boundaries[1] < count
    said = [f"message {number}" for number in range(count)]
    lines = [each["text"] for each in recorded(record)]
    if hand_over == "at_least_once":
        assert without_the_one_at_work(lines, boundaries) == said
    else:
        assert [each for each in said if each in set(lines)] == lines, "in order, nothing twice"
        assert len(lines) >= count - 2, "at most the one at work is lost"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of another process's memory")
async def test_ten_megabytes_cross_whole_in_a_small_multiple_of_their_size(
    relay: RelayProcess, topic: str, tmp_path: Path
) -> None:
    payload = os.urandom(10_000_000)
    program = await Program.start(url=relay.ws, topic=topic, record=tmp_path / "record")
    try:
        before = psutil.Process(program.process.pid).memory_info().rss
        async with talking(relay.ws, topic, "alice", options=strata.Options()) as alice:
            await alice.send(payload)
            await until(lambda: recorded(tmp_path / "record"), "it arrived", 100)
            await until(lambda: alice.told("reliable:message:delivered"), "it is acknowledged", 100)
            retransmissions = alice.channel.statistics.sds.retransmissions
        (line,) = recorded(tmp_path / "record")
        assert line["bytes"] == len(payload) and line["sha256"] == hashlib.sha256(payload).hexdigest()
        peak = peak_bytes(program.process.pid)
        print(f"{(peak - before) / len(payload):.1f} times its size, {retransmissions} retransmissions")
        assert peak - before < 8 * len(payload)
    finally:
        await program.kill()


def peak_bytes(pid: int) -> int:
    """The peak resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    (peak,) = (int(each.split()[1]) * 1024 for each in status.split("\n") if each.startswith("VmHWM"))
    return peak


# Authors.


@pytest.mark.req("C-287")
async def test_a_spoofed_sender_is_dropped_and_the_true_one_is_heard(relay: RelayProcess, topic: str) -> None:
    true, mallory = Identity.generate(), Identity.generate()
    async with (
        talking(relay.ws, topic, identity=true, sender_binding="did") as alice,
        talking(relay.ws, topic, sender_binding="did") as bob,
        talking(relay.ws, topic, true.did, identity=mallory) as spoofer,
    ):
        await spoofer.send(b"I am Alice")
        await until(lambda: spoofer.told("message-sent"), "the relay takes it: it is signed by somebody")
        await until(lambda: bob.channel.statistics.senders_forged > 0, "Bob has seen through it")
        await alice.send(b"I am Alice, really")
        await until(lambda: bob.taken, "Bob hears Alice")
        assert bob.taken == [b"I am Alice, really"]


@pytest.mark.req("C-287", "C-294")
async def test_a_genuine_repair_is_accepted_and_a_forged_one_is_not(relay: RelayProcess, topic: str) -> None:
    absent, helper = Identity.generate(), Identity.generate()
    yesterday = int(time.time()) - 2 * 86_400  # no relay would still accept the original

    def said(text: bytes) -> Packet:
        message = SdsMessage(
            message_id=secrets.token_hex(32),
            channel_id="room",
            sender_id=absent.did,
            lamport_timestamp=yesterday * 1_000,
            content=segment_of(text),
        )
        envelope = MessageEnvelope(content_topic=topic, payload=message.encode())
        return build_packet(absent, envelope, now=yesterday, nonce=f"0x{secrets.token_hex(16)}")

    def again(original: Packet) -> Packet:
        return build_repair(helper, original, now=int(time.time()), nonce=f"0x{secrets.token_hex(16)}")

    genuine, other = said(b"said two days ago"), said(b"never said")
    value = json.loads(genuine.canonical)
    value["content"] = other.content
    forged = strata.protocol.packets.build(
        helper,
        {"type": topic, "profile": "reliable-channel/1", "original": value},
        timestamp=int(time.time()),
        nonce=f"0x{secrets.token_hex(16)}",
    )
    async with (
        strata.connect(relay.ws, identity=helper) as publishing,
        talking(relay.ws, topic, sender_binding="did") as bob,
    ):
        await publishing.publish(forged)
        await publishing.publish(again(genuine))
        await until(lambda: bob.taken, "the repair is heard")
        assert bob.taken == [b"said two days ago"]
        # And again, by the node: it embeds the original, not the first repair.
        await publishing.node.send_again(again_hash(bob), topic=topic, request_id="r")
        await until_stored(relay.ws, topic, lambda count: count == 3)
        await publishing.node.close()
        packets = await stored(relay.ws, topic)
        embedded = [each.content["original"] for each in packets if each.author_id == helper.did]
        assert embedded.count(genuine.value) == 2
        assert bob.taken == [b"said two days ago"]


def again_hash(talker: Talker) -> bytes:
    """The hash of the packet that brought the latest message."""
    found = talker.told("message-received")[-1].hash
    assert isinstance(found, bytes)
    return found


def segment_of(text: bytes) -> bytes:
    (segment,) = segment_message(text, SegmentationConfig(), request_id=None)
    return encode_segment(segment)


async def until_stored(url: str, topic: str, wanted: Callable[[int], bool]) -> None:
    async with asyncio.timeout(30):
        while not wanted(len(await stored(url, topic))):  # noqa: ASYNC110 -- the relay is asked each time
            await asyncio.sleep(0.05)


# What relays see, and how long they keep it.


@pytest.mark.req("C-185", "C-290", "C-280")
async def test_an_ephemeral_message_is_stored_to_expire_in_a_minute(relay: RelayProcess, topic: str) -> None:
    async with talking(relay.ws, topic, "alice") as alice, talking(relay.ws, topic, "bob") as bob:
        await alice.channel.send_ephemeral(b"typing")
        await until(lambda: bob.taken, "it arrives")
        assert bob.told("message-received")[0].ephemeral and bob.channel.log() == []
        (packet,) = await stored(relay.ws, topic)
        assert packet.content["ephemeral"] is True
        assert packet.value["expires_at"] == packet.timestamp + 60


@pytest.mark.req("C-295")
async def test_after_its_retention_the_relay_serves_a_message_no_more(
    relay: RelayProcess, topic: str
) -> None:
    async with talking(relay.ws, topic, "alice", retention_seconds=4) as alice:
        await alice.send(b"for four seconds")
        await until(lambda: alice.told("message-sent"), "it is there")
        (packet,) = await stored(relay.ws, topic)
        assert packet.value["expires_at"] == packet.timestamp + 4
    await until_stored(relay.ws, topic, lambda count: count == 0)


async def test_with_a_group_key_nothing_of_a_channel_can_be_read_at_the_relay(
    relay: RelayProcess, topic: str
) -> None:
    key = GroupKey.generate()

    def hook() -> dict[str, Any]:
        return {"encryption": GroupKeyEncryption("room", key)}

    async with (
        talking(relay.ws, topic, "alice-the-sender", **hook()) as alice,
        talking(relay.ws, topic, "bob-the-sender", **hook()) as bob,
        talking(relay.ws, topic, "eve") as eve,
    ):
        await alice.send(b"the secret plan")
        await bob.send(b"the secret answer")
        await alice.channel.send_ephemeral(b"the secret whisper")
        await until(lambda: len(bob.taken) == 2 and alice.taken == [b"the secret answer"], "they understand")
        await until(lambda: alice.synced and bob.synced, "all acknowledged")
        await until(lambda: eve.channel.statistics.sds.received + 1, "Eve listens")
        packets = await stored(relay.ws, topic)
        assert len(packets) >= 3
        ids = [*alice.channel.log(), *bob.channel.log()]
        for packet in packets:
            text = packet.content["payload"]
            assert isinstance(text, str)
            payload = base64.b64decode(text)
            for word in (b"secret", b"sender", b"room", *(each.encode() for each in ids)):
                assert word not in payload and word not in packet.canonical
        assert eve.taken == [] and eve.channel.log() == []
