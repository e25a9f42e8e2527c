"""One peer's protocol state: a frame in, one action out, and nothing a peer sends raises."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.errors import ErrorCode, InvalidPacket

from relayd.cursor import CursorCodec
from relayd.session import (
    Action,
    Answer,
    CloseConnection,
    PublishReceived,
    Session,
    SessionLimits,
    SubscriptionClosed,
    SubscriptionOpened,
    ok_payload,
    read_failure_payload,
    refusal_payload,
)

CODEC = CursorCodec(bytes(32))


def session(**limits: int) -> Session:
    return Session(SessionLimits(**limits), CODEC)


def take(peer: Session, message: object, now: float = 0.0) -> Action:
    return peer.receive_text(json.dumps(message).encode(), now)


def error_of(action: Action) -> dict[str, Any]:
    assert isinstance(action, Answer | CloseConnection), action
    message = json.loads(action.payload)
    assert message["type"] == "ERROR"
    assert message["reason"]
    assert message["code"] == action.code
    return message


def subscribe(identifier: str = "s", **members: Any) -> dict[str, Any]:
    return {"type": "SUBSCRIBE", "subscription_id": identifier, **members}


def test_a_publish_keeps_the_packet_s_bytes():
    raw = b'{"b":1, "a":[1.0,"\\u0041"]}'
    action = session().receive_text(b'{"type":"PUBLISH","client_msg_id":"m","packet":' + raw + b"}", 0)
    assert action == PublishReceived(raw, "m")


@pytest.mark.req("R-135")
@pytest.mark.parametrize("message", [subscribe(), {"type": "UNSUBSCRIBE", "subscription_id": "s"}])
def test_a_message_needs_no_client_msg_id(message):
    assert not isinstance(take(session(), message), Answer)


@pytest.mark.req("R-004", "R-142")
def test_unknown_and_null_members_change_nothing():
    null = dict.fromkeys(("authors", "types", "since", "until", "limit", "cursor", "order", "packet_ids"))
    opened = take(session(), subscribe(filters={**null, "x_new": 1}, gapless=None, x_new={"a": []}))
    assert isinstance(opened, SubscriptionOpened)
    assert opened.subscription.filter == take(session(), subscribe()).subscription.filter  # type: ignore[union-attr]


MALFORMED = [
    b"{",
    b"",
    b"[1]",
    b"7",
    b'"x"',
    b"null",
    b'{"type":"PUBLISH"} x',
    b'{"a":1,}',
    b"// no\n{}",
    b"\xff",
]


@pytest.mark.req("R-001", "R-132")
@pytest.mark.parametrize("frame", MALFORMED)
def test_what_is_no_json_object_is_malformed(frame):
    error = error_of(session().receive_text(frame, 0))
    assert (error["code"], error["detail"]) == ("invalid_schema", "malformed_json")


@pytest.mark.req("R-002", "R-131", "R-140")
@pytest.mark.parametrize(
    "message",
    [
        {},
        {"type": "PING"},
        {"TYPE": "PUBLISH", "packet": {}},
        {"type": "publish", "packet": {}},
        {"type": 7},
        {"type": None},
        {"type": "EVENT", "packet": {}, "received_at": 1},
        {"type": "OK", "packet_id": "0x", "status": "ACCEPTED"},
        {"type": "LINK_REQUEST"},
    ],
)
def test_a_foreign_type_is_unknown_and_keeps_the_connection(message):
    error = error_of(take(session(), {**message, "client_msg_id": "m"}))
    assert (error["code"], error["detail"], error["client_msg_id"]) == ("invalid_schema", "unknown_type", "m")


@pytest.mark.req("R-137")
@pytest.mark.parametrize("name", [7, ["m"], {"a": 1}, True, "x" * 129, "ü" * 65])
@pytest.mark.parametrize("message", [subscribe(), {"type": "PUBLISH", "packet": {}}, {"type": "NONE"}])
def test_a_bad_client_msg_id_is_refused_and_left_out(message, name):
    error = error_of(take(session(), {**message, "client_msg_id": name}))
    assert error["code"] == "invalid_schema"
    assert "client_msg_id" not in error


@pytest.mark.req("R-136")
@pytest.mark.parametrize("name", ["", "m", "x" * 128, "ü" * 64])
def test_a_client_msg_id_is_echoed_up_to_128_bytes(name):
    assert error_of(take(session(), {"type": "NONE", "client_msg_id": name}))["client_msg_id"] == name
    assert "client_msg_id" not in error_of(take(session(), {"type": "NONE"}))


@pytest.mark.req("R-141", "R-195")
@pytest.mark.parametrize(
    "members",
    [
        {"filters": []},
        {"filters": {"authors": "did:strata:x"}},
        {"filters": {"types": [1]}},
        {"filters": {"since": "yesterday"}},
        {"filters": {"until": 1.5}},
        {"filters": {"limit": -1}},
        {"filters": {"limit": "10"}},
        {"filters": {"cursor": 7}},
        {"filters": {"order": "sideways"}},
        {"filters": {"order": "ASC"}},
        {"filters": {"packet_ids": ["0xAB"]}},
        {"filters": {"packet_ids": ["0x" + "AB" * 32]}},
        {"filters": {"received_since": []}},
        {"history_marker": "yes"},
        {"gapless": 1},
        {"gapless": True, "filters": {"limit": 5}},
        {"gapless": True, "filters": {"order": "asc"}},
        {"filters": {"authors": ["did:strata:x"] * 1001}},
    ],
)
def test_a_subscribe_of_wrong_shape_names_its_subscription_and_opens_none(members):
    peer = session()
    error = error_of(take(peer, subscribe("feed", client_msg_id="m", **members)))
    assert (error["code"], error["subscription_id"], error["client_msg_id"]) == (
        "invalid_schema",
        "feed",
        "m",
    )
    assert not peer.subscriptions


@pytest.mark.req("R-141")
@pytest.mark.parametrize("identifier", [None, "", "x" * 129, "ü" * 65, 7, []])
def test_a_bad_subscription_id_opens_nothing(identifier):
    peer = session()
    message = subscribe()
    if identifier is None:
        del message["subscription_id"]
    else:
        message["subscription_id"] = identifier
    assert error_of(take(peer, message))["code"] == "invalid_schema"
    assert not peer.subscriptions
    assert isinstance(take(peer, subscribe("ü" * 64)), SubscriptionOpened)


@pytest.mark.req("R-156", "R-157")
@pytest.mark.parametrize(
    "filters",
    [
        {"cursor": ""},
        {"cursor": "1.AAAA"},
        {"cursor": CursorCodec(b"x" * 32).encode(5)},
        {"cursor": CODEC.encode(5), "order": "desc"},
        {"cursor": CODEC.encode(5, ascending=False)},
    ],
)
def test_a_cursor_that_is_not_ours_or_of_the_other_order_is_invalid(filters):
    peer = session()
    error = error_of(take(peer, subscribe("feed", filters=filters)))
    assert (error["code"], error["subscription_id"]) == ("invalid_cursor", "feed")
    assert not peer.subscriptions
    assert isinstance(take(peer, subscribe(filters={"cursor": CODEC.encode(5)})), SubscriptionOpened)


@pytest.mark.req("R-162")
def test_the_same_id_replaces_even_where_no_further_one_fits():
    peer = session(max_subscriptions=1)
    first = take(peer, subscribe())
    second = take(peer, subscribe(filters={"types": ["A"]}))
    assert isinstance(first, SubscriptionOpened)
    assert isinstance(second, SubscriptionOpened)
    assert second.replaced is first.subscription
    assert list(peer.subscriptions.values()) == [second.subscription]


@pytest.mark.req("R-162")
def test_a_faulty_replacement_leaves_the_open_one_alone():
    peer = session()
    first = take(peer, subscribe())
    assert isinstance(first, SubscriptionOpened)
    error_of(take(peer, subscribe(filters={"limit": -1})))
    assert peer.subscriptions == {"s": first.subscription}


@pytest.mark.req("R-164")
def test_the_subscription_beyond_the_limit_is_refused():
    peer = session(max_subscriptions=2)
    take(peer, subscribe("a"))
    take(peer, subscribe("b"))
    error = error_of(take(peer, subscribe("c")))
    assert (error["code"], error["detail"], error["subscription_id"]) == (
        "rate_limited",
        "too_many_subscriptions",
        "c",
    )
    assert error["retry_after"] >= 1
    take(peer, {"type": "UNSUBSCRIBE", "subscription_id": "a"})
    assert isinstance(take(peer, subscribe("c")), SubscriptionOpened)


@pytest.mark.req("R-180")
def test_unsubscribe_ends_what_is_open_and_ignores_what_is_not():
    peer = session()
    opened = take(peer, subscribe())
    assert isinstance(opened, SubscriptionOpened)
    end = {"type": "UNSUBSCRIBE", "subscription_id": "s"}
    assert take(peer, end) == SubscriptionClosed(opened.subscription)
    assert take(peer, end) is None


@pytest.mark.req("R-149", "R-150")
@pytest.mark.parametrize(
    ("limit", "expected"), [(None, 100), (0, 0), (7, 7), (500, 500), (501, 500), (2**53 - 1, 500)]
)
def test_limits_are_defaulted_and_capped(limit, expected):
    opened = take(session(), subscribe(filters={"limit": limit}))
    assert isinstance(opened, SubscriptionOpened)
    assert opened.subscription._request.limit == expected


@pytest.mark.req("R-132")
def test_a_flood_of_malformed_frames_closes_and_a_trickle_does_not():
    peer = session(malformed_limit=3)
    for now in (0.0, 1.0, 2.0):
        assert isinstance(peer.receive_text(b"{", now), Answer)
    closing = peer.receive_text(b"{", 3.0)
    assert isinstance(closing, CloseConnection)
    assert closing.close_code == 1008
    assert error_of(closing)["code"] == "invalid_schema"
    peer = session(malformed_limit=3)
    for number in range(50):
        assert isinstance(peer.receive_text(b"{", number * 20.0), Answer)


@pytest.mark.req("R-128")
def test_a_binary_frame_is_invalid_schema():
    error = error_of(session().receive_binary(0))
    assert (error["code"], error["detail"]) == ("invalid_schema", "binary_frame")


@pytest.mark.req("R-196")
def test_an_auth_without_a_challenge_is_unauthenticated():
    message = {
        "type": "AUTH",
        "author_id": "did:strata:x",
        "challenge": "c",
        "signature": "0x",
        "client_msg_id": "m",
    }
    error = error_of(take(session(), message))
    assert (error["code"], error["client_msg_id"]) == ("unauthenticated", "m")


@pytest.mark.req("R-110", "R-136", "R-195")
def test_the_answers_to_a_publish():
    assert json.loads(ok_payload("0xab", 5, "m", duplicate=False)) == {
        "type": "OK",
        "packet_id": "0xab",
        "status": "ACCEPTED",
        "client_msg_id": "m",
        "received_at": 5,
    }
    assert json.loads(ok_payload("0xab", 5, None, duplicate=True)) == {
        "type": "OK",
        "packet_id": "0xab",
        "status": "ACCEPTED",
        "received_at": 5,
        "duplicate": True,
    }
    large = InvalidPacket(ErrorCode.PACKET_TOO_LARGE, "too large", max_bytes=9)
    assert json.loads(refusal_payload(large, "m")) == {
        "type": "ERROR",
        "code": "packet_too_large",
        "reason": "too large",
        "client_msg_id": "m",
        "max_bytes": 9,
    }
    assert json.loads(read_failure_payload("s"))["subscription_id"] == "s"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=20,
)
members = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["SUBSCRIBE", "UNSUBSCRIBE", "PUBLISH", "AUTH"]) | values,
        "subscription_id": st.text(max_size=140) | values,
        "client_msg_id": st.text(max_size=140) | values,
        "packet": values,
        "filters": st.dictionaries(
            st.sampled_from(["authors", "types", "limit", "cursor", "order", "since", "packet_ids"]), values
        )
        | values,
        "gapless": values,
        "history_marker": values,
    },
)


@given(st.lists(st.binary(max_size=60) | members.map(lambda m: json.dumps(m).encode()), max_size=30))
def test_whatever_a_peer_sends_comes_out_as_one_action(frames):
    peer = session(max_subscriptions=3)
    for frame in frames:
        action = peer.receive_text(frame, 0)
        if isinstance(action, Answer | CloseConnection):
            assert error_of(action)["code"] in {str(code) for code in ErrorCode}
            msgspec.json.decode(action.payload)
        assert len(peer.subscriptions) <= 3
