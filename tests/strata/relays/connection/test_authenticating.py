"""The client's side of AUTH as a state machine: challenges in, AUTH out, `now` chosen by the test."""

from __future__ import annotations

import base64
import random
from dataclasses import replace

import pytest
from strata.protocol import wire
from strata.protocol.errors import (
    IdentityError,
    InvalidMessage,
    MissingCapability,
    RequestRefused,
    RequestTimeout,
)
from strata.relays.connection.authenticating import AuthState
from strata.relays.connection.core import AuthenticationSettled, Core, ShortChallenge
from strata.relays.connection.options import Options
from strata.relays.connection.publishing import PublishSettled
from strata.relays.connection.values import Announced, Authenticated, Published, Query

ALWAYS = Options(authenticate="always", auth_timeout=5, backoff_base=0.5, ack_timeout=1000)
NEEDED = replace(ALWAYS, authenticate="when_needed")
RELAY = "did:strata:relay_1"
UNIX = 1_760_000_000.0
ALL = ["publish", "subscribe"]
PLAIN = Announced()


class Bench:
    """A connection whose relay is played by the test."""

    def __init__(self, signer, options=ALWAYS, *, announced=PLAIN, seed=0, address="here", met=None):
        self.me = signer
        self.core = Core(options, random=random.Random(seed).random, signer=signer, address=address, met=met)
        self.announced = announced
        self.made = 0

    def connect(self, now=0.0):
        self.core.connection_made(self.announced, now, unix_now=UNIX + now)
        return self

    def challenge(self, n=1, *, now=0.0, server_id=RELAY, left=120, text=None):
        text = base64.b64encode(n.to_bytes(32, "big")).decode() if text is None else text
        expires_at = int(UNIX + now + left)
        self.say(wire.AuthChallenge(challenge=text, server_id=server_id, expires_at=expires_at), now)

    def say(self, message, now=0.0):
        self.core.receive_message(wire.encode(message), now)

    def ok(self, request="a1", now=0.0, *, author_id=None, capabilities=ALL):
        author_id = self.me.did if author_id is None else author_id
        self.say(wire.AuthOk(author_id=author_id, capabilities=capabilities, client_msg_id=request), now)

    def error(self, request, code, now=0.0, **members):
        self.say(wire.Error(code=code, reason="because", client_msg_id=request, **members), now)

    def sent(self):
        return [wire.decode_client_message(frame) for frame in self.core.data_to_send()]

    def auths(self):
        return [message for message in self.sent() if isinstance(message, wire.Auth)]

    def outcomes(self):
        return [c.outcome for c in self.core.changes() if isinstance(c, AuthenticationSettled)]

    def publish(self, name="x", now=0.0):
        return self.core.publish(name, b'{"packet":1}', timeout=1000, now=now)

    def settled(self):
        return {c.handle: c.outcome for c in self.core.changes() if isinstance(c, PublishSettled)}

    def state(self) -> AuthState:
        return self.core.authentication_state

    def session(self) -> Authenticated | None:
        return self.core.session

    def server_id(self) -> str | None:
        return self.core.server_id


@pytest.fixture
def bench(me):
    return Bench(me).connect()


def test_what_a_relay_says_of_its_additions_is_kept_within_bounds(bench):
    for n in range(1000):
        bench.say(
            wire.AuthChallenge(
                challenge=base64.b64encode(n.to_bytes(32, "big")).decode(),
                server_id=RELAY,
                expires_at=int(UNIX + 120),
                extensions=[f"{n}-{m}" for m in range(100)],
            )
        )
    announced = bench.core.announced
    assert announced is not None and 100 <= len(announced.extensions) <= 256


# States (R-293 … R-297).


@pytest.mark.req("R-293")
def test_authenticated_only_on_the_relays_word(bench, me):
    assert bench.state() is AuthState.UNAUTHENTICATED
    bench.challenge()
    assert bench.state() is AuthState.AUTHENTICATING and bench.session() is None
    (auth,) = bench.auths()
    assert (auth.author_id, auth.client_msg_id) == (me.did, "a1")
    bench.ok()
    assert bench.state() is AuthState.AUTHENTICATED
    assert bench.session() == Authenticated(me.did, frozenset(ALL))
    assert bench.outcomes() == [bench.session()]
    assert bench.core.statistics.authentications == 1


