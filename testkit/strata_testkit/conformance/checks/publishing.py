"""Section 11: PUBLISH and OK."""

from __future__ import annotations

from collections.abc import Callable

from strata.protocol.ids import Identity

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.forge import flipped, members, publish_text, seal, sized
from strata_testkit.conformance.model import Group
from strata_testkit.conformance.peer import expect_error, expect_ok, ids_of
from strata_testkit.conformance.verdicts import DECISIONS, Failed, expect, expect_equal, shorten

__all__ = ["CHECKS"]

CHECKS = Group(11)

_STATUSES = ("ACCEPTED", "QUEUED")

Fault = tuple[str, str, str | None, Callable[[Context, Identity], bytes]]


@CHECKS("R-181", "R-188", source="RFC-0004 §2, §3.2")
async def valid_packets_are_stored_and_forwarded(context: Context) -> None:
    """A valid packet is acknowledged, stored and forwarded"""
    author = context.identity()
    packet = context.packet(author)
    async with context.connect() as peer, context.connect() as reader:
        await reader.subscribe("live", {"authors": [author.did]})
        ok = expect_ok(await peer.publish(packet), packet)
        expect(ok.get("status") in _STATUSES, "status ACCEPTED or QUEUED", ok)
        expect_equal(ids_of(await reader.events("live", 1)), [packet.packet_id], "the live packet")
        history = await peer.subscribe("s", {"authors": [author.did]})
        expect_equal(history.ids, [packet.packet_id], "the stored packet")


@CHECKS("R-182", source="RFC-0004 §3.2")
async def nothing_is_acknowledged_unverified(context: Context) -> None:
    """A packet with a bad signature gets an ERROR and nothing else: no OK is sent before verification"""
    author = context.identity()
    async with context.connect() as peer:
        for number in range(5):
            await peer.send(
                publish_text(flipped(context.packet(author).canonical, "signature"), f"bad{number}")
            )
        for _ in range(5):
            expect_error(await peer.answer(), "invalid_signature")
        await peer.barrier()
        expect(not peer.inbox, "one answer each", list(peer.inbox))
        expect_equal((await peer.subscribe("s", {"authors": [author.did]})).ids, [], "nothing stored")


@CHECKS("R-183", source="RFC-0002 §4.2; decision A-060", extension=DECISIONS)
async def a_wrong_id_is_an_invalid_signature(context: Context) -> None:
    """An id that does not recompute is `invalid_signature`, detail `packet_id_mismatch`"""
    packet = context.packet(context.identity())
    async with context.connect() as peer:
        answer = await peer.publish(flipped(packet.canonical, "packet_id"))
        expect_error(answer, "invalid_signature", detail="packet_id_mismatch")


def _too_large(context: Context, author: Identity) -> bytes:
    size = context.subject.max_packet_bytes + 9
    return sized(author, {"type": "POST"}, size, timestamp=context.now()).canonical


_FAULTS: tuple[Fault, ...] = (
    (
        "schema before size",
        "invalid_schema",
        None,
        lambda context, author: seal(
            author,
            members(context.packet(author), version=2, x="x" * context.subject.max_packet_bytes),
        ),
    ),
    (
        "size before id",
        "packet_too_large",
        None,
        lambda context, author: flipped(_too_large(context, author), "packet_id"),
    ),
    (
        "id before freshness",
        "invalid_signature",
        "packet_id_mismatch",
        lambda context, author: flipped(context.packet(author, age=10**7).canonical, "packet_id"),
    ),
    (
        "age before signature",
        "timestamp_too_old",
        None,
        lambda context, author: flipped(context.packet(author, age=10**7).canonical, "signature"),
    ),
    (
        "expiry before signature",
        "packet_expired",
        None,
        lambda context, author: flipped(context.packet(author, expires_in=-60).canonical, "signature"),
    ),
    (
        "future before unknown key",
        "timestamp_in_future",
        None,
        lambda context, author: seal(
            author,
            members(context.packet(author, age=-999), author_id="did:example:nobody"),
        ),
    ),
    (
        "signature before type rules",
        "invalid_signature",
        None,
        lambda context, author: flipped(
            context.build(author, {"type": "CORRECTION", "target_packet": 7}).canonical, "signature"
        ),
    ),
)


@CHECKS("R-184", source="decision A-059", extension=DECISIONS)
async def the_first_fault_answers(context: Context) -> None:
    """Of two faults, the one that is checked first decides the answer"""
    async with context.connect() as peer:
        for name, code, detail, build in _FAULTS:
            answer = await peer.publish(build(context, context.identity()))
            if answer.get("code") != code or (detail is not None and answer.get("detail") != detail):
                raise Failed(f"{name}: {code}{f' ({detail})' if detail else ''}", shorten(answer))
        packet = context.packet(context.identity())
        await peer.store(packet)
        repeat = await peer.publish(flipped(packet.canonical, "signature"))
        expect(repeat.get("duplicate") is True, "duplicate before signature: OK", repeat)


@CHECKS("R-191", source="RFC-0004 §3.2; decision A-076", extension=DECISIONS)
async def authors_need_not_be_the_session(context: Context) -> None:
    """One session may publish packets by several authors"""
    async with context.connect() as peer:
        await peer.store(*(context.packet(context.identity()) for _ in range(5)))


@CHECKS("R-192", source="RFC-0004 §3.2, §3.5")
async def every_publish_has_one_answer(context: Context) -> None:
    """A mixture of good, bad and shapeless packets gets exactly one OK or ERROR each"""
    author = context.identity()
    frames: dict[str, tuple[str, str]] = {}
    for number in range(20):
        good, bad = context.packets(author, 2)
        frames[f"good{number}"] = (publish_text(good, f"good{number}"), "OK")
        frames[f"bad{number}"] = (publish_text(flipped(bad.canonical, "signature"), f"bad{number}"), "ERROR")
        frames[f"none{number}"] = (publish_text("{}", f"none{number}"), "ERROR")
    async with context.connect() as peer:
        for text, _ in frames.values():
            await peer.send(text)
        seen: dict[str, str] = {}
        for _ in frames:
            answer = await peer.answer()
            name = str(answer.get("client_msg_id"))
            expect(name in frames and name not in seen, "one answer for each PUBLISH", answer)
            seen[name] = str(answer.get("type"))
        expect_equal(
            seen, {name: kind for name, (_, kind) in frames.items()}, "OK for the good, ERROR for the rest"
        )
        await peer.barrier()
        expect(not peer.inbox, "no second answer", list(peer.inbox)[:3])
