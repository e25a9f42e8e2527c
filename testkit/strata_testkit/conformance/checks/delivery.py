"""Section 10: EVENTs, live delivery, and the end of subscriptions."""

from __future__ import annotations

from strata_testkit.conformance.context import Context
from strata_testkit.conformance.model import Group, Keyword
from strata_testkit.conformance.peer import expect_error, expect_ok, ids_of
from strata_testkit.conformance.verdicts import DECISIONS, expect, expect_equal

__all__ = ["CHECKS"]

CHECKS = Group(10)

_MOST_SUBSCRIPTIONS = 300


@CHECKS("R-158", "R-188", source="RFC-0004 §3.1, §3.2")
async def new_packets_are_forwarded(context: Context) -> None:
    """A subscriber on another session gets each new matching packet"""
    author = context.identity()
    packets = context.packets(author, 3)
    async with context.connect() as publisher, context.connect() as reader:
        await reader.subscribe("s", {"authors": [author.did]})
        for packet in packets:
            await publisher.store(packet)
            (event,) = await reader.events("s", 1)
            expect_equal(event["packet"], packet.value, "the whole packet")


@CHECKS("R-162", source="RFC-0004 §3.1; decision A-053", extension=DECISIONS)
async def the_same_id_replaces(context: Context) -> None:
    """A SUBSCRIBE under an open `subscription_id` replaces that subscription without an error"""
    old, new = context.identity(), context.identity()
    wanted = context.packet(new)
    async with context.connect() as peer:
        await peer.subscribe("s", {"authors": [old.did]})
        await peer.subscribe("s", {"authors": [new.did]})
        await peer.store(context.packet(old), wanted, context.packet(old))
        expect_equal(ids_of(await peer.quiet("s")), [wanted.packet_id], "packets of the new filter alone")


@CHECKS("R-163", "R-172", source="RFC-0004 §3.3")
async def each_subscription_has_its_event(context: Context) -> None:
    """A packet that matches two subscriptions is sent once for each, with its `subscription_id`"""
    author, kind = context.identity(), context.type()
    packet = context.packet(author, type=kind)
    async with context.connect() as peer:
        await peer.subscribe("a", {"authors": [author.did]})
        await peer.subscribe("b", {"types": [kind]})
        await peer.store(packet)
        await peer.barrier()
        for name in ("a", "b"):
            expect_equal(ids_of(peer.taken(name)), [packet.packet_id], f"one EVENT on {name}")
        expect(not peer.inbox, "nothing else", list(peer.inbox))


@CHECKS("R-172", source="RFC-0004 §3.3", concludes=True)
async def every_event_names_its_subscription(context: Context) -> None:
    """Every EVENT due to a SUBSCRIBE carries its `subscription_id`"""
    breach = context.witness.breaches.get("R-172")
    expect(breach is None, "a subscription_id on every EVENT", breach)


@CHECKS("R-164", source="RFC-0004 §6; decision A-052", level=Keyword.MAY, extension=DECISIONS)
async def too_many_subscriptions_are_limited(context: Context) -> None:
    """Subscriptions beyond the session's limit are `rate_limited`, detail `too_many_subscriptions`"""
    limits = context.subject.manifest.get("limits")
    limit = limits.get("max_subscriptions", 64) if isinstance(limits, dict) else 64
    if limit > _MOST_SUBSCRIPTIONS:
        return
    async with context.connect(expects_limit="too_many_subscriptions") as peer:
        for number in range(limit):
            await peer.subscribe(f"s{number}", {"limit": 0, "types": [context.type()]})
        _, error = await peer.try_subscribe("more", {"limit": 0})
        expect(error is not None, "ERROR rate_limited", "one subscription more")
        expect_error(error or {}, "rate_limited", detail="too_many_subscriptions")
        await peer.unsubscribe("s0")
        await peer.subscribe("more", {"limit": 0})


@CHECKS("R-169", "R-267", source="RFC-0004 §3.7, §8", level=Keyword.MAY)
async def anonymous_sessions_may_read(context: Context) -> None:
    """A session that never authenticates may subscribe"""
    author = context.identity()
    packet = context.packet(author)
    async with context.connect() as publisher, context.connect(anonymous=True) as peer:
        await publisher.store(packet)
        history = await peer.subscribe("s", {"authors": [author.did]})
        expect_equal(history.ids, [packet.packet_id], "the packet")


@CHECKS("R-171", source="RFC-0004 §3.3", concludes=True)
async def every_packet_served_is_whole(context: Context) -> None:
    """Every packet of every EVENT is whole: its schema holds and its id recomputes"""
    witness = context.witness
    breach = witness.breaches.get("R-171")
    expect(breach is None, f"{witness.events} sound packets", breach)


@CHECKS("R-175", "R-158", source="RFC-0004 §3.2; decision A-055")
async def publishers_see_their_own_packets(context: Context) -> None:
    """A session that publishes and subscribes gets both OK and EVENT"""
    author = context.identity()
    packet = context.packet(author)
    async with context.connect() as peer:
        await peer.subscribe("s", {"authors": [author.did]})
        expect_ok(await peer.publish(packet), packet)
        expect_equal(ids_of(await peer.events("s", 1)), [packet.packet_id], "its own packet")


@CHECKS("R-177", source="decision A-066", level=Keyword.SHOULD, extension=DECISIONS)
async def live_events_keep_the_order(context: Context) -> None:
    """Live EVENTs of one subscription leave in the order of acceptance"""
    author = context.identity()
    packets = [context.packet(author, "x" * (9000 if n % 7 == 0 else 3), n=n) for n in range(60)]
    async with context.connect() as publisher, context.connect() as reader:
        await reader.subscribe("s", {"authors": [author.did]})
        await publisher.store(*packets)
        order = [event["packet"]["content"]["n"] for event in await reader.events("s", 60)]
        expect_equal(order, list(range(60)), "the order of acceptance")


@CHECKS("R-178", source="RFC-0004 §3.6")
async def unsubscribe_ends_it(context: Context) -> None:
    """After UNSUBSCRIBE nothing more is sent for that id, and other subscriptions continue"""
    author = context.identity()
    packet = context.packet(author)
    async with context.connect() as peer:
        await peer.subscribe("gone", {"authors": [author.did]})
        await peer.subscribe("open", {"authors": [author.did]})
        await peer.unsubscribe("gone")
        await peer.barrier()
        await peer.store(packet)
        expect_equal(ids_of(await peer.events("open", 1)), [packet.packet_id], "the packet, where it is open")
        expect_equal(await peer.quiet("gone"), [], "nothing after UNSUBSCRIBE")


@CHECKS("R-180", source="RFC-0004 §3.6; decision A-052", extension=DECISIONS)
async def unsubscribing_the_unknown_is_silent(context: Context) -> None:
    """UNSUBSCRIBE for an id that is not open gets no answer"""
    async with context.connect() as peer:
        await peer.unsubscribe("nope")
        await peer.send({"type": "UNSUBSCRIBE", "subscription_id": "nope", "client_msg_id": "u"})
        packet = context.packet(context.identity())
        expect_ok(await peer.publish(packet), packet)
        await peer.barrier()
        expect(not peer.inbox, "nothing", list(peer.inbox))
