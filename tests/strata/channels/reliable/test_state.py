"""Restarts, crashes and failing disks: nothing reported is lost or reported twice (channel.md §13)."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from strata.channels.persistence import (
    ChannelState,
    MemoryPersistence,
    ParticipantKey,
    Persistence,
    PersistenceError,
    SqlitePersistence,
    StorageFull,
    StoreInUse,
)
from strata.channels.persistence.interface import StoredState
from strata.channels.persistence.testing import FaultyPersistence
from strata.channels.reliable import (
    MessageAcknowledged,
    MessageReceived,
    MessageSent,
    ReliableMessageDelivered,
    ReliableMessageDeliveryError,
    ReliableMessageSendError,
    SendingMessageIrrecoverableError,
    make_channel,
)
from strata.channels.sds import HistoryEntry, Kind
from strata_testkit.sim import NO_FAULTS, Process, SimNetwork, SimNode, run_virtually

from tests.support.scripted_node import (
    QUIET,
    TOPIC,
    ScriptedNode,
    Told,
    chunks,
    filter_of,
    node_off_by,
    opened,
    said,
    settle,
    sync,
)
from tests.support.scripted_store import DictStore, Failing, InPlace, Mortal
from tests.support.short_lives import ShortLife, short_lives
from tests.support.virtual_time import virtually

ALICE = ParticipantKey("room", "alice")

Opener = Callable[[], Persistence]


class Disk:
    """A durable store that is opened repeatedly."""

    def __init__(self, path: Path | None) -> None:
        """SQLite at `path`; if None, a store that a user wrote."""
        self.path = path
        self._held: dict[ParticipantKey, StoredState] = {}

    def __call__(self) -> Persistence:
        path = self.path
        if path is None:
            return DictStore(self._held)
        return InPlace(lambda: SqlitePersistence.open(path, synchronous="NORMAL"))

    def another(self, name: str) -> Disk:
        """An empty store of the same kind."""
        return Disk(None if self.path is None else self.path.with_name(name))


@pytest.fixture(params=["sqlite", "custom"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return Disk(tmp_path / "channels.db" if request.param == "sqlite" else None)


@asynccontextmanager
async def living(open_disk: Opener, node: ScriptedNode, **options: Any) -> AsyncIterator[tuple[Any, Told]]:
    """One life of alice on a disk."""
    store = open_disk()
    try:
        async with opened(node, persistence=store, **options) as pair:
            yield pair
    finally:
        await store.close()


@pytest.mark.req("C-249", "C-257", "C-253")
@virtually
async def test_unacknowledged_chunks_are_sent_again_after_a_restart(disk: Disk) -> None:
    node = ScriptedNode()
    options: dict[str, Any] = {
        "segment_size_bytes": 2,
        "acknowledgement_timeout_ms": 5_000,
        "max_retransmissions": 2,
    }
    async with living(disk, node, **options) as (channel, _):
        request_id = await channel.send(b"c0c1c2")
        await settle()
        await node.deliver(sync(1, follows=[node.sent[1]]))
    again = node_off_by(60)
    async with living(disk, again, **options) as (channel, told):
        await settle()
        # What is overdue is sent at once: the same messages, with the same request id.
        assert [sent.payload for sent in again.sent] == [node.sent[0].payload, node.sent[2].payload]
        assert [sent.request_id for sent in again.sent] == [f"{request_id}:1", f"{request_id}:3"]
        await again.deliver(sync(2, follows=[again.sent[0], again.sent[1]]))
        assert [event.chunks_acknowledged for event in told.of(MessageAcknowledged)][-1] == (0, 1, 2)
        assert [event.request_id for event in told.of(ReliableMessageDelivered)] == [request_id]
    last = node_off_by(120)
    async with living(disk, last, **options) as (channel, told):
        await asyncio.sleep(60)
        assert last.sent == [] and told.events == [] and channel.sync_status().is_synced


@pytest.mark.req("C-257")
@virtually
async def test_what_was_given_up_long_ago_is_still_so_after_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("strata.channels.sds.outgoing._MAX_EXHAUSTED", 1)
    options = {"acknowledgement_timeout_ms": 5_000, "max_retransmissions": 0}
    disk = Disk(None)
    async with living(disk, ScriptedNode(), **options) as (channel, _):
        for payload in (b"one", b"two", b"three"):
            await channel.send(payload)
        await asyncio.sleep(10)
        assert [each.undelivered for each in channel.sync_status().outstanding] == [True, True, True]
    # Otherwise they would be outstanding for ever: only a limited number of abandoned messages is kept.
    monkeypatch.setattr("strata.channels.reliable.requests._MAX_UNDELIVERED", 2)
    async with living(disk, node_off_by(60), **options) as (channel, _):
        assert [each.undelivered for each in channel.sync_status().outstanding] == [True, True]


@pytest.mark.req("C-257")
@virtually
async def test_attempts_made_before_a_restart_count(disk: Disk) -> None:
    options: dict[str, Any] = {"acknowledgement_timeout_ms": 5_000, "max_retransmissions": 2}
    node = ScriptedNode()
    async with living(disk, node, **options) as (channel, _):
        await channel.send(b"hello")
        await asyncio.sleep(7)
        assert len(node.sent) == 2
    again = node_off_by(20)
    async with living(disk, again, **options) as (channel, told):
        await asyncio.sleep(60)
        assert len(again.sent) == 1 and len(told.of(ReliableMessageDeliveryError)) == 1
    # The error was reported; a late acknowledgement still counts, even in a later life.
    third = node_off_by(120)
    async with living(disk, third, **options) as (channel, told):
        await asyncio.sleep(60)
        assert told.events == [] and third.sent == []
        await third.deliver(sync(1, follows=[node.sent[0]]))
        assert len(told.of(ReliableMessageDelivered)) == 1 and told.of(ReliableMessageSendError) == []


@pytest.mark.req("C-257", "C-211")
@virtually
async def test_partial_messages_become_whole_after_a_restart(disk: Disk) -> None:
    parts = chunks(1, b"abcdefghij", 4)
    node = ScriptedNode()
    async with living(disk, node) as (_, told):
        await node.deliver(parts[0], parts[2])
        assert told.payloads == []
    again = node_off_by(60)
    async with living(disk, again) as (channel, told):
        assert channel.sync_status().partial_messages == 1
        await again.deliver(parts[0], parts[1])
        assert told.payloads == [b"abcdefghij"] and channel.sync_status().partial_messages == 0


@pytest.mark.req("C-257", "C-250")
@virtually
async def test_what_waits_for_a_gap_is_delivered_after_a_restart(disk: Disk) -> None:
    first, second = said(1), said(2, follows=[said(1)])
    node = ScriptedNode()
    async with living(disk, node, retrieve_frequency_ms=0) as (channel, told):
        await node.deliver(second)
    again = node_off_by(60)
    async with living(disk, again, retrieve_frequency_ms=0) as (channel, told):
        assert [each.message_id for each in channel.sync_status().missing] == ["bob-1"]
        await again.deliver(first, second)
        assert told.payloads == [b"bob 1", b"bob 2"]
        assert channel.log() == ["bob-1", "bob-2"]


@pytest.mark.req("C-249", "C-046")
@virtually
async def test_what_was_told_is_not_told_again_after_a_restart(disk: Disk) -> None:
    node = ScriptedNode()
    async with living(disk, node) as (_, told):
        await node.deliver(said(1), said(2))
        assert told.payloads == [b"bob 1", b"bob 2"]
    again = node_off_by(60)
    async with living(disk, again) as (channel, told):
        await again.deliver(said(1), said(2))
        assert told.payloads == [] and channel.log() == ["bob-1", "bob-2"]


@pytest.mark.req("C-257")
@virtually
async def test_what_nobody_took_is_there_after_a_restart(disk: Disk) -> None:
    node = ScriptedNode()
    async with living(disk, node, take=False) as (channel, _):
        event = node.packed(said(1))
        await node.deliver(event, said(2), said(3))
        assert (await anext(channel)).payload == b"bob 1"
        assert channel.sync_status().inbox == 2
    again = node_off_by(60)
    async with living(disk, again, take=False) as (channel, _):
        taken = [await anext(channel) for _ in range(2)]
        assert [message.payload for message in taken] == [b"bob 2", b"bob 3"]
        assert taken[0].message_id == channel.get_message_id(b"bob 2")
        assert channel.sync_status().inbox == 0


@pytest.mark.req("C-254", "C-071")
@virtually
async def test_hints_are_known_after_a_restart(disk: Disk) -> None:
    node = ScriptedNode()
    async with living(disk, node) as (channel, _):
        await channel.send(b"mine")
        await settle()
        await node.deliver(event := node.packed(said(1)))
    again = node_off_by(60)
    async with living(disk, again, acknowledgement_timeout_ms=10_000_000) as (channel, _):
        await channel.send(b"next")
        await settle()
        hints = {entry.message_id: entry.retrieval_hint for entry in again.sent[-1].sds.causal_history}
        assert hints == {node.sent[0].sds.message_id: node.sent[0].message_hash, "bob-1": event.message_hash}


@pytest.mark.req("C-249", "C-250")
@virtually
async def test_filter_and_lamport_time_go_on_after_a_restart(disk: Disk) -> None:
    node = ScriptedNode()
    ahead = said(1, lamport=1_760_000_000_000 + 3_600_000)  # an hour ahead: the Lamport clock follows
    async with living(disk, node) as (_, told):
        await node.deliver(ahead)
        assert told.payloads == [b"bob 1"]
    again = node_off_by(60)
    async with living(disk, again) as (channel, _):
        await channel.send(b"next")
        await settle()
        sent = again.sent[0].sds
        assert (sent.lamport_timestamp or 0) > (ahead.lamport_timestamp or 0)
        assert sent.bloom_filter == filter_of(ahead)


@pytest.mark.req("C-248", "C-250")
@virtually
async def test_the_store_holds_every_part_of_the_state() -> None:
    store = MemoryPersistence()
    node = ScriptedNode(answer=lambda sent: 0.0 if sent.segment.payload == b"01" else None)
    options: dict[str, Any] = {"messages_per_epoch": 10, "segment_size_bytes": 2, "retrieve_frequency_ms": 0}
    async with opened(node, persistence=store, take=False, **options) as (channel, _):
        await channel.send(b"0123")
        await node.deliver(
            said(1), said(3, follows=[HistoryEntry("bob-2", bytes(32), "bob")]), chunks(10, b"abcd", 2)[0]
        )
        state = ChannelState.read(await store.load(ALICE))
        assert len(state.sent_chunks) == 2 and sum(c.dispatched for c in state.sent_chunks.values()) == 1
        assert [record.payload for record in state.inbox.values()] == [b"bob 1"]
        assert len(state.segments) == 1 and len(state.query_marks) == 1
        held = {kind.removeprefix("sds.") for kind in (await store.load(ALICE)).records}
        assert {"outgoing", "waiting", "missing", "request", "clock"} <= held
        assert "lamport" in (await store.load(ALICE)).counters
    counts = (await store.load(ParticipantKey("", node.transport_identity))).records
    assert "epoch" in counts


@pytest.mark.req("C-251")
@virtually
async def test_without_a_store_of_its_own_a_channel_forgets() -> None:
    node = ScriptedNode()
    async with opened(node) as (channel, _):
        await channel.send(b"hello")
        await settle()
    async with opened(node) as (channel, _):
        assert channel.log() == [] and channel.sync_status().is_synced


@pytest.mark.req("C-258")
@virtually
async def test_channels_and_senders_share_a_store_and_nothing_in_it(disk: Disk) -> None:
    store = disk()
    node, other = ScriptedNode(), ScriptedNode("did:test:other")
    hall = "/test/1/hall/proto"
    async with (
        opened(node, persistence=store) as (room_alice, _),
        opened(node, persistence=store, channel_id="hall", topic=hall) as (hall_alice, _),
        opened(other, persistence=store, sender_id="bea") as (room_bea, _),
    ):
        await room_alice.send(b"room, alice")
        await hall_alice.send(b"hall, alice")
        await room_bea.send(b"room, bea")
        await settle()
        logs = [room_alice.log(), hall_alice.log(), room_bea.log()]
        assert [len(log) for log in logs] == [1, 1, 1] and len({log[0] for log in logs}) == 3
    async with (
        opened(node, persistence=store) as (room_alice, _),
        opened(node, persistence=store, channel_id="hall", topic=hall) as (hall_alice, _),
        opened(other, persistence=store, sender_id="bea") as (room_bea, _),
    ):
        assert [room_alice.log(), hall_alice.log(), room_bea.log()] == logs
        await room_alice.close(purge=True)
        assert ALICE not in await store.participants()
        assert ParticipantKey("room", "bea") in await store.participants()
    await store.close()


# Crashes (C-255).


@dataclass
class Program:
    """What alice's program itself knows, over all its lives."""

    lives: int = 0
    tried: int = 0
    accepted: list[bytes] = field(default_factory=list)
    received: list[bytes] = field(default_factory=list)
    told: Counter[tuple[str, str]] = field(default_factory=Counter)


