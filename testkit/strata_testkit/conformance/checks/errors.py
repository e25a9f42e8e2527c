"""Section 12: ERROR and codes."""

from __future__ import annotations

from strata.protocol.errors import ErrorCode

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.forge import flipped, sized
from strata_testkit.conformance.model import Group
from strata_testkit.conformance.peer import expect_error
from strata_testkit.conformance.verdicts import expect

__all__ = ["CHECKS"]

CHECKS = Group(12)


@CHECKS("R-195", source="RFC-0004 §3.5", concludes=True)
async def every_error_has_code_and_reason(context: Context) -> None:
    """Every ERROR has a `code` and a `reason`"""
    breach = context.witness.breaches.get("R-195")
    expect(breach is None, "code and reason in every ERROR", breach)


@CHECKS("R-196", source="RFC-0004 §3.5")
async def the_common_codes_mean_what_they_say(context: Context) -> None:
    """`invalid_schema`, `invalid_signature`, `packet_too_large` and `unauthenticated` mean what they say"""
    author = context.identity()
    auth = {"type": "AUTH", "author_id": author.did, "challenge": "eA==", "signature": "0x" + "00" * 64}
    async with context.connect() as peer:
        expect_error(await peer.publish("{}"), ErrorCode.INVALID_SCHEMA)
        broken = flipped(context.packet(author).canonical, "signature")
        expect_error(await peer.publish(broken), ErrorCode.INVALID_SIGNATURE)
        size = context.subject.max_packet_bytes + 9
        too_large = sized(author, {"type": "POST"}, size, timestamp=context.now())
        expect_error(await peer.publish(too_large), ErrorCode.PACKET_TOO_LARGE)
        expect_error(await peer.ask(auth), ErrorCode.UNAUTHENTICATED)


@CHECKS("R-199", source="RFC-0000 §8; decision A-062", concludes=True)
async def no_reason_leaks(context: Context) -> None:
    """No `reason` contains a stack trace, SQL, a path or a key"""
    breach = context.witness.breaches.get("R-199")
    expect(breach is None, "reasons for people", breach)
