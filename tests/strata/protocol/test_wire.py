"""Wire messages: what each type reads and writes, and how a bad frame is answered."""

from __future__ import annotations

import contextlib
import json
import re
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw
from strata.protocol import wire
from strata.protocol.errors import ErrorCode, InvalidMessage

PACKET = b'{"packet_id":"0x00","x":[1.50, "\\u00e9"]}'

CLIENT_MESSAGES: list[wire.ClientMessage] = [
    wire.Subscribe(subscription_id="s"),
    wire.Subscribe(
        subscription_id="s",
        filters=wire.Filters(
            authors=["did:strata:a"],
            types=["POST"],
            since=1,
            until=2,
            limit=0,
            cursor="c",
            order="desc",
            packet_ids=["0x00"],
            received_since=3,
            received_until=4,
        ),
        replication_profile="FULL_ARCHIVE",
        history_marker=True,
        gapless=True,
        client_msg_id="m",
    ),
    wire.Unsubscribe(subscription_id="s", client_msg_id="m"),
    wire.Publish(packet=Raw(PACKET), client_msg_id="m"),
    wire.Auth(author_id="did:strata:a", challenge="AA==", signature="0x00", capabilities=["publish"]),
]
RELAY_MESSAGES: list[wire.RelayMessage] = [
    wire.Event(
        packet=Raw(PACKET), received_at=1, subscription_id="s", cursor="c", relay_annotations={"a": 1}
    ),
    wire.Event(packet=Raw(PACKET), received_at=1),
    wire.Ok(packet_id="0x00", status="ACCEPTED", client_msg_id="m", duplicate=True, received_at=1),
    wire.Error(code="rate_limited", reason="r", retry_after=7, limit=60, remaining=0, window_seconds=60),
    wire.Error(code="invalid_schema", reason="r", subscription_id="s", detail="unknown_type"),
    wire.AuthChallenge(challenge="AA==", server_id="did:strata:r", expires_at=9, extensions=["gapless"]),
    wire.AuthOk(author_id="did:strata:a", capabilities=[], client_msg_id="m"),
    wire.EndOfHistory(subscription_id="s", complete=True, cursor=None),
    wire.EndOfHistory(subscription_id="s", complete=False, cursor="c", client_msg_id="m"),
]


def refusal(data: bytes | str) -> InvalidMessage:
    with pytest.raises(InvalidMessage) as caught:
        wire.decode_client_message(data.encode() if isinstance(data, str) else data)
    assert caught.value.code is ErrorCode.INVALID_SCHEMA
    return caught.value


def plain(message: wire.ClientMessage | wire.RelayMessage) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(wire.encode(message))
    return decoded


# --- Both directions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", CLIENT_MESSAGES, ids=lambda message: type(message).__name__)
def test_client_messages_arrive_as_they_were_sent(message: wire.ClientMessage) -> None:
    decoded = wire.decode_client_message(wire.encode(message))
    assert type(decoded) is type(message)
    assert wire.encode(decoded) == wire.encode(message)


@pytest.mark.parametrize("message", RELAY_MESSAGES, ids=lambda message: type(message).__name__)
def test_relay_messages_arrive_as_they_were_sent(message: wire.RelayMessage) -> None:
    data = wire.encode(message)
    for given_data in (data, data.decode()):
        decoded = wire.decode_relay_message(given_data)
        assert type(decoded) is type(message)
        assert wire.encode(decoded) == data


@pytest.mark.req("R-003", "R-015")
def test_emitted_names_are_snake_case_and_nothing_is_null() -> None:
    for message in (*CLIENT_MESSAGES, *RELAY_MESSAGES):
        for name, member in plain(message).items():
            assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
            assert member is not None or isinstance(message, wire.EndOfHistory)
    for name in wire.Filters.__struct_fields__:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)


@pytest.mark.req("R-040", "R-171")
def test_a_packet_keeps_the_bytes_it_came_with() -> None:
    publish = wire.decode_client_message(b'{"type":"PUBLISH","packet":' + PACKET + b"}")
    assert isinstance(publish, wire.Publish)
    assert bytes(publish.packet) == PACKET
    event = wire.decode_relay_message(wire.encode(wire.Event(packet=Raw(PACKET), received_at=1)))
    assert isinstance(event, wire.Event)
    assert bytes(event.packet) == PACKET


@pytest.mark.req("R-165")
def test_the_end_of_history_names_its_cursor_even_when_there_is_none() -> None:
    assert plain(wire.EndOfHistory(subscription_id="s", complete=True, cursor=None))["cursor"] is None
    decoded = wire.decode_relay_message('{"type":"END_OF_HISTORY","subscription_id":"s","complete":true}')
    assert isinstance(decoded, wire.EndOfHistory)
    assert decoded.cursor is UNSET