@dataclass
class Outcome:
    program: Program
    heard: list[bytes]
    """What bob received."""
    writes: int
    """The number of writes in alice's first life."""
    crashed: bool
    in_step: bool


PLAN = (b"alice one", b"alice two, which is longer than one segment", b"alice three")
BOBS = (b"bob one", b"bob two is in several segments as well", b"bob three", b"bob four")
TALK: dict[str, Any] = {**QUIET, "segment_size_bytes": 16, "sync_min_interval_ms": 8_000}


async def live(program: Program, node: SimNode, store: Persistence, hand_over: str) -> bool:
    """One life of alice's program; return whether it ended with nothing left to do."""
    options: dict[str, Any] = {**TALK, "hand_over": hand_over, "persistence": store}
    program.lives += 1
    # Each life has another random seed: otherwise their requests would have the same ids.
    rng = random.Random(100 + program.lives)
    channel = make_channel(node, "room", TOPIC, "alice", rng=rng, options=options)

    def tell(event: Any) -> None:
        program.told[getattr(event, "request_id", ""), event.name] += 1

    async def take() -> None:
        async for message in channel:
            program.received.append(message.payload)

    for name in channel.message_events.names:
        if "received" not in name:
            channel.message_events.on(name, tell)
    await channel.open()
    taking = asyncio.create_task(take())
    while program.tried < len(PLAN):
        payload = PLAN[program.tried]
        program.tried += 1  # if the program dies here, it does not know whether it was accepted
        await channel.send(payload)
        program.accepted.append(payload)
        await asyncio.sleep(2)
    await asyncio.sleep(60)
    status = channel.sync_status()
    taking.cancel()
    await channel.close()
    return status.is_synced and status.inbox == 0


