"""Challenges, AUTH and capabilities, with time and random bytes chosen by the test."""

from __future__ import annotations

import base64
import dataclasses
import itertools

import pytest
from strata.protocol.auth import answer_challenge, signing_input
from strata.protocol.errors import ErrorCode, InvalidMessage, InvalidPacket
from strata.protocol.ids import Identity
from strata.protocol.keys import KeyChain, KeyRules
from strata.protocol.wire import EXTENSIONS, Auth, AuthChallenge, decode_relay_message, encode

from relayd.access.auth import (
    CAPABILITIES,
    MAX_FAILURES,
    AuthAttempt,
    Authentication,
    AuthKeys,
    Grants,
    Proof,
    verify_attempt,
)

NOW = 1_760_000_000
LIFETIME = 120
RELAY = Identity(bytes([9]) * 32)
ALICE = Identity(bytes(range(32)))
BOB = Identity(bytes([7]) * 32)
_random = (number.to_bytes(32, "big") for number in itertools.count(1))


class Keys:
    """An identity whose one key is refused with the detail that the test sets."""

    def __init__(self, detail: str | None = None) -> None:
        self.detail = detail

    def check_auth_key(self, public_key: bytes, at: int) -> None:
        raise InvalidPacket(ErrorCode.INVALID_SIGNATURE, "no", detail=self.detail)

    def verify_auth(self, message: bytes, signature: bytes, at: int) -> bytes:
        raise InvalidPacket(ErrorCode.INVALID_SIGNATURE, "no", detail=self.detail)


def chain_of(identity: Identity) -> KeyChain:
    return KeyChain.genesis(identity.did, rules=KeyRules())


@pytest.fixture
def session() -> Authentication:
    return Authentication(RELAY.did, LIFETIME)


def issued(session: Authentication, now: int = NOW) -> AuthChallenge:
    return session.issue(next(_random), now)


def refusal(session: Authentication, message: Auth, now: int = NOW) -> tuple[str, str | None]:
    with pytest.raises(InvalidMessage) as refused:
        session.begin(message, now)
    assert refused.value.client_msg_id == message.client_msg_id
    return refused.value.code.value, refused.value.detail


def verdict(attempt: AuthAttempt, keys: AuthKeys | None = None) -> tuple[str, str | None] | None:
    try:
        verify_attempt(attempt, keys or chain_of(ALICE), NOW)
    except InvalidMessage as error:
        return error.code.value, error.detail
    return None


@pytest.mark.req("R-139", "R-268", "R-269", "R-271")
def test_a_challenge_is_32_random_bytes_for_two_minutes(session):
    random = bytes(range(100, 132))
    challenge = session.issue(random, NOW)
    assert base64.b64decode(challenge.challenge, validate=True) == random
    assert challenge.server_id == RELAY.did
    assert challenge.expires_at == NOW + 120
    assert challenge.extensions == list(EXTENSIONS)
    assert decode_relay_message(encode(challenge)) == challenge


def test_fewer_random_bytes_are_our_bug(session):
    with pytest.raises(AssertionError):
        session.issue(bytes(31), NOW)


@pytest.mark.req("R-275", "R-277")
def test_a_signature_over_the_challenge_and_the_relay_s_did_is_good(session):
    attempt = session.begin(answer_challenge(issued(session), ALICE, client_msg_id="a"), NOW)
    assert (attempt.author_id, attempt.client_msg_id, attempt.requested) == (ALICE.did, "a", None)
    assert verdict(attempt) is None
    assert session.identity is None  # until the caller reports success


@pytest.mark.req("R-276")
@pytest.mark.parametrize(
    ("signed", "expected"),
    [
        (lambda text: base64.b64decode(text) + RELAY.did.encode(), None),
        (lambda text: text.encode() + b"|" + RELAY.did.encode(), ("invalid_signature", None)),
        (lambda text: text.encode(), ("invalid_signature", None)),
        (lambda text: RELAY.did.encode() + text.encode(), ("invalid_signature", None)),
        (lambda text: signing_input(text, BOB.did), ("invalid_signature", None)),
    ],
    ids=["decoded", "separated", "challenge alone", "turned round", "another relay"],
)
def test_the_decoded_reading_is_good_too_and_no_other(session, signed, expected):
    challenge = issued(session)
    signature = "0x" + ALICE.sign(signed(challenge.challenge)).hex()
    message = Auth(author_id=ALICE.did, challenge=challenge.challenge, signature=signature)
    assert verdict(session.begin(message, NOW)) == expected