@pytest.mark.req("R-004", "R-138")
@pytest.mark.parametrize(
    "message", [*CLIENT_MESSAGES, *RELAY_MESSAGES], ids=lambda message: type(message).__name__
)
def test_unknown_members_are_ignored(message: Any) -> None:
    extended = json.dumps({"x_new": {"a": [1]}, **plain(message), "y_new": None}).encode()
    decode: Any = wire.decode_client_message if message in CLIENT_MESSAGES else wire.decode_relay_message
    assert type(decode(extended)) is type(message)


@pytest.mark.req("R-014", "R-142")
def test_null_is_absence() -> None:
    nulls = {name: None for name in wire.Filters.__struct_fields__}
    message = {"type": "SUBSCRIBE", "subscription_id": "s", "filters": nulls, "client_msg_id": None}
    decoded = wire.decode_client_message(json.dumps(message).encode())
    assert decoded == wire.Subscribe(subscription_id="s", filters=wire.Filters())
    assert wire.decode_client_message(b'{"type":"SUBSCRIBE","subscription_id":"s","filters":null}') == (
        wire.Subscribe(subscription_id="s")
    )


@pytest.mark.req("R-135")
def test_no_message_needs_a_client_msg_id() -> None:
    for message in CLIENT_MESSAGES:
        members = {name: member for name, member in plain(message).items() if name != "client_msg_id"}
        assert wire.decode_client_message(json.dumps(members).encode()).client_msg_id is None


def test_members_may_come_in_any_order() -> None:
    decoded = wire.decode_client_message(b'{"client_msg_id":"m","packet":{},"type":"PUBLISH"}')
    assert isinstance(decoded, wire.Publish)
    assert decoded.client_msg_id == "m"


# --- Bad frames ---------------------------------------------------------------------------------------------


@pytest.mark.req("R-001", "R-132")
@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b"7",
        b'"PUBLISH"',
        b'{"type":"PUBLISH","packet":{}} // a comment',
        b'{"type":"PUBLISH" /* a comment */,"packet":{}}',
        b'{"type":"PUBLISH","packet":{}}{}',
        b'{"type":"PUBLISH","packet":{',
        b'{"type":"\xff","packet":{}}',
        b'{"type":"PUBLISH","client_msg_id":"\xff","packet":{}}',
        b'{"type":"PUBLISH","client_msg_id":"\\ud800","packet":{}}',
        b'{"type":"PUBLISH","packet":' + b"[" * 100_000,
        b'{"type":"PUBLISH","packet":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
    ids=lambda frame: repr(frame[:40]),
)
def test_what_is_no_json_object(frame: bytes) -> None:
    error = refusal(frame)
    assert error.detail == "malformed_json"
    assert error.client_msg_id is None


@pytest.mark.req("R-131", "R-140", "R-002")
@pytest.mark.parametrize(
    "members",
    [
        {},
        {"type": None},
        {"type": 7},
        {"type": ["PUBLISH"]},
        {"type": "PING"},
        {"type": "publish"},
        {"TYPE": "PUBLISH"},
        {"type": "LINK_REQUEST"},
        {"type": "EVENT", "packet": {}, "received_at": 1},
        {"type": "OK", "packet_id": "0x00", "status": "ACCEPTED"},
        {"type": "AUTH_CHALLENGE"},
    ],
    ids=str,
)
def test_unknown_types(members: dict[str, Any]) -> None:
    error = refusal(json.dumps({"client_msg_id": "m", **members}))
    assert (error.detail, error.client_msg_id) == ("unknown_type", "m")


@pytest.mark.parametrize("member", ["type", "client_msg_id", "subscription_id", "packet", "x"])
@pytest.mark.parametrize("item", ["1.5e300", "[]", '{"":1}'])
def test_a_refused_frame_is_not_decoded(member: str, item: str) -> None:
    frame = f'{{"{member}":[{",".join([item] * 50_000)}],"type":"PUBLISH","packet":[]}}'.encode()
    tracemalloc.start()
    try:
        with contextlib.suppress(InvalidMessage):
            wire.decode_client_message(frame)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Decoded, 50 000 values take 400 KB, plus as much for their contents. Only a packet's bytes are kept.
    assert peak < (500_000 if member == "packet" else 100_000)


@pytest.mark.req("R-131")
def test_a_client_does_not_read_what_clients_send() -> None:
    with pytest.raises(InvalidMessage) as caught:
        wire.decode_relay_message('{"type":"PUBLISH","packet":{}}')
    assert caught.value.detail == "unknown_type"


