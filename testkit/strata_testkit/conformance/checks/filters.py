"""Section 10: which packets a filter admits."""

from __future__ import annotations

from strata.protocol.packets import Packet

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.model import Group, Keyword
from strata_testkit.conformance.peer import expect_error, expect_ok, ids_of
from strata_testkit.conformance.verdicts import DECISIONS, Failed, Message, expect, expect_equal, shorten

__all__ = ["CHECKS"]

CHECKS = Group(10)

_WRONG: list[Message] = [
    {"filters": []},
    {"filters": {"authors": "did:strata:x"}},
    {"filters": {"types": [7]}},
    {"filters": {"since": "now"}},
    {"filters": {"limit": -1}},
    {"filters": {"limit": "5"}},
    {"filters": {"order": "up"}},
    {"filters": {"cursor": 7}},
]


@CHECKS("R-141", source="decision A-052", extension=DECISIONS)
async def wrong_subscriptions_are_refused(context: Context) -> None:
    """A SUBSCRIBE of the wrong shape is `invalid_schema` with its `subscription_id`, and opens nothing"""
    author = context.identity()
    async with context.connect() as peer:
        for wrong in _WRONG:
            answer = await peer.refused_subscription({"subscription_id": "s", **wrong})
            if (answer.get("code"), answer.get("subscription_id")) != ("invalid_schema", "s"):
                raise Failed(
                    f"ERROR invalid_schema for subscription s, for {shorten(wrong)}", shorten(answer)
                )
        for identifier in (
            {},
            {"subscription_id": ""},
            {"subscription_id": 7},
            {"subscription_id": "x" * 129},
        ):
            expect_error(await peer.refused_subscription(identifier), "invalid_schema")
        await peer.store(context.packet(author))
        expect_equal(await peer.quiet("s"), [], "no subscription")


@CHECKS("R-142", "R-143", source="RFC-0004 §3.1; RFC-0007 §6.1; decision A-051", extension=DECISIONS)
async def null_and_empty_restrict_nothing(context: Context) -> None:
    """A null filter member means the same as its absence, and so does an empty list"""
    author, kind = context.identity(), context.type()
    packet = context.packet(author, type=kind)
    nulls = dict.fromkeys(("since", "until", "limit", "cursor", "order"))
    filters: list[Message] = [
        {**nulls, "authors": [author.did], "types": None},
        {"authors": [author.did], "types": []},
        {**nulls, "authors": None, "types": [kind]},
        {"authors": [], "types": [kind]},
    ]
    async with context.connect() as peer:
        await peer.store(packet)
        for number, filter in enumerate(filters):
            history = await peer.subscribe(f"s{number}", filter)
            expect_equal(history.ids, [packet.packet_id], f"the packet, by {shorten(filter)}")


@CHECKS("R-144", "R-302", "R-303", source="RFC-0004 §3.1, §4")
async def filters_combine(context: Context) -> None:
    """Values of one member are alternatives, members combine with AND; in history and live"""
    authors = [context.identity() for _ in range(3)]
    kinds = [context.type() for _ in range(3)]

    def matrix() -> list[tuple[int, int, Packet]]:
        return [(a, t, context.packet(authors[a], type=kinds[t])) for a in range(3) for t in range(3)]

    filters = {"authors": [authors[0].did, authors[2].did], "types": [kinds[1], kinds[2]]}
    stored, live = matrix(), matrix()

    def wanted(cells: list[tuple[int, int, Packet]]) -> list[str]:
        return [packet.packet_id for a, t, packet in cells if a in (0, 2) and t in (1, 2)]

    async with context.connect() as peer:
        await peer.store(*(packet for _, _, packet in stored))
        history = await peer.subscribe("s", filters)
        expect_equal(history.ids, wanted(stored), "2 authors × 2 types of the stored packets")
        await peer.store(*(packet for _, _, packet in live))
        expect_equal(ids_of(await peer.quiet("s")), wanted(live), "2 authors × 2 types of the live packets")


