"""RFC-0004 from outside: connections, frames, errors (relay.md §1, §9, §12)."""

from __future__ import annotations

import json
import re

import pytest
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from tests.support.bare_client import BareClient, open_client, publish_text
from tests.support.made_packets import ids_of, make, new_identity, seal
from tests.support.relay_process import RelayProcess


@pytest.mark.req("R-127")
async def test_the_endpoint_is_at_strata_and_nowhere_else(relay: RelayProcess):
    assert relay.ws.endswith("/strata")
    async with open_client(relay.ws + "?x=1") as client:
        await client.barrier()
    with pytest.raises(InvalidStatus) as refused:
        async with open_client(relay.ws.removesuffix("/strata") + "/other"):
            pass
    assert refused.value.response.status_code == 404


@pytest.mark.req("R-128")
async def test_a_binary_frame_is_refused_and_the_connection_stays(client: BareClient):
    await client.send(publish_text(make(new_identity()), "m").encode())
    error = await client.receive()
    assert (error["type"], error["code"]) == ("ERROR", "invalid_schema")
    await client.barrier()


@pytest.mark.req("R-129")
@pytest.mark.parametrize("options", [{}, {"subprotocols": ["chat"]}, {"compression": "deflate"}])
async def test_offers_of_a_client_are_ignored(relay: RelayProcess, options):
    async with open_client(relay.ws, **options) as client:
        assert client.socket.subprotocol is None
        assert (await client.publish(make(new_identity(), "x" * 2000)))["type"] == "OK"


@pytest.mark.req("R-001", "R-002", "R-131", "R-132", "R-140", "R-195", "R-198")
@pytest.mark.parametrize(
    ("frame", "detail"),
    [
        ("{", "malformed_json"),
        ("[1]", "malformed_json"),
        ('"PUBLISH"', "malformed_json"),
        ('{"type":"UNSUBSCRIBE","subscription_id":"s"} // why', "malformed_json"),
        ("", "malformed_json"),
        ('{"type":"PING"}', "unknown_type"),
        ('{"TYPE":"PUBLISH"}', "unknown_type"),
        ('{"type":"OK","packet_id":"0x","status":"ACCEPTED"}', "unknown_type"),
        ('{"type":"LINK_REQUEST"}', "unknown_type"),
        ('{"type":"PUBLISH"}', None),
        ('{"type":"SUBSCRIBE"}', None),
        ('{"type":"PUBLISH","packet":7}', None),
    ],
)
async def test_a_bad_frame_is_one_error_and_the_next_request_works(client: BareClient, frame, detail):
    await client.send(frame)
    error = await client.receive()
    assert (error["type"], error["code"], error.get("detail")) == ("ERROR", "invalid_schema", detail)
    assert error["reason"]
    assert (await client.publish(make(new_identity())))["type"] == "OK"
    assert not client.inbox


@pytest.mark.req("R-132")
async def test_a_flood_of_malformed_frames_closes_with_1008(relay: RelayProcess):
    async with open_client(relay.ws) as client:
        with pytest.raises(ConnectionClosedError) as closed:
            for _ in range(100):
                await client.send("{")
                await client.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008


@pytest.mark.req("R-001")
async def test_text_that_is_not_utf8_ends_the_connection_with_1007(relay: RelayProcess):
    async with open_client(relay.ws) as client:
        await client.socket.send(b'{"type":"\xff"}', text=True)
        with pytest.raises(ConnectionClosedError) as closed:
            await client.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1007


@pytest.mark.req("R-128")
async def test_a_fragmented_message_is_one_message(client: BareClient):
    text = publish_text(make(new_identity()), "m")
    await client.socket.send([text[:10], "", text[10:11], text[11:]])
    assert (await client.answer("m"))["type"] == "OK"


@pytest.mark.req("R-004", "R-138")
async def test_unknown_members_are_ignored_in_every_message(client: BareClient):
    identity = new_identity()
    packet = make(identity)
    await client.send(publish_text(packet, "m")[:-1] + ',"x_new":{"a":[1]}}')
    assert (await client.answer("m"))["type"] == "OK"
    filters = {"authors": [identity.did], "x_new": 1}
    events, _ = await client.subscribe("s", filters, x_new=1)
    assert ids_of(events) == [packet.packet_id]
    await client.send({"type": "UNSUBSCRIBE", "subscription_id": "s", "x_new": 1})
    await client.publish(make(identity))
    assert await client.quiet("s") == []


