"""Key windows, events and verdicts: one author, no recovery, packets in sequence."""

from __future__ import annotations

import random
import sys
from types import FrameType

import pytest
from strata.protocol import packets
from strata.protocol.documents import implicit_genesis, key_multibase
from strata.protocol.errors import InvalidPacket
from strata.protocol.ids import Identity, base58_encode
from strata.protocol.keys import KeyChain, KeyStanding, Use
from strata.protocol.keys.ledger import KeyLedger
from strata.protocol.packets import Packet

from tests.support.alice import (
    ALICE,
    DAY,
    RULES,
    SKEW,
    T,
    add,
    alive,
    chain,
    document,
    key,
    key_id,
    method,
    post,
    refused,
    revoke,
    rotate,
    sign,
)

NAMED = "did:strata:relay_1"


def freeze(n: int) -> Packet:
    """Return an event without effect."""
    return sign(0, {"type": "KEY_EVENT", "event": "FREEZE", "key_id": key_id(0), "n": n})


@pytest.mark.req("R-060")
def test_a_self_certifying_did_needs_no_document():
    chain().verify(post(0), T)
    chain().verify(post(0), 0)
    chain().verify_auth(b"challenge", key(0).sign(b"challenge"), T)
    (only,) = chain().keys(T)
    assert (only.key_id, only.valid_from, only.valid_until) == (key_id(0), 0, None)
    implicit = implicit_genesis(ALICE)
    assert implicit is not None
    assert [m.public_key for m in implicit.methods] == [key(0).public_key]


@pytest.mark.req("R-060")
@pytest.mark.parametrize("name", [key_id(0), f"{ALICE}#{key_multibase(key(0).public_key)}"])
def test_both_ids_name_the_implicit_key(name):
    content = {"type": "KEY_EVENT", "event": "REVOKE", "key_id": name, "revoked_at": T - 1}
    assert not alive(chain((sign(0, content), T)), T)


@pytest.mark.req("R-046")
def test_the_bare_form_of_a_did_carries_its_key_too():
    did = "did:strata:z" + base58_encode(key(0).public_key)
    packet = packets.build(key(0).speaking_for(did), {"type": "POST"}, timestamp=T)
    KeyChain.genesis(did).verify(packet, T)


@pytest.mark.req("R-047", "R-048")
@pytest.mark.parametrize("did", [NAMED, "did:ngo:example"])
def test_a_named_did_needs_a_configured_key(did):
    packet = packets.build(key(0).speaking_for(did), {"type": "POST"}, timestamp=T)
    unknown = KeyChain.genesis(did)
    assert not unknown.is_resolvable
    assert refused(unknown, packet, T) == ("invalid_signature", "unresolved_key")
    KeyChain.genesis(did, static_key=key(0).public_key).verify(packet, T)


@pytest.mark.req("R-056")
def test_documents_come_before_a_configured_key_and_that_before_the_dids_own():
    assert alive(chain(), T) == {0}
    assert alive(chain(static_key=key(5).public_key), T) == {5}
    known = document(method(0), method(6))
    assert alive(chain(static_key=key(5).public_key, documents=[known]), T) == {0, 6}


@pytest.mark.req("R-062", "R-063", "R-065", "R-067")
@pytest.mark.parametrize(
    ("at", "code"),
    [
        (T - SKEW - 1, "key_not_yet_valid"),
        (T - SKEW, None),
        (T + DAY + SKEW, None),
        (T + DAY + SKEW + 1, "key_expired"),
    ],
)
def test_the_window_and_its_skew_are_exact(at, code):
    made = chain(documents=[document(method(0, valid_from=T, valid_until=T + DAY))])
    if code is None:
        made.verify(post(0), at)
        assert alive(made, at) == {0}
    else:
        assert refused(made, post(0), at) == (code, None)
        assert not alive(made, at)


