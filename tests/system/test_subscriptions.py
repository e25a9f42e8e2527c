"""SUBSCRIBE, EVENT and UNSUBSCRIBE from outside (relay.md §10)."""

from __future__ import annotations

import asyncio
import time

import pytest
from strata.protocol.packets import Packet

from tests.support.bare_client import BareClient, open_client
from tests.support.made_packets import ids_of, make, new_identity
from tests.support.relay_process import RelayProcess


async def stored(client: BareClient, identity, count: int, **members) -> list[Packet]:
    packets = [make(identity, n=n, **members) for n in range(count)]
    for answer in await client.publish_all(packets):
        assert answer["type"] == "OK"
    return packets


def ids(packets: list[Packet]) -> list[str]:
    return [packet.packet_id for packet in packets]


@pytest.mark.req("R-098", "R-153", "R-171", "R-172", "R-173")
async def test_history_and_live_events_are_whole(client: BareClient):
    identity = new_identity()
    filters = {"authors": [identity.did]}
    before = await stored(client, identity, 3)
    events, end = await client.subscribe("a", filters)
    await client.subscribe("b", filters)
    after = await stored(client, identity, 2)
    live = await client.events("a", 2)
    assert ids_of(events) == ids(before)
    assert ids_of(live) == ids(after)
    assert len(await client.events("b", 2)) == 2
    for event in [*events, *live]:
        assert set(event) == {"type", "subscription_id", "packet", "received_at", "cursor"}
        assert abs(event["received_at"] - time.time()) < 60
    assert end == {
        "type": "END_OF_HISTORY",
        "subscription_id": "a",
        "complete": True,
        "cursor": events[-1]["cursor"],
        "client_msg_id": end["client_msg_id"],
    }


@pytest.mark.req("R-016", "R-040", "R-171")
async def test_the_packet_s_bytes_come_back_as_they_were_signed(client: BareClient):
    identity = new_identity()
    odd = {
        "\U0001f980": 1,
        "\ufb33": 2,
        "numbers": [1e21, 1e-7, 0.5, -0.0],
        "nul": "a\u0000b",
        "text": "Grüße €",
    }
    packet = make(identity, odd=odd, extra={"x_unknown": {"z": [None, True]}})
    assert (await client.publish(packet))["type"] == "OK"
    await client.send({"type": "SUBSCRIBE", "subscription_id": "s", "filters": {"authors": [identity.did]}})
    frame = await client.socket.recv()
    assert isinstance(frame, str)
    assert packet.canonical in frame.encode()


@pytest.mark.req("R-142", "R-143", "R-144", "R-145", "R-146", "R-302", "R-303")
async def test_filters_alternate_inside_and_combine_between(client: BareClient):
    one, two, three = new_identity(), new_identity(), new_identity()
    made = {
        (author.did, kind): make(author, type=kind)
        for author in (one, two, three)
        for kind in ("AAA", "BBB", "aaa")
    }
    await client.publish_all(list(made.values()))

    async def found(**filters: object) -> set[str]:
        events, _ = await client.subscribe("s", {"since": int(time.time()) - 300, "limit": 500, **filters})
        return {event["packet"]["packet_id"] for event in events} & set(ids(list(made.values())))

    def those(authors: list[str], types: list[str]) -> set[str]:
        return {p.packet_id for (author, kind), p in made.items() if author in authors and kind in types}

    everyone = [one.did, two.did, three.did]
    every = ["AAA", "BBB", "aaa"]
    assert await found(authors=[one.did, two.did], types=["AAA", "BBB"]) == those(
        [one.did, two.did], ["AAA", "BBB"]
    )
    assert await found(authors=[one.did]) == those([one.did], every)
    assert await found(authors=[], types=["AAA"]) == those(everyone, ["AAA"])
    assert await found(authors=None, types=None) == those(everyone, every)
    assert await found(authors=everyone, types=[]) == those(everyone, every)
    assert await found(authors=[one.did[:-1]]) == set()
    assert await found(authors=[one.did + "x"], types=["AAA"]) == set()


@pytest.mark.req("R-144", "R-145", "R-146")
async def test_live_delivery_filters_as_history_does(client: BareClient):
    one, two = new_identity(), new_identity()
    await client.subscribe("s", {"authors": [one.did], "types": ["AAA"], "limit": 0})
    wanted = make(one, type="AAA")
    await client.publish_all([make(one, type="aaa"), make(two, type="AAA"), wanted, make(one, type="BBB")])
    assert ids_of(await client.quiet("s")) == [wanted.packet_id]