@pytest.mark.req("R-293", "R-297")
@pytest.mark.parametrize(
    "answer",
    [
        {"author_id": "did:strata:relay_1"},
        {"request": "a7"},
    ],
    ids=["for somebody else", "to another request"],
)
def test_a_word_about_something_else_is_none(bench, answer):
    bench.challenge()
    bench.ok(**{"request": "a1"} | answer)
    assert bench.state() is AuthState.AUTHENTICATING
    assert bench.core.statistics.messages_invalid == 1


@pytest.mark.req("R-293", "R-297")
def test_auth_ok_out_of_nowhere_authenticates_nobody(bench):
    bench.ok()
    assert bench.state() is AuthState.UNAUTHENTICATED and bench.session() is None


@pytest.mark.req("R-294")
@pytest.mark.parametrize(
    ("code", "request_id"),
    [
        ("unauthenticated", "a1"),
        ("invalid_signature", "a1"),
        ("blocked_author", "a1"),
        ("zzz", "a1"),
        # A plain relay need not say which request its ERROR is about.
        ("unauthenticated", None),
        ("invalid_signature", None),
    ],
)
def test_a_refusal_returns_to_unauthenticated(bench, code, request_id):
    bench.challenge()
    bench.error(request_id, code)
    assert bench.state() is AuthState.UNAUTHENTICATED
    assert bench.core.statistics.authentications_refused == 1


@pytest.mark.req("R-293", "R-295", "R-297")
def test_silence_is_a_failure_after_the_timeout(bench):
    bench.challenge(now=1)
    assert bench.core.get_timer() == 6
    bench.core.handle_timer(5.9)
    assert bench.state() is AuthState.AUTHENTICATING
    bench.core.handle_timer(6)
    assert bench.state() is AuthState.UNAUTHENTICATED
    bench.ok(now=7)
    assert bench.state() is AuthState.UNAUTHENTICATED, "what comes too late is no answer"
    # No fresh challenge comes, so no attempt follows.
    while bench.core.get_timer() < 1e6:
        bench.core.handle_timer(bench.core.get_timer())
    (failure,) = bench.outcomes()
    assert isinstance(failure, RequestTimeout)
    assert bench.core.statistics.authentications_timed_out == 1


def test_a_relay_that_never_challenges_is_not_waited_for_for_ever(bench):
    assert bench.core.get_timer() == 5
    bench.core.handle_timer(5)
    (failure,) = bench.outcomes()
    assert isinstance(failure, RequestTimeout) and "AUTH_CHALLENGE" in str(failure)


@pytest.mark.req("R-284")
def test_a_new_connection_is_anonymous_and_authenticates_anew(bench):
    bench.challenge()
    bench.ok()
    bench.sent()
    bench.core.connection_lost()
    assert bench.state() is AuthState.UNAUTHENTICATED and bench.session() is None
    bench.connect(now=10)
    bench.challenge(2, now=10)
    (auth,) = bench.auths()
    assert auth.client_msg_id == "a2" and bench.state() is AuthState.AUTHENTICATING


# Retries.


@pytest.mark.req("R-296")
def test_a_failure_that_may_pass_is_tried_again_with_a_fresh_challenge_after_a_random_wait(me):
    moments = set()
    for seed in range(10):
        bench = Bench(me, seed=seed).connect()
        bench.challenge(1)
        first = bench.auths()
        bench.error("a1", "unauthenticated", detail="challenge_expired")
        bench.challenge(2)
        assert bench.auths() == [], "not at once"
        moments.add(bench.core.get_timer())
        bench.core.handle_timer(bench.core.get_timer())
        (second,) = bench.auths()
        assert second.challenge != first[0].challenge
        bench.ok("a2")
        assert bench.state() is AuthState.AUTHENTICATED
    assert len(moments) == 10 and max(moments) <= 1.0


def test_a_challenge_tells_how_late_it_is_at_the_most_by_the_relays_clock(bench):
    def relay_clock(now: float) -> float | None:
        ahead = bench.core.relay_ahead
        return None if ahead is None else now + ahead

    assert relay_clock(0.0) is None
    bench.challenge(1, now=10.0, left=120)
    assert relay_clock(10.0) == UNIX + 10 + 120 - 60, "it gives sixty seconds at least"
    bench.challenge(2, now=20.0, left=-3_000)
    assert relay_clock(20.0) == UNIX + 20 - 3_060, "whatever our clock says"


@pytest.mark.req("R-268")
def test_a_challenge_is_answered_once(bench):
    bench.challenge(1)
    assert len(bench.auths()) == 1
    bench.error("a1", "unauthenticated")
    while bench.core.get_timer() < 1e6:
        bench.core.handle_timer(bench.core.get_timer())
    assert bench.auths() == [], "there was no other one"