@CHECKS("R-145", source="RFC-0004 §3.1")
async def authors_compare_whole(context: Context) -> None:
    """`authors` compares the whole DID: a prefix or another case matches nothing"""
    author = context.identity()
    async with context.connect() as peer:
        await peer.store(context.packet(author))
        others = [
            author.did[:-1],
            author.did + "x",
            author.did.upper(),
            author.did.removeprefix("did:strata:"),
        ]
        history, error = await peer.try_subscribe("s", {"authors": others})
        expect(error is not None or not history.events, "no packet", history.ids)


@CHECKS("R-146", source="RFC-0004 §3.1")
async def types_compare_exactly(context: Context) -> None:
    """`types` compares `content.type` exactly"""
    author, kind = context.identity(), context.type("Case")
    packet = context.packet(author, type=kind)
    async with context.connect() as peer:
        await peer.store(packet)
        history = await peer.subscribe(
            "s", {"authors": [author.did], "types": [kind.lower(), kind[:-1], kind + " "]}
        )
        expect_equal(history.ids, [], "no packet of a similar type")
        expect_equal((await peer.subscribe("t", {"types": [kind]})).ids, [packet.packet_id], "the packet")


@CHECKS("R-147", "R-304", source="RFC-0004 §3.1, §4; decision A-042")
async def since_is_an_inclusive_bound(context: Context) -> None:
    """`since` admits that timestamp and later ones, in history and live"""
    author = context.identity()
    old, at, young = (context.packet(author, age=age) for age in (301, 300, 299))
    filters = {"authors": [author.did], "since": at.timestamp}
    async with context.connect() as peer:
        await peer.store(old, at, young)
        history = await peer.subscribe("s", filters)
        expect_equal(history.ids, [at.packet_id, young.packet_id], "the two packets from `since` on")
        late, early = context.packet(author, age=400), context.packet(author)
        await peer.store(late, early)
        expect_equal(ids_of(await peer.quiet("s")), [early.packet_id], "the live packet after `since`, alone")


@CHECKS("R-148", "R-304", source="RFC-0004 §3.1, §4; decision A-042")
async def until_bounds_history_alone(context: Context) -> None:
    """`until` is an inclusive bound on stored packets; live ones are sent regardless"""
    author = context.identity()
    old, at, young = (context.packet(author, age=age) for age in (301, 300, 299))
    async with context.connect() as peer:
        await peer.store(old, at, young)
        history = await peer.subscribe("s", {"authors": [author.did], "until": at.timestamp})
        expect_equal(history.ids, [old.packet_id, at.packet_id], "the two packets up to `until`")
        live = context.packet(author)
        await peer.store(live)
        expect_equal(ids_of(await peer.quiet("s")), [live.packet_id], "the live packet later than `until`")


@CHECKS("R-166", source="decision A-048", level=Keyword.SHOULD, extension="packet_ids")
async def packets_are_found_by_id(context: Context) -> None:
    """`packet_ids` selects only those packets, in history and live"""
    author = context.identity()
    packets = context.packets(author, 3)
    awaited, other = context.packets(author, 2)
    wanted = [packets[2].packet_id, packets[0].packet_id, "0x" + "00" * 32, awaited.packet_id]
    async with context.connect() as peer:
        await peer.store(*packets)
        history = await peer.subscribe("s", {"packet_ids": wanted})
        expect_equal(history.ids, [packets[0].packet_id, packets[2].packet_id], "the two packets asked for")
        await peer.store(other, awaited)
        expect_equal(ids_of(await peer.quiet("s")), [awaited.packet_id], "the live packet asked for")


@CHECKS("R-168", source="decision A-042", level=Keyword.MAY, extension="received_range")
async def received_bounds_look_at_arrival(context: Context) -> None:
    """`received_since` and `received_until` bound `received_at`, inclusively"""
    author = context.identity()
    packet = context.packet(author, age=5000)
    async with context.connect() as peer:
        at = expect_ok((await peer.store(packet))[0])["received_at"]
        for bounds, found in (
            ({"received_since": at, "received_until": at}, True),
            ({"received_since": at + 1}, False),
            ({"received_until": at - 1}, False),
        ):
            history = await peer.subscribe("s", {"authors": [author.did], **bounds})
            expect_equal(history.ids, [packet.packet_id] if found else [], f"what {bounds} admits")