@pytest.mark.req("R-063")
@pytest.mark.parametrize("timestamp", [T, T + DAY + 10 * SKEW])
def test_the_authors_clock_does_not_matter(timestamp):
    made = chain(documents=[document(method(0, valid_from=T, valid_until=T + DAY))])
    packet = sign(0, {"type": "POST"}, timestamp)
    assert refused(made, packet, T + 2 * DAY) == ("key_expired", None)


@pytest.mark.req("R-066")
def test_any_live_key_signs_and_the_newest_is_tried_first():
    made = chain((add(0, 1), T), (add(1, 2, valid_from=T - 10), T + 1))
    for n in (0, 1, 2):
        made.verify(post(n), T + 2)
    assert made.candidates(T + 2) == (key(1).public_key, key(2).public_key, key(0).public_key)


@pytest.mark.req("R-067")
def test_a_signature_by_no_key_of_the_author_is_simply_invalid():
    assert refused(chain(), post(7), T) == ("invalid_signature", None)


@pytest.mark.req("R-067")
def test_a_dead_key_is_named_as_what_it_is():
    made = chain((add(0, 1, valid_from=T + DAY), T), (revoke(0, 0, revoked_at=T), T + 1))
    assert refused(made, post(0), T + 2) == ("key_revoked", None)
    assert refused(made, post(1), T + 2) == ("key_not_yet_valid", None)


@pytest.mark.req("R-277", "R-281")
@pytest.mark.parametrize(
    ("n", "detail"), [(0, "key_revoked"), (1, "key_not_yet_valid"), (2, "key_expired"), (9, None)]
)
def test_auth_says_the_state_of_a_key_in_the_detail(n, detail):
    made = chain(
        (add(0, 1, valid_from=T + DAY), T),
        (add(0, 2, valid_from=T - DAY, valid_until=T - DAY + 1), T),
        (revoke(0, 0, revoked_at=T), T + 1),
    )
    with pytest.raises(InvalidPacket) as refusal:
        made.verify_auth(b"challenge", key(n).sign(b"challenge"), T + 2)
    assert (refusal.value.code, refusal.value.detail) == ("invalid_signature", detail)


@pytest.mark.req("R-061")
def test_each_use_needs_a_key_that_the_document_lists_for_it():
    made = chain(
        documents=[
            document(method(0), method(1), method(2), assertion=[key_id(0)], authentication=[key_id(1)])
        ]
    )
    made.verify(post(0), T)
    made.verify_auth(b"c", key(1).sign(b"c"), T)
    assert refused(made, post(1), T) == ("invalid_signature", "key_use_not_allowed")
    with pytest.raises(InvalidPacket) as refusal:
        made.verify_auth(b"c", key(0).sign(b"c"), T)
    assert refusal.value.detail == "key_use_not_allowed"
    assert refused(made, add(1, 5), T) == ("invalid_signature", "key_use_not_allowed")


@pytest.mark.req("R-061")
def test_a_missing_array_means_every_signing_key_and_an_empty_one_none():
    missing = chain(documents=[document(method(0), method(1), method(11, recovery=True))])
    assert alive(missing, T) == {0, 1}
    empty = chain(documents=[document(method(0), assertion=[])])
    assert not alive(empty, T)
    assert empty.candidates(T, Use.AUTH) == (key(0).public_key,)


@pytest.mark.req("R-068")
def test_an_event_is_signed_by_a_key_that_is_there_already():
    assert refused(chain(), add(1, 1), T) == ("invalid_signature", None)
    revoked = chain((add(0, 1), T), (revoke(0, 1, revoked_at=T), T + 1))
    assert refused(revoked, add(1, 2), T + 2) == ("key_revoked", None)


@pytest.mark.req("R-069")
def test_a_key_may_revoke_itself_once():
    made = chain((revoke(0, 0, revoked_at=T), T))
    assert refused(made, post(0), T + 1) == ("key_revoked", None)
    assert refused(made, revoke(0, 0, revoked_at=T - 5), T + 1) == ("key_revoked", None)


