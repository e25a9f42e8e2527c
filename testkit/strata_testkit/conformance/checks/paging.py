"""Section 10: order, limits, cursors and the seam between history and live."""

from __future__ import annotations

import asyncio
import contextlib

from strata.protocol.ids import Identity

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.model import Group, Keyword
from strata_testkit.conformance.peer import Peer, expect_error, ids_of
from strata_testkit.conformance.verdicts import DECISIONS, Failed, Message, expect, expect_equal

__all__ = ["CHECKS"]

CHECKS = Group(10)

_PACKETS_AT_A_SEAM = 6
"""The number of packets on their way to the relay during each of twenty subscriptions."""


@CHECKS("R-149", source="RFC-0004 §3.1", level=Keyword.MAY)
async def limits_are_kept(context: Context) -> None:
    """No more than `limit` stored packets are sent"""
    author = context.identity()
    packets = context.packets(author, 12)
    async with context.connect() as peer:
        await peer.store(*packets)
        for limit in (1, 5, 12, 400):
            history = await peer.subscribe("s", {"authors": [author.did], "limit": limit})
            expect(len(history.events) <= limit, f"at most {limit} packets", len(history.events))


@CHECKS("R-151", source="RFC-0004 §3.1; decision A-043", level=Keyword.MAY)
async def history_is_sent(context: Context) -> None:
    """All matching stored packets are sent, up to `limit`"""
    author = context.identity()
    packets = context.packets(author, 12)
    async with context.connect() as peer:
        await peer.store(*packets)
        for limit in (5, 12, 400):
            history = await peer.subscribe("s", {"authors": [author.did], "limit": limit})
            expect_equal(len(history.events), min(limit, 12), "how many packets were sent")


@CHECKS("R-150", source="decision A-043", extension=DECISIONS)
async def limit_zero_is_live_alone(context: Context) -> None:
    """`limit: 0` sends no history and starts live delivery"""
    author = context.identity()
    stored, live = context.packets(author, 2)
    async with context.connect() as peer:
        await peer.store(stored)
        history = await peer.subscribe("s", {"authors": [author.did], "limit": 0})
        expect_equal(history.ids, [], "no stored packet")
        await peer.store(live)
        expect_equal(ids_of(await peer.quiet("s")), [live.packet_id], "the live packet")


@CHECKS("R-152", "R-305", source="RFC-0004 §3.1, §4")
async def history_is_in_order_of_arrival(context: Context) -> None:
    """Stored packets are sent in order of arrival, whatever their timestamps; in reverse for `desc`"""
    author = context.identity()
    packets = [context.packet(author, n=n, age=(n * 37) % 50) for n in range(50)]
    wanted = [packet.packet_id for packet in packets]
    async with context.connect() as peer:
        await peer.store(*packets)
        for order, ids in ((None, wanted), ("asc", wanted), ("desc", wanted[::-1])):
            filters = {"authors": [author.did], "limit": 100, **({"order": order} if order else {})}
            expect_equal((await peer.subscribe(f"s-{order}", filters)).ids, ids, f"the order for {order}")


@CHECKS("R-153", source="RFC-0004 §3.1, §3.3")
async def history_has_cursors(context: Context) -> None:
    """Every stored packet comes with a cursor"""
    author = context.identity()
    async with context.connect() as peer:
        await peer.store(*context.packets(author, 5))
        for order in ("asc", "desc"):
            history = await peer.subscribe(f"s-{order}", {"authors": [author.did], "order": order})
            cursors = [event.get("cursor") for event in history.events]
            expect(
                len(cursors) == 5 and all(isinstance(c, str) and c for c in cursors), "five cursors", cursors
            )


@CHECKS("R-154", "R-306", source="RFC-0004 §3.1, §4")
async def pages_meet_every_packet_once(context: Context) -> None:
    """Paging by cursor finds every packet once and in order, in either direction"""
    author = context.identity()
    packets = context.packets(author, 60)
    wanted = [packet.packet_id for packet in packets]
    async with context.connect() as peer:
        await peer.store(*packets)
        for order, ids in (("asc", wanted), ("desc", wanted[::-1])):
            expect_equal(await _walk(peer, author, order, step=7), ids, f"all packets, {order}")


async def _walk(peer: Peer, author: Identity, order: str, *, step: int) -> list[str]:
    """The ids of all pages, each page read by its own subscription."""
    got: list[str] = []
    cursor: str | None = None
    for page in range(100):
        limit = step + page % 3
        filters: Message = {"authors": [author.did], "limit": limit, "order": order}
        history = await peer.subscribe("page", filters | ({"cursor": cursor} if cursor else {}))
        await peer.unsubscribe("page")
        got += history.ids
        if len(history.events) < limit:
            return got
        cursor = history.cursor
    raise Failed("an end of the pages", f"{len(got)} packets in 100 pages")


