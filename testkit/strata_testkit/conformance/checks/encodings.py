"""Section 2: encodings, hashes and identifiers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from strata.protocol import canonical

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.forge import flipped, malleated, members
from strata_testkit.conformance.model import Group
from strata_testkit.conformance.peer import expect_error, expect_ok
from strata_testkit.conformance.verdicts import DECISIONS, expect, expect_equal

__all__ = ["CHECKS"]

CHECKS = Group(2)

_MALFORMED_IDS: dict[str, Callable[[str], str]] = {
    "upper case": lambda text: "0x" + text[2:].upper(),
    "no prefix": lambda text: text[2:],
    "base58": lambda text: "z" + text[3:],
    "multihash": lambda text: "0x1e20" + text[2:],
    "too short": lambda text: text[:-1],
}


@CHECKS("R-018", "R-019", source="RFC-0000 §5.1")
async def ids_are_blake3(context: Context) -> None:
    """A packet whose id is SHA-256 is refused"""
    packet = context.packet(context.identity())
    digest = hashlib.sha256(packet.signed_bytes).hexdigest()
    async with context.connect() as peer:
        expect_error(await peer.publish(canonical.encode(members(packet, packet_id="0x" + digest))))


@CHECKS("R-020", source="RFC-0000 §5.2")
async def malformed_ids_are_refused(context: Context) -> None:
    """A packet_id in any form other than 0x and 64 lowercase hex digits is `invalid_schema`"""
    packet = context.packet(context.identity())
    async with context.connect() as peer:
        for change in _MALFORMED_IDS.values():
            broken = canonical.encode(members(packet, packet_id=change(packet.packet_id)))
            expect_error(await peer.publish(broken), "invalid_schema")


@CHECKS("R-020", "R-021", source="RFC-0000 §5.2, §5.3", concludes=True)
async def ids_are_hex(context: Context) -> None:
    """Every packet id the relay sends is 0x and 64 lowercase hex digits"""
    breach = context.witness.breaches.get("R-020")
    expect(breach is None, "well-formed ids in every OK", breach)


@CHECKS("R-022", "R-183", source="RFC-0002 §4.2")
async def a_wrong_id_is_refused(context: Context) -> None:
    """A packet_id that is not the hash of the packet is refused"""
    packet = context.packet(context.identity())
    async with context.connect() as peer:
        expect_error(await peer.publish(flipped(packet.canonical, "packet_id")))


@CHECKS("R-023", source="RFC-0002 §4.2; RFC-0001 §4")
async def the_signature_is_over_the_bytes(context: Context) -> None:
    """A signature over the id or its hash, not over the canonical bytes, is refused"""
    author = context.identity()
    packet = context.packet(author)
    async with context.connect() as peer:
        for signed in (packet.digest, packet.packet_id.encode(), packet.canonical):
            forged = "0x" + author.sign(signed).hex()
            broken = canonical.encode(members(packet, signature=forged))
            expect_error(await peer.publish(broken), "invalid_signature")


@CHECKS("R-024", source="RFC-0002 §3.1; decision A-011", extension=DECISIONS)
async def signatures_in_upper_case_are_taken_and_kept(context: Context) -> None:
    """A signature may be in either case and is served as it was published"""
    author = context.identity()
    packet = context.packet(author)
    upper = "0x" + packet.signature[2:].upper()
    async with context.connect() as peer:
        expect_ok(await peer.publish(canonical.encode(members(packet, signature=upper))), packet)
        history = await peer.subscribe("s", {"authors": [author.did]})
        expect_equal([event["packet"]["signature"] for event in history.events], [upper], "the signature")


@CHECKS("R-025", source="RFC 8032 §5.1.7; decision A-011", extension=DECISIONS)
async def malleated_signatures_are_refused(context: Context) -> None:
    """A signature with S beyond the group order is refused"""
    async with context.connect() as peer:
        expect_error(await peer.publish(malleated(context.packet(context.identity()))), "invalid_signature")


@CHECKS("R-025", source="decision A-011", extension=DECISIONS)
async def malformed_signatures_are_invalid_schema(context: Context) -> None:
    """A signature of the wrong length or not in hex is `invalid_schema`"""
    packet = context.packet(context.identity())
    async with context.connect() as peer:
        for text in ("0x", "0x" + "00" * 63, "0x" + "zz" * 64, packet.signature[2:]):
            broken = canonical.encode(members(packet, signature=text))
            expect_error(await peer.publish(broken), "invalid_schema")


@CHECKS("R-030", source="RFC-0000 §8")
async def the_signature_comes_before_the_content(context: Context) -> None:
    """A packet with a bad signature is refused for that, whatever is wrong with its content"""
    author = context.identity()
    edge = context.build(author, {"type": "TRUST_EDGE", "from": "did:strata:someone", "to": 7, "strength": 9})
    async with context.connect() as peer:
        expect_error(await peer.publish(flipped(edge.canonical, "signature")), "invalid_signature")
