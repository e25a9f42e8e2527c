"""What a relay publishes about itself: made alike by every process, and renewed in time."""

from __future__ import annotations

import asyncio
import dataclasses
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.packets import Packet, check_freshness
from strata.protocol.typed import check_content
from strata.relays.curation import Arrival, current_descriptor
from strata_testkit.sim.loop import run_virtually, virtual_time

from relayd.announcing import Announcer, announcements
from relayd.config import Settings

NOW = 1_790_000_000
RELAY = Identity.from_seed(b"R" * 32)
SETTINGS = Settings(public_url="wss://relay.example/s", announce_seconds=7200, replication_peers=("did:a",))


def test_they_are_sound_and_every_process_makes_the_same():
    said = announcements(SETTINGS, RELAY, NOW)
    assert [packet.content["type"] for packet in said] == ["RELAY_DESCRIPTOR", "CONFIG"]
    for packet in said:
        check_content(Packet.parse(packet.canonical), [RELAY.public_key])
        assert packet.expires_at == packet.timestamp + 7200
        assert NOW - 3600 < packet.timestamp <= NOW
    start = said[0].timestamp
    for at in (start, start + 1, start + 3599):
        assert announcements(SETTINGS, RELAY, at) == said
    assert announcements(SETTINGS, RELAY, start + 3600)[0].timestamp == start + 3600
    arrivals = [Arrival(packet, packet.timestamp) for packet in said]
    assert current_descriptor(RELAY.did, arrivals, NOW) is not None


def test_a_relay_takes_its_own_words_however_young_packets_have_to_be():
    settings = dataclasses.replace(SETTINGS, announce_seconds=86_400, max_packet_age_seconds=600)
    for at in range(NOW, NOW + 86_400, 599):
        for packet in announcements(settings, RELAY, at):
            check_freshness(packet, at, max_age_seconds=600)


def test_who_is_read_by_nobody_says_no_policy_and_who_announces_nothing_says_nothing():
    alone = Settings(public_url="wss://relay.example/s", announce_seconds=7200)
    assert [packet.content["type"] for packet in announcements(alone, RELAY, NOW)] == ["RELAY_DESCRIPTOR"]
    assert announcements(Settings(replication_peers=("did:a",)), RELAY, NOW) == []


@pytest.mark.req("R-383")
def test_a_descriptor_is_renewed_before_it_expires_and_tried_again_where_it_was_refused():
    stored: list[tuple[int, str]] = []
    refusals = [True] * 3

    def submit(request: Any) -> None:
        packet = Packet.parse(request.raw)
        if refusals:
            refusals.pop()
            error = InvalidPacket(ErrorCode.INTERNAL_ERROR, "away", detail="store_unavailable")
            asyncio.get_running_loop().call_soon(request.lane.publisher.publish_refused, request, error)
            return
        stored.append((NOW + int(virtual_time()), packet.packet_id))
        answer = lambda: request.lane.publisher.publish_accepted(request, NOW, duplicate=False)  # noqa: E731
        asyncio.get_running_loop().call_soon(answer)

    async def work() -> None:
        alone = Settings(public_url="wss://relay.example/s", announce_seconds=7200)
        admission = cast(Any, SimpleNamespace(submit=submit))
        announcer = Announcer(lambda: alone, RELAY, admission, lambda: NOW + int(virtual_time()))
        task = asyncio.create_task(announcer.run())
        await asyncio.sleep(86_400)
        task.cancel()

    run_virtually(work)
    assert len(stored) == len({packet_id for _, packet_id in stored}) == 25
    assert stored[0][0] - NOW == 180, "after three refusals, a minute each"
    gaps = [after[0] - before[0] for before, after in pairwise(stored[1:])]
    assert max(gaps) <= 3600 + 60, "long before the one before it expires"
