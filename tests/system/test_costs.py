"""Packets that are expensive to read do not burden the loop: any frame or stored packet costs others little.

`relayd_loop_step_seconds` shows it, and every system test checks it when its relay stops. The frames here are
the most expensive ones for their size, and each is sent often enough not to be a stray.
"""

from __future__ import annotations

import time

import pytest
from strata.protocol.packets import Packet

from tests.support.bare_client import BareClient, open_client
from tests.support.made_packets import make, new_identity, seal
from tests.support.relay_process import RelayProcess
from tests.support.waiting import wait_until

LARGEST_FRAME = 2 * 262_144 + 65_536
ITEMS = ["1e-9", "1.5e300", "1e21", "[]", "{}", '{"":1}', '{"\uffff":{}}', '"\\n"']


def filled(before: str, item: str, after: str, size: int) -> str:
    """Text of about `size` bytes that repeats one item of a list."""
    count = (size - len(before) - len(after)) // (len(item.encode()) + 1)
    return before + ",".join([item] * count) + after


async def ask(client: BareClient, text: str) -> dict[str, object]:
    await client.socket.send(text)
    return await client.receive()


@pytest.mark.req("R-321")
@pytest.mark.parametrize("item", ITEMS)
async def test_no_frame_keeps_the_loop(relay: RelayProcess, client: BareClient, item: str) -> None:
    for size in (16_000, 65_000, 250_000, LARGEST_FRAME):
        for before, after in (
            ('{"type":"PUBLISH","packet":{"content":[', "]}}"),
            ('{"type":"PUBLISH","packet": {"content":[', ']," ":1," ":2}}'),
            ('{"type":[', "]}"),
            ('{"type":"PUBLISH","packet":{},"client_msg_id":[', "]}"),
            ('{"type":"SUBSCRIBE","subscription_id":"s","filters":{"types":[', "]}}"),
            ('{"type":"UNSUBSCRIBE","subscription_id":7,"more":[', "]}"),
        ):
            frame = filled(before, item, after, size - 64)
            for _ in range(4):
                answer = await ask(client, frame)
                assert answer["type"] == "ERROR" and answer["code"] in ("invalid_schema", "packet_too_large")
    wait_until(lambda: relay.steps()[0] > 100, "a hundred looks at the loop")
    _, steps = relay.steps()
    assert {"0.04", "0.08", "+Inf"} <= steps.keys()
    relay.check_loop()


@pytest.mark.req("R-208", "R-209")
async def test_what_is_stored_and_downgraded_is_served_at_the_cost_of_a_copy(relay: RelayProcess) -> None:
    author = new_identity()
    numbers = [1e-9] * 30_000 + ["x" * 70_000]
    members = {"version": 1, "timestamp": int(time.time()), "author_id": author.did}
    packets = [
        Packet.parse(seal(author, {**members, "content": content, "provenance_header": header}))
        for content, header in (
            ({"type": "NUMBERS", "numbers": numbers}, {"origin_type": "SATELLITE"}),
            ({"type": "HEADER"}, {"origin_type": "SATELLITE", "numbers": numbers}),
        )
    ]
    async with open_client(relay.ws) as client:
        for packet in packets:
            for _ in range(5):
                assert (await client.publish(packet))["type"] == "OK"
        before = relay.metric("process_cpu_seconds_total")
        for packet in packets:
            for _ in range(10):
                assert relay.get(f"/packets/{packet.packet_id}")[0] == 200
        events, _ = await client.subscribe("s", {"authors": [author.did]})
        assert len(events) == 2
        spent = relay.metric("process_cpu_seconds_total") - before
    # Decoding and canonicalising one of these takes 20 ms or more; copying it, a tenth of a millisecond.
    assert spent < 20 * 0.1
    relay.check_loop()


@pytest.mark.req("R-121", "R-122")
@pytest.mark.parametrize("kind", ["KEY_EVENT", "CLIENT_MANIFEST", "RELAY_DESCRIPTOR"])
async def test_nobody_leaves_large_packets_that_are_kept_for_ever(client: BareClient, kind: str) -> None:
    author = new_identity()
    answer = await client.publish(make(author, type=kind, event="NOOP", x=[{}] * 10_000))
    assert (answer["type"], answer["code"]) == ("ERROR", "packet_too_large")
    assert (answer["detail"], answer["max_bytes"]) == ("identity_packet", 16_384)


@pytest.mark.req("R-321")
async def test_the_filters_of_a_connection_take_two_mebibytes_and_no_more(client: BareClient) -> None:
    open_subscriptions = 0
    while True:
        types = [f"{open_subscriptions}/{n}" for n in range(1000)]
        name = f"s{open_subscriptions}"
        await client.send(
            {
                "type": "SUBSCRIBE",
                "subscription_id": name,
                "filters": {"types": types},
                "history_marker": True,
            }
        )
        answer = await client.receive()
        if answer["type"] == "ERROR":
            break
        assert answer["type"] == "END_OF_HISTORY"
        open_subscriptions += 1
    # Ten kilobytes are sent for each subscription, and half a mebibyte is kept.
    assert (answer["code"], answer["detail"]) == ("rate_limited", "too_many_filter_bytes")
    assert answer["limit"] == 2 * 2**20 and 3 <= open_subscriptions <= 5
