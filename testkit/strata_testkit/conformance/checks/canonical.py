"""Section 1: JSON and canonical form."""

from __future__ import annotations

import json

from strata.protocol import canonical

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.forge import members, publish_text, respelled, seal, with_member
from strata_testkit.conformance.model import Group
from strata_testkit.conformance.peer import expect_error, expect_ok
from strata_testkit.conformance.verdicts import DECISIONS, expect, expect_equal

__all__ = ["CHECKS"]

CHECKS = Group(1)

HARD_TO_KEEP: dict[str, object] = {
    "text": 'Grüße, relay € 🦀 \u0000\u0001\u001f\u2028 \\"/',
    "numbers": [1.0, 0.5, 1e-7, 1e21, -0.0, 5e-324, 1.7976931348623157e308, 2**53 - 1, 0.1 + 0.2],
    "names": {"\ue000": 1, "😀": 2, "a\u0000": 3, "": 4, "Z": 5, "é": 6, "e\u0301": 7},
    "null": None,
}
"""Content that a database or an encoder changes unless it keeps the bytes."""

_AMBIGUOUS = {
    "a member named twice": '"version":1',
    "a member named twice, further in": '"x":{"a":1,"a":1}',
    "a lone surrogate": '"x":"\\ud800"',
    "NaN": '"x":NaN',
    "Infinity": '"x":-Infinity',
    "a number beyond doubles": '"x":1e999',
}
_UNSAFE_INTEGERS = ("9007199254740993", "-9007199254740992", "9007199254740993.0")


@CHECKS("R-001", source="RFC-0000 §4.1")
async def comments_are_no_json(context: Context) -> None:
    """A frame with a comment in it is refused"""
    async with context.connect() as peer:
        await peer.send('{"type":"UNSUBSCRIBE","subscription_id":"s"} // why')
        expect_error(await peer.answer(), "invalid_schema")


@CHECKS("R-002", source="RFC-0000 §4.1")
async def member_names_are_case_sensitive(context: Context) -> None:
    """A member's name in another case is another member"""
    packet = context.packet(context.identity())
    async with context.connect() as peer:
        await peer.send(publish_text(packet).replace('"type":"PUBLISH"', '"Type":"PUBLISH"', 1))
        expect_error(await peer.answer())


@CHECKS("R-004", source="RFC-0000 §4.1; RFC-0004 §9")
async def unknown_members_of_messages_are_ignored(context: Context) -> None:
    """Members that a relay does not know are ignored in every message"""
    author = context.identity()
    packet = context.packet(author)
    async with context.connect() as peer:
        await peer.send(publish_text(packet, "c")[:-1] + ',"x_new":{"a":[1]}}')
        expect_ok(await peer.answer(), packet)
        history = await peer.subscribe("s", {"authors": [author.did], "x_new": 1}, x_new=[])
        expect_equal(history.ids, [packet.packet_id], "the packet, by a SUBSCRIBE with unknown members")
        await peer.send({"type": "UNSUBSCRIBE", "subscription_id": "s", "x_new": None})
        await peer.store(context.packet(author))
        expect_equal(await peer.quiet("s"), [], "nothing, after an UNSUBSCRIBE with an unknown member")


@CHECKS("R-005", "R-039", source="RFC-0002 §4.2")
async def unknown_members_of_packets_are_kept(context: Context) -> None:
    """A packet's unknown members stay in its hash, in storage and in what is served"""
    author = context.identity()
    packet = context.build(
        author, {"type": "POST", "text": "x", "own": [{"a": None}]}, extra={"x_top": {"b": [1, "2"]}}
    )
    async with context.connect() as peer:
        expect_ok(await peer.publish(packet), packet)
        history = await peer.subscribe("s", {"authors": [author.did]})
        expect_equal(history.ids, [packet.packet_id], "the packet")
        expect_equal(history.events[0]["packet"], packet.value, "the packet with its unknown members")


@CHECKS("R-006", source="RFC-0000 §7")
async def types_are_case_sensitive(context: Context) -> None:
    """`content.type` compares case-sensitively"""
    author = context.identity()
    lower, upper = context.packet(author, type="post"), context.packet(author, type="POST")
    async with context.connect() as peer:
        await peer.store(lower, upper)
        history = await peer.subscribe("s", {"authors": [author.did], "types": ["post"]})
        expect_equal(history.ids, [lower.packet_id], "the packet of type post alone")


