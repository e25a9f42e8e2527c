"""Section 16: storage, indexing, queries."""

from __future__ import annotations

import json

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.model import Group
from strata_testkit.conformance.verdicts import Message, expect, expect_equal

__all__ = ["CHECKS"]

CHECKS = Group(16)

_HOSTILE = ["'; DROP TABLE packets; --", "a\u0000b", "\\", "$1", "%s", "x" * 3000, "ü🦀", ""]


@CHECKS("R-300", "R-301", source="RFC-0004 §4, §7; decision A-048", extension="http_packets")
async def packets_have_a_url(context: Context) -> None:
    """`GET /packets/{packet_id}` returns the packet and its `received_at`, or 404"""
    packet = context.packet(context.identity(), weights=[1.0, 1e21], nul="\u0000")
    async with context.connect() as peer:
        (ok,) = await peer.store(packet)
    answer = await context.get(f"/packets/{packet.packet_id}")
    expect(
        answer.status == 200 and answer.content_type == "application/json",
        "200, application/json",
        answer.status,
    )
    expect(
        packet.canonical in answer.body,
        "the bytes that were published",
        answer.body.decode("utf-8", "replace"),
    )
    received_at = json.loads(answer.body).get("received_at")
    expect(ok.get("received_at") in (None, received_at), "received_at as in the OK", received_at)
    expect_equal((await context.get("/packets/0x" + "00" * 32)).status, 404, "the status of an unknown id")


@CHECKS("R-302", "R-303", "R-304", source="RFC-0004 §4")
async def packets_are_found(context: Context) -> None:
    """Stored packets are found by author, by type and by time"""
    author, kind = context.identity(), context.type()
    packet = context.packet(author, type=kind, age=100)
    at = packet.timestamp
    async with context.connect() as peer:
        await peer.store(packet)
        ways: list[Message] = [
            {"authors": [author.did]},
            {"types": [kind]},
            {"types": [kind], "since": at, "until": at},
        ]
        for number, filters in enumerate(ways):
            history = await peer.subscribe(f"s{number}", filters)
            expect_equal(history.ids, [packet.packet_id], f"the packet, by {sorted(filters)}")


@CHECKS("R-312", source="RFC-0000 §8")
async def hostile_values_are_values(context: Context) -> None:
    """Quotes, NULs and long strings are stored, compared and served as they are"""
    author = context.identity()
    packets = [context.packet(author, type=kind) for kind in _HOSTILE]
    async with context.connect() as peer:
        await peer.store(*packets)
        for kind, packet in zip(_HOSTILE, packets, strict=True):
            history = await peer.subscribe("s", {"authors": [author.did], "types": [kind]})
            expect_equal(history.ids, [packet.packet_id], f"the packet of type {kind!r:.40}")
