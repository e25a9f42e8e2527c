"""What a newer document does to known keys: it sets their roles; their windows can only shrink."""

from __future__ import annotations

from typing import Any

import pytest
from strata.protocol.documents import DidDocument, VerificationMethod, key_multibase
from strata.protocol.keys.roles import earlier, under_document
from strata.protocol.keys.states import KeyState

from tests.support.alice import ALICE, T, document, key, key_id, method


def listing(*methods: VerificationMethod, **members: Any) -> DidDocument:
    """A document with the DID's own key and these methods."""
    return document(method(0), *methods, **members)


def states(*methods: VerificationMethod) -> dict[bytes, KeyState]:
    return under_document({}, listing(*methods), introduced_by="first")


def only(keys: dict[bytes, KeyState], n: int = 1) -> KeyState:
    return keys[key(n).public_key]


@pytest.mark.parametrize(
    ("name", "known", "newer", "expected"),
    [
        ("valid_from", T, T - 9, T),
        ("valid_from", T, T + 9, T + 9),
        ("valid_until", T + 5, T + 9, T + 5),
        ("valid_until", T + 9, T + 5, T + 5),
        ("valid_until", T + 5, None, T + 5),
        ("valid_until", None, T + 5, T + 5),
        ("revoked_at", T + 5, None, T + 5),
        ("revoked_at", T + 5, T + 9, T + 5),
        ("revoked_at", None, T + 9, T + 9),
    ],
)
def test_the_window_of_a_known_key_only_shrinks(name, known, newer, expected):
    keys = states(method(1, **{name: known}))
    merged = only(under_document(keys, listing(method(1, **{name: newer})), introduced_by="second"))
    assert getattr(merged, name) == expected
    assert merged.introduced_by == "first"


def test_where_an_operator_vouches_only_a_revocation_is_not_taken_back():
    keys = states(method(1, valid_from=T, valid_until=T + 5, revoked_at=T + 5))
    newer = listing(method(1, valid_from=T - 9, valid_until=T + 9, revoked_at=T + 9))
    merged = only(under_document(keys, newer, introduced_by=None))
    assert (merged.valid_from, merged.valid_until, merged.revoked_at) == (T - 9, T + 9, T + 5)


@pytest.mark.req("R-061")
def test_the_part_of_a_known_key_is_the_documents():
    keys = states(method(1))
    assert only(keys).authentication and only(keys).assertion and not only(keys).recovery
    parts = {"authentication": [key_id(0)], "assertion": [key_id(1)]}
    listed = listing(method(1, custody="hardware"), **parts)
    merged = only(under_document(keys, listed, introduced_by="second"))
    assert (merged.authentication, merged.assertion, merged.recovery) == (False, True, False)
    assert merged.custody == "hardware"
    recovering = only(under_document(keys, listing(method(1, recovery=True)), introduced_by="second"))
    assert (recovering.authentication, recovering.assertion, recovering.recovery) == (False, False, True)


@pytest.mark.req("R-061")
def test_a_key_that_is_listed_no_more_has_no_part_and_keeps_its_window():
    keys = states(method(1, valid_until=T + 5), method(2, recovery=True))
    after = under_document(keys, listing(), introduced_by="second")
    for n in (1, 2):
        left = only(after, n)
        assert (left.authentication, left.assertion, left.recovery) == (False, False, False)
        assert left.key_id == key_id(n)
    assert only(after).valid_until == T + 5
    assert list(after) == [key(n).public_key for n in range(3)]


def test_a_key_whose_id_another_one_has_now_goes_by_its_spelling():
    keys = states(method(1))
    other = method(2)
    renamed = listing(type(other)(key_id(1), other.public_key, other.valid_from))
    after = under_document(keys, renamed, introduced_by="second")
    assert only(after, 2).key_id == key_id(1)
    assert only(after).key_id == f"{ALICE}#{key_multibase(key(1).public_key)}"


@pytest.mark.parametrize(
    ("one", "other", "expected"), [(None, None, None), (1, None, 1), (None, 2, 2), (2, 1, 1), (0, 5, 0)]
)
def test_the_earlier_of_two_ends(one, other, expected):
    assert earlier(one, other) == earlier(other, one) == expected
