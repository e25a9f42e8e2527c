"""Packets that a clock that was ahead has told as received in the future, and their mending."""

from __future__ import annotations

import msgspec
import pytest
from strata.protocol.sequences import DAY_SECONDS

from relayd.lineage import SKEW_SECONDS
from relayd.store import LogQuery

NOW = 1_790_000_000
YEARS = 3650 * DAY_SECONDS


async def told(store, now: int) -> list[int]:
    return [row.received_at for row in (await store.page(LogQuery(), 100, now)).rows]


@pytest.mark.req("R-099")
@pytest.mark.parametrize("ahead", [7200, YEARS])
async def test_packets_of_the_future_are_told_as_received_when_the_next_one_was(store, packet, ahead):
    await store.append([packet(1)], NOW)
    await store.append([packet(2), packet(3)], NOW + ahead)
    await store.append([packet(4)], NOW + 10)
    await store.append([packet(5)], NOW + SKEW_SECONDS + 60)
    await store.append([msgspec.structs.replace(packet(6), content_type="KEY_EVENT")], NOW + 2 * ahead)
    assert await store.latest_told_at() == NOW + 2 * ahead
    held, later = NOW + 10 + SKEW_SECONDS, NOW + SKEW_SECONDS + 60
    assert await told(store, NOW) == [NOW, NOW + ahead, NOW + ahead, held, later, NOW + 2 * ahead]
    sequences = [row.sequence for row in (await store.page(LogQuery(), 100, NOW)).rows]
    now = NOW + 1000
    assert await store.mend_times(now) == (3, 1, NOW + 2 * ahead)
    assert await told(store, now) == [NOW, held, held, held, later, now]
    assert [row.sequence for row in (await store.page(LogQuery(), 100, now)).rows] == sequences
    assert await store.latest_told_at() == now
    found = await store.find([packet(2).packet_id, packet(6).packet_id])
    assert [received_at for _, received_at in found.values()] in ([held, now], [now, held])
    page = await store.page(LogQuery(received_until=held), 100, now)
    assert [row.received_at for row in page.rows] == [NOW, held, held, held]
    assert await store.mend_times(now) == (0, 0, None)
    appended = await store.append([packet(7)], now)
    assert appended.dispositions[0].received_at == now


async def test_a_log_that_was_held_by_an_older_program_is_told_rightly_from_the_first_append(
    store, packet, sql
):
    await store.append([packet(1)], NOW + YEARS)
    await sql.execute("UPDATE log_head SET last_told_at = NULL, latest_told_at = NULL")
    assert await store.latest_told_at() == NOW + YEARS
    appended = await store.append([packet(2)], NOW)
    assert appended.dispositions[0].received_at == NOW + SKEW_SECONDS
    assert await store.latest_told_at() == NOW + YEARS
    assert await store.mend_times(NOW) == (1, 0, NOW + YEARS)