@CHECKS("R-154", "R-161", source="RFC-0004 §3.1, §4; decision A-039, A-040")
async def pages_meet_what_is_stored_meanwhile(context: Context) -> None:
    """Paging while several sessions publish finds every packet once, including those stored meanwhile"""
    author = context.identity()
    rounds = [context.packets(author, 40) for _ in range(3)]

    async def publish(number: int) -> None:
        async with context.connect() as peer:
            await peer.store(*rounds[number])

    async with context.connect() as reader, asyncio.TaskGroup() as tasks:
        publishers = [
            tasks.create_task(publish(number), name=f"conformance-publisher-{number}") for number in range(3)
        ]
        got: list[str] = []
        cursor: str | None = None
        while True:
            finished = all(task.done() for task in publishers)
            filters: Message = {"authors": [author.did], "limit": 11} | ({"cursor": cursor} if cursor else {})
            # The page ends where live EVENTs begin; packets that arrive live are on a later page too.
            page = (await reader.subscribe("page", filters)).page(11)
            await reader.unsubscribe("page")
            await reader.barrier()
            reader.taken("page")
            got += page.ids
            cursor = page.cursor if page.events else cursor
            if finished and len(page.events) < 11:
                break
    wanted = sorted(packet.packet_id for packets in rounds for packet in packets)
    expect_equal(sorted(got), wanted, "every packet once")


@CHECKS("R-156", source="decision A-041", extension=DECISIONS)
async def cursors_are_positions(context: Context) -> None:
    """A cursor may be used with another limit and other filters; in the other order it is `invalid_cursor`"""
    author, kind = context.identity(), context.type()
    packets = [context.packet(author, type=kind if n % 2 else "POST") for n in range(6)]
    async with context.connect() as peer:
        await peer.store(*packets)
        cursor = (await peer.subscribe("s", {"authors": [author.did], "limit": 2})).cursor
        rest = await peer.subscribe("t", {"types": [kind], "cursor": cursor, "limit": 50})
        expect_equal(rest.ids, [packets[3].packet_id, packets[5].packet_id], "the rest of one type")
        filters = {"authors": [author.did], "cursor": cursor, "order": "desc"}
        expect_error(
            await peer.refused_subscription({"subscription_id": "u", "filters": filters}), "invalid_cursor"
        )


@CHECKS("R-155", "R-157", source="RFC-0007 §6.4; decision A-041")
async def bad_cursors_are_refused(context: Context) -> None:
    """A forged or undecodable cursor is `invalid_cursor` and opens nothing"""
    author = context.identity()
    async with context.connect() as peer:
        await peer.store(*context.packets(author, 2))
        cursor = (await peer.subscribe("good", {"authors": [author.did]})).cursor
        middle = len(cursor) // 2
        other = "A" if cursor[middle] != "A" else "B"
        forged = cursor[:middle] + other + cursor[middle + 1 :]
        for text in (forged, cursor[:-1], cursor + "A", "x", "1", "é", "x" * 2000):
            filters = {"authors": [author.did], "cursor": text}
            answer = await peer.refused_subscription({"subscription_id": "bad", "filters": filters})
            expect_error(answer, "invalid_cursor")
        await peer.store(context.packet(author))
        expect_equal(await peer.quiet("bad"), [], "no subscription")


@CHECKS("R-159", "R-158", source="decision A-045; RFC-0004 §3.1")
async def the_seam_is_tight(context: Context) -> None:
    """Subscribing while others publish loses nothing and repeats nothing"""
    author = context.identity()
    packets = context.packets(author, 120)
    wanted = [packet.packet_id for packet in packets]

    async with context.connect() as reader, context.connect() as publisher:
        names: list[str] = []
        for first in range(0, len(packets), _PACKETS_AT_A_SEAM):
            names.append(f"s{len(names)}")
            filters = {"authors": [author.did], "limit": 400}
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(publisher.store(*packets[first : first + _PACKETS_AT_A_SEAM]))
                await reader.send({"type": "SUBSCRIBE", "subscription_id": names[-1], "filters": filters})
                await reader.barrier()
        for name in names:
            expect_equal(
                ids_of(await reader.events(name, len(wanted))), wanted, "every packet once, in order"
            )
        await reader.barrier()
        expect(not reader.inbox, "no EVENT more", list(reader.inbox)[:3])