@pytest.mark.req("R-147", "R-148", "R-304")
async def test_since_binds_history_and_live_and_until_history_alone(client: BareClient):
    identity = new_identity()
    packets = [make(identity, age=age) for age in (400, 300, 200)]
    await client.publish_all(packets)
    times = [packet.timestamp for packet in packets]
    filters = {"authors": [identity.did], "since": times[1], "until": times[1]}
    events, _ = await client.subscribe("s", filters)
    assert ids_of(events) == [packets[1].packet_id]
    late, early = make(identity), make(identity, age=350)
    await client.publish_all([early, late])
    assert ids_of(await client.quiet("s")) == [late.packet_id]


@pytest.mark.req("R-168")
async def test_received_bounds_look_at_arrival(client: BareClient):
    identity = new_identity()
    start = int(time.time())
    old = make(identity, age=5000)
    received_at = (await client.publish(old))["received_at"]
    for bounds, found in [
        ({"received_since": start - 5}, True),
        ({"received_since": received_at, "received_until": received_at}, True),
        ({"received_until": start - 5}, False),
        ({"received_since": received_at + 1}, False),
        ({"since": start - 5}, False),
    ]:
        events, _ = await client.subscribe("s", {"authors": [identity.did], **bounds})
        assert ids_of(events) == ([old.packet_id] if found else []), bounds


@pytest.mark.req("R-149", "R-150", "R-151", "R-165")
async def test_limits(client: BareClient):
    identity = new_identity()
    packets = await stored(client, identity, 510)
    for limit, count in [(None, 100), (0, 0), (1, 1), (99, 99), (10_000, 500)]:
        events, end = await client.subscribe("s", {"authors": [identity.did], "limit": limit})
        assert ids_of(events) == ids(packets)[:count]
        assert end["complete"] is False
    live = make(identity)
    await client.subscribe("s", {"authors": [identity.did], "limit": 0})
    await client.publish(live)
    assert ids_of(await client.quiet("s")) == [live.packet_id]
    events, end = await client.subscribe("s", {"authors": [identity.did], "types": ["NONE"]})
    assert events == []
    assert end["complete"] is True


@pytest.mark.req("R-152", "R-154", "R-156", "R-306")
@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_paging_meets_every_packet_once(client: BareClient, order):
    identity = new_identity()
    packets = await stored(client, identity, 250)
    got: list[str] = []
    cursor, complete, page = None, False, 0
    while not complete:
        page += 1
        filters = {"authors": [identity.did], "limit": 30 + page, "cursor": cursor, "order": order}
        events, end = await client.subscribe("s", filters)
        assert len(events) <= 30 + page
        got += ids_of(events)
        complete = end["complete"]
        assert end["cursor"] == (events[-1]["cursor"] if events else cursor)
        cursor = end["cursor"]
    assert got == (ids(packets) if order == "asc" else ids(packets)[::-1])


@pytest.mark.req("R-154", "R-159")
async def test_paging_while_others_publish_skips_nothing(relay: RelayProcess, client: BareClient):
    identity = new_identity()
    first = await stored(client, identity, 100)
    async with open_client(relay.ws) as publisher:
        publishing = asyncio.create_task(stored(publisher, identity, 400), name="publisher")
        history: list[str] = []
        cursor = None
        while not publishing.done() or len(history) < 500:
            filters = {"authors": [identity.did], "limit": 37, "cursor": cursor}
            events, end = await client.subscribe("page", filters)
            # Live EVENTs come between the pages; those of the history come before the marker.
            history += [i for i, event in zip(ids_of(events), events, strict=True) if event["cursor"]]
            cursor = end["cursor"]
            await client.send({"type": "UNSUBSCRIBE", "subscription_id": "page"})
            await client.quiet("page")
        assert history == ids(first) + ids(await publishing)


