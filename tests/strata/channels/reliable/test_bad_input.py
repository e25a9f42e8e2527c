"""Whatever strangers send, the channel keeps working and no other participant is harmed (C-074, C-302)."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strata.channels.messaging.values import NodeMessageError, NodeMessageSent, ReceivedEnvelope
from strata.channels.persistence import SqlitePersistence, StorageFull
from strata.channels.reliable import (
    IrretrievableMessage,
    MessageReceived,
    ReliableChannel,
    ReliableError,
    ReliableMessageDelivered,
    make_channel,
)
from strata.channels.sds import HistoryEntry, SdsMessage
from strata.channels.segmentation.messages import Segment, encode_segment, message_hash
from strata_testkit.sim import run_virtually

from tests.support.scripted_node import (
    QUIET,
    START_MS,
    TOPIC,
    ScriptedNode,
    Told,
    chunks,
    ephemeral,
    filter_of,
    opened,
    said,
    segments,
    settle,
    sync,
)
from tests.support.scripted_store import InPlace
from tests.support.virtual_time import virtually

_numbers = itertools.count(900_000)


async def sing(node: ScriptedNode, channel: ReliableChannel, told: Told) -> None:
    """Check that a channel works: one message comes in, one goes out and is acknowledged."""
    n = next(_numbers)
    before = len(told.payloads)
    await node.deliver(said(n, f"canary {n}".encode(), sender="canary"))
    assert f"canary {n}".encode() in told.payloads[before:]
    sent = len(node.sent)
    request_id = await channel.send(f"own {n}".encode())
    await settle()
    (own,) = [each for each in node.sent[sent:] if each.request_id.startswith(request_id)]
    await node.deliver(sync(n, sender="canary", follows=[own]))
    assert request_id in [event.request_id for event in told.of(ReliableMessageDelivered)]


@asynccontextmanager
async def unharmed(**options: Any) -> AsyncIterator[tuple[ScriptedNode, ReliableChannel, Told]]:
    """A channel that works before, and must work afterwards."""
    node = ScriptedNode()
    async with opened(node, **{"retrieve_frequency_ms": 0, **options}) as (channel, told):
        await sing(node, channel, told)
        yield node, channel, told
        await sing(node, channel, told)


def lamport_of(channel: ReliableChannel) -> int:
    assert channel._session is not None
    return channel._session.engine.sds.lamport


# SDS.


@pytest.mark.req("C-302", "C-074")
@virtually
async def test_garbage_and_every_truncation_of_a_message_are_dropped() -> None:
    async with unharmed() as (node, _, told):
        whole = said(1, b"the whole message", follows=[HistoryEntry("x" * 64, bytes(32), "carol")]).encode()
        before = len(told.payloads)
        for cut in range(len(whole)):
            await node.message_events.emit(node.packed(whole[:cut]))
        for seed in range(200):
            await node.message_events.emit(node.packed(random.Random(seed).randbytes(seed)))
        await settle()
        # A truncated message is refused, unless it ends between two fields and then holds less.
        assert b"the whole message" not in told.payloads[before:]


@pytest.mark.req("C-302", "C-119")
@pytest.mark.parametrize("lamport", [2**64 - 1, 2**63, 2**63 - 1, START_MS + 30 * 86_400_000])
@virtually
async def test_an_extreme_lamport_time_freezes_nothing(lamport: int) -> None:
    async with unharmed() as (node, channel, told):
        await node.deliver(said(1, lamport=lamport))
        assert told.payloads[-1] == b"bob 1"
        assert lamport_of(channel) < START_MS + 86_400_000
        await node.deliver(said(2))
        assert told.payloads[-1] == b"bob 2" and channel.log()[-1] == "bob-1"


@pytest.mark.req("C-302", "C-119")
@virtually
async def test_an_extreme_lamport_time_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "channels.db"
    for n in (1, 2):
        store = InPlace(lambda: SqlitePersistence.open(path))
        async with unharmed(persistence=store) as (node, channel, told):
            await node.deliver(said(n, lamport=2**64 - n))
            assert told.payloads[-1] == f"bob {n}".encode()
            assert len([each for each in channel.log() if each.startswith("bob")]) == n
        await store.close()


@pytest.mark.req("C-302", "C-103")
@pytest.mark.parametrize("size", [0, 1, 18_751, 18_753, 100_000])
@virtually
async def test_a_filter_of_another_length_is_ignored(size: int) -> None:
    async with unharmed() as (node, channel, told):
        await channel.send(b"mine")
        await settle()
        message = said(1)
        await node.deliver(replace_filter(message, b"\xff" * size))
        await node.deliver(replace_filter(sync(1), b"\xff" * size))
        assert told.payloads[-1] == b"bob 1"
        assert "message-possibly-acknowledged" not in told.names


def replace_filter(message: SdsMessage, data: bytes) -> SdsMessage:
    return msgspec.structs.replace(message, bloom_filter=data)


@pytest.mark.req("C-302")
@virtually
async def test_a_filter_of_all_ones_is_no_acknowledgement_by_itself() -> None:
    async with unharmed() as (node, channel, _):
        await channel.send(b"mine")
        await settle()
        outstanding = len(channel.sync_status().outstanding)
        await node.deliver(replace_filter(said(1), b"\xff" * 18_752))
        assert len(channel.sync_status().outstanding) == outstanding
        # The same message again is not a second witness.
        await node.deliver(replace_filter(said(1), b"\xff" * 18_752))
        assert len(channel.sync_status().outstanding) == outstanding


@pytest.mark.req("C-302", "C-095")
@virtually
async def test_a_history_of_a_hundred_thousand_is_dropped() -> None:
    async with unharmed() as (node, channel, _):
        entries = tuple(HistoryEntry(f"{n}") for n in range(100_000))
        hostile = SdsMessage("bob", "huge", "room", START_MS, entries, content=segments(b"x")[0])
        await node.deliver(hostile)
        assert channel.sync_status().missing == () and "huge" not in channel.log()
        asks = SdsMessage("bob", "asks", "room", START_MS, repair_request=entries, content=segments(b"x")[0])
        await node.deliver(asks)
        assert "asks" not in channel.log()


@pytest.mark.req("C-302", "C-095")
@virtually
async def test_a_message_of_two_megabytes_is_dropped_unread() -> None:
    async with unharmed() as (node, channel, _):
        await node.deliver(said(1, bytes(2 << 20)))
        assert channel.statistics.sds.oversized == 1 and "bob-1" not in channel.log()


@pytest.mark.req("C-302")
@virtually
async def test_a_flood_of_gaps_by_syncs_leaves_room_for_true_ones() -> None:
    async with unharmed(max_missing=100, max_waiting=100) as (node, channel, told):
        for n in range(50):
            await node.deliver(sync(n, follows=[HistoryEntry(f"none-{n}-{m}") for m in range(20)]))
        assert len(channel.sync_status().missing) <= 100
        first = said(1)
        await node.deliver(said(2, follows=[first]))
        await node.deliver(first)
        assert told.payloads[-2:] == [b"bob 1", b"bob 2"]


@pytest.mark.req("C-302")
@virtually
async def test_messages_that_follow_each_other_in_a_circle_are_freed_in_the_end() -> None:
    async with unharmed(lost_message_timeout_ms=30_000) as (node, channel, told):
        before = len(told.payloads)
        one, two = said(1, follows=[said(2)]), said(2, follows=[said(1)])
        itself = said(3, follows=[said(3)])
        await node.deliver(one, two, itself)
        honest = said(4)
        await node.deliver(honest)
        assert b"bob 4" in told.payloads
        await asyncio.sleep(120)
        assert sorted(told.payloads[before:]) == [b"bob 1", b"bob 2", b"bob 3", b"bob 4"]
        assert channel.sync_status().missing == ()


@pytest.mark.req("C-302")
@pytest.mark.parametrize(
    "fields",
    [
        {"sender_id": ""},
        {"sender_id": "x" * 257},
        {"message_id": ""},
        {"message_id": "x" * 257},
        {"causal_history": (HistoryEntry(""),)},
        {"causal_history": (HistoryEntry("x" * 10_000),)},
        {"repair_request": (HistoryEntry("x" * 257),)},
        {"lamport_timestamp": None, "content": None},
    ],
)
@virtually
async def test_unusable_ids_are_dropped(fields: dict[str, Any]) -> None:
    async with unharmed() as (node, channel, told):
        before, log = len(told.payloads), channel.log()
        await node.deliver(msgspec.structs.replace(said(1), **fields))
        assert told.payloads[before:] == [] and channel.log() == log
        assert channel.statistics.sds.undecodable == 1


@pytest.mark.req("C-302")
@pytest.mark.parametrize("told_at", [2**64, 10**400, -(2**64)])
@virtually
async def test_times_beyond_all_measure_harm_no_channel(
    told_at: int,
) -> None:
    async with unharmed() as (node, channel, told):
        first, second = said(1), said(2, follows=[said(1)])
        for message in (second, first):
            packed = node.packed(message)
            await node.deliver(
                replace(packed, received_at=told_at, message=replace(packed.message, timestamp=told_at))
            )
        assert told.payloads[-2:] == [b"bob 1", b"bob 2"]
        assert channel.health.error is None


@pytest.mark.req("C-302")
@virtually
async def test_ids_that_look_like_parts_of_our_own_names_confuse_nothing() -> None:
    async with unharmed(sync_min_interval_ms=2_000) as (node, _, told):
        for n, name in enumerate(("sync:1", "repair:x", "room\x1falice", "current", "\x00")):
            await node.deliver(
                SdsMessage("bob", name, "room", START_MS + n, content=segments(name.encode())[0])
            )
            assert told.payloads[-1] == name.encode()
        asks = tuple(HistoryEntry(name, None, "bob") for name in ("sync:1", "repair:x"))
        await node.deliver(said(50, asks=asks))
        await asyncio.sleep(300)


@pytest.mark.req("C-302")
@virtually
async def test_hints_of_strangers_are_bounded_and_harmless() -> None:
    async with unharmed(retrieve_frequency_ms=1_000) as (node, channel, _):
        entries = [
            HistoryEntry(f"gone-{n}", bytes([n]) * size) for n, size in enumerate((0, 31, 33, 100_000))
        ]
        await node.deliver(said(1, follows=entries))
        await asyncio.sleep(10)
        assert all(len(each) == 32 for _, hashes in node.fetches for each in hashes)
        held = [each.retrieval_hint for each in channel.sync_status().missing]
        assert all(hint is None or len(hint) <= 256 for hint in held)


@pytest.mark.req("C-302")
@virtually
async def test_a_forged_repetition_of_an_id_with_other_content_is_not_told() -> None:
    async with unharmed() as (node, _, told):
        await node.deliver(said(1, b"genuine"), said(1, b"forged"))
        assert b"genuine" in told.payloads and b"forged" not in told.payloads


# Segments.


def lying(n: int, digest: bytes, *, sender: str = "bob", **fields: Any) -> SdsMessage:
    members: dict[str, Any] = {"entire_message_hash": digest, "data_segment_count": 1, "payload": b"x"}
    segment = Segment(**members | fields)
    return said(n, sender=sender, content=encode_segment(segment))


@pytest.mark.req("C-302", "C-074")
@pytest.mark.parametrize(
    "fields",
    [
        {"data_segment_count": 0},
        {"data_segment_count": 2**32 - 1},
        {"data_segment_count": 257},
        {"data_segment_index": 1},
        {"is_parity": True},
        {"is_parity": True, "parity_segment_count": 2**32 - 1},
        {"payload": b""},
        {"request_id": "r" * 10_000},
        {"original_length": 2**63},
        {"entire_message_hash": b"short"},
        {"entire_message_hash": bytes(32)},
    ],
)
@virtually
async def test_a_segment_that_lies_makes_no_message(fields: dict[str, Any]) -> None:
    async with unharmed() as (node, channel, told):
        before = len(told.payloads)
        await node.deliver(lying(1, message_hash(b"y"), **fields))
        assert told.payloads[before:] == []
        # It does not hold back the message that follows it.
        await node.deliver(said(2, follows=[lying(1, bytes(32))]))
        assert told.payloads[before:] == [b"bob 2"]
        assert channel.sync_status().missing == ()


@pytest.mark.req("C-302", "C-200")
@virtually
async def test_segments_that_disagree_about_their_number_harm_only_themselves() -> None:
    async with unharmed() as (node, _, told):
        genuine = chunks(10, b"abcdefgh", 4)
        await node.deliver(genuine[0])
        await node.deliver(lying(50, message_hash(b"abcdefgh"), data_segment_count=9, data_segment_index=1))
        await node.deliver(genuine[1])
        assert told.payloads[-1] == b"abcdefgh"


@pytest.mark.req("C-302")
@virtually
async def test_a_forged_segment_of_another_sender_does_not_poison_a_message() -> None:
    async with unharmed() as (node, _, told):
        genuine = chunks(10, b"abcdefgh", 4)
        await node.deliver(genuine[0])
        forged = lying(
            50,
            message_hash(b"abcdefgh"),
            sender="mallory",
            data_segment_count=2,
            data_segment_index=1,
            payload=b"EVIL",
        )
        await node.deliver(forged, genuine[1])
        assert told.payloads[-1] == b"abcdefgh" and not any(b"EVIL" in each for each in told.payloads)


@pytest.mark.req("C-302")
@virtually
async def test_segments_whose_whole_does_not_match_the_hash_are_given_up_and_told() -> None:
    async with unharmed() as (node, channel, told):
        digest = message_hash(b"something else")
        await node.deliver(
            *[lying(50 + n, digest, data_segment_count=2, data_segment_index=n) for n in range(2)]
        )
        assert [event.message_id for event in told.of(IrretrievableMessage)] == [digest.hex()]
        assert channel.sync_status().partial_messages == 0


@pytest.mark.req("C-302", "C-079")
@virtually
async def test_a_flood_of_partial_messages_costs_the_flooder_alone() -> None:
    async with unharmed(max_partial_messages_per_sender=10) as (node, channel, told):
        honest = chunks(10, b"abcdefgh", 4, sender="carol")
        await node.deliver(honest[0])
        for n in range(100):
            await node.deliver(chunks(1000 + 10 * n, f"flood{n:05}".encode(), 5)[0])
        assert channel.sync_status().partial_messages <= 11
        await node.deliver(honest[1])
        assert told.payloads[-1] == b"abcdefgh"


@pytest.mark.req("C-302")
@virtually
async def test_ephemeral_messages_that_lie_are_counted_and_dropped() -> None:
    async with unharmed() as (node, channel, told):
        before = len(told.payloads)
        parts = segments(b"in two parts", size=8)
        wrong = encode_segment(
            Segment(entire_message_hash=bytes(32), data_segment_count=1, payload=b"not that")
        )
        for n, content in enumerate((parts[0], wrong, b"\xff\xff", b"plain")):
            await node.deliver(SdsMessage("bob", f"e{n}", "room", content=content))
        assert told.payloads[before:] == [] and channel.statistics.ephemerals_invalid == 4


@pytest.mark.req("C-302")
@virtually
async def test_a_flood_of_ephemeral_messages_takes_no_room_from_others() -> None:
    node = ScriptedNode()
    async with opened(node, max_inbox_messages=10, take=False) as (channel, _):
        for n in range(9):
            await node.deliver(said(n))
        for n in range(50):
            flood = asyncio.create_task(node.deliver(ephemeral(n, b"flood")))
            await settle()
            if not flood.done():
                flood.cancel()
        taken = [(await anext(channel)).payload for _ in range(9)]
        assert taken == [f"bob {n}".encode() for n in range(9)]


# Senders.


@pytest.mark.req("C-302", "C-287")
@virtually
async def test_with_sender_binding_a_forged_sender_is_dropped_and_acknowledges_nothing() -> None:
    did, mallory = "did:strata:bob", "did:strata:mallory"
    async with unharmed(sender_binding="did") as (node, channel, told):
        await channel.send(b"mine")
        await settle()
        outstanding, before = channel.sync_status().outstanding, len(told.payloads)
        own = node.sent[-1]
        forged = said(1, b"forged", sender=did, follows=[own])
        await node.deliver(forged, author=mallory)
        await node.deliver(forged, author=None)
        await node.deliver(sync(2, sender=did, follows=[own]), author=mallory)
        await node.deliver(SdsMessage(did, "e", "room", content=segments(b"forged")[0]), author=mallory)
        assert channel.statistics.senders_forged == 4
        assert channel.sync_status().outstanding == outstanding and told.payloads[before:] == []
        # The genuine message has the same id, and the forged one does not shut it out.
        await node.deliver(said(1, b"genuine", sender=did), author=did)
        assert told.payloads[before:] == [b"genuine"]


@pytest.mark.req("C-302")
@virtually
async def test_ones_own_name_on_a_stranger_s_message_tells_and_acknowledges_nothing() -> None:
    async with unharmed() as (node, channel, told):
        await channel.send(b"mine")
        await settle()
        before, outstanding = len(told.payloads), len(channel.sync_status().outstanding)
        await node.deliver(said(1, b"forged", sender="alice", follows=[node.sent[-1]]))
        assert told.payloads[before:] == []
        assert len(channel.sync_status().outstanding) == outstanding


# The store's answers.


@pytest.mark.req("C-302", "C-165")
@virtually
async def test_a_store_that_answers_with_garbage_harms_nothing() -> None:
    async with unharmed(retrieve_frequency_ms=1_000) as (node, channel, told):
        before = len(told.payloads)
        hint = bytes([7]) * 32
        node.stored[hint] = replace(node.packed(b"\xff garbage"), message_hash=hint)
        other = replace(
            node.packed(b""), message=ReceivedEnvelope(content_topic=TOPIC, payload=said(5).encode())
        )
        node.pages = [[node.packed(b"garbage")], [], [other, other]]
        await node.deliver(said(2, follows=[HistoryEntry("bob-1", hint, "bob")]))
        await asyncio.sleep(30)
        assert [each.message_id for each in channel.sync_status().missing] == ["bob-1"]
        assert told.payloads[before:] == [b"bob 5"]
        await node.deliver(said(1))
        assert told.payloads[before:] == [b"bob 5", b"bob 1", b"bob 2"]


@pytest.mark.req("C-302", "C-300")
@virtually
async def test_a_store_without_end_is_not_read_for_ever() -> None:
    class Endless(ScriptedNode):
        async def history(self, topic: str, *, since_ms: int) -> Any:
            n = 0
            while True:
                await asyncio.sleep(0.1)
                self.taken = n = n + 1
                yield [self.packed(said(n, channel="hall"))]

    node = Endless()
    options: dict[str, Any] = {"retrieve_frequency_ms": 1_000, "query_on_connect": False}
    async with opened(node, **options) as (_, told):
        await node.deliver(said(2, follows=[HistoryEntry("bob-1", None, "bob")]))
        await asyncio.sleep(30)
        assert node.taken <= 80  # forty pages for each of two queries at most
        await node.deliver(said(1))
        assert told.payloads == [b"bob 1", b"bob 2"]


@pytest.mark.req("C-302")
@virtually
async def test_answers_about_requests_nobody_made_are_ignored() -> None:
    async with unharmed() as (node, _, told):
        before = len(told.events)
        await node.message_events.emit(NodeMessageSent("unknown", bytes(32)))
        await node.message_events.emit(NodeMessageError("unknown", None, "no", "refused", False))
        await node.message_events.emit(NodeMessageError("unknown", None, "no", "rate_limited", True, 10**9))
        await settle()
        assert told.events[before:] == []


# The program and its surroundings.


@pytest.mark.req("C-302", "C-026")
@virtually
async def test_handlers_that_raise_stop_nothing() -> None:
    async with unharmed() as (node, channel, told):

        def broken(event: Any) -> None:
            raise RuntimeError("a handler")

        async def broken_later(event: Any) -> None:
            await asyncio.sleep(0)
            raise RuntimeError("a handler")

        for name in channel.message_events.names:
            channel.message_events.on(name, broken)
            channel.message_events.on(name, broken_later)
        await node.deliver(said(1))
        assert told.payloads[-1] == b"bob 1"


@pytest.mark.req("C-256", "C-302")
@virtually
async def test_a_full_disk_harms_nothing_that_was_stored(tmp_path: Path) -> None:
    path = tmp_path / "channels.db"
    store = InPlace(lambda: SqlitePersistence.open(path, max_bytes=400_000))
    node = ScriptedNode()
    channel = make_channel(node, "room", TOPIC, "alice", options={**QUIET, "persistence": store})
    told = Told(channel)
    await channel.open()
    delivered: list[bytes] = []
    for n in range(100):
        delivering = asyncio.create_task(node.deliver(said(n, random.Random(n).randbytes(20_000))))
        await asyncio.sleep(0.5)
        if isinstance(channel.health.store.error, StorageFull):
            break
        await delivering
    assert isinstance(channel.health.store.error, StorageFull)
    delivered = list(told.payloads)
    assert delivered
    with pytest.raises(StorageFull):
        await channel.send(b"no room")
    with pytest.raises(StorageFull):
        await channel.close()
    delivering.cancel()
    await store.close()
    # With room again, it continues where it was; peers send again what did not fit.
    store = InPlace(lambda: SqlitePersistence.open(path))
    again = ScriptedNode()
    async with opened(again, persistence=store) as (channel, told):
        for n in range(len(delivered) + 2):
            await again.deliver(said(n, random.Random(n).randbytes(20_000)))
        assert told.payloads == [
            random.Random(n).randbytes(20_000) for n in range(len(delivered), len(delivered) + 2)
        ]
        await channel.send(b"works")
    await store.close()


# Everything together.

entries = st.builds(
    HistoryEntry,
    st.sampled_from(["bob-1", "bob-2", "bob-3", "", "x" * 300, "own"]),
    st.none() | st.binary(max_size=40),
    st.none() | st.sampled_from(["bob", "alice", "", "y" * 300]),
)
hostile_messages = st.builds(
    SdsMessage,
    st.sampled_from(["bob", "alice", "carol", "", "z" * 300]),
    st.sampled_from(["bob-1", "bob-2", "bob-3", "own", "", "w" * 300]),
    st.sampled_from(["room", "room", "room", "hall", ""]),
    st.none() | st.sampled_from([0, 1, START_MS, 2**63, 2**64 - 1]),
    st.lists(entries, max_size=4).map(tuple),
    st.none() | st.just(b"\xff" * 18_752) | st.just(filter_of()) | st.binary(max_size=30),
    st.lists(entries, max_size=4).map(tuple),
    st.none()
    | st.binary(max_size=60)
    | st.builds(
        lambda **fields: encode_segment(Segment(**fields)),
        entire_message_hash=st.sampled_from([bytes(32), message_hash(b"ab"), b"short"]),
        data_segment_count=st.sampled_from([0, 1, 2, 3, 256, 2**32 - 1]),
        data_segment_index=st.integers(0, 3),
        parity_segment_count=st.sampled_from([0, 1, 256]),
        parity_segment_index=st.integers(0, 2),
        is_parity=st.booleans(),
        payload=st.sampled_from([b"", b"a", b"b", b"ab"]),
        request_id=st.none() | st.sampled_from(["r", "r" * 200]),
        original_length=st.none() | st.sampled_from([0, 1, 2**63]),
    ),
)


@pytest.mark.req("C-302", "C-074")
@given(
    inputs=st.lists(
        st.binary(max_size=200) | hostile_messages.map(SdsMessage.encode) | st.just(None), max_size=25
    ),
    binding=st.sampled_from(["off", "did"]),
)
@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_arrives_the_channel_works_on_and_tells_nothing_twice(
    inputs: Sequence[bytes | None], binding: str
) -> None:
    async def run() -> None:
        async with unharmed(
            sender_binding=binding,
            sync_min_interval_ms=5_000,
            retrieve_frequency_ms=1_000,
            lost_message_timeout_ms=20_000,
            reassembly_timeout_ms=20_000,
        ) as (node, channel, told):
            for data in inputs:
                if data is None:
                    await asyncio.sleep(30)
                else:
                    await node.deliver(data)
            await asyncio.sleep(60)
            for received in told.of(MessageReceived):
                assert received.message_id == message_hash(received.payload).hex()
                assert received.sender_id not in ("alice", "")
            log = channel.log()
            assert len(log) == len(set(log))
            status = channel.sync_status()
            assert status.missing == () and status.partial_messages == 0  # in time everything is given up

    run_virtually(run)


@virtually
async def test_errors_of_a_channel_are_of_one_kind() -> None:
    node = ScriptedNode()
    channel = make_channel(node, "room", TOPIC, "alice")
    with pytest.raises(ReliableError):
        await channel.send(b"too early")
