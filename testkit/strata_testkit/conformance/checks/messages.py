"""Section 9: connection and message rules."""

from __future__ import annotations

import asyncio

from strata.protocol.wire import EXTENSIONS
from websockets.typing import Subprotocol

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.forge import publish_text
from strata_testkit.conformance.model import Group, Keyword
from strata_testkit.conformance.peer import expect_error, expect_ok
from strata_testkit.conformance.verdicts import DECISIONS, Failed, expect, expect_equal

__all__ = ["CHECKS"]

CHECKS = Group(9)

_FOREIGN_TYPES = (
    '{"type":"PING"}',
    '{"x":1}',
    '{"type":"OK","packet_id":"0x","status":"ACCEPTED"}',
    '{"type":7}',
)
_MALFORMED = ("{", "[1]", '"PUBLISH"', "", "nonsense")


@CHECKS("R-127", source="RFC-0004 §1, §3", level=Keyword.SHOULD)
async def a_query_is_no_other_endpoint(context: Context) -> None:
    """The endpoint may be reached with a query in its URL"""
    async with context.connect(path="?x=1") as peer:
        await peer.barrier()


@CHECKS("R-128", source="decision A-064", extension=DECISIONS)
async def binary_frames_are_refused(context: Context) -> None:
    """A binary frame is `invalid_schema`, and the connection stays open"""
    packet = context.packet(context.identity())
    async with context.connect() as peer:
        await peer.send(publish_text(packet, "c").encode())
        expect_error(await peer.answer(), "invalid_schema")
        expect_ok(await peer.publish(packet), packet)


@CHECKS("R-127", "R-128", source="RFC 6455 §5.4")
async def fragments_are_one_message(context: Context) -> None:
    """A message in several frames is one message"""
    packet = context.packet(context.identity())
    text = publish_text(packet, "c")
    async with context.connect() as peer:
        await peer.socket.send([text[:10], "", text[10:11], text[11:]])
        expect_ok(await peer.answer(), packet)


@CHECKS("R-129", source="decision A-064", extension=DECISIONS)
async def offers_are_optional(context: Context) -> None:
    """No subprotocol is needed, an offered one is ignored, and compression may be offered"""
    for subprotocols, compression in ((None, None), ([Subprotocol("chat")], None), (None, "deflate")):
        async with context.connect(subprotocols=subprotocols, compression=compression) as peer:
            expect(peer.socket.subprotocol is None, "no subprotocol", peer.socket.subprotocol)
            expect_ok(await peer.publish(context.packet(context.identity(), "x" * 2000)))


@CHECKS("R-130", source="decision A-064", level=Keyword.SHOULD, extension=DECISIONS)
async def pings_are_answered(context: Context) -> None:
    """A ping is answered with a pong"""
    async with context.connect() as peer:
        pong = asyncio.ensure_future(await peer.socket.ping())
        await peer.barrier()
        expect(pong.done(), "a pong", "none before the next answer")


@CHECKS("R-131", "R-198", source="RFC-0004 §9", level=Keyword.SHOULD)
async def unknown_types_are_errors(context: Context) -> None:
    """A message of an unknown or missing type is an ERROR, and the connection stays open"""
    async with context.connect() as peer:
        for text in _FOREIGN_TYPES:
            await peer.send(text)
            expect_error(await peer.answer(), "invalid_schema")
        expect_ok(await peer.publish(context.packet(context.identity())))


@CHECKS("R-131", "R-140", source="decision A-063", level=Keyword.SHOULD, extension=DECISIONS)
async def unknown_types_say_so(context: Context) -> None:
    """The ERROR for an unknown type has detail `unknown_type`; LINK_REQUEST is such a type"""
    async with context.connect() as peer:
        for text in (*_FOREIGN_TYPES, '{"type":"LINK_REQUEST"}'):
            await peer.send(text)
            expect_error(await peer.answer(), "invalid_schema", detail="unknown_type")


@CHECKS("R-132", "R-198", source="RFC-0004 §9", level=Keyword.SHOULD)
async def malformed_frames_are_errors(context: Context) -> None:
    """A frame that is not a JSON object is `invalid_schema`, and the connection stays open"""
    async with context.connect() as peer:
        for text in _MALFORMED:
            await peer.send(text)
            expect_error(await peer.answer(), "invalid_schema")
        expect_ok(await peer.publish(context.packet(context.identity())))


