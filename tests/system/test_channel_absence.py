"""Long absences and late comers over a real relay: everything in order, once, resumed at the right place.

`STRATA_ABSENCE` sets the number of messages missed; the suite uses few.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import pytest
import strata
from strata.channels.messaging import NodeMessageReceived
from strata.channels.persistence import SqlitePersistence
from strata.channels.reliable import SyncStatus
from strata.protocol.ids import Identity

from benches.channel_absence import CHANNEL, join_to_first_live, publish_all, read_all, written
from tests.support.relay_process import RelayProcess

MISSED = int(os.environ.get("STRATA_ABSENCE", "1500"))
FILTER_IDS = 100
"""A small filter: the packets are small, and a relay of the suite holds many."""


async def test_a_long_absence_is_made_up_for_in_order_and_in_bounded_memory(
    relay: RelayProcess, topic: str
) -> None:
    await publish_all(relay.ws, written(MISSED, topic, filter_ids=FILTER_IDS))
    spent = await read_all(relay.ws, topic, MISSED, filter_ids=FILTER_IDS)
    assert spent.messages == MISSED
    print(spent)
    # The log and the known ids are bounded; the messages themselves are many times larger.
    assert spent.grown_bytes < 400_000_000


def connected(url: str, *, pool: bool) -> strata.Relay | strata.Pool:
    if pool:
        return strata.connect_pool([url], identity=Identity.generate())
    return strata.connect(url, identity=Identity.generate())


@pytest.mark.parametrize("pool", [False, True])
async def test_a_reading_in_several_lives_skips_nothing_and_repeats_nothing(
    relay: RelayProcess, topic: str, tmp_path: Path, pool: bool
) -> None:
    count = 700
    await publish_all(relay.ws, written(count, topic, filter_ids=FILTER_IDS))
    taken: list[bytes] = []
    seen: list[SyncStatus] = []
    lives = 0
    while len(taken) < count:
        lives += 1
        async with (
            await SqlitePersistence.open(tmp_path / "channel.db") as store,
            connected(relay.ws, pool=pool) as connection,
        ):
            room = connection.channel(
                CHANNEL,
                topic=topic,
                sender_id="me",
                persistence=store,
                bloom_filter_size=FILTER_IDS,
                max_inbox_messages=100,
                hand_over="again",
            )
            async with room, asyncio.timeout(120):
                for _ in range(min(300, count - len(taken))):
                    taken.append((await anext(room)).payload)
                    seen.append(room.sync_status())
                if len(taken) < count:
                    taken.pop()  # it was being processed when the program left, so it comes again
    assert taken == [b"message %d" % number for number in range(count)]
    assert lives > 2
    assert not any(status.is_synced for status in seen[: count // 3])


@pytest.mark.parametrize("pool", [False, True])
async def test_a_newcomer_is_sent_a_page_or_two_before_what_is_said_now_whatever_was_said_before(
    relay: RelayProcess, topic: str, pool: bool
) -> None:
    await publish_all(relay.ws, written(MISSED, topic, filter_ids=FILTER_IDS))
    joined = await join_to_first_live(relay.ws, topic, filter_ids=FILTER_IDS, pool=pool)
    print(joined)
    # A page of the latest messages, and one more if the first already contains a present one.
    assert joined.packets <= 1_020 < MISSED


@pytest.mark.parametrize("pool", [False, True])
async def test_what_comes_in_while_somebody_joins_is_read_or_heard(
    relay: RelayProcess, topic: str, pool: bool
) -> None:
    count = 600
    had: Counter[bytes] = Counter()

    def note(event: NodeMessageReceived) -> None:
        had[event.message_hash] += 1

    publishing = asyncio.create_task(publish_all(relay.ws, written(count, topic, filter_ids=FILTER_IDS)))
    async with connected(relay.ws, pool=pool) as connection, asyncio.timeout(60):
        node = connection.node
        node.message_events.on("message_received", note)
        await node.subscribe_live([topic])
        async with aclosing(node.read(topic, order="asc", since_ms=0)) as pages:
            async for page in pages:
                for event in page.messages:
                    note(event)
        await publishing
        while len(had) < count:  # noqa: ASYNC110 -- the deadline is above
            await asyncio.sleep(0.01)