@pytest.mark.req("R-156", "R-157")
async def test_bad_cursors_are_refused_and_open_nothing(client: BareClient):
    identity = new_identity()
    await stored(client, identity, 2)
    events, _ = await client.subscribe("good", {"authors": [identity.did]})
    cursor = events[0]["cursor"]
    bad = [cursor[:-1], cursor + "A", "", "1.", "1." + "A" * 22, "é", "0" + cursor[1:], "x" * 10_000]
    bad += [
        cursor[:at] + ("A" if cursor[at] != "A" else "B") + cursor[at + 1 :] for at in range(2, len(cursor))
    ]
    for text in bad:
        _, error = await client.subscribe("bad", {"authors": [identity.did], "cursor": text})
        assert (error["type"], error["code"], error["subscription_id"]) == ("ERROR", "invalid_cursor", "bad")
    _, error = await client.subscribe("bad", {"cursor": cursor, "order": "desc"})
    assert error["code"] == "invalid_cursor"
    await client.publish(make(identity))
    assert await client.quiet("bad") == []
    events, _ = await client.subscribe("again", {"cursor": cursor, "types": ["NONE"], "limit": 3})
    assert events == []


@pytest.mark.req("R-160")
async def test_a_cut_history_leaves_cursors_off_live_events(client: BareClient):
    identity = new_identity()
    packets = await stored(client, identity, 5)
    events, end = await client.subscribe("s", {"authors": [identity.did], "limit": 2})
    live = make(identity)
    await client.publish(live)
    (event,) = await client.events("s", 1)
    assert event["packet"]["packet_id"] == live.packet_id
    assert "cursor" not in event
    rest, end = await client.subscribe("t", {"authors": [identity.did], "cursor": events[-1]["cursor"]})
    assert ids_of(rest) == [*ids(packets[2:]), live.packet_id]
    assert end["complete"] is True
    await client.publish(make(identity))
    assert "cursor" not in (await client.events("s", 1))[0]
    assert "cursor" in (await client.events("t", 1))[0]


@pytest.mark.req("R-158", "R-178")
async def test_live_until_unsubscribe(client: BareClient):
    identity = new_identity()
    await client.subscribe("s", {"authors": [identity.did]})
    first = make(identity)
    await client.publish(first)
    assert ids_of(await client.quiet("s")) == [first.packet_id]
    await client.send({"type": "UNSUBSCRIBE", "subscription_id": "s"})
    await client.publish(make(identity))
    assert await client.quiet("s") == []


@pytest.mark.req("R-159")
@pytest.mark.parametrize("gapless", [False, True])
async def test_subscribing_amid_publishing_loses_and_repeats_nothing(relay: RelayProcess, gapless):
    identity = new_identity()
    options = {"gapless": True} if gapless else {}
    limit = {} if gapless else {"limit": 500}
    async with open_client(relay.ws) as publisher, open_client(relay.ws) as reader:
        publishing = asyncio.create_task(stored(publisher, identity, 400), name="publisher")
        names: list[str] = []
        while not publishing.done() and len(names) < 40:
            names.append(f"s{len(names)}")
            await reader.send(
                {
                    "type": "SUBSCRIBE",
                    "subscription_id": names[-1],
                    "filters": {"authors": [identity.did], **limit},
                }
                | options
            )
            await reader.barrier()
        packets = await publishing
        for name in names:
            assert ids_of(await reader.events(name, 400)) == ids(packets)
        await reader.barrier()
        assert not reader.inbox


@pytest.mark.req("R-162")
async def test_the_same_id_replaces_at_once(client: BareClient):
    one, two = new_identity(), new_identity()
    await client.subscribe("s", {"authors": [one.did]})
    _, end = await client.subscribe("s", {"authors": [two.did]})
    assert end["type"] == "END_OF_HISTORY"
    wanted = make(two)
    await client.publish_all([make(one), wanted, make(one)])
    assert ids_of(await client.quiet("s")) == [wanted.packet_id]


@pytest.mark.req("R-163", "R-172")
async def test_overlapping_subscriptions_each_get_their_event(client: BareClient):
    identity = new_identity()
    await client.subscribe("a", {"authors": [identity.did]})
    await client.subscribe("b", {"types": ["OVERLAP"]})
    packet = make(identity, type="OVERLAP")
    await client.publish(packet)
    await client.barrier()
    assert ids_of(client.taken("a")) == ids_of(client.taken("b")) == [packet.packet_id]
    assert not client.inbox


@pytest.mark.req("R-164")
async def test_the_65th_subscription_is_refused(relay: RelayProcess):
    async with open_client(relay.ws) as client:
        for number in range(64):
            _, end = await client.subscribe(f"s{number}", {"limit": 0})
            assert end["type"] == "END_OF_HISTORY"
        _, error = await client.subscribe("s64", {"limit": 0})
        assert (error["code"], error["detail"], error["subscription_id"]) == (
            "rate_limited",
            "too_many_subscriptions",
            "s64",
        )
        assert error["retry_after"] >= 1
        await client.send({"type": "UNSUBSCRIBE", "subscription_id": "s0"})
        _, end = await client.subscribe("s64", {"limit": 0})
        assert end["type"] == "END_OF_HISTORY"


