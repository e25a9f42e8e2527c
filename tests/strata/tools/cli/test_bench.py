"""`strata bench` against the naive relay: what it writes, counts and refuses to do."""

from __future__ import annotations

import json
from functools import partial

import pytest
from strata.protocol import wire
from strata.tools.cli.bench import percentile

from tests.support.strata_command import run_strata

SMALL = ("--count", 40, "--connections", 2, "--in-flight", 4, "--subscribers", 3)


@pytest.fixture
def run(tmp_path):
    return partial(run_strata, "bench", XDG_CONFIG_HOME=tmp_path / "config")


async def test_every_packet_is_stored_and_delivered_to_every_subscriber(run, fake):
    code, out, err = await run(fake.url, *SMALL, "--json")
    publish, fan_out = (json.loads(line) for line in out.splitlines())
    assert code == 0 and "writes up to 80 packets" in err and "throw-away identity" in err
    assert (publish["part"], publish["stored"], publish["refused"]) == ("publish", 40, {})
    assert (publish["connections"], publish["in_flight"]) == (2, 4)
    assert (fan_out["part"], fan_out["stored"], fan_out["deliveries"]) == ("fan-out", 40, 120)
    for part in (publish, fan_out):
        assert 0 < part["p50"] <= part["p99"] < 30 and part["per_second"] > 0 and part["seconds"] > 0
    packets = [packet for packet, _ in fake.model.log]
    assert len(packets) == 81, "and the one that shows that the subscribers are in place"
    assert len({packet.content_type for packet in packets}) == 2
    assert all(packet.expires_at == packet.timestamp + 600 for packet in packets)
    for packet in packets[:3]:
        packet.verify(now=packet.timestamp)


async def test_a_packet_that_comes_twice_does_not_stand_for_one_that_does_not_come(run, extended):
    model = extended.model
    event = model._event

    def confused(subscribe, index, with_cursor):
        """To each subscriber: the packet before, where the last but one is due."""
        return event(subscribe, index - (index == last), with_cursor)

    last = 10 + 1 + 8  # the first part's packets, the one that shows that subscribers are in place, and eight
    model._event = confused
    options = ("--count", 10, "-c", 1, "--in-flight", 1, "--subscribers", 2)
    code, out, err = await run(extended.url, *options, "--json")
    told = json.loads(out.splitlines()[1])
    assert code == 1 and (told["stored"], told["deliveries"], told["repeated"]) == (10, 18, 2)
    assert "2 deliveries did not arrive" in err and "2 deliveries came to a subscriber that had" in err


async def test_the_table(run, extended):
    code, out, _ = await run(extended.url, *SMALL)
    head, publish, fan_out = out.splitlines()
    assert code == 0 and head.split()[:3] == ["part", "packets", "deliveries"]
    assert publish.split()[:3] == ["publish", "40", "-"] and "4 in flight" in publish
    assert fan_out.split()[:3] == ["fan-out", "40", "120"] and "3 subscribers" in fan_out


async def test_without_subscribers_there_is_one_part(run, extended):
    code, out, _ = await run(extended.url, *SMALL, "--subscribers", 0, "--json")
    assert code == 0 and json.loads(out)["part"] == "publish"


async def test_the_time_bounds_it_and_what_is_in_flight_then_is_waited_for(run, extended):
    extended.model.answer = lambda message: "silence"
    options = ("--count", 6, "-c", 1, "--in-flight", 1, "--seconds", 2, "--subscribers", 0, "--json")
    code, out, _ = await run(extended.url, *options)
    assert code == 1 and json.loads(out)["refused"] == {"no answer": 1}, "the other five were never sent"


async def test_refusals_are_counted_by_their_code(run, extended):
    def answer(message):
        return wire.Error(code="policy_rejected", reason="not here", client_msg_id=message.client_msg_id)

    extended.model.answer = answer
    code, out, _ = await run(extended.url, "--count", 10, "-s", 0, "--json")
    assert code == 1
    assert json.loads(out)["refused"] == {"policy_rejected": 10} and json.loads(out)["stored"] == 0


async def test_a_relay_that_refuses_subscriptions_ends_it(run, extended):
    def answer(message):
        return wire.Error(code="policy_rejected", reason="not here", client_msg_id=message.client_msg_id)

    extended.model.answer_subscribe = answer
    code, _, err = await run(extended.url, *SMALL)
    assert code == 1 and "refuses the subscription: not here" in err


async def test_a_relay_elsewhere_needs_a_yes(run):
    code, out, err = await run("wss://relay.example/strata")
    assert (code, out) == (2, "") and "--yes" in err


async def test_nobody_there_is_exit_code_1(run, unused_tcp_port):
    code, out, err = await run(f"ws://127.0.0.1:{unused_tcp_port}/strata", "--count", 1)
    assert (code, out) == (1, "") and "is the relay running?" in err
    assert (await run("nonsense"))[0] == 2


def test_percentiles():
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
    assert percentile(list(range(1, 101)), 0.5) == 50
    assert percentile(list(range(1, 101)), 0.99) == 99