@pytest.mark.req("R-141", "R-136")
@pytest.mark.parametrize(
    "filters",
    [
        [],
        "POST",
        {"authors": "did:strata:a"},
        {"authors": [1]},
        {"authors": [None]},
        {"types": {}},
        {"since": "1"},
        {"since": 1.5},
        {"since": True},
        {"since": 2**53},
        {"until": -(2**53)},
        {"until": 10**30},
        {"limit": -1},
        {"limit": 1.5},
        {"order": "up"},
        {"order": "ASC"},
        {"cursor": 7},
        {"packet_ids": "0x00"},
        {"received_since": "x"},
        {"received_until": []},
    ],
    ids=str,
)
def test_bad_filters_are_answered_to_their_subscription(filters: Any) -> None:
    message = {"type": "SUBSCRIBE", "subscription_id": "s", "client_msg_id": "m", "filters": filters}
    error = refusal(json.dumps(message))
    assert (error.subscription_id, error.client_msg_id, error.detail) == ("s", "m", None)
    assert error.reason.startswith("SUBSCRIBE: ")


@pytest.mark.req("R-141")
@pytest.mark.parametrize("name", ["history_marker", "gapless"])
def test_switches_are_booleans(name: str) -> None:
    cases: list[Any] = [1, "true", []]
    for wrong in cases:
        refusal(json.dumps({"type": "SUBSCRIBE", "subscription_id": "s", name: wrong}))


@pytest.mark.req("R-141")
@pytest.mark.parametrize("kind", ["SUBSCRIBE", "UNSUBSCRIBE"])
@pytest.mark.parametrize("wrong", [None, 7, "", "x" * 129, "é" * 65, [], {}])
def test_subscription_ids(kind: str, wrong: Any) -> None:
    error = refusal(json.dumps({"type": kind, "subscription_id": wrong, "client_msg_id": "m"}))
    assert error.client_msg_id == "m"
    assert "subscription_id" in error.reason
    assert error.subscription_id in (None, "")
    assert "subscription_id" in refusal(json.dumps({"type": kind})).reason


@pytest.mark.req("R-141", "R-136")
def test_the_longest_ids_pass() -> None:
    for longest in ("x" * 128, "é" * 64, "🦀" * 32):
        message = {"type": "SUBSCRIBE", "subscription_id": longest, "client_msg_id": longest}
        decoded = wire.decode_client_message(json.dumps(message, ensure_ascii=False).encode())
        assert decoded == wire.Subscribe(subscription_id=longest, client_msg_id=longest)


@pytest.mark.req("R-137")
@pytest.mark.parametrize("wrong", [7, True, [], {}, "x" * 129, "é" * 65], ids=repr)
@pytest.mark.parametrize(
    "members",
    [
        {"type": "PUBLISH", "packet": {}},
        {"type": "SUBSCRIBE", "subscription_id": "s"},
        {"type": "AUTH", "author_id": "a", "challenge": "c", "signature": "s"},
    ],
    ids=lambda members: members["type"],
)
def test_a_bad_client_msg_id_is_refused_and_not_echoed(members: dict[str, Any], wrong: Any) -> None:
    error = refusal(json.dumps({**members, "client_msg_id": wrong}))
    assert error.client_msg_id is None
    assert error.detail is None


@pytest.mark.req("R-137", "R-141")
def test_overlong_ids_are_not_echoed_whatever_else_is_wrong() -> None:
    for overlong in ("x" * 129, "é" * 65):
        error = refusal(json.dumps({"type": "PING", "client_msg_id": overlong}))
        assert error.client_msg_id is None
        ids = {"client_msg_id": overlong, "subscription_id": overlong}
        error = refusal(json.dumps({"type": "SUBSCRIBE", "filters": 7, **ids}))
        assert (error.client_msg_id, error.subscription_id) == (None, None)
        error = refusal(json.dumps({"type": "SUBSCRIBE", **ids}))
        assert (error.client_msg_id, error.subscription_id) == (None, None)


@pytest.mark.req("R-137", "R-141")
@pytest.mark.parametrize("type_", ["SUBSCRIBE", "UNSUBSCRIBE"])
@pytest.mark.parametrize("wrong", [7, "x" * 129, "é" * 65], ids=repr)
def test_a_bad_client_msg_id_leaves_the_subscription_named(type_: str, wrong: Any) -> None:
    error = refusal(json.dumps({"type": type_, "subscription_id": "s", "client_msg_id": wrong}))
    assert (error.client_msg_id, error.subscription_id) == (None, "s")