@pytest.mark.req("R-165")
async def test_the_marker_comes_only_when_asked_for(client: BareClient):
    identity = new_identity()
    await stored(client, identity, 1)
    filters = {"authors": [identity.did]}
    for options in ({}, {"history_marker": False}, {"history_marker": None}):
        await client.send({"type": "SUBSCRIBE", "subscription_id": "s", "filters": filters, **options})
        await client.events("s", 1)
        await client.barrier()
        assert not client.inbox
    events, end = await client.subscribe("none", {"types": ["NEVER"], "order": "desc"})
    assert (events, end["complete"], end["cursor"]) == ([], True, None)
    events, end = await client.subscribe("none", {"types": ["NEVER"]})
    assert (events, end["complete"]) == ([], True)
    (later,) = await stored(client, identity, 1)
    events, _ = await client.subscribe("from the end", {**filters, "cursor": end["cursor"]})
    assert ids_of(events) == [later.packet_id]


@pytest.mark.req("R-166", "R-300", "R-301")
async def test_packets_by_id(client: BareClient):
    identity = new_identity()
    packets = await stored(client, identity, 3)
    unknown = "0x" + "00" * 32
    events, _ = await client.subscribe(
        "s", {"packet_ids": [packets[2].packet_id, packets[0].packet_id, unknown]}
    )
    assert ids_of(events) == [packets[0].packet_id, packets[2].packet_id]
    awaited = make(identity)
    await client.subscribe("s", {"packet_ids": [awaited.packet_id]})
    await client.publish_all([make(identity), awaited])
    assert ids_of(await client.quiet("s")) == [awaited.packet_id]


@pytest.mark.req("R-167")
async def test_a_gapless_stream_has_no_cap_and_a_cursor_on_every_event(client: BareClient):
    identity = new_identity()
    packets = await stored(client, identity, 1200)
    filters = {"authors": [identity.did]}
    await client.send({"type": "SUBSCRIBE", "subscription_id": "s", "filters": filters, "gapless": True})
    events = await client.events("s", 1200)
    more = await stored(client, identity, 5)
    events += await client.events("s", 5)
    assert ids_of(events) == ids(packets) + ids(more)
    cursors = [event["cursor"] for event in events]
    await client.send(
        {
            "type": "SUBSCRIBE",
            "subscription_id": "s",
            "filters": {**filters, "cursor": cursors[700]},
            "gapless": True,
        }
    )
    assert ids_of(await client.events("s", 504)) == ids_of(events)[701:]
    for wrong in ({"limit": 5}, {"order": "asc"}):
        _, error = await client.subscribe("t", wrong, gapless=True)
        assert error["code"] == "invalid_schema"


@pytest.mark.req("R-169", "R-175", "R-176")
async def test_a_publisher_sees_its_own_packet_after_its_ok(client: BareClient):
    identity = new_identity()
    await client.subscribe("s", {"authors": [identity.did]})
    packet = make(identity)
    await client.send('{"type":"PUBLISH","client_msg_id":"own","packet":' + packet.canonical.decode() + "}")
    first, second = await client.receive(), await client.receive()
    assert [first["type"], second["type"]] == ["OK", "EVENT"]


@pytest.mark.req("R-179")
async def test_subscriptions_are_freed_on_unsubscribe_replacement_and_disconnect(relay: RelayProcess):
    before = relay.metric("relayd_subscriptions")
    async with open_client(relay.ws) as client:
        for cycle in range(2000):
            name = f"s{cycle % 50}"
            await client.send({"type": "SUBSCRIBE", "subscription_id": name, "filters": {"limit": 0}})
            if cycle % 3 == 0:
                await client.send({"type": "UNSUBSCRIBE", "subscription_id": name})
        await client.barrier()
        assert relay.metric("relayd_subscriptions") <= before + 50
    deadline = asyncio.get_running_loop().time() + 10
    while relay.metric("relayd_subscriptions") != before:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.02)


@pytest.mark.req("R-180")
async def test_unsubscribe_of_an_unknown_id_says_nothing(client: BareClient):
    await client.send({"type": "UNSUBSCRIBE", "subscription_id": "nope"})
    assert (await client.publish(make(new_identity())))["type"] == "OK"
    assert not client.inbox