async def crash_run(disk: Disk, crash_at: int | None, *, written: bool, hand_over: str) -> Outcome:
    """Alice talks with bob, dies at a write, and lives again."""
    network = SimNetwork(1, NO_FAULTS, random.Random(5))
    program, heard = Program(), list[bytes]()
    bob = make_channel(SimNode("bob", network), "room", TOPIC, "bob", rng=random.Random(7), options=TALK)
    bob.message_events.on(MessageReceived.name, lambda event: heard.append(event.payload))
    await bob.open()

    async def talk() -> None:
        for payload in BOBS:
            await asyncio.sleep(1.5)
            await bob.send(payload)

    talking = asyncio.create_task(talk())
    store = disk()
    mortal = Mortal(store, crash_at, written=written)
    process = Process("alice")

    async def attach() -> SimNode:
        return SimNode("alice", network)

    node = await process.start(attach())  # what the node does dies with the process too
    life = process.start(live(program, node, mortal, hand_over))
    death = asyncio.create_task(mortal.crashed.wait())
    await asyncio.wait([life, death], return_when=asyncio.FIRST_COMPLETED)
    crashed = mortal.crashed.is_set()
    if crashed:
        node.unplug()
        process.kill()
        await asyncio.wait([life])
        await store.close()
        await asyncio.sleep(3)
        store = disk()
        node = SimNode("alice", network)
        life = asyncio.create_task(live(program, node, store, hand_over))
    in_step = await life
    death.cancel()
    await talking
    status = bob.sync_status()
    await store.close()
    await bob.close()
    return Outcome(
        program, heard, mortal.writes, crashed, in_step and not status.missing and not status.outstanding
    )