@pytest.mark.req("R-070")
def test_the_chain_begins_with_a_key_whose_window_has_begun():
    made = chain(documents=[document(method(0, valid_from=T + 10))])
    made.verify(post(0), T)  # packets are allowed the skew
    assert refused(made, add(0, 1), T + 9) == ("key_not_yet_valid", None)
    made.apply(add(0, 1), T + 10)


MALFORMED = {
    "no event": {"event": None},
    "no key_id": {"key_id": None},
    "another DID's key_id": {"key_id": "did:strata:bob#keys-1"},
    "another DID's key_id that spells a key of this one": {
        "event": "REVOKE",
        "revoked_at": T,
        "key_id": f"did:strata:bob#{key_multibase(key(0).public_key)}",
    },
    "another DID's key_id in an event without effect": {
        "event": "NOTE",
        "key_id": "did:strata:bob#keys-1",
    },
    "an empty fragment": {"key_id": f"{ALICE}#"},
    "no key": {"public_key_multibase": None},
    "a key in another codec": {"public_key_multibase": "z" + base58_encode(b"\xe7\x01" + bytes(33))},
    "no valid_from": {"valid_from": None},
    "text for valid_from": {"valid_from": str(T)},
    "a negative valid_from": {"valid_from": -1},
    "an end before the beginning": {"valid_until": T - 1},
    "a boolean for valid_until": {"valid_until": True},
    "ROTATE without replaces": {"event": "ROTATE"},
    "REVOKE without revoked_at": {"event": "REVOKE"},
    "a reason that is no text": {"reason": 5},
    "an id that spells another key": {"key_id": f"{ALICE}#{key_multibase(key(9).public_key)}"},
}


@pytest.mark.req("R-071")
@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_event_is_refused(change):
    content = add(0, 1).content | change
    # Without a detail: the content is refused, not a key that it names.
    assert refused(chain(), sign(0, content), T) == ("invalid_schema", None)


@pytest.mark.req("R-071")
def test_an_event_names_keys_that_exist_and_gives_out_none_twice():
    made = chain((add(0, 1), T))
    assert refused(made, rotate(0, 9, 2), T + 1) == ("invalid_schema", "unknown_key")
    assert refused(made, revoke(0, 9), T + 1) == ("invalid_schema", "unknown_key")
    again = add(0, 1, valid_from=T + 5)
    assert refused(made, again, T + 1) == ("invalid_schema", "key_known")
    renamed = sign(0, add(0, 1).content | {"key_id": key_id(5)})
    assert refused(made, renamed, T + 1) == ("invalid_schema", "key_known")


@pytest.mark.req("R-071")
def test_an_unknown_event_is_kept_and_does_nothing():
    content = {"type": "KEY_EVENT", "event": "FREEZE", "key_id": key_id(0)}
    made = chain((sign(0, content), T))
    assert len(made.events) == 1
    assert made.keys(T) == chain().keys(T)
    assert refused(chain(), sign(9, content), T) == ("invalid_signature", None)


@pytest.mark.req("R-072")
@pytest.mark.parametrize(("at", "both"), [(T + 50, True), (T + 100 + SKEW, True), (T + 101 + SKEW, False)])
def test_rotation_ends_the_old_key_when_the_new_one_begins(at, both):
    made = chain((rotate(0, 0, 1, valid_from=T + 100), T))
    made.verify(post(1), at)
    if both:
        made.verify(post(0), at)
    else:
        assert refused(made, post(0), at) == ("key_expired", None)


@pytest.mark.req("R-072")
@pytest.mark.parametrize(
    "first", [add(0, 1, valid_until=T + 100), rotate(0, 0, 2, valid_from=T + 100)], ids=["its own", "rotated"]
)
def test_a_rotation_makes_no_key_live_longer(first):
    old = 1 if first.content["event"] == "ADD" else 0
    made = chain((first, T), (rotate(old, old, 3, valid_from=T + 10_000), T + 1))
    made.verify(post(old), T + 100 + SKEW)
    assert refused(made, post(old), T + 101 + SKEW) == ("key_expired", None)


