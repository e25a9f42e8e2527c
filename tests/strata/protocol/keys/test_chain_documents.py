"""DID_DOCUMENT packets, the links between documents, and conflicts."""

from __future__ import annotations

from itertools import permutations

import pytest
from strata.protocol import packets
from strata.protocol.documents import VerificationMethod, build_document, method_id
from strata.protocol.errors import InvalidPacket
from strata.protocol.keys import KeyChain, document_content

from tests.support.alice import (
    DAY,
    T,
    add,
    alive,
    chain,
    document,
    key,
    key_id,
    method,
    post,
    publish,
    refused,
    revoke,
    rotate,
    sign,
    with_recovery,
)

GENESIS = document(method(0), method(1), method(11, recovery=True))


def succeed(previous, *methods, **members):
    return document(*methods, previous=previous, **members)


@pytest.mark.req("R-065", "R-079")
def test_an_author_publishes_a_first_document_and_its_recovery_keys_count():
    made = chain((publish(0, GENESIS), T))
    assert made.head == GENESIS
    assert alive(made, T) == {0, 1}
    recover = rotate(11, 0, 2)
    assert made.apply(recover, T + 1).is_pending(recover.packet_id, T + 1)


@pytest.mark.req("R-065")
def test_a_first_document_says_from_when_its_keys_count():
    made = chain((publish(0, document(method(0), method(1, valid_from=T + DAY))), T))
    assert refused(made, post(1), T)[0] == "key_not_yet_valid"
    made.verify(post(1), T + DAY)


@pytest.mark.req("R-068")
def test_a_document_is_signed_by_a_live_key_with_the_right_to_assert():
    assert refused(chain(), publish(7, GENESIS), T) == ("invalid_signature", None)
    # A key may not sign the document that first lists it.
    assert refused(chain(), publish(1, GENESIS), T) == ("invalid_signature", None)
    assert refused(chain((revoke(0, 0), T)), publish(0, GENESIS), T + 1) == ("key_revoked", None)
    made = chain(documents=[document(method(0), method(1), assertion=[key_id(0)])])
    later = succeed(made.head, method(0), method(1))
    assert refused(made, publish(1, later), T) == ("invalid_signature", "key_use_not_allowed")


@pytest.mark.req("R-051")
def test_a_document_is_its_authors_own():
    other = build_document(
        "did:strata:bob", [VerificationMethod("did:strata:bob#k", key(3).public_key, T)], created_at=T
    )
    assert refused(chain(), sign(0, document_content(other)), T) == ("invalid_schema", None)
    value = GENESIS.value
    methods = value["verification_method"]
    assert isinstance(methods, list)
    value["verification_method"] = methods[1:]
    assert refused(chain(), sign(0, {"type": "DID_DOCUMENT", "document": value}), T) == (
        "invalid_schema",
        None,
    )
    assert refused(chain(), sign(0, {"type": "DID_DOCUMENT"}), T) == ("invalid_schema", None)


@pytest.mark.req("R-053")
def test_documents_only_move_forward():
    second = succeed(GENESIS, method(0), created_at=T + 1)
    third = succeed(second, method(0), created_at=T + 2)
    made = chain((publish(0, GENESIS), T), (publish(0, second), T + 1), (publish(0, third), T + 2))
    assert made.head == third
    assert made.documents == (GENESIS, second, third)
    again = packets.build(key(0), document_content(second), timestamp=T + 3)
    assert refused(made, again, T + 3) == ("invalid_schema", "document_not_linked")
    first_again = packets.build(key(0), document_content(GENESIS), timestamp=T + 3)
    assert refused(made, first_again, T + 3) == ("invalid_schema", "document_not_linked")
    another_first = publish(0, document(method(0), created_at=T + 9))
    assert refused(made, another_first, T + 3) == ("invalid_schema", "document_not_linked")


@pytest.mark.req("R-053")
def test_a_document_whose_predecessor_is_unknown_is_refused():
    lost = succeed(GENESIS, method(0))
    assert refused(chain(), publish(0, succeed(lost, method(0))), T) == (
        "invalid_schema",
        "document_not_linked",
    )


def test_the_newest_document_may_be_published_again():
    made = chain((publish(0, GENESIS), T))
    again = packets.build(key(0), document_content(GENESIS), timestamp=T + 3)
    assert made.apply(again, T + 3).documents == (GENESIS,)


@pytest.mark.req("R-061")
def test_a_successor_changes_what_keys_may_do_and_introduces_none():
    made = chain((publish(0, GENESIS), T))
    stranger = succeed(GENESIS, method(0), method(2))
    assert refused(made, publish(0, stranger), T + 1) == ("invalid_schema", "document_key_unknown")
    renamed = succeed(
        GENESIS, method(0), VerificationMethod(method_id(made.did, "new"), key(1).public_key, T)
    )
    assert refused(made, publish(0, renamed), T + 1) == ("invalid_schema", "document_key_unknown")
    narrower = succeed(GENESIS, method(0), method(1), assertion=[key_id(1)])
    made = made.apply(publish(0, narrower), T + 1)
    assert alive(made, T + 1) == {1}
    assert refused(made, post(0), T + 1) == ("invalid_signature", "key_use_not_allowed")


def test_a_key_becomes_a_recovery_key_by_event_and_then_document():
    made = chain((publish(0, GENESIS), T), (add(0, 12), T + 1))
    later = succeed(GENESIS, method(0), method(12, recovery=True))
    made = made.apply(publish(0, later), T + 2)
    assert refused(made, post(12), T + 2) == ("invalid_signature", "recovery_key_not_allowed")
    assert refused(made, rotate(11, 0, 2), T + 3) == (
        "invalid_signature",
        "key_use_not_allowed",
    )  # no longer listed
    recover = rotate(12, 0, 2)
    assert made.apply(recover, T + 3).is_pending(recover.packet_id, T + 3)