@pytest.mark.req("R-296")
def test_attempts_are_bounded(bench):
    now = 0.0
    for n in range(1, 10):
        bench.challenge(n, now=now)
        now = min(max(bench.core.get_timer(), now), now + 100)
        bench.core.handle_timer(now)
        bench.error(f"a{n}", "unauthenticated", now=now)
    assert len(bench.auths()) == 3
    (failure,) = bench.outcomes()
    assert isinstance(failure, RequestRefused)


@pytest.mark.parametrize(
    ("code", "detail"),
    [("invalid_signature", "key_revoked"), ("unauthenticated", "unresolved_key"), ("zzz", None)],
)
def test_a_refusal_that_will_not_pass_is_final(bench, code, detail):
    bench.challenge(1)
    bench.error("a1", code, detail=detail)
    bench.challenge(2)
    assert len(bench.auths()) == 1
    (failure,) = bench.outcomes()
    assert (failure.code, failure.detail) == (code, detail)
    assert bench.core.authentication_error is failure


@pytest.mark.req("R-338")
def test_a_rate_limit_is_kept_and_the_challenge_with_it(bench):
    bench.challenge(1)
    (first,) = bench.auths()
    bench.error("a1", "rate_limited", now=1, retry_after=3)
    bench.core.handle_timer(3.9)
    assert bench.auths() == []
    due = bench.core.get_timer()
    assert 4 <= due <= 4.6
    bench.core.handle_timer(due)
    (second,) = bench.auths()
    assert second.challenge == first.challenge, "nobody has looked at it"


@pytest.mark.req("R-338")
def test_a_limit_beyond_reason_is_a_refusal(bench):
    bench.challenge(1)
    bench.error("a1", "rate_limited", retry_after=10**9)
    (failure,) = bench.outcomes()
    assert failure.retry_after == 10**9


# What is signed.


@pytest.mark.req("R-298")
@pytest.mark.parametrize("broken", [{"text": "a:b"}, {"server_id": "relay"}])
def test_a_malformed_challenge_is_not_signed(bench, broken):
    bench.challenge(**broken)
    assert bench.auths() == [] and bench.state() is AuthState.UNAUTHENTICATED
    (failure,) = bench.outcomes()
    assert isinstance(failure, InvalidMessage)
    assert bench.core.statistics.challenges_refused == 1


@pytest.mark.req("R-298")
def test_a_relay_is_held_to_the_did_it_is_expected_under(me):
    bench = Bench(me, replace(ALWAYS, relay_id="did:strata:other")).connect()
    bench.challenge()
    (failure,) = bench.outcomes()
    assert failure.detail == "server_id_unexpected" and bench.auths() == []


@pytest.mark.req("R-298")
def test_a_relay_is_held_to_the_did_it_showed_first_over_all_connections(bench):
    bench.challenge()
    assert bench.server_id() == RELAY
    bench.error("a1", "unauthenticated")
    bench.core.connection_lost()
    bench.sent()
    bench.connect(10)
    bench.challenge(2, now=10, server_id="did:strata:impostor")
    assert bench.auths() == []
    assert bench.outcomes()[-1].detail == "server_id_unexpected"
    assert bench.server_id() == RELAY


@pytest.mark.req("R-346", "R-390")
def test_a_manifest_makes_no_pin_and_can_contradict_one(me):
    bench = Bench(me, announced=Announced(relay_id="did:strata:claimed")).connect()
    assert bench.server_id() is None
    bench.challenge()
    assert bench.server_id() == RELAY, "what counts is what the relay has us sign"
    pinned = Bench(me, replace(ALWAYS, relay_id=RELAY), announced=Announced(relay_id="did:strata:claimed"))
    pinned.connect().challenge()
    assert pinned.auths() == []
    assert pinned.outcomes()[0].detail == "server_id_unexpected"


@pytest.mark.req("R-273")
def test_a_challenge_with_little_time_left_is_answered_and_told_of(bench):
    bench.challenge(left=20)
    (warning,) = [c for c in bench.core.changes() if isinstance(c, ShortChallenge)]
    assert warning.seconds_left == 20
    assert bench.core.statistics.challenges_short == 1
    assert len(bench.auths()) == 1
    bench.challenge(2, left=59)
    assert bench.core.statistics.challenges_short == 1, "a second's clock error is nobody's fault"


