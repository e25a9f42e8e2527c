"""Section 3: packet structure."""

from __future__ import annotations

from collections.abc import Mapping

from strata.protocol.packets import MINIMAL_PROVENANCE_HEADER, byte_hash

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.forge import flipped, members, packet_id_of, seal
from strata_testkit.conformance.model import Group, Keyword
from strata_testkit.conformance.peer import expect_error, expect_ok
from strata_testkit.conformance.verdicts import Failed, Message, expect_equal, shorten

__all__ = ["CHECKS"]

CHECKS = Group(3)

_HASH = byte_hash(b"hello")
_HEADER = dict(MINIMAL_PROVENANCE_HEADER)

_REQUIRED: list[Mapping[str, object]] = [
    *({name: ...} for name in ("version", "timestamp", "author_id", "content")),
    {"version": "1"},
    {"timestamp": "now"},
    {"timestamp": True},
    {"author_id": 7},
    {"author_id": "alice"},
    {"content": []},
    {"content": {"text": "x"}},
    {"content": {"type": 7}},
]
_OPTIONAL: list[Mapping[str, object]] = [
    {"expires_at": "soon"},
    {"nonce": 7},
    {"provenance_header": []},
    {"attestations": {}},
    {"content": {"type": "POST", "text": 7}},
    {"content": {"type": "POST", "thread_ref": 7}},
    {"content": {"type": "POST", "media": {}}},
]
_MEDIA: list[Mapping[str, object]] = [
    {"content": {"type": "POST", "media": [{}]}, "provenance_header": _HEADER},
    {"content": {"type": "POST", "media": [{"media_hash": "ipfs://x"}]}, "provenance_header": _HEADER},
    {"content": {"type": "POST", "media": [{"media_hash": _HASH.upper()}]}, "provenance_header": _HEADER},
]


async def _refuse_each(context: Context, faults: list[Mapping[str, object]]) -> None:
    """Expect `invalid_schema` for each fault, in a packet with a correct id and signature."""
    async with context.connect() as peer:
        for fault in faults:
            author = context.identity()
            broken = seal(author, members(context.packet(author), **fault))
            answer = await peer.publish(broken)
            if (answer.get("type"), answer.get("code")) != ("ERROR", "invalid_schema"):
                shown = shorten({name: "absent" if item is ... else item for name, item in fault.items()})
                raise Failed(f"ERROR invalid_schema for {shown}", shorten(answer))


@CHECKS("R-031", source="RFC-0002 §3.1; RFC-0004 §3.2")
async def required_members_are_required(context: Context) -> None:
    """A packet that lacks a required member, or has one of the wrong type, is `invalid_schema`"""
    await _refuse_each(context, _REQUIRED)
    packet = context.packet(context.identity())
    async with context.connect() as peer:
        for name in ("packet_id", "signature"):
            text = f'"{name}":"{getattr(packet, name)}"'
            without = packet.canonical.decode().replace(text + ",", "").replace("," + text, "")
            expect_error(await peer.publish(without), "invalid_schema")


@CHECKS("R-032", source="RFC-0002 §3.1")
async def optional_members_have_their_types(context: Context) -> None:
    """An optional member of the wrong type is `invalid_schema`"""
    await _refuse_each(context, _OPTIONAL)


@CHECKS("R-255", source="RFC-0002 §3.1; RFC-0003 §3.2")
async def attestations_are_objects(context: Context) -> None:
    """`attestations` other than an array of objects is `invalid_schema`; such an array is stored unjudged"""
    await _refuse_each(context, [{"attestations": ["x"]}, {"attestations": 7}])
    author = context.identity()
    foreign = seal(
        author, members(context.packet(author), attestations=[{"target_packet": "0x" + "12" * 32}])
    )
    async with context.connect() as peer:
        expect_ok(await peer.publish(foreign))


@CHECKS("R-033", source="RFC-0002 §3.1, §5")
async def media_need_a_header(context: Context) -> None:
    """Media without a provenance header are `invalid_schema`"""
    await _refuse_each(context, [{"content": {"type": "POST", "media": [{"media_hash": _HASH}]}}])


@CHECKS("R-027", "R-035", source="RFC-0000 §5.5; RFC-0002 §3.2")
async def media_have_a_hash(context: Context) -> None:
    """Every media entry has a well-formed media_hash, which is never a URI"""
    await _refuse_each(context, _MEDIA)


@CHECKS("R-037", source="RFC-0002 §7")
async def consensus_metrics_are_reserved(context: Context) -> None:
    """A populated `consensus_metrics` is refused; an empty one is accepted"""
    await _refuse_each(context, [{"consensus_metrics": {"human_votes": 1}}])
    author = context.identity()
    async with context.connect() as peer:
        nothing: tuple[Message | None, ...] = ({}, None)
        for empty in nothing:
            packet = seal(author, members(context.packet(author), consensus_metrics=empty))
            expect_ok(await peer.publish(packet))


@CHECKS("R-041", source="RFC-0002 §3.2", level=Keyword.MAY)
async def unknown_threads_are_taken(context: Context) -> None:
    """`thread_ref` may name a packet the relay has never seen"""
    async with context.connect() as peer:
        expect_ok(await peer.publish(context.packet(context.identity(), thread_ref="0x" + "12" * 32)))


@CHECKS("R-042", source="RFC-0002 §3.3", level=Keyword.MAY)
async def equal_nonces_are_no_duplicates(context: Context) -> None:
    """Two packets with the same nonce are two packets"""
    author = context.identity()
    packet = context.packet(author)
    twin = seal(author, members(packet, x=1))
    async with context.connect() as peer:
        await peer.store(packet, twin)
        history = await peer.subscribe("s", {"authors": [author.did]})
        expect_equal(history.ids, [packet.packet_id, packet_id_of(twin)], "both packets")


@CHECKS("R-043", "R-182", source="RFC-0002 §4.2; RFC-0001 §5.4; RFC-0004 §3.2")
async def tampered_packets_are_nowhere(context: Context) -> None:
    """A packet with a changed signature or by another key is refused, and neither stored nor forwarded"""
    author, stranger = context.identity(), context.identity()
    packet = context.packet(author)
    under_another_key = seal(stranger, members(packet))
    async with context.connect() as peer, context.connect() as reader:
        await reader.subscribe("live", {"authors": [author.did]})
        expect_error(await peer.publish(flipped(packet.canonical, "signature")), "invalid_signature")
        expect_error(await peer.publish(under_another_key), "invalid_signature")
        expect_equal(await reader.quiet("live"), [], "nothing forwarded")
        expect_equal((await peer.subscribe("s", {"authors": [author.did]})).ids, [], "nothing stored")