@CHECKS("R-133", "R-192", source="RFC-0004 §3; decision A-066")
async def pipelined_publishes_keep_their_order(context: Context) -> None:
    """Packets sent without waiting are accepted in the order sent, with one answer each"""
    author = context.identity()
    packets = [
        context.packet(author, "x" * (20_000 if number % 10 == 0 else 5), n=number) for number in range(100)
    ]
    async with context.connect() as peer:
        answers = await peer.publish_all(packets)
        for answer, packet in zip(answers, packets, strict=True):
            expect_ok(answer, packet)
        await peer.barrier()
        expect(not peer.inbox, "one answer for each PUBLISH", list(peer.inbox)[:3])
        history = await peer.subscribe("s", {"authors": [author.did], "limit": 100})
        order = [event["packet"]["content"]["n"] for event in history.events]
        expect_equal(order, list(range(100)), "the order of sending")


@CHECKS("R-135", source="RFC-0004 §3.7")
async def ids_of_messages_are_optional(context: Context) -> None:
    """Every message works without `client_msg_id`"""
    author = context.identity()
    packet = context.packet(author)
    async with context.connect() as peer:
        await peer.send({"type": "SUBSCRIBE", "subscription_id": "s", "filters": {"authors": [author.did]}})
        await peer.send(publish_text(packet))
        expect_ok(await peer.answer(), packet)
        (event,) = await peer.events("s", 1)
        expect_equal(event["packet"]["packet_id"], packet.packet_id, "the packet")
        await peer.send({"type": "UNSUBSCRIBE", "subscription_id": "s"})
        await peer.barrier()


@CHECKS("R-136", source="RFC-0004 §3.4, §3.5", level=Keyword.SHOULD)
async def ids_of_messages_are_echoed(context: Context) -> None:
    """OK and ERROR echo `client_msg_id` unchanged, and have none if the request had none"""
    async with context.connect() as peer:
        for name in ("x", "x" * 128, "é" * 64, "", 'quote " and \\ slash'):
            await peer.send(publish_text(context.packet(context.identity()), name))
            expect_equal((await peer.answer()).get("client_msg_id"), name, "client_msg_id of the OK")
            await peer.send(publish_text("{}", name))
            expect_equal((await peer.answer()).get("client_msg_id"), name, "client_msg_id of the ERROR")
        await peer.send(publish_text(context.packet(context.identity())))
        answer = await peer.answer()
        expect("client_msg_id" not in answer, "no client_msg_id where none was given", answer)


@CHECKS("R-137", source="decision A-065", extension=DECISIONS)
async def bad_ids_of_messages_are_refused(context: Context) -> None:
    """A `client_msg_id` that is not a string of at most 128 bytes is `invalid_schema`, and not echoed"""
    async with context.connect() as peer:
        for name in ('"' + "x" * 129 + '"', '"' + "é" * 65 + '"', "7", "[]"):
            packet = context.packet(context.identity())
            await peer.send(publish_text(packet).replace('"packet"', f'"client_msg_id":{name},"packet"', 1))
            answer = expect_error(await peer.answer(), "invalid_schema")
            expect("client_msg_id" not in answer, "no client_msg_id", answer)


@CHECKS("R-138", source="RFC-0004 §9; RFC-0000 §4.1")
async def plain_peers_are_served(context: Context) -> None:
    """A peer that uses no addition gets what RFC-0004 promises, and no message unknown to it"""
    author = context.identity()
    stored, live = context.packets(author, 2)
    async with context.connect() as peer:
        await peer.store(stored)
        await peer.send({"type": "SUBSCRIBE", "subscription_id": "s", "filters": {"authors": [author.did]}})
        first = await peer.receive()
        await peer.store(live)
        (second,) = await peer.events("s", 1)
        ids = [event.get("packet", {}).get("packet_id") for event in (first, second)]
        expect_equal(ids, [stored.packet_id, live.packet_id], "the stored packet, then the live one")
        await peer.barrier()
        expect(not peer.inbox, "no message that was not asked for", list(peer.inbox))


@CHECKS("R-139", source="decision A-050", level=Keyword.SHOULD, extension=DECISIONS)
async def additions_are_announced(context: Context) -> None:
    """The additions are listed as `extensions` in the manifest, and in the challenge if there is one"""
    announced = context.subject.manifest.get("extensions")
    expect(isinstance(announced, list) and set(EXTENSIONS) <= set(announced), f"{EXTENSIONS}", announced)
    if context.subject.sends_challenge:
        async with context.connect(anonymous=True) as peer:
            challenge = await peer.challenge()
            if challenge.get("extensions") != announced:
                raise Failed(f"extensions {announced} in AUTH_CHALLENGE", str(challenge.get("extensions")))