@pytest.mark.slow
@pytest.mark.req("C-255", "C-257", "C-296")
@pytest.mark.parametrize("hand_over", ["once", "again"])
@pytest.mark.parametrize("written", [False, True], ids=["before", "after"])
def test_a_crash_at_any_write_loses_nothing_that_was_promised_and_repeats_nothing(
    disk: Disk, hand_over: str, written: bool
) -> None:
    def run(n: int | None) -> Outcome:
        return run_virtually(
            lambda: crash_run(disk.another(f"{n}.db"), n, written=written, hand_over=hand_over)
        )

    whole = run(None)
    assert whole.heard == list(PLAN) and whole.program.received == list(BOBS)
    assert whole.in_step and whole.writes > 20
    for crash_at in range(1, whole.writes, 5 if disk.path else 1):
        outcome = run(crash_at)
        program, where = outcome.program, f"crash at write {crash_at} of {whole.writes}"
        assert outcome.crashed and outcome.in_step, where
        # Accepted means that bob gets it; he receives nothing twice.
        assert max(Counter(outcome.heard).values()) == 1, where
        assert set(program.accepted) <= set(outcome.heard), where
        received = Counter(program.received)
        if hand_over == "once":
            assert max(received.values()) == 1, where
            # Only the one that was being handed over may be lost with the program.
            assert len(set(BOBS) - set(received)) <= int(written), where
        else:
            assert set(received) == set(BOBS), where
            assert sum(received.values()) <= len(BOBS) + 1, where
        ends = {key: count for key, count in program.told.items() if key[1].startswith("reliable:")}
        assert max(ends.values()) == 1, where
        assert not [key for key in ends if "error" in key[1]], where


