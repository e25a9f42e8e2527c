"""Leaving a channel over a real relay: all messages have been sent, or the program gets an error."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import strata
from strata.channels.encryption import GroupKey, GroupKeyEncryption
from strata.channels.persistence import SqlitePersistence
from strata.channels.reliable import MessageReceived, NotSent, ReliableChannel
from strata.protocol.ids import Identity

from tests.support.ports import free_port
from tests.support.relay_process import RelayProcess, running
from tests.support.waiting import until

KEY = GroupKeyEncryption("room", GroupKey(bytes(32)))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "encrypted": {"encryption": KEY},
    "bound": {"sender_binding": "did"},
}
MENDING = strata.Options(backoff_base=0.05, backoff_cap=0.5)


async def received(url: str, topic: str, count: int = 1, **options: Any) -> list[bytes]:
    """The messages that a later participant receives."""
    taken: list[bytes] = []
    async with (
        strata.connect(url, identity=Identity.generate()) as relay,
        relay.channel("room", topic=topic, **options) as room,
    ):
        while len(taken) < count:
            taken.append((await anext(room)).payload)
    return taken


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("size", [10, 300_000])
async def test_one_message_and_out(relay: RelayProcess, topic: str, kind: str, size: int) -> None:
    payload = random.Random(1).randbytes(size)
    async with strata.connect(relay.ws, identity=Identity.generate()) as mine:
        async with mine.channel("room", topic=topic, **OPTIONS[kind]) as room:
            await room.send(payload)
    assert await received(relay.ws, topic, **OPTIONS[kind]) == [payload]


@pytest.mark.parametrize("pool", [False, True])
async def test_closing_the_connection_lets_the_messages_of_its_channels_out(
    relay: RelayProcess, topic: str, pool: bool
) -> None:
    identity = Identity.generate()
    connection = (
        strata.connect_pool([relay.ws], identity=identity)
        if pool
        else strata.connect(relay.ws, identity=identity)
    )
    async with connection as mine:
        rooms: list[ReliableChannel] = []
        for number in range(3):
            room = mine.channel("room", topic=f"{topic}{number}", sender_id=f"me {number}")
            rooms.append(await room.open())
            await room.send(b"%d" % number)
    for number, room in enumerate(rooms):
        assert not room.is_started()
        assert await received(relay.ws, f"{topic}{number}") == [b"%d" % number]


async def test_with_the_relay_away_the_program_is_told_or_the_store_keeps_the_message(
    tmp_path: Path, topic: str
) -> None:
    port = free_port()
    identity = Identity.generate()
    relay = RelayProcess(tmp_path / "relay", port=port)
    with running(relay):
        async with strata.connect(relay.ws, identity=identity, options=MENDING) as mine:
            relay.kill()
            await until(lambda: not mine.is_connected, "the connection is lost")
            with pytest.raises(NotSent) as caught:
                async with mine.channel("room", topic=topic, drain_timeout_ms=300) as room:
                    lost = await room.send(b"lost")
            assert caught.value.requests == (lost,)
            store = await SqlitePersistence.open(tmp_path / "store.db")
            keeping: dict[str, Any] = {"persistence": store, "sender_id": "me", "drain_timeout_ms": 300}
            async with mine.channel("room", topic=topic, **keeping) as room:
                await room.send(b"kept", request_id="one")
            relay.start()
            keeping["drain_timeout_ms"] = 30_000
            async with mine.channel("room", topic=topic, **keeping) as room:
                await room.send(b"kept", request_id="one")
                await room.send(b"and another")
            await store.close()
        assert await received(relay.ws, topic, 2) == [b"kept", b"and another"]


async def test_events_alone_bring_messages(relay: RelayProcess, topic: str) -> None:
    async with (
        strata.connect(relay.ws, identity=Identity.generate()) as hers,
        strata.connect(relay.ws, identity=Identity.generate()) as his,
        hers.channel("room", topic=topic) as room,
        his.channel("room", topic=topic, hand_over="at_least_once") as same_room,
    ):
        await room.send(b"hello")
        async for event in same_room.events():
            if isinstance(event, MessageReceived):
                assert event.payload == b"hello"
                await same_room.ack(event)
                break
        assert same_room.sync_status().inbox == 0