@CHECKS("R-160", "R-154", source="RFC-0004 §3.1; decision A-044")
async def a_cut_history_is_reached_by_its_cursor(context: Context) -> None:
    """If `limit` cuts the history, live packets are sent, and the rest is reached through the last cursor"""
    author = context.identity()
    packets = context.packets(author, 5)
    live = context.packet(author, n=5)
    async with context.connect() as peer:
        await peer.store(*packets)
        history = await peer.subscribe("s", {"authors": [author.did], "limit": 2})
        await peer.store(live)
        (event,) = await peer.events("s", 1)
        expect_equal(event["packet"]["packet_id"], live.packet_id, "the live packet")
        rest = await peer.subscribe("t", {"authors": [author.did], "cursor": history.cursor})
        wanted = [packet.packet_id for packet in (*packets[2:], live)]
        expect_equal(rest.ids, wanted, "the rest of the history")
        if context.subject.announces(DECISIONS):
            expect(
                "cursor" not in event,
                "no cursor on a live EVENT while history is outstanding",
                event.get("cursor"),
            )


@CHECKS("R-165", source="decision A-047", level=Keyword.MAY, extension="history_marker")
async def the_marker_ends_history(context: Context) -> None:
    """END_OF_HISTORY is sent once if requested, says whether history is complete, and never comes unasked"""
    author = context.identity()
    async with context.connect() as peer:
        await peer.store(*context.packets(author, 3))
        for limit, complete in ((2, False), (3, None), (50, True), (0, None)):
            history = await peer.subscribe("s", {"authors": [author.did], "limit": limit})
            marker = history.marker or {}
            expect(marker.get("type") == "END_OF_HISTORY", "END_OF_HISTORY", marker)
            expect(isinstance(marker.get("client_msg_id"), str), "its client_msg_id", marker)
            expect(
                complete in (None, marker.get("complete")), f"complete: {complete} for limit {limit}", marker
            )
            if history.events:
                expect_equal(marker.get("cursor"), history.cursor, "the cursor of the last packet")
        nothing = await peer.subscribe("t", {"authors": [context.identity().did]})
        marker = nothing.marker or {}
        expect(
            marker.get("complete") is True and "cursor" in marker, "a complete history and a cursor", marker
        )
        await peer.send({"type": "SUBSCRIBE", "subscription_id": "u", "filters": {"authors": [author.did]}})
        await peer.events("u", 3)
        await peer.barrier()
        expect(not peer.inbox, "no marker unasked", list(peer.inbox))


@CHECKS("R-167", source="decision A-067", extension="gapless")
async def gapless_is_one_stream(context: Context) -> None:
    """A gapless subscription sends stored and live packets as one ascending stream, each with a cursor"""
    author = context.identity()
    packets = context.packets(author, 140)
    filters = {"authors": [author.did]}
    async with context.connect() as peer:
        await peer.store(*packets[:130])
        await peer.send({"type": "SUBSCRIBE", "subscription_id": "s", "filters": filters, "gapless": True})
        events = await peer.events("s", 130)
        await peer.store(*packets[130:])
        events += await peer.events("s", 10)
        expect_equal(ids_of(events), [packet.packet_id for packet in packets], "every packet once, in order")
        expect(
            all(isinstance(e.get("cursor"), str) for e in events),
            "a cursor on each",
            events[-1].get("cursor"),
        )
        resumed = {**filters, "cursor": events[99]["cursor"]}
        await peer.send({"type": "SUBSCRIBE", "subscription_id": "t", "filters": resumed, "gapless": True})
        expect_equal(ids_of(await peer.events("t", 40)), ids_of(events)[100:], "what follows a cursor")
        for wrong in ({"limit": 5}, {"order": "asc"}):
            message = {"subscription_id": "u", "filters": wrong, "gapless": True}
            expect_error(await peer.refused_subscription(message), "invalid_schema")


@CHECKS("R-170", source="decision A-067", extension=DECISIONS, floods=True, timeout=60.0)
async def a_slow_reader_loses_nothing(context: Context) -> None:
    """A reader that stops reading for a while gets everything once, in order, when it reads again"""
    author = context.identity()
    packets = [context.packet(author, "x" * 16_000, n=n) for n in range(400)]
    async with context.connect(max_queue=1) as reader, context.connect() as publisher:
        await reader.subscribe("s", {"authors": [author.did]})
        # The reader's socket fills up: nothing is read from it until everything is published.
        await publisher.store(*packets)
        got = ids_of(await reader.events("s", len(packets)))
        expect_equal(got, [packet.packet_id for packet in packets], "every packet once, in order")
        with contextlib.suppress(TimeoutError):
            expect_equal(await reader.quiet("s"), [], "nothing twice")