@pytest.mark.req("R-136")
def test_an_empty_client_msg_id_is_echoed_like_any_other() -> None:
    assert refusal('{"type":"PUBLISH","client_msg_id":""}').client_msg_id == ""
    assert refusal('{"type":"PING","client_msg_id":""}').client_msg_id == ""
    decoded = wire.decode_client_message(b'{"type":"PUBLISH","client_msg_id":"","packet":{}}')
    assert decoded.client_msg_id == ""


@pytest.mark.req("R-197", "R-201")
@pytest.mark.parametrize(("asked", "waits"), [("3", 3), ("2.5", 3), ("0.001", 1), ("3.0", 3), ("null", None)])
def test_a_relay_may_ask_for_parts_of_a_second(asked: str, waits: int | None) -> None:
    members = f'"retry_after":{asked},"limit":0.5,"remaining":0.25,"window_seconds":1.5'
    error = wire.decode_relay_message(f'{{"type":"ERROR","code":"rate_limited","reason":"r",{members}}}')
    assert isinstance(error, wire.Error) and error.wait_seconds == waits


@pytest.mark.req("R-181")
def test_a_publish_without_packet() -> None:
    error = refusal('{"type":"PUBLISH","client_msg_id":"m"}')
    assert (error.client_msg_id, error.detail) == ("m", None)
    assert "packet" in error.reason


@pytest.mark.req("R-184", "R-192")
@pytest.mark.parametrize("packet", ["null", "7", "[]", ' "{}"', "true"])
def test_a_publish_whose_packet_is_no_object(packet: str) -> None:
    error = refusal(f'{{"type":"PUBLISH","client_msg_id":"m","packet": {packet}}}')
    assert (error.code, error.client_msg_id, error.detail) == ("invalid_schema", "m", None)
    assert "packet" in error.reason


@pytest.mark.req("R-199")
def test_reasons_quote_nothing_that_was_sent() -> None:
    for members in (
        {"type": "SUBSCRIBE", "subscription_id": "s", "filters": {"order": "secret - at `$.x`" * 1000}},
        {"type": "SUBSCRIBE", "subscription_id": "s", "filters": {"since": "secret"}},
        {"type": "SUBSCRIBE", "subscription_id": "s", "filters": {"secret": 1, "limit": -5}},
        {"type": "secret"},
        {"type": "PUBLISH", "client_msg_id": ["secret"]},
    ):
        reason = refusal(json.dumps(members)).reason
        assert "secret" not in reason
        assert len(reason) < 200
    order = {"type": "SUBSCRIBE", "subscription_id": "s", "filters": {"order": "up"}}
    assert "$.filters.order" in refusal(json.dumps(order)).reason


# --- Arbitrary input ----------------------------------------------------------------------------------------

fragment = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=5), items, max_size=3),
    max_leaves=6,
)
member_names = sorted(
    {name for message in (*CLIENT_MESSAGES, *RELAY_MESSAGES) for name in message.__struct_fields__}
)
message_types = st.sampled_from(
    sorted({str(message.__struct_config__.tag) for message in (*CLIENT_MESSAGES, *RELAY_MESSAGES)})
)


@given(message_types | fragment, st.dictionaries(st.sampled_from(member_names), fragment))
def test_any_object_is_a_message_or_is_refused(kind: Any, members: dict[str, Any]) -> None:
    data = json.dumps({"type": kind, **members}).encode()
    for decode in (wire.decode_client_message, wire.decode_relay_message):
        try:
            message = decode(data)
        except InvalidMessage as error:
            assert error.client_msg_id is None or error.client_msg_id == members["client_msg_id"]
            assert error.subscription_id is None or error.subscription_id == members["subscription_id"]
        else:
            assert decode(wire.encode(message)) == message or "packet" in members


@given(st.binary(max_size=60), st.integers(0, 200))
def test_any_bytes_are_a_message_or_are_refused(junk: bytes, at: int) -> None:
    whole = wire.encode(CLIENT_MESSAGES[1])
    for data in (junk, whole[:at] + junk + whole[at:], whole[:at] + junk):
        for decode in (wire.decode_client_message, wire.decode_relay_message):
            try:
                decode(data)
            except InvalidMessage as error:
                assert error.code is ErrorCode.INVALID_SCHEMA


@pytest.mark.req("R-139")
def test_the_announced_additions() -> None:
    assert set(wire.EXTENSIONS) == {
        "packet_ids",
        "received_range",
        "history_marker",
        "gapless",
        "http_packets",
        "log_reset",
        "not_via",
        "reconcile",
    }


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        CLIENT_MESSAGES[0].client_msg_id = "other"  # type: ignore[misc]
    assert issubclass(wire.Subscribe, msgspec.Struct)
