"""One peer's protocol state: a frame in, one action out, and no input from a peer raises."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol.auth import answer_challenge
from strata.protocol.errors import ErrorCode, InvalidMessage
from strata.protocol.ids import Identity
from strata.protocol.wire import Auth

from relayd.access.auth import AuthAttempt, Authentication, Grants
from relayd.access.limits import Limits, Quotas, SessionLimits
from relayd.cursor import CursorCodec
from relayd.sessions.actions import (
    Action,
    AuthReceived,
    AuthRefused,
    CloseConnection,
    ModerationReceived,
    PublishReceived,
    ReconcileReceived,
    Reply,
    SubscriptionClosed,
    SubscriptionOpened,
    UnknownUnsubscribe,
)
from relayd.sessions.session import Session
from relayd.store.types import LogEntry, NewPacket

CODEC = CursorCodec(bytes(32))
OPEN = Grants()


RELAY = "did:strata:z6MkvDqGT54cXesYGvABpF1UapVNwjCqRcafi4Px6Thv5T3Z"


def session(grants: Grants = OPEN, **limits: Any) -> Session:
    return Session(SessionLimits(**limits), CODEC, Authentication(RELAY, 120), grants)


def take(peer: Session, message: object, now: float = 0.0) -> Action:
    return peer.receive_text(json.dumps(message).encode(), now)


def error_of(action: Action) -> dict[str, Any]:
    assert isinstance(action, Reply | CloseConnection), action
    message: dict[str, Any] = json.loads(action.payload)
    assert message["type"] == "ERROR"
    assert message["reason"]
    assert message["code"] == action.code
    return message


def subscribe(identifier: str = "s", **members: Any) -> dict[str, Any]:
    return {"type": "SUBSCRIBE", "subscription_id": identifier, **members}


@pytest.mark.req("R-321")
def test_the_filters_of_subscriptions_that_have_ended_are_paid_for_no_more():
    wanted = subscribe(filters={"types": ["POST"]})
    opened = take(session(), wanted)
    assert isinstance(opened, SubscriptionOpened)
    peer = session(max_filter_bytes=opened.subscription.filter.kept_bytes)
    for _ in range(3):
        assert isinstance(take(peer, wanted), SubscriptionOpened)
        assert error_of(take(peer, {**wanted, "subscription_id": "t"}))["code"] == "rate_limited"
        assert isinstance(take(peer, wanted), SubscriptionOpened), "one that is replaced"
        take(peer, {"type": "UNSUBSCRIBE", "subscription_id": "s"})


@pytest.mark.req("R-285")
def test_a_reload_grants_no_more_than_auth_ok_has_stated():
    peer = session()
    peer.authenticated(attempt(peer), ("publish",))
    assert list(peer.regrant(OPEN)) == []
    assert error_of(take(peer, subscribe()))["code"] == "unauthenticated"


@pytest.mark.req("R-321")
def test_nothing_is_published_by_who_holds_much_while_memory_is_short():
    peer = session()
    peer.is_short_of_memory = True
    assert error_of(take(peer, PUBLISH))["code"] == "rate_limited"
    peer.is_short_of_memory = False
    assert isinstance(take(peer, PUBLISH), PublishReceived)


def test_a_publish_keeps_the_packet_s_bytes():
    raw = b'{"b":1, "a":[1.0,"\\u0041"]}'
    action = session().receive_text(b'{"type":"PUBLISH","client_msg_id":"m","packet":' + raw + b"}", 0)
    assert action == PublishReceived(raw, "m")


@pytest.mark.req("R-135")
@pytest.mark.parametrize("message", [subscribe(), {"type": "UNSUBSCRIBE", "subscription_id": "s"}])
def test_a_message_needs_no_client_msg_id(message):
    assert not isinstance(take(session(), message), Reply)


@pytest.mark.req("R-004", "R-142")
def test_unknown_and_null_members_change_nothing():
    null = dict.fromkeys(("authors", "types", "since", "until", "limit", "cursor", "order", "packet_ids"))
    opened = take(session(), subscribe(filters={**null, "x_new": 1}, gapless=None, x_new={"a": []}))
    plain = take(session(), subscribe())
    assert isinstance(opened, SubscriptionOpened) and isinstance(plain, SubscriptionOpened)
    assert opened.subscription.filter == plain.subscription.filter


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


@pytest.mark.req("R-141", "R-167", "R-195")
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
    assert take(peer, end) == UnknownUnsubscribe()


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
        assert isinstance(peer.receive_text(b"{", now), Reply)
    closing = peer.receive_text(b"{", 3.0)
    assert isinstance(closing, CloseConnection)
    assert closing.close_code == 1008
    assert error_of(closing)["code"] == "invalid_schema"
    peer = session(malformed_limit=3)
    for number in range(50):
        assert isinstance(peer.receive_text(b"{", number * 20.0), Reply)


@pytest.mark.req("R-128")
def test_a_binary_frame_is_invalid_schema():
    error = error_of(session().receive_binary(0))
    assert (error["code"], error["detail"]) == ("invalid_schema", "binary_frame")


ALICE = Identity(bytes(range(32)))
NOW = 1_760_000_000
NEEDS_AUTH = Grants(require_auth=frozenset({"publish", "subscribe"}))
PUBLISH = {"type": "PUBLISH", "packet": {}, "client_msg_id": "m"}


def attempt(peer: Session, **changes: Any) -> AuthAttempt:
    """A good AUTH up to its signature."""
    challenge = peer.authentication.issue(bytes(range(32)), NOW)
    answer = answer_challenge(challenge, ALICE, client_msg_id="a", **changes)
    action = take(peer, msgspec.to_builtins(answer))
    assert action == AuthReceived(answer)
    begun = peer.begin_auth(answer, 0.0, NOW)
    assert isinstance(begun, AuthAttempt)
    return begun


@pytest.mark.req("R-196", "R-278")
def test_an_auth_without_a_challenge_is_refused_and_a_new_challenge_follows():
    message = Auth(author_id="did:strata:x", challenge="c", signature="0x", client_msg_id="m")
    refused = session().begin_auth(message, 0.0, NOW)
    assert isinstance(refused, AuthRefused)
    error = json.loads(refused.payload)
    assert (error["code"], error["detail"], error["client_msg_id"]) == (
        "unauthenticated",
        "challenge_unknown",
        "m",
    )


@pytest.mark.req("R-282")
def test_the_fifth_failure_closes_with_1008():
    peer, bad = session(), Auth(author_id="x", challenge="c", signature="0x")
    assert [type(peer.begin_auth(bad, 0.0, NOW)) for _ in range(4)] == [AuthRefused] * 4
    closing = peer.begin_auth(bad, 0.0, NOW)
    assert isinstance(closing, CloseConnection)
    assert (closing.close_code, closing.cause) == (1008, "auth_failures")
    assert error_of(closing)["detail"] == "challenge_unknown"


@pytest.mark.req("R-285", "R-136", "R-139")
def test_auth_ok_states_the_capabilities_and_the_extensions():
    peer = session()
    done = peer.authenticated(attempt(peer), ("publish",))
    assert json.loads(done.payload) == {
        "type": "AUTH_OK",
        "author_id": ALICE.did,
        "capabilities": ["publish"],
        "client_msg_id": "a",
        "extensions": [
            "packet_ids",
            "received_range",
            "history_marker",
            "gapless",
            "http_packets",
            "log_reset",
            "not_via",
            "reconcile",
        ],
    }
    assert peer.identity == ALICE.did
    nothing = peer.authenticated(attempt(peer), ())
    assert json.loads(nothing.payload)["capabilities"] == []


@pytest.mark.req("R-288", "R-289")
@pytest.mark.parametrize(
    ("capabilities", "publishes", "subscribes"),
    [
        (("publish",), True, False),
        (("subscribe",), False, True),
        (("replicate",), False, False),
        (("publish", "subscribe"), True, True),
        ((), False, False),
    ],
)
def test_each_capability_allows_its_action_and_no_other(capabilities, publishes, subscribes):
    peer = session()
    peer.authenticated(attempt(peer), capabilities)
    for action, allowed in ((take(peer, PUBLISH), publishes), (take(peer, subscribe()), subscribes)):
        if allowed:
            assert not isinstance(action, Reply)
        else:
            error = error_of(action)
            assert (error["code"], error["detail"]) == ("unauthenticated", "missing_capability")
    missing = take(peer, {**subscribe("t"), "client_msg_id": "n"})
    if not subscribes:
        error = error_of(missing)
        assert (error["subscription_id"], error["client_msg_id"]) == ("t", "n")


@pytest.mark.req("R-289", "R-292")
def test_what_needs_auth_is_refused_to_an_anonymous_session():
    peer = session(Grants(require_auth=frozenset({"publish"})))
    assert error_of(take(peer, PUBLISH))["detail"] == "missing_capability"
    assert isinstance(take(peer, subscribe()), SubscriptionOpened)
    assert isinstance(take(peer, {"type": "UNSUBSCRIBE", "subscription_id": "s"}), SubscriptionClosed)


@pytest.mark.req("R-289")
@pytest.mark.parametrize(
    "members",
    [{}, {"gapless": True}, {"filters": {"limit": 0}}, {"filters": {"packet_ids": ["0x" + "ab" * 32]}}],
)
def test_no_form_of_subscription_gets_round_the_capability(members):
    assert error_of(take(session(NEEDS_AUTH), subscribe(**members)))["detail"] == "missing_capability"


@pytest.mark.req("R-283", "R-288")
def test_losing_subscribe_ends_what_is_open():
    peer = session()
    opened = take(peer, subscribe())
    assert isinstance(opened, SubscriptionOpened)
    kept = peer.authenticated(attempt(peer), ("publish", "subscribe"))
    assert list(kept.ended) == []
    lost = peer.authenticated(attempt(peer), ("publish",))
    ((subscription, payload),) = lost.ended
    assert subscription is opened.subscription
    error = json.loads(payload)
    assert (error["code"], error["detail"], error["subscription_id"]) == (
        "unauthenticated",
        "missing_capability",
        "s",
    )
    assert peer.subscriptions == {}


@pytest.mark.req("R-211", "R-288")
def test_only_who_may_replicate_gets_packets_as_signed():
    peer = session()
    before = take(peer, subscribe("before"))
    assert isinstance(before, SubscriptionOpened) and not before.subscription.signed
    peer.authenticated(attempt(peer), ("subscribe", "replicate"))
    during = take(peer, subscribe("during"))
    assert isinstance(during, SubscriptionOpened) and during.subscription.signed
    lost = peer.authenticated(attempt(peer), ("subscribe",))
    assert [subscription for subscription, _ in lost.ended] == [during.subscription]
    after = take(peer, subscribe("after"))
    assert isinstance(after, SubscriptionOpened) and not after.subscription.signed


@pytest.mark.req("R-283")
def test_a_failed_auth_leaves_what_was():
    peer = session()
    peer.authenticated(attempt(peer), ("subscribe",))
    opened = take(peer, subscribe())
    refused = peer.auth_failed(InvalidMessage("no", code=ErrorCode.INVALID_SIGNATURE))
    assert isinstance(refused, AuthRefused)
    assert peer.identity == ALICE.did
    assert error_of(take(peer, PUBLISH))["detail"] == "missing_capability"
    assert isinstance(opened, SubscriptionOpened)
    assert peer.subscriptions == {"s": opened.subscription}


def limited(peer: Session, **limits: int) -> None:
    peer.use_quota(Quotas(Limits(**limits)).hold("a"))


@pytest.mark.req("R-314", "R-315")
def test_a_publish_over_the_limit_says_when_to_come_back():
    peer = session()
    limited(peer, publishes=2)
    assert [type(take(peer, PUBLISH)) for _ in range(2)] == [PublishReceived] * 2
    action = take(peer, PUBLISH)
    assert isinstance(action, Reply)
    assert (action.request, action.limited) == ("PUBLISH", "publish")
    error = error_of(action)
    assert (error["code"], error["client_msg_id"]) == ("rate_limited", "m")
    assert (error["retry_after"], error["limit"], error["remaining"], error["window_seconds"]) == (
        30,
        2,
        0,
        60,
    )
    assert isinstance(take(peer, PUBLISH, now=30.0), PublishReceived)


@pytest.mark.req("R-314", "R-317")
def test_subscribes_and_history_are_limited_apart():
    peer = session()
    limited(peer, subscribes=2, backfill_bytes=1000)
    assert isinstance(take(peer, subscribe("a")), SubscriptionOpened)
    assert peer.backfill_budget is not None
    peer.backfill_budget.spend(2000, 0.0)
    spent = take(peer, subscribe("b"))
    assert isinstance(spent, Reply)
    assert (spent.limited, error_of(spent)["detail"]) == ("backfill", "backfill_limit")
    assert error_of(spent)["subscription_id"] == "b"
    too_many = take(peer, subscribe("c"))
    assert isinstance(too_many, Reply)
    assert (too_many.limited, error_of(too_many)["detail"]) == ("subscribe", "subscribe_limit")
    assert isinstance(take(peer, PUBLISH), PublishReceived)


@pytest.mark.req("R-314", "R-317")
def test_too_many_auths_are_limited_and_use_up_no_challenge():
    peer, bad = session(), Auth(author_id="x", challenge="c", signature="0x", client_msg_id="m")
    limited(peer, auths=2)
    for _ in range(2):
        assert isinstance(peer.begin_auth(bad, 0.0, NOW), AuthRefused)
    answer = answer_challenge(peer.authentication.issue(bytes(32), NOW), ALICE)
    refused = peer.begin_auth(answer, 0.0, NOW)
    assert isinstance(refused, Reply)
    assert error_of(refused)["retry_after"] == 30
    assert isinstance(peer.begin_auth(answer, 30.0, NOW), AuthAttempt)


@pytest.mark.req("R-316")
def test_auths_stay_charged_to_the_address():
    peer, bad = session(), Auth(author_id="x", challenge="c", signature="0x")
    limited(peer, auths=1)
    peer.use_quota(Quotas(Limits(publishes=5)).hold("did:a"))
    peer.begin_auth(bad, 0.0, NOW)
    assert isinstance(peer.begin_auth(bad, 0.0, NOW), Reply)


@pytest.mark.req("R-289", "R-314")
def test_the_shape_is_judged_before_the_capability_and_that_before_the_limit():
    peer = session(NEEDS_AUTH)
    limited(peer, publishes=1, subscribes=1)
    assert error_of(take(peer, {"type": "PUBLISH"}))["code"] == "invalid_schema"
    for _ in range(3):
        assert error_of(take(peer, PUBLISH))["code"] == "unauthenticated"
    peer.authenticated(attempt(peer), ("publish",))
    assert isinstance(take(peer, PUBLISH), PublishReceived)
    assert error_of(take(peer, PUBLISH))["code"] == "rate_limited"


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
        "author_id": st.text(max_size=20) | values,
        "challenge": st.text(max_size=50) | values,
        "signature": st.just("0x" + "0" * 128) | values,
        "capabilities": st.lists(st.text(max_size=8), max_size=3) | values,
    },
)


@pytest.mark.slow
@given(st.lists(st.binary(max_size=60) | members.map(lambda m: json.dumps(m).encode()), max_size=30))
def test_whatever_a_peer_sends_comes_out_as_one_action(frames):
    peer = session(max_subscriptions=3)
    for frame in frames:
        action: object = peer.receive_text(frame, 0)
        if isinstance(action, AuthReceived):
            action = peer.begin_auth(action.message, 0.0, NOW)
        if isinstance(action, AuthRefused):
            assert json.loads(action.payload)["type"] == "ERROR"
        if isinstance(action, Reply | CloseConnection):
            assert error_of(action)["code"] in {str(code) for code in ErrorCode}
            msgspec.json.decode(action.payload)
        assert len(peer.subscriptions) <= 3


def test_moderation_is_for_operators_and_unknown_where_there_are_none():
    text = b'{"type":"MODERATE","action":"list","client_msg_id":"m1"}'
    answer = session(OPEN).receive_text(text, 0.0)
    assert isinstance(answer, Reply) and b'"unknown_type"' in answer.payload and b'"m1"' in answer.payload
    ruled = Grants(operators=frozenset({ALICE.did}))
    peer = session(ruled)
    answer = peer.receive_text(text, 0.0)
    assert isinstance(answer, Reply) and answer.code == ErrorCode.UNAUTHENTICATED
    assert b'"missing_capability"' in answer.payload
    attempt = AuthAttempt(ALICE.did, b"", (), None, None)
    peer.authenticated(attempt, ruled.effective(ALICE.did, None))
    assert isinstance(peer.receive_text(text, 0.0), ModerationReceived)
    list(peer.regrant(Grants()))
    assert isinstance(peer.receive_text(text, 0.0), Reply), "whoever is off the list may no more"


def test_what_a_subscribe_asks_for_is_what_is_read():
    cursor = CODEC.encode(70, ascending=False)
    filters = {"order": "desc", "limit": 7, "until": 9, "cursor": cursor}
    opened = take(session(), subscribe(filters=filters, client_msg_id="m"))
    assert isinstance(opened, SubscriptionOpened)
    subscription = opened.subscription
    assert (subscription.client_msg_id, subscription.signed) == ("m", False)
    assert subscription.resumes_after is not None and subscription.resumes_after.sequence == 70
    subscription.start(100)
    read = subscription.next_read(100, 50)
    assert read is not None and read.limit == 8, "one more tells whether the limit cut something off"
    query = read.query
    assert (query.after, query.up_to, query.ascending, query.until) == (0, 69, False, 9)


@pytest.mark.req("R-362")
def test_a_profile_is_of_peers_alone_and_one_that_cannot_be_told_is_refused_to_all():
    for granted in (("subscribe",), ("subscribe", "replicate")):
        peer = session()
        peer.authenticated(attempt(peer), granted)
        refused = take(peer, subscribe(replication_profile="HIGH_TRUST_ONLY", client_msg_id="m"))
        assert error_of(refused)["code"] == "unsupported_profile"
        opened = take(peer, subscribe(replication_profile="PUBLIC_SOCIAL"))
        assert isinstance(opened, SubscriptionOpened)
        assert bool(opened.subscription.filter.types) is ("replicate" in granted)


@pytest.mark.req("R-144", "R-361")
def test_a_profile_and_types_that_have_nothing_in_common_match_nothing():
    peer = session()
    peer.authenticated(attempt(peer), ("subscribe", "replicate"))
    opened = take(peer, subscribe(filters={"types": ["NOTE"]}, replication_profile="PUBLIC_SOCIAL"))
    assert isinstance(opened, SubscriptionOpened)
    wanted = opened.subscription.filter
    packets = [NewPacket(bytes(32), "did:strata:a", type_, 1, None, b"{}") for type_ in ("NOTE", "POST")]
    assert not any(
        wanted.matches(LogEntry(1, received_at, packet)) for packet in packets for received_at in (0, 1, 2)
    )


def reconcile(**members: Any) -> dict[str, Any]:
    return {"type": "RECONCILE", "message": "61", "client_msg_id": "m", **members}


def test_a_comparison_that_begins_is_charged_as_a_subscription_and_one_that_goes_on_is_not():
    peer = session()
    begins, goes_on = reconcile(since=0, until=9), reconcile()
    assert error_of(take(peer, begins))["detail"] == "missing_capability"
    peer.authenticated(attempt(peer), ("replicate",))
    assert isinstance(take(peer, begins), ReconcileReceived), "no limit holds"
    limited(peer, subscribes=2, backfill_bytes=1000)
    assert isinstance(take(peer, begins), ReconcileReceived)
    assert peer.backfill_budget is not None
    peer.backfill_budget.spend(2000, 0.0)
    for limit in ("backfill", "subscribe"):
        refused = take(peer, begins)
        assert isinstance(refused, Reply) and refused.limited == limit
        assert error_of(refused)["client_msg_id"] == "m"
        assert isinstance(take(peer, goes_on), ReconcileReceived)