@pytest.mark.req("R-268", "R-278")
def test_a_challenge_is_good_once(session):
    answer = answer_challenge(issued(session), ALICE)
    session.begin(answer, NOW)
    assert refusal(session, answer) == ("unauthenticated", "challenge_unknown")


@pytest.mark.req("R-268", "R-278")
def test_a_challenge_is_used_up_by_whatever_names_it(session):
    challenge = issued(session)
    bad = Auth(author_id="nobody", challenge=challenge.challenge, signature="0x")
    assert refusal(session, bad) == ("unauthenticated", "unresolved_key")
    assert refusal(session, answer_challenge(challenge, ALICE)) == ("unauthenticated", "challenge_unknown")


@pytest.mark.req("R-268", "R-278")
def test_no_other_session_can_answer_it(session):
    other = Authentication(RELAY.did, LIFETIME)
    issued(other)
    answer = answer_challenge(issued(session), ALICE)
    assert refusal(other, answer) == ("unauthenticated", "challenge_unknown")
    session.begin(answer, NOW)


@pytest.mark.req("R-278")
def test_without_a_challenge_none_can_be_answered(session):
    message = Auth(author_id=ALICE.did, challenge="c", signature="0x", client_msg_id="m")
    assert refusal(session, message) == ("unauthenticated", "challenge_unknown")


@pytest.mark.req("R-274")
def test_an_answer_after_the_deadline_is_too_late(session):
    on_time = answer_challenge(issued(session), ALICE)
    session.begin(on_time, NOW + LIFETIME)
    late = answer_challenge(issued(session), ALICE)
    assert refusal(session, late, NOW + LIFETIME + 1) == ("unauthenticated", "challenge_expired")


@pytest.mark.req("R-274", "R-282")
def test_an_answer_that_crosses_the_next_challenge_hears_that_it_was_late(session):
    late = answer_challenge(issued(session), ALICE)
    assert session.wants_challenge(NOW + LIFETIME + 1)
    fresh = issued(session, NOW + LIFETIME + 1)
    assert refusal(session, late, NOW + LIFETIME + 1) == ("unauthenticated", "challenge_expired")
    session.begin(answer_challenge(fresh, ALICE), NOW + LIFETIME + 1)


@pytest.mark.req("R-282")
def test_an_anonymous_session_gets_a_new_challenge_when_the_old_one_expires(session):
    issued(session)
    assert not session.wants_challenge(NOW + LIFETIME)
    assert session.wants_challenge(NOW + LIFETIME + 1)
    assert not session.wants_challenge(NOW + LIFETIME + 1)


@pytest.mark.req("R-282")
def test_an_authenticated_session_is_left_alone(session):
    issued(session)
    session.succeeded(ALICE.did)
    assert not session.wants_challenge(NOW + LIFETIME + 1)


@pytest.mark.req("R-281")
@pytest.mark.parametrize(
    "signature", ["", "0x", "0x" + "0" * 127, "0x" + "g" * 128, "0" * 130, "0X" + "0" * 128]
)
def test_a_signature_of_the_wrong_form_is_an_invalid_one(session, signature):
    message = Auth(author_id=ALICE.did, challenge=issued(session).challenge, signature=signature)
    assert refusal(session, message) == ("invalid_signature", None)


@pytest.mark.req("R-281")
def test_another_s_signature_is_invalid(session):
    answer = answer_challenge(issued(session), BOB)
    stolen = Auth(author_id=ALICE.did, challenge=answer.challenge, signature=answer.signature)
    assert verdict(session.begin(stolen, NOW)) == ("invalid_signature", None)


@pytest.mark.req("R-279")
def test_an_identity_nobody_knows_is_unauthenticated(session):
    answer = answer_challenge(issued(session), ALICE)
    named = Auth(author_id="did:strata:stranger", challenge=answer.challenge, signature=answer.signature)
    chain = KeyChain.genesis("did:strata:stranger", rules=KeyRules())
    assert verdict(session.begin(named, NOW), chain) == ("unauthenticated", "unresolved_key")