@CHECKS("R-007", "R-038", source="RFC-0000 §7, §7.3")
async def unknown_types_are_taken(context: Context) -> None:
    """An unknown type is stored, filtered by and served like any other"""
    author, unknown = context.identity(), context.type("UNHEARD_OF")
    packet = context.packet(author, type=unknown, domain="NEW", subject="NEW", reason="NEW_REASON")
    async with context.connect() as peer:
        expect_ok(await peer.publish(packet), packet)
        history = await peer.subscribe("s", {"types": [unknown]})
        expect_equal(history.ids, [packet.packet_id], "the packet of a new type")


@CHECKS("R-009", "R-016", "R-022", "R-023", "R-040", source="RFC-0000 §4.2; RFC-0002 §4; RFC-0004 §2")
async def what_is_hard_to_keep_is_kept(context: Context) -> None:
    """Escapes, NUL, astral names and ECMAScript numbers are served as they were signed"""
    author = context.identity()
    packet = context.build(author, {"type": "POST", **HARD_TO_KEEP})
    async with context.connect() as peer:
        expect_ok(await peer.publish(packet), packet)
        history = await peer.subscribe("s", {"authors": [author.did]})
        expect_equal(history.ids, [packet.packet_id], "the packet")
        served = canonical.encode(history.events[0]["packet"])
        expect(served == packet.canonical, "the canonical bytes that were published", served.decode())


@CHECKS("R-009", "R-117", source="RFC-0000 §4.2; RFC-0002 §3.5")
async def any_spelling_is_the_same_packet(context: Context) -> None:
    """Spaces, escapes and the order of members change neither id nor signature"""
    packet = context.packet(context.identity(), "Grüße 🦀", n=1)
    spelled = json.dumps(json.loads(packet.canonical), indent=2)
    async with context.connect() as peer:
        expect_ok(await peer.publish(spelled), packet)


@CHECKS("R-013", source="decision A-003", extension=DECISIONS)
async def a_zero_fraction_is_an_integer(context: Context) -> None:
    """`1760000000.0` counts as the integer, since the canonical form makes the two identical"""
    packet = context.packet(context.identity())
    async with context.connect() as peer:
        expect_ok(await peer.publish(respelled(packet)), packet)


@CHECKS("R-011", source="decision A-002", extension=DECISIONS)
async def text_without_one_canonical_form_is_refused(context: Context) -> None:
    """Duplicate members, lone surrogates, NaN and numbers beyond doubles are `invalid_schema`"""
    async with context.connect() as peer:
        for text in _AMBIGUOUS.values():
            packet = context.packet(context.identity())
            await peer.send(publish_text(with_member(packet.canonical, text)))
            expect_error(await peer.answer(), "invalid_schema")


@CHECKS("R-012", source="decision A-003", extension=DECISIONS)
async def integers_beyond_doubles_are_refused(context: Context) -> None:
    """An integer beyond 2^53 - 1 is `invalid_schema`, since doubles would change it silently"""
    async with context.connect() as peer:
        for literal in _UNSAFE_INTEGERS:
            packet = context.packet(context.identity())
            expect_error(
                await peer.publish(with_member(packet.canonical, f'"x":{literal}')), "invalid_schema"
            )


@CHECKS("R-014", source="RFC-0000 §4.2; decision A-004", extension=DECISIONS)
async def null_and_absence_hash_differently(context: Context) -> None:
    """A null member is part of the hash, and means the same as an absent one"""
    author = context.identity()
    absent = context.packet(author)
    content = {**absent.content, "thread_ref": None}
    null = seal(author, members(absent, content=content))
    async with context.connect() as peer:
        first, second = await peer.store(absent, null)
        expect(first["packet_id"] != second["packet_id"], "two packets", first)
        history = await peer.subscribe("s", {"authors": [author.did]})
        expect(
            history.events[-1]["packet"].get("content") == content,
            "thread_ref: null as signed",
            history.events,
        )


@CHECKS("R-017", source="RFC-0000 §9.2; decision A-007", extension=DECISIONS)
async def other_versions_are_refused(context: Context) -> None:
    """A packet of an unknown version is `invalid_schema`, and the reason names the version"""
    author = context.identity()
    async with context.connect() as peer:
        answer = await peer.publish(seal(author, members(context.packet(author), version=2)))
        expect_error(answer, "invalid_schema")
        expect("2" in str(answer.get("reason")), "a reason that names version 2", answer)


@CHECKS("R-003", source="RFC-0000 §4.3", concludes=True)
async def members_are_snake_case(context: Context) -> None:
    """Every member the relay sends is snake_case"""
    breach = context.witness.breaches.get("R-003")
    expect(breach is None, "snake_case members in every message", breach)
