"""Section 8: size."""

from __future__ import annotations

import asyncio
import json

from strata.protocol.packets import Packet
from websockets.exceptions import ConnectionClosed

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.forge import publish_text, sized
from strata_testkit.conformance.model import Group, Keyword
from strata_testkit.conformance.peer import Peer, expect_error, expect_ok
from strata_testkit.conformance.verdicts import DECISIONS, Failed, expect_equal

__all__ = ["CHECKS"]

CHECKS = Group(8)

_HARD_MAX_BYTES = 1_048_576


def _sized(context: Context, size_bytes: int) -> Packet:
    now = context.now()
    content = {"type": "POST"}
    return sized(context.identity(), content, size_bytes, timestamp=now, expires_at=now + 60)


async def _expect_too_large(peer: Peer) -> None:
    """Expect ERROR `packet_too_large`, or a close with 1009 in place of an answer."""
    try:
        expect_error(await peer.answer(), "packet_too_large")
    except ConnectionClosed as closed:
        if closed.rcvd is None or closed.rcvd.code != 1009:
            raise Failed("ERROR packet_too_large, or a close with 1009", str(closed)) from None


@CHECKS("R-117", "R-121", source="RFC-0002 §3.5; RFC-0004 §6.2")
async def the_size_limit_is_exact(context: Context) -> None:
    """A packet of exactly the limit is accepted; one byte more is `packet_too_large`"""
    limit = context.subject.max_packet_bytes
    fits = _sized(context, limit)
    async with context.connect() as peer:
        expect_error(await peer.publish(_sized(context, limit + 1)), "packet_too_large")
        expect_ok(await peer.publish(fits), fits)


@CHECKS("R-117", source="RFC-0002 §3.5; decision A-012", extension=DECISIONS)
async def spelling_is_no_size(context: Context) -> None:
    """Spaces and escapes do not count: the size is that of the canonical form"""
    packet = _sized(context, context.subject.max_packet_bytes)
    async with context.connect() as peer:
        expect_ok(await peer.publish(json.dumps(json.loads(packet.canonical), indent=8)), packet)


@CHECKS("R-122", source="RFC-0004 §6.2", level=Keyword.SHOULD)
async def too_large_says_how_large(context: Context) -> None:
    """`packet_too_large` states `max_bytes`"""
    limit = context.subject.max_packet_bytes
    async with context.connect() as peer:
        answer = expect_error(await peer.publish(_sized(context, limit + 1)), "packet_too_large")
        expect_equal(answer.get("max_bytes"), limit, "max_bytes")


@CHECKS("R-119", source="RFC-0002 §3.5", level=Keyword.SHOULD)
async def a_mebibyte_is_the_end(context: Context) -> None:
    """A packet above 1 048 576 bytes is never accepted"""
    async with context.connect() as peer:
        await peer.socket.send(publish_text(_sized(context, _HARD_MAX_BYTES + 1), "big"))
        await _expect_too_large(peer)


@CHECKS("R-123", "R-126", source="decision A-013", extension=DECISIONS)
async def huge_frames_are_refused(context: Context) -> None:
    """A frame larger than any packet can need is answered `packet_too_large` or closed with 1009"""
    async with context.connect() as peer:
        sending = asyncio.create_task(peer.socket.send("x" * (4 * 2**20)), name="conformance-huge-frame")
        try:
            await _expect_too_large(peer)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