@pytest.mark.req("R-277", "R-281")
@pytest.mark.parametrize("detail", ["key_revoked", "key_expired", "recovery_key_not_allowed", None])
def test_what_is_known_of_the_key_is_the_detail(session, detail):
    attempt = session.begin(answer_challenge(issued(session), ALICE), NOW)
    assert verdict(attempt, Keys(detail)) == ("invalid_signature", detail)


@pytest.mark.req("R-282")
def test_the_fifth_failure_in_a_row_is_one_too_many(session):
    assert MAX_FAILURES == 5
    assert [session.failed() for _ in range(5)] == [False] * 4 + [True]


@pytest.mark.req("R-282", "R-283")
def test_success_starts_the_count_again(session):
    for _ in range(4):
        session.failed()
    session.succeeded(ALICE.did)
    assert not session.failed()
    assert session.identity == ALICE.did


@pytest.mark.req("R-277")
def test_a_session_ends_with_its_key_and_says_why():
    proof = Proof(ALICE.public_key)
    assert proof.broken(chain_of(ALICE), NOW) is None
    for keys, detail in ((chain_of(BOB), None), (Keys("key_revoked"), "key_revoked")):
        ended = proof.broken(keys, NOW)
        assert ended is not None
        assert (ended.code, ended.detail) == (ErrorCode.UNAUTHENTICATED, detail)


PEER, OPERATOR = "did:strata:peer", "did:strata:operator"
ALL = ["publish", "subscribe", "replicate"]


@pytest.mark.req("R-286", "R-287", "R-290")
@pytest.mark.parametrize(
    ("did", "requested", "effective"),
    [
        (ALICE.did, None, ["publish", "subscribe"]),
        (ALICE.did, [], []),
        (ALICE.did, ["publish"], ["publish"]),
        (ALICE.did, ["subscribe", "publish", "publish"], ["publish", "subscribe"]),
        (ALICE.did, ["publish", "fly"], ["publish"]),
        (ALICE.did, ["fly"], []),
        (ALICE.did, ALL, ["publish", "subscribe"]),
        (PEER, None, ALL),
        (PEER, ["replicate"], ["replicate"]),
        (PEER, ["subscribe"], ["subscribe"]),
        (ALICE.did, ["operate"], []),
        (PEER, ["operate"], []),
        (OPERATOR, None, ["publish", "subscribe", "operate"]),
        (OPERATOR, ["operate"], ["operate"]),
        (OPERATOR, ["publish"], ["publish"]),
        (OPERATOR, ALL, ["publish", "subscribe"]),
    ],
)
def test_effective_is_what_is_asked_for_and_granted(did, requested, effective):
    grants = Grants(peers=frozenset({PEER}), operators=frozenset({OPERATOR}))
    assert list(grants.effective(did, requested)) == effective


@pytest.mark.req("R-292")
@pytest.mark.parametrize(
    ("require_auth", "anonymous"),
    [
        ([], {"publish", "subscribe"}),
        (["publish"], {"subscribe"}),
        (["subscribe"], {"publish"}),
        (["publish", "subscribe"], set()),
    ],
)
def test_what_an_anonymous_session_may_do(require_auth, anonymous):
    grants = Grants(require_auth=frozenset(require_auth))
    assert grants.anonymous == anonymous
    assert grants.of(ALICE.did) == {"publish", "subscribe"}


@pytest.mark.req("R-290", "R-292")
def test_with_members_others_gain_nothing_by_authenticating():
    grants = Grants(
        frozenset({"publish"}),
        members=frozenset({ALICE.did}),
        peers=frozenset({PEER}),
        operators=frozenset({OPERATOR}),
    )
    assert grants.of(OPERATOR) == {"publish", "subscribe", "operate"}
    assert grants.of(ALICE.did) == {"publish", "subscribe"}
    assert grants.of(BOB.did) == {"subscribe"}
    assert grants.of(PEER) == set(CAPABILITIES)


def test_grants_follow_from_what_they_were_made_of():
    grants = dataclasses.replace(Grants(), require_auth=frozenset({"publish"}))
    assert grants.anonymous == {"subscribe"}