WRITER = """
import asyncio
from tests.support.scripted_node import ScriptedNode, chunks, make_channel, TOPIC
from strata.channels.persistence import SqlitePersistence

async def send(path):
    store = await SqlitePersistence.open(path)
    node = ScriptedNode()
    channel = make_channel(node, "room", TOPIC, "alice", options={"persistence": store})
    async with channel:
        await node.deliver(chunks(1, b"abcdefgh", 4)[0])
        n = 0
        while True:
            request_id = await channel.send(b"message %d" % n)
            print(request_id, flush=True)
            n += 1

def main(path):
    asyncio.run(send(path))
"""


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., ShortLife]]:
    """Starts writers."""
    with short_lives(WRITER) as starting:
        yield starting


@pytest.mark.slow
@pytest.mark.req("C-257", "C-255")
@pytest.mark.parametrize("confirmations", [1, 7, 40])
def test_after_kill_9_everything_accepted_is_sent_again_and_partial_messages_go_on(
    confirmations: int, start: Callable[..., ShortLife], tmp_path: Path
) -> None:
    path = tmp_path / "channels.db"
    writer = start(str(path))
    accepted = [writer.line() for _ in range(confirmations)]
    accepted += writer.kill()

    async def next_life() -> None:
        node = node_off_by(10.0**8)
        store = InPlace(lambda: SqlitePersistence.open(path))
        async with opened(node, persistence=store) as (channel, told):
            outstanding = [each.request_id for each in channel.sync_status().outstanding]
            assert set(accepted) <= set(outstanding)
            await asyncio.sleep(2)
            sent = {message.request_id.removesuffix(":1") for message in node.sent}
            assert set(accepted) <= sent
            await node.deliver(chunks(1, b"abcdefgh", 4)[1])
            assert told.payloads == [b"abcdefgh"]
        await store.close()

    run_virtually(next_life)