@pytest.mark.req("R-072")
def test_a_rotated_key_steps_into_the_part_of_the_old_one():
    known = document(method(0), method(1), assertion=[key_id(0)], authentication=[key_id(1)])
    made = chain((rotate(0, 1, 2), T), documents=[known])
    assert key(2).public_key in made.candidates(T + 1, Use.AUTH)
    assert refused(made, post(2), T + 1) == ("invalid_signature", "key_use_not_allowed")


@pytest.mark.req("R-076")
def test_a_revocation_that_is_known_bites_without_skew():
    made = chain((add(0, 1), T), (revoke(0, 1, revoked_at=T + 50), T + 10))
    made.verify(post(1), T + 50)
    assert refused(made, post(1), T + 51) == ("key_revoked", None)
    with pytest.raises(InvalidPacket):
        made.verify_auth(b"c", key(1).sign(b"c"), T + 51)


@pytest.mark.req("R-076")
def test_a_revocation_one_second_ago_bites_at_once():
    made = chain((revoke(0, 0, revoked_at=T - 1), T))
    assert refused(made, post(0), T) == ("key_revoked", None)


@pytest.mark.req("R-076")
def test_a_revocation_is_never_taken_back():
    made = chain(
        (add(0, 1), T), (revoke(0, 1, revoked_at=T), T + 1), (revoke(0, 1, revoked_at=T + DAY), T + 2)
    )
    assert refused(made, post(1), T + 3) == ("key_revoked", None)
    assert {state.revoked_at for state in made.keys(T + 3)} == {None, T}


@pytest.mark.req("R-077", "R-078")
def test_what_was_received_before_a_revocation_was_known_stays_valid_for_a_reader():
    made = chain((add(0, 1), T), (revoke(0, 1, revoked_at=T - DAY), T + 100))
    made.verify(post(1), T + 99, ingest=False)
    made.verify(post(1), T + 100, ingest=False)  # which came first within that second is unknown
    assert refused(made, post(1), T + 101, ingest=False) == ("key_revoked", None)
    assert refused(made, post(1), T + 99) == ("key_revoked", None)  # a relay judges by all it knows


@pytest.mark.req("R-076", "R-077")
def test_a_reader_holds_a_packet_to_the_revocation_known_when_it_came():
    made = chain((revoke(0, 0, revoked_at=T + 50), T))
    made.verify(post(0), T + 50, ingest=False)
    assert refused(made, post(0), T + 51, ingest=False) == ("key_revoked", None)


@pytest.mark.req("R-074")
def test_a_reader_takes_a_key_from_the_second_in_which_it_was_added():
    made = chain((add(0, 1), T), (revoke(0, 1, revoked_at=T - 1), T), (add(0, 2), T + 5))
    assert refused(made, post(1), T - 1, ingest=False) == ("invalid_signature", None)
    made.verify(post(1), T, ingest=False)
    assert refused(made, post(1), T + 1, ingest=False) == ("key_revoked", None)
    made.verify(post(2), T + 5, ingest=False)
    assert refused(made, post(2), T + 4, ingest=False) == ("invalid_signature", None)


@pytest.mark.req("R-063", "R-072")
def test_a_back_dated_rotation_does_not_reach_back_for_a_reader():
    made = chain((rotate(0, 0, 1, valid_from=T - DAY), T))
    made.verify(post(0), T - 1, ingest=False)
    assert refused(made, post(0), T + 1, ingest=False) == ("key_expired", None)


def test_a_reader_may_judge_the_identity_packets_themselves():
    first, second = add(0, 1), revoke(1, 0, revoked_at=T)
    made = chain((first, T), (second, T + 1))
    for packet, received_at in made.events:
        made.verify(packet, received_at, ingest=False)
    assert (
        refused(chain((first, T)), revoke(1, 0, revoked_at=T), T - 1, ingest=False)[0] == "invalid_signature"
    )


