"""Section 7: duplicates and replay."""

from __future__ import annotations

import asyncio
import json

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.forge import members
from strata_testkit.conformance.model import Group
from strata_testkit.conformance.peer import expect_error, expect_ok, ids_of
from strata_testkit.conformance.verdicts import DECISIONS, expect, expect_equal

__all__ = ["CHECKS"]

CHECKS = Group(7)


@CHECKS("R-109", source="RFC-0002 §8; RFC-0004 §8")
async def repeats_are_dropped(context: Context) -> None:
    """A repeated packet is neither stored nor forwarded again"""
    author = context.identity()
    packet = context.packet(author)
    async with context.connect() as peer:
        await peer.subscribe("live", {"authors": [author.did]})
        await peer.store(packet)
        await peer.publish(packet)
        await peer.publish(packet)
        expect_equal(ids_of(await peer.quiet("live")), [packet.packet_id], "one EVENT")
        history = await peer.subscribe("s", {"authors": [author.did]})
        expect_equal(history.ids, [packet.packet_id], "one stored packet")


@CHECKS("R-110", source="decision A-056", extension=DECISIONS)
async def repeats_are_answered_ok(context: Context) -> None:
    """A repeated PUBLISH is answered OK, ACCEPTED, `duplicate: true`"""
    packet = context.packet(context.identity())
    async with context.connect() as peer:
        (first,) = await peer.store(packet)
        again = expect_ok(await peer.publish(packet), packet)
        expect("duplicate" not in first, "no `duplicate` on the first OK", first)
        seen = (again.get("status"), again.get("duplicate"), again.get("received_at"))
        expect_equal(seen, ("ACCEPTED", True, first.get("received_at")), "status, duplicate, received_at")


@CHECKS("R-111", source="RFC-0002 §8")
async def sessions_at_once_store_once(context: Context) -> None:
    """Packets that several sessions publish at once are stored and sent once, and get an OK on each"""
    author = context.identity()
    packets = context.packets(author, 10)

    async def publish() -> None:
        async with context.connect() as peer:
            await peer.store(*packets)

    async with context.connect() as reader:
        await reader.subscribe("live", {"authors": [author.did]})
        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                tasks.create_task(publish(), name=f"conformance-publisher-{number}")
        wanted = sorted(packet.packet_id for packet in packets)
        expect_equal(sorted(ids_of(await reader.quiet("live"))), wanted, "one EVENT for each packet")
        history = await reader.subscribe("s", {"authors": [author.did]})
        expect_equal(sorted(history.ids), wanted, "one stored copy of each packet")


@CHECKS("R-112", "R-183", source="RFC-0002 §8; decision A-059")
async def a_known_id_hides_nothing(context: Context) -> None:
    """Another body under the id of a stored packet is refused, and not treated as a repeat"""
    author = context.identity()
    packet = context.packet(author)
    altered = json.dumps(members(packet, content={"type": "POST", "text": "altered"}))
    async with context.connect() as peer:
        await peer.store(packet)
        expect_error(await peer.publish(altered), "invalid_signature", "invalid_schema")