# A failing store (C-256).


@pytest.mark.req("C-256")
@virtually
async def test_a_failing_store_is_seen_and_tried_again_and_nothing_leaves_meanwhile() -> None:
    store = Failing(MemoryPersistence())
    node = ScriptedNode()
    async with opened(node, persistence=store) as (channel, told):
        store.error = StorageFull("full")
        sending = asyncio.create_task(channel.send(b"patience"))
        await asyncio.sleep(20)
        assert not sending.done() and node.sent == [] and told.events == []
        broken = channel.health.store
        assert isinstance(broken.error, StorageFull) and broken.failures > 2
        # A further message is refused: nothing more can be promised now.
        with pytest.raises(StorageFull):
            await channel.send(b"too much")
        assert len(told.of(SendingMessageIrrecoverableError)) == 1
        store.error = None
        request_id = await sending
        await asyncio.sleep(31)
        assert channel.health.store.error is None and channel.health.store.failures == 0
        assert node.sent[0].segment.payload == b"patience"
        assert told.of(MessageSent)[0].request_id == request_id
        await channel.send(b"works again")
        await settle()
        assert node.sent[-1].segment.payload == b"works again"


@pytest.mark.req("C-256", "C-255")
@virtually
async def test_what_arrives_while_the_store_fails_is_told_once_it_is_stored() -> None:
    store = Failing(MemoryPersistence())
    node = ScriptedNode()
    async with opened(node, persistence=store) as (channel, told):
        store.error = StorageFull("full")
        await node.deliver(said(1), said(2))
        await asyncio.sleep(20)
        assert told.payloads == []
        store.error = None
        await asyncio.sleep(31)
        assert told.payloads == [b"bob 1", b"bob 2"] and channel.log() == ["bob-1", "bob-2"]
    again = node_off_by(100)
    async with opened(again, persistence=store) as (_, told):
        await again.deliver(said(1), said(2))
        assert told.payloads == []


@pytest.mark.req("C-255", "C-256")
@pytest.mark.parametrize("hand_over", ["once", "again"])
@virtually
async def test_nothing_is_told_before_it_is_stored(hand_over: str) -> None:
    store = Failing(MemoryPersistence())
    node = ScriptedNode(answer=lambda sent: 5.0)
    options: dict[str, Any] = {"acknowledgement_timeout_ms": 100_000, "hand_over": hand_over}
    async with opened(node, persistence=store, **options) as (channel, told):
        await channel.send(b"mine")
        await asyncio.sleep(1)
        store.error = StorageFull("full")
        await asyncio.sleep(9)
        await node.deliver(said(1), sync(2, follows=[node.sent[0]]))
        await asyncio.sleep(5)
        # The transport and a peer have it; if reported now, a crash would make the next life report it again.
        assert told.names == ["sending-message"]
        store.error = None
        await asyncio.sleep(31)
        assert told.payloads == [b"bob 1"]
        assert len(told.of(MessageSent)) == len(told.of(ReliableMessageDelivered)) == 1