@pytest.mark.req("R-076")
def test_a_document_revives_nothing():
    made = chain(
        (publish(0, GENESIS), T),
        (revoke(0, 1), T + 1),
        (publish(0, succeed(GENESIS, method(0), method(1))), T + 2),
    )
    assert refused(made, post(1), T + 3) == ("key_revoked", None)
    late = chain((rotate(0, 0, 1), T), (publish(1, document(method(0), method(1))), T + 1))
    assert refused(late, post(0), T + 1000) == ("key_expired", None)


def test_a_document_may_close_a_window():
    made = chain((publish(0, GENESIS), T))
    later = succeed(GENESIS, method(0), method(1, revoked_at=T + 5))
    assert alive(made.apply(publish(0, later), T + 1), T + 6) == {0}


def test_a_document_that_would_silence_its_author_is_refused():
    nobody = document(method(0), assertion=[])
    assert refused(chain(), publish(0, nobody), T) == ("invalid_schema", "document_without_keys")
    rotated = chain((rotate(0, 0, 1, valid_from=T - DAY), T))
    forgotten = document(method(0))
    assert refused(rotated, publish(1, forgotten), T + 1) == ("invalid_schema", "document_without_keys")


def test_a_key_whose_id_a_document_gives_away_keeps_one_that_spells_it():
    did = "did:strata:relay_1"
    signer = key(5).speaking_for(did)
    first = build_document(did, [VerificationMethod(method_id(did), key(6).public_key, T)], created_at=T)
    made = KeyChain.genesis(did, static_key=key(5).public_key)
    made = made.apply(packets.build(signer, document_content(first), timestamp=T), T)
    assert made.candidates(T) == (key(6).public_key,)
    assert len({state.key_id for state in made.keys(T)}) == 2


@pytest.mark.req("R-054")
@pytest.mark.parametrize("same_second", [True, False])
def test_two_successors_of_one_document_and_no_key_resolves(same_second):
    one, two = (publish(0, succeed(GENESIS, method(0), created_at=T + n)) for n in (1, 2))
    made = chain((publish(0, GENESIS), T), (one, T + 1), (two, T + 1 if same_second else T + 2))
    assert made.conflict is not None
    assert GENESIS.hash in made.conflict
    assert made.head is None
    assert len(made.documents) == 3
    assert len(made.events) == 3
    assert not made.candidates(T + 3)
    assert refused(made, post(0), T + 3) == ("invalid_signature", "document_conflict")
    assert refused(made, add(0, 2), T + 3) == ("invalid_signature", "document_conflict")
    with pytest.raises(InvalidPacket) as refusal:
        made.verify_auth(b"c", key(0).sign(b"c"), T + 3)
    assert refusal.value.detail == "document_conflict"
    made.verify(post(0), T, ingest=False)  # before the conflict


@pytest.mark.req("R-054")
def test_configured_documents_that_fork_resolve_no_key():
    one, two = (succeed(GENESIS, method(0), created_at=T + n) for n in (1, 2))
    for known in ([GENESIS, one, two], [one, two], [GENESIS, document(method(0), created_at=T + 7)]):
        made = chain(documents=known)
        assert made.conflict
        assert set(made.documents) == set(known)
        assert refused(made, post(0), T) == ("invalid_signature", "document_conflict")


@pytest.mark.req("R-054")
def test_a_published_document_can_conflict_with_a_configured_one():
    one, two = (succeed(GENESIS, method(0), created_at=T + n) for n in (1, 2))
    made = chain((publish(0, two), T), documents=[one])  # the operator did not configure its predecessor
    assert made.conflict


@pytest.mark.req("R-053")
def test_configured_documents_are_put_in_order_by_their_links():
    second = succeed(GENESIS, method(0), method(2), created_at=T + 1)  # an operator may introduce keys
    third = succeed(second, method(0), method(2, valid_until=T + DAY), created_at=T + 2)
    for known in permutations([GENESIS, second, third]):
        made = chain(documents=known)
        assert made.documents == (GENESIS, second, third)
        assert alive(made, T) == {0, 2}


def test_a_configured_document_may_extend_a_window_but_not_undo_a_revocation():
    first = document(method(0), method(1, valid_until=T), method(2, revoked_at=T))
    second = succeed(first, method(0), method(1, valid_until=T + DAY), method(2))
    assert alive(chain(documents=[first, second]), T + DAY) == {0, 1}


def test_a_configured_document_of_somebody_else_is_an_error():
    with pytest.raises(InvalidPacket, match="another DID"):
        KeyChain.genesis("did:strata:bob", documents=[GENESIS])


def test_no_recovery_keys_are_left_over_by_a_document_without_them():
    made = chain((publish(0, with_recovery()), T))
    made = made.apply(publish(0, succeed(made.head, method(0))), T + 1)
    assert refused(made, rotate(11, 0, 2), T + 2) == ("invalid_signature", "key_use_not_allowed")


@pytest.mark.req("R-074")
def test_a_key_added_in_the_second_of_a_document_is_not_silenced_by_it():
    """It does not matter which of the two has the smaller id or came first."""
    for number in range(8):
        published = sign(0, {**document_content(document(method(0))), "note": number})
        for events in permutations([(published, T), (add(0, 1), T)]):
            made = KeyChain.replay(published.author_id, events)
            assert alive(made, T) == {0, 1}
