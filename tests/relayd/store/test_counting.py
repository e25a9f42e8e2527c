"""What is counted in a log: places without a row, rows that are not what their id says, what was erased."""

from __future__ import annotations

import time

import asyncpg
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet

from relayd.moderation import Kind
from relayd.store import NewPacket, Store
from relayd.store.counting import count_log, log_end, packets_beyond
from relayd.store.erasing import Eraser
from tests.support.made_packets import make, new_identity

NOW = int(time.time())


def row_of(packet: Packet) -> NewPacket:
    return NewPacket(
        packet.digest, packet.author_id, packet.content_type, packet.timestamp, None, packet.canonical
    )


async def test_each_kind_of_loss_is_counted_as_what_it_is(store: Store, sql: asyncpg.Connection):
    author = new_identity()
    made = [make(author, str(n)) for n in range(10)]
    await store.append([row_of(packet) for packet in made[:6]], NOW - 86_400)
    await store.append([row_of(packet) for packet in made[6:]], NOW)
    head = await store.head()
    assert (await log_end(store.url)).head == head
    counted = await count_log(store.url)
    assert (counted.packets, counted.erased, counted.missing, counted.damaged) == (10, 0, 0, 0)
    assert (counted.head, counted.last_received_at) == (head, NOW)
    eraser = Eraser(store.url, Identity(bytes(32)))
    await eraser.erase(
        Kind.PACKET, [made[0].packet_id], reason="asked for", actor="ann", via="command", now=NOW
    )
    await sql.execute("DELETE FROM packets WHERE packet_id = $1", made[2].digest)
    await sql.execute("UPDATE packets SET body = 'other' WHERE packet_id = $1", made[3].digest)
    await sql.execute("UPDATE packets SET body = '' WHERE packet_id = $1", made[4].digest)
    counted = await count_log(store.url)
    assert (counted.packets, counted.erased, counted.missing, counted.damaged) == (8, 1, 1, 2)
    assert await packets_beyond(store.url, head - 2) == 2