def test_the_clock_going_back_does_not_bring_back_a_key():
    made = chain((revoke(0, 0, revoked_at=T - DAY), T))
    assert refused(made, post(0), T - 10) == ("key_revoked", None)


def test_a_chain_is_that_of_one_author():
    stranger = packets.build(Identity.from_seed(b"s" * 32), {"type": "POST"}, timestamp=T)
    with pytest.raises(ValueError, match="the chain is that of"):
        chain().verify(stranger, T)
    with pytest.raises(ValueError, match="the chain is that of"):
        chain().apply(stranger, T)
    with pytest.raises(ValueError, match="is not an identity packet"):
        chain().apply(post(0), T)


def test_applying_a_packet_again_changes_nothing():
    made = chain((add(0, 1), T))
    assert made.apply(add(0, 1), T + 5) is made
    made.verify(add(0, 1), T + 5)


def test_what_may_be_shown_to_people():
    made = chain((rotate(0, 0, 1, valid_from=T + 100), T))
    old, new = made.keys(T)
    assert [state.standing(T, SKEW) for state in (old, new)] == [KeyStanding.VALID, KeyStanding.VALID]
    assert old.standing(T + 101 + SKEW, SKEW) is KeyStanding.EXPIRED
    assert new.introduced_by == made.events[0][0].packet_id
    assert "hello" not in repr(made)
    assert made.rules is RULES


@pytest.mark.req("R-061", "R-277", "R-281")
def test_a_key_that_authenticated_once_is_asked_about_by_itself():
    def state(made: KeyChain, n: int, at: int) -> str | None:
        try:
            made.check_auth_key(key(n).public_key, at)
        except InvalidPacket as refusal:
            assert refusal.code == "invalid_signature"
            return refusal.detail
        return None

    assert chain().verify_auth(b"c", key(0).sign(b"c"), T) == key(0).public_key
    assert state(chain(), 0, T) is None
    assert state(chain((revoke(0, 0, revoked_at=T), T + 1)), 0, T + 1) == "key_revoked"
    replaced = chain((rotate(0, 0, 1, valid_from=T + 100), T))
    assert state(replaced, 0, T + 100 + SKEW) is None
    assert state(replaced, 0, T + 101 + SKEW) == "key_expired"
    assert replaced.holds_until(T + 100, Use.AUTH) == T + 101 + SKEW
    unlisted = chain(documents=[document(method(0), method(1), authentication=[key_id(1)])])
    assert state(unlisted, 0, T) == "key_use_not_allowed"


@pytest.mark.slow
def test_the_past_is_the_same_in_whatever_order_it_is_asked_for():
    """Intermediate states are cached; each must be that of its moment."""
    events = [(add(0, n + 1, valid_from=T), T + 2 * n) for n in range(12)]
    events += [(freeze(n), T + 30 + n // 3) for n in range(90)]
    events += [(revoke(0, n + 1, revoked_at=T), T + 90 + 2 * n) for n in range(12)]
    asked = KeyChain.replay(ALICE, events, rules=RULES)
    moments = list(range(T - 1, T + 120, 15))
    alone = {
        at: KeyChain.replay(ALICE, [each for each in events if each[1] <= at], rules=RULES) for at in moments
    }
    for order in (moments, moments[::-1], random.Random(5).sample(moments, len(moments))):
        for at in order:
            assert asked._past_state(at).keys == alone[at]._ledger.keys, at


@pytest.mark.parametrize("order", [1, -1])
def test_a_history_is_read_without_a_chain_for_each_moment(order):
    events = [(freeze(n), T + 2 * n) for n in range(500)]
    made = KeyChain.replay(ALICE, events, rules=RULES)
    judged = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal judged
        judged += event == "call" and frame.f_code is KeyLedger.receive.__code__

    packet = post(0)
    sys.setprofile(count)
    try:
        for n in range(0, 500, 10)[::order]:
            made.verify(packet, T + 2 * n + 1, ingest=False)
    finally:
        sys.setprofile(None)
    assert judged < 3000  # it was 12,500 once