def test_a_challenge_that_has_expired_is_not_answered(me):
    bench = Bench(me, NEEDED).connect()
    bench.challenge(1, now=0, left=120)
    handle = bench.publish(now=130)
    bench.sent()
    bench.error(handle, "unauthenticated", now=131)
    assert bench.auths() == []
    bench.challenge(2, now=132)
    assert len(bench.auths()) == 1


def test_a_signer_that_fails_is_an_error_and_no_crash(me):
    class Broken:
        did = me.did

        def sign(self, message):
            raise OSError("the device is gone")

    bench = Bench(Broken()).connect()
    bench.challenge()
    (failure,) = bench.outcomes()
    assert isinstance(failure, IdentityError) and isinstance(failure.__cause__, OSError)


# Requests before and after it.


@pytest.mark.req("R-339")
def test_with_always_nothing_goes_out_before_the_session_is_authenticated(bench):
    handle = bench.publish()
    state = bench.core.subscribe(Query(), 0)
    assert bench.sent() == []
    bench.challenge()
    assert [type(m) for m in bench.sent()] == [wire.Auth]
    bench.ok()
    assert [type(m) for m in bench.sent()] == [wire.Subscribe, wire.Publish]
    assert state.wire_id is not None and handle == "p1"


def test_with_always_a_failure_ends_what_was_asked_for(bench):
    handle = bench.publish()
    state = bench.core.subscribe(Query(), 0)
    bench.challenge()
    bench.error("a1", "invalid_signature", detail="key_expired")
    settled = bench.settled()
    assert settled[handle].detail == "key_expired"
    assert state.error is not None and state.error.detail == "key_expired"
    late = bench.publish()
    assert bench.settled()[late].detail == "key_expired"
    assert [type(m) for m in bench.sent()] == [wire.Auth]


def test_when_needed_stays_anonymous_until_the_relay_wants_more(me):
    bench = Bench(me, NEEDED).connect()
    bench.challenge()
    handle = bench.publish()
    assert [type(m) for m in bench.sent()] == [wire.Publish]
    bench.say(wire.Ok(packet_id="x", status="ACCEPTED", client_msg_id=handle))
    assert isinstance(bench.settled()[handle], Published)
    assert bench.state() is AuthState.UNAUTHENTICATED and bench.auths() == []


@pytest.mark.parametrize("detail", [None, "missing_capability"])
def test_when_needed_authenticates_and_repeats_what_was_refused(me, detail):
    bench = Bench(me, NEEDED).connect()
    bench.challenge()
    first, second = bench.publish("x"), bench.publish("y")
    state = bench.core.subscribe(Query(), 0)
    sent = bench.sent()
    bench.error(first, "unauthenticated", detail=detail)
    bench.error(second, "unauthenticated", detail=detail)
    bench.error(state.wire_id, "unauthenticated", detail=detail)
    assert bench.settled() == {} and state.error is None
    assert [type(m) for m in bench.sent()] == [wire.Auth]
    bench.ok()
    again = bench.sent()
    assert [m.packet for m in again if isinstance(m, wire.Publish)] == [m.packet for m in sent[:2]]
    assert sum(isinstance(m, wire.Subscribe) for m in again) == 1


def test_what_was_refused_before_the_relay_knew_us_is_repeated_after(me):
    """The refusal and AUTH_OK may overtake each other (R-133)."""
    bench = Bench(me, NEEDED).connect()
    bench.challenge()
    first, second = bench.publish("x"), bench.publish("y")
    state = bench.core.subscribe(Query(), 0)
    bench.sent()
    bench.error(first, "unauthenticated")
    bench.ok()
    bench.sent()
    bench.error(second, "unauthenticated")
    bench.error(state.wire_id, "unauthenticated")
    assert bench.settled() == {} and state.error is None
    assert [type(m) for m in bench.sent()] == [wire.Publish, wire.Subscribe]
    bench.error(second, "unauthenticated")
    assert bench.settled()[second].code == "unauthenticated", "now it knew"


def test_a_refusal_stands_with_the_reason_why_authentication_did_not_help(me):
    bench = Bench(me, NEEDED).connect()
    bench.challenge()
    handle = bench.publish()
    state = bench.core.subscribe(Query(), 0)
    bench.error(handle, "unauthenticated", detail="missing_capability")
    bench.error(state.wire_id, "unauthenticated", detail="missing_capability")
    bench.error("a1", "invalid_signature", detail="key_revoked")
    refusal = bench.settled()[handle]
    assert refusal.detail == "missing_capability" and refusal.__cause__.detail == "key_revoked"
    assert state.error.detail == "missing_capability"
    other = bench.publish("z")
    bench.error(other, "unauthenticated")
    assert bench.settled()[other].__cause__.detail == "key_revoked", "it is not tried for each request"


