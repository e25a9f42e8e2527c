"""Section 6: time, freshness, expiry."""

from __future__ import annotations

import asyncio
import time

from strata.protocol.ids import Identity
from strata.protocol.packets import Packet

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.forge import members, seal
from strata_testkit.conformance.model import Group
from strata_testkit.conformance.peer import Peer, expect_error, expect_ok, ids_of
from strata_testkit.conformance.verdicts import DECISIONS, expect, expect_equal

__all__ = ["CHECKS"]

CHECKS = Group(6)

_FUTURE_BOUND = 300
_MARGIN = 30
"""The distance kept from a bound, in seconds, since the clocks of two machines may differ."""
_SHORT_LIVES = (2, 6, 30)
"""Lifetimes to try, in seconds: on a busy machine, a packet may expire on its way to the relay."""


@CHECKS("R-092", "R-095", source="RFC-0002 §3.3")
async def the_future_is_refused(context: Context) -> None:
    """A timestamp more than 300 s ahead is refused, one slightly less ahead is accepted"""
    author = context.identity()
    async with context.connect() as peer:
        expect_error(await peer.publish(context.packet(author, age=-_FUTURE_BOUND - _MARGIN)))
        expect_ok(await peer.publish(context.packet(author, age=-_FUTURE_BOUND + _MARGIN)))


@CHECKS("R-093", source="RFC-0002 §3.3, §8")
async def the_distant_past_is_refused(context: Context) -> None:
    """A timestamp older than 24 h (or the announced bound) is refused, a slightly newer one is accepted"""
    author, bound = context.identity(), context.subject.max_packet_age_seconds
    async with context.connect() as peer:
        expect_error(await peer.publish(context.packet(author, age=bound + _MARGIN)))
        expect_ok(await peer.publish(context.packet(author, age=bound - _MARGIN)))


@CHECKS("R-029", source="RFC-0000 §6")
async def milliseconds_are_the_far_future(context: Context) -> None:
    """A timestamp in milliseconds is not converted but refused"""
    author = context.identity()
    packet = context.packet(author, expires_in=None)
    async with context.connect() as peer:
        expect_error(await peer.publish(seal(author, members(packet, timestamp=packet.timestamp * 1000))))


@CHECKS("R-101", source="RFC-0002 §3.3; RFC-0004 §8")
async def expired_packets_are_refused(context: Context) -> None:
    """A packet that has already expired is refused"""
    async with context.connect() as peer:
        expect_error(await peer.publish(context.packet(context.identity(), expires_in=-_MARGIN)))


@CHECKS("R-094", source="decision A-034", extension=DECISIONS)
async def each_time_fault_has_its_code(context: Context) -> None:
    """The codes are `timestamp_in_future`, `timestamp_too_old`, `packet_expired`"""
    author, bound = context.identity(), context.subject.max_packet_age_seconds
    async with context.connect() as peer:
        ahead = context.packet(author, age=-_FUTURE_BOUND - _MARGIN)
        expect_error(await peer.publish(ahead), "timestamp_in_future")
        expect_error(await peer.publish(context.packet(author, age=bound + _MARGIN)), "timestamp_too_old")
        expect_error(await peer.publish(context.packet(author, expires_in=-_MARGIN)), "packet_expired")


@CHECKS("R-097", "R-099", source="RFC-0002 §3.3; RFC-0004 §4")
async def arrival_is_recorded_once(context: Context) -> None:
    """`received_at` is the relay's own time of arrival, does not change, and never decreases"""
    author = context.identity()
    packets = [context.packet(author, age=age) for age in (5000, 10, 3000, 0)]
    async with context.connect() as peer:
        for packet in packets:
            await peer.store(packet)
        first = (await peer.subscribe("s", {"authors": [author.did]})).events
        again = (await peer.subscribe("t", {"authors": [author.did]})).events
        times = [int(event.get("received_at") or 0) for event in first]
        expect_equal(ids_of(first), [packet.packet_id for packet in packets], "the order of arrival")
        expect_equal([event.get("received_at") for event in again], times, "unchanged received_at")
        expect(times == sorted(times), "received_at that never decreases", times)
        now = context.now()
        expect(all(abs(now - at) < 60 for at in times), f"received_at near {now}", times)


@CHECKS("R-098", "R-173", source="RFC-0002 §3.3; RFC-0004 §3.3", concludes=True)
async def every_event_says_when_it_arrived(context: Context) -> None:
    """Every EVENT carries an integer `received_at`"""
    breach = context.witness.breaches.get("R-098")
    expect(breach is None, "received_at on every EVENT", breach)


async def _stored_before_it_expires(context: Context, peer: Peer, author: Identity) -> Packet:
    for seconds in _SHORT_LIVES:
        packet = context.packet(author, expires_in=seconds)
        answer = await peer.publish(packet)
        if answer["type"] == "OK" or context.now() < (packet.expires_at or 0):
            break
    expect_ok(answer)
    return packet


@CHECKS("R-100", "R-102", "R-103", source="RFC-0002 §3.1, §3.3, §8; decision A-036")
async def expired_packets_are_served_nowhere(context: Context) -> None:
    """Once `expires_at` has passed, the packet is not served; one inside `content` has no effect"""
    author = context.identity()
    lasting = context.packet(author, expires_at=context.now() - 9)
    async with context.connect() as peer:
        short = await _stored_before_it_expires(context, peer, author)
        await peer.store(lasting)
        remaining = (short.expires_at or 0) + 2 - time.time() - context.subject.clock_offset
        await asyncio.sleep(max(remaining, 0))
        history = await peer.subscribe("s", {"authors": [author.did]})
        expect_equal(history.ids, [lasting.packet_id], "the packet that has not expired, alone")
        if context.subject.announces("http_packets"):
            expect_equal(
                (await context.get(f"/packets/{short.packet_id}")).status, 410, "the status of its URL"
            )
        if context.subject.announces(DECISIONS):
            answer = expect_ok(await peer.publish(short), short)
            expect(answer.get("duplicate") is True, "an expired packet to be known still (R-102)", answer)