@pytest.mark.req("R-135", "R-136")
async def test_messages_without_a_client_msg_id_are_answered_without_one(client: BareClient):
    await client.send(publish_text(make(new_identity())))
    ok = await client.receive()
    assert ok["type"] == "OK"
    assert "client_msg_id" not in ok
    await client.send(publish_text("{}"))
    error = await client.receive()
    assert error["type"] == "ERROR"
    assert "client_msg_id" not in error
    await client.send(
        {"type": "SUBSCRIBE", "subscription_id": "s", "history_marker": True, "filters": {"limit": 0}}
    )
    marker = await client.receive()
    assert marker["type"] == "END_OF_HISTORY"
    assert "client_msg_id" not in marker


@pytest.mark.req("R-136", "R-137")
@pytest.mark.parametrize(
    ("name", "echoed"), [("x" * 128, True), ("é" * 64, True), ("x" * 129, False), (7, False)]
)
async def test_the_client_msg_id_is_echoed_or_refused(client: BareClient, name, echoed):
    packet = make(new_identity())
    await client.send(
        f'{{"type":"PUBLISH","client_msg_id":{json.dumps(name)},"packet":{packet.canonical.decode()}}}'
    )
    answer = await client.receive()
    assert answer["type"] == ("OK" if echoed else "ERROR")
    assert answer.get("client_msg_id") == (name if echoed else None)


@pytest.mark.req("R-133", "R-152", "R-177", "R-192")
async def test_pipelined_publishes_enter_the_log_in_order_and_each_has_one_answer(client: BareClient):
    identity = new_identity()
    await client.subscribe("live", {"authors": [identity.did], "limit": 0})
    packets = [make(identity, "x" * (20_000 if n % 10 == 0 else 5), n=n) for n in range(300)]
    answers = await client.publish_all(packets)
    assert [answer["packet_id"] for answer in answers] == [packet.packet_id for packet in packets]
    live = await client.events("live", 300)
    assert [event["packet"]["content"]["n"] for event in live] == list(range(300))
    assert [message for message in client.inbox if message["type"] != "EVENT"] == []
    events, end = await client.subscribe("s", {"authors": [identity.did], "limit": 500})
    assert [event["packet"]["content"]["n"] for event in events] == list(range(300))
    assert end["complete"] is True
    assert await client.quiet("live") == []


@pytest.mark.req("R-003", "R-195", "R-199")
async def test_every_member_sent_is_snake_case_and_no_reason_leaks(client: BareClient):
    identity = new_identity()
    await client.publish(make(identity))
    await client.publish("{}")
    await client.publish(seal(identity, {"author_id": "'; DROP TABLE packets; --"}))
    await client.subscribe("s", {"authors": [identity.did]})
    await client.subscribe("t", {"cursor": "no'; SELECT"})
    await client.send({"type": "SUBSCRIBE", "subscription_id": "u", "filters": {"types": ["\x00", "'"]}})
    await client.send({"type": "SUBSCRIBE", "subscription_id": "v", "filters": {"authors": ["%s $1 \\"] * 3}})
    events, _ = await client.subscribe("s", {"authors": [identity.did]})
    messages = [*client.inbox, *events, await client.publish("[]"), await client.publish(make(identity))]
    for message in messages:
        for member in _members({k: v for k, v in message.items() if k != "packet"}):
            assert re.fullmatch(r"[a-z][a-z0-9_]*", member)
        if message["type"] == "ERROR":
            assert not re.search(
                r"Traceback|SELECT|postgres|asyncpg|/home|/usr|0x[0-9a-f]{32}", message["reason"]
            )


def _members(value: object) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(name for inner in value.values() for name in _members(inner))]
    if isinstance(value, list):
        return [name for inner in value for name in _members(inner)]
    return []