def test_without_an_identity_or_a_wish_the_refusal_is_told_at_once(me):
    for bench in (Bench(None, NEEDED), Bench(me, replace(NEEDED, authenticate="never"))):
        bench.connect().challenge()
        handle = bench.publish()
        bench.error(handle, "unauthenticated")
        assert bench.settled()[handle].code == "unauthenticated"
        assert bench.auths() == []


def test_a_stray_refusal_makes_nobody_say_who_they_are(me):
    bench = Bench(me, NEEDED).connect()
    bench.challenge()
    bench.error(None, "unauthenticated")
    bench.error("p9", "unauthenticated")
    assert bench.sent() == []


@pytest.mark.req("R-339")
def test_after_a_cut_what_was_needed_comes_first(me):
    bench = Bench(me, NEEDED).connect()
    bench.challenge()
    handle = bench.publish()
    bench.error(handle, "unauthenticated")
    bench.ok()
    state = bench.core.subscribe(Query(), 0)
    bench.core.connection_lost()
    bench.sent()
    bench.connect(10)
    assert bench.sent() == [] and state.wire_id is None
    bench.challenge(2, now=10)
    assert [type(m) for m in bench.sent()] == [wire.Auth]
    bench.ok("a2", now=11)
    assert {type(m) for m in bench.sent()} == {wire.Subscribe, wire.Publish}


@pytest.mark.req("R-339")
def test_after_a_cut_a_relay_that_wants_no_authentication_any_more_is_used_without(me):
    bench = Bench(me, NEEDED).connect()
    bench.challenge()
    handle = bench.publish()
    bench.error(handle, "unauthenticated")
    bench.core.connection_lost()
    bench.sent()
    bench.connect(10)
    bench.core.handle_timer(15)
    assert [type(m) for m in bench.sent()] == [wire.Publish]


@pytest.mark.req("R-291")
def test_what_the_relay_has_not_granted_is_not_attempted(bench):
    waiting = bench.publish("w")
    bench.challenge()
    bench.sent()
    bench.ok(capabilities=["subscribe"])
    assert isinstance(bench.settled()[waiting], MissingCapability)
    handle = bench.publish()
    refusal = bench.settled()[handle]
    assert isinstance(refusal, MissingCapability) and refusal.capability == "publish"
    assert "subscribe" in str(refusal)
    bench.core.subscribe(Query(), 0)
    assert [type(m) for m in bench.sent()] == [wire.Subscribe]


@pytest.mark.req("R-291")
def test_a_subscription_the_relay_has_not_granted_ends_with_a_typed_error(bench):
    bench.challenge()
    bench.sent()
    bench.ok(capabilities=[])
    state = bench.core.subscribe(Query(), 0)
    assert isinstance(state.error, MissingCapability) and bench.sent() == []


@pytest.mark.req("R-285")
def test_a_relay_that_enforces_no_capabilities_may_leave_them_out(bench):
    bench.challenge()
    bench.ok(capabilities=None)
    bench.publish()
    assert any(isinstance(message, wire.Publish) for message in bench.sent())


def test_capabilities_are_asked_for_as_configured(me):
    bench = Bench(me, replace(ALWAYS, capabilities=("subscribe",))).connect()
    bench.challenge()
    (auth,) = bench.auths()
    assert auth.capabilities == ["subscribe"]


def test_asking_by_hand(me):
    bench = Bench(me, NEEDED).connect()
    assert bench.core.authenticate(0)
    bench.challenge()
    bench.ok()
    assert bench.outcomes() == [bench.session()]
    assert not bench.core.authenticate(1), "it is done"


@pytest.mark.req("R-298")
def test_the_challenge_of_a_relay_met_elsewhere_is_not_signed_unless_both_are_said_to_be_one(me):
    met: dict[str, str] = {}
    Bench(me, met=met, address="there").connect().challenge()
    assert met == {RELAY: "there"}
    again = Bench(me, met=met, address="there").connect()
    again.challenge()
    assert len(again.auths()) == 1
    forwarding = Bench(me, met=met, address="here").connect()
    forwarding.challenge()
    (failure,) = forwarding.outcomes()
    assert failure.detail == "server_id_elsewhere" and "there" in failure.reason
    assert forwarding.auths() == [] and met == {RELAY: "there"}
    told = Bench(me, replace(ALWAYS, relay_id=RELAY), met=met, address="here").connect()
    told.challenge()
    assert len(told.auths()) == 1
