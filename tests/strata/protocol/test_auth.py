"""What AUTH signs, and what a client refuses to sign."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import auth, ids, wire
from strata.protocol.errors import ErrorCode, InvalidMessage
from strata.protocol.ids import Identity

RELAY = "did:strata:z6MkvDqGT54cXesYGvABpF1UapVNwjCqRcafi4Px6Thv5T3Z"
CHALLENGE = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="


def challenge(text=CHALLENGE, server_id=RELAY, expires_at=1_760_000_120):
    return wire.AuthChallenge(challenge=text, server_id=server_id, expires_at=expires_at)


@pytest.mark.req("R-275")
def test_the_signature_of_the_specification():
    """Vector V2 (docs/requirements/relay.md §15)."""
    me = Identity.from_seed(bytes(range(32)))
    answer = auth.answer_challenge(challenge(), me, capabilities=["publish", "subscribe"], client_msg_id="a1")
    assert json.loads(wire.encode(answer)) == {
        "type": "AUTH",
        "author_id": "did:strata:z6MkehRgf7yJbgaGfYsdoAsKdBPE3dj2CYhowQdcjqSJgvVd",
        "challenge": CHALLENGE,
        "signature": "0xd58c98eb8a01479fa52213ac072d6609193e03b4e34c6d31d4fcc88ebbdaf2b0"
        "b487854fafc847c1ad1b41e15940b925e11093d084c3dfe22a06c64857f04f06",
        "capabilities": ["publish", "subscribe"],
        "client_msg_id": "a1",
    }
    signature = bytes.fromhex(answer.signature[2:])
    assert ids.verify(me.public_key, (CHALLENGE + RELAY).encode(), signature)
    # only a relay may accept the decoded form; this client never sends it.
    assert not ids.verify(me.public_key, base64.b64decode(CHALLENGE) + RELAY.encode(), signature)


def test_what_is_asked_for_is_left_out_only_when_it_is_everything():
    me = Identity.generate()
    assert b"capabilities" not in wire.encode(auth.answer_challenge(challenge(), me))
    assert b'"capabilities":[]' in wire.encode(auth.answer_challenge(challenge(), me, capabilities=()))


@pytest.mark.req("R-298")
@pytest.mark.parametrize(
    "text",
    [
        "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh:=",
        CHALLENGE + ":",
        CHALLENGE + "\n",
        " " + CHALLENGE,
        CHALLENGE[:-1],
        "-_ECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
        '{"content":{"type":"POST"}}',
        "A" * 1028,
        "é" * 44,
        "",
    ],
)
def test_a_challenge_that_is_not_pure_base64_is_not_signed(text):
    with pytest.raises(InvalidMessage) as caught:
        auth.check_challenge(challenge(text), None)
    assert caught.value.detail == "challenge_malformed"


@pytest.mark.req("R-268")
def test_a_challenge_of_fewer_than_32_bytes_is_not_signed():
    auth.check_challenge(challenge(base64.b64encode(bytes(32)).decode()), None)
    with pytest.raises(InvalidMessage):
        auth.check_challenge(challenge(base64.b64encode(bytes(31)).decode()), None)


@pytest.mark.req("R-298")
@pytest.mark.parametrize("server_id", ["", "relay_1", "did:", "did:strata:a b", "did:strata:a:"])
def test_a_relay_without_a_did_is_not_signed_for(server_id):
    with pytest.raises(InvalidMessage) as caught:
        auth.check_challenge(challenge(server_id=server_id), None)
    assert caught.value.detail == "server_id_malformed"


@pytest.mark.req("R-298")
def test_only_the_relay_expected_is_signed_for():
    auth.check_challenge(challenge(), RELAY)
    auth.check_challenge(challenge(), None)
    with pytest.raises(InvalidMessage) as caught:
        auth.check_challenge(challenge(server_id="did:strata:relay_1"), RELAY)
    assert caught.value.detail == "server_id_unexpected"
    assert caught.value.code == ErrorCode.UNAUTHENTICATED
    assert CHALLENGE not in str(caught.value)


@pytest.mark.req("R-298")
@given(st.binary(min_size=32, max_size=64), st.text(max_size=80), st.text(max_size=80))
def test_what_is_signed_for_one_relay_can_be_read_in_one_way_only(random, other_challenge, other_id):
    """A-071: no other challenge and relay give the same text, so a signature cannot be reused for them."""
    ours = challenge(base64.b64encode(random).decode())
    theirs = challenge(other_challenge, other_id)
    text = auth.signing_input(ours.challenge, ours.server_id)
    for cut in range(len(text.decode())):
        shifted = challenge(text.decode()[:cut], text.decode()[cut:])
        if shifted != ours:
            with pytest.raises(InvalidMessage):
                auth.check_challenge(shifted, None)
    if auth.signing_input(other_challenge, other_id) == text:
        assert theirs == ours


def test_the_vector_of_the_requirements_is_this_one():
    text = (Path(__file__).parents[3] / "docs/requirements/relay.md").read_text()
    assert CHALLENGE in text and RELAY in text