@pytest.mark.req("C-255", "C-256")
@virtually
async def test_nothing_is_acknowledged_to_others_before_it_is_stored() -> None:
    store = Failing(MemoryPersistence())
    node = ScriptedNode()
    async with opened(node, persistence=store, sync_min_interval_ms=10_000):
        store.error = StorageFull("full")
        message = said(1)
        await node.deliver(message)
        await asyncio.sleep(60)
        # If the program died now, the message would be lost: no peer may think that it is here.
        early = [sent.sds for sent in node.sent]
        store.error = None
        await asyncio.sleep(60)
        assert not any(message.message_id in {e.message_id for e in each.causal_history} for each in early)
        assert not any(each.bloom_filter == filter_of(message) for each in early)
        assert any(
            "bob-1" in {entry.message_id for entry in sent.sds.causal_history}
            for sent in node.sent
            if sent.sds.kind is Kind.SYNC
        )


@pytest.mark.req("C-256")
@virtually
async def test_a_store_with_an_error_of_its_own_kind_is_no_exception() -> None:
    store = Failing(MemoryPersistence())
    node = ScriptedNode()
    async with opened(node, persistence=store) as (channel, told):
        store.error = OSError("the cable is out")
        await node.deliver(said(1))
        await asyncio.sleep(5)
        assert isinstance(channel.health.store.error, PersistenceError) and told.payloads == []
        store.error = None
        await asyncio.sleep(31)
        assert told.payloads == [b"bob 1"]


@pytest.mark.req("C-256")
@virtually
async def test_a_store_that_fails_for_good_ends_the_iteration_with_its_error() -> None:
    class Gone(PersistenceError):
        retry = False

    store = Failing(MemoryPersistence())
    node = ScriptedNode()
    channel = make_channel(node, "room", TOPIC, "alice", options={**QUIET, "persistence": store})
    await channel.open()
    await node.deliver(said(1))
    store.error = Gone("the disk is gone")
    with pytest.raises(Gone):
        await anext(channel)
    with pytest.raises(Gone):
        await channel.send(b"into the void")
    with pytest.raises(Gone):
        await channel.close()
    assert not channel.is_started()


@pytest.mark.req("C-256")
@virtually
async def test_a_write_that_failed_after_taking_effect_repeats_nothing() -> None:
    store = FaultyPersistence(MemoryPersistence())
    node = ScriptedNode()
    async with opened(node, persistence=store, acknowledgement_timeout_ms=100_000) as (channel, told):
        store.fail_after = [StorageFull("perhaps")] * 3
        await node.deliver(said(1))
        await channel_sends(channel)
        await asyncio.sleep(40)
        assert told.payloads == [b"bob 1"] and len(told.of(MessageSent)) >= 1
        assert told.of(ReliableMessageSendError) == []


async def channel_sends(channel: Any) -> None:
    """Send as soon as the store allows it."""
    while True:
        try:
            await channel.send(b"mine")
        except PersistenceError:
            await asyncio.sleep(1)
        else:
            return


async def test_a_second_user_of_a_store_is_turned_away(tmp_path: Path) -> None:
    path = tmp_path / "channels.db"
    store = await SqlitePersistence.open(path)
    script = (
        "import asyncio, sys\n"
        "from strata.channels.persistence import SqlitePersistence, StoreInUse\n"
        "try:\n"
        "    asyncio.run(SqlitePersistence.open(sys.argv[1]))\n"
        "except StoreInUse:\n"
        "    print('in use')\n"
    )
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(path), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await other.communicate()
    assert out.strip() == b"in use"
    with pytest.raises(StoreInUse):
        await SqlitePersistence.open(path)
    # The first is not disturbed.
    node = ScriptedNode()
    channel = make_channel(node, "room", TOPIC, "alice", options={"persistence": store})
    async with channel:
        await channel.send(b"still mine")
    await store.close()
