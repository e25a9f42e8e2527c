"""DID Documents: reading, consistency checks, hashing and writing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import canonical, packets
from strata.protocol.documents import (
    MAX_DOCUMENT_BYTES,
    DidDocument,
    RecoveryPolicy,
    VerificationMethod,
    build_document,
    document_hash,
    implicit_genesis,
    is_document_hash,
    key_multibase,
    method_id,
    spelled_key,
)
from strata.protocol.errors import InvalidPacket
from strata.protocol.ids import Identity, base58_encode
from strata.protocol.keys.statements import PublishedDocument, read_statement

AUTHOR = Identity.from_seed(bytes(range(32)))
DID = AUTHOR.did
OTHER = Identity.from_seed(bytes(range(1, 33)))
# relay.md §4, whose hash is vector V3.
EXAMPLE: dict[str, Any] = {
    "id": DID,
    "verification_method": [
        {
            "id": f"{DID}#keys-1",
            "type": "Ed25519VerificationKey2020",
            "controller": DID,
            "public_key_hex": f"0x{AUTHOR.public_key.hex()}",
            "public_key_multibase": DID.removeprefix("did:strata:"),
            "valid_from": 1_750_000_000,
            "valid_until": 0,
        }
    ],
    "authentication": [f"{DID}#keys-1"],
    "assertion": [f"{DID}#keys-1"],
    "created_at": 1_750_000_000,
    "prev_did_doc_hash": None,
}
EXAMPLE_HASH = "zgWAf4CTqgaAQMirshrTa7m7XbwbmRavZoufDw7GcVRpE4H"


def read(value: Any) -> DidDocument:
    return DidDocument.parse(json.dumps(value).encode())


def with_method(**members: Any) -> dict[str, Any]:
    method = {name: m for name, m in (EXAMPLE["verification_method"][0] | members).items() if m != "absent"}
    return EXAMPLE | {"verification_method": [method]}


@pytest.mark.req("R-052")
def test_the_hash_is_that_of_the_vector():
    document = read(EXAMPLE)
    assert len(document.canonical) == 699
    assert document.hash == document_hash(document.canonical) == EXAMPLE_HASH


def test_what_a_document_says():
    document = read(EXAMPLE)
    assert (document.did, document.created_at, document.prev_hash) == (DID, 1_750_000_000, None)
    assert document.methods == (VerificationMethod(f"{DID}#keys-1", AUTHOR.public_key, 1_750_000_000),)
    assert document.authentication == document.assertion == (f"{DID}#keys-1",)
    assert document.recovery_policy is None
    assert document.value == EXAMPLE
    assert document == DidDocument.from_value(EXAMPLE)
    assert len({document, DidDocument.from_value(EXAMPLE)}) == 1
    assert document != EXAMPLE
    assert EXAMPLE_HASH in repr(document)


def test_the_document_of_a_packet_is_read_from_its_text(monkeypatch):
    packet = packets.build(AUTHOR, {"type": "DID_DOCUMENT", "document": EXAMPLE}, timestamp=1_760_000_000)
    # Encoding it would take as long as parsing the packet, and strangers publish long chains of them.
    monkeypatch.setattr(canonical, "encode", None)
    document = DidDocument.in_packet(EXAMPLE, packet.canonical)
    assert document.hash == EXAMPLE_HASH and read_statement(packet) == PublishedDocument(document)


@pytest.mark.req("R-049")
@pytest.mark.parametrize("methods", [None, [], {}, "all"])
def test_a_document_lists_a_method(methods):
    with pytest.raises(InvalidPacket, match="verification_method"):
        read(EXAMPLE | {"verification_method": methods})


@pytest.mark.req("R-049")
@pytest.mark.parametrize("valid_from", ["absent", None, "1750000000", 1.5, -1, True])
def test_every_method_says_from_when_it_is_valid(valid_from):
    with pytest.raises(InvalidPacket, match="valid_from"):
        read(with_method(valid_from=valid_from))


@pytest.mark.req("R-050")
def test_a_method_may_end_and_0_null_and_absence_are_an_open_end():
    assert read(with_method(valid_until=1_760_000_000)).methods[0].valid_until == 1_760_000_000
    for open_end in (0, None, "absent"):
        assert read(with_method(valid_until=open_end)).methods[0].valid_until is None
    method = VerificationMethod(method_id(DID), AUTHOR.public_key, 5, valid_until=9)
    assert build_document(DID, [method], created_at=5).methods == (method,)


VIOLATIONS = {
    "no object": [],
    "no id": EXAMPLE | {"id": None},
    "an id that is no DID": EXAMPLE | {"id": "alice"},
    "a method of another DID": with_method(id=f"{OTHER.did}#keys-1"),
    "a method id without a name": with_method(id=f"{DID}#"),
    "a method id that spells another key": with_method(id=f"{DID}#{key_multibase(OTHER.public_key)}"),
    "a controller that is somebody else": with_method(controller=OTHER.did),
    "no controller": with_method(controller="absent"),
    "a type unknown": with_method(type="JsonWebKey2020"),
    "a short key": with_method(public_key_hex="0x00", public_key_multibase="absent"),
    "spellings that differ": with_method(public_key_hex=f"0x{OTHER.public_key.hex()}"),
    "no key": with_method(public_key_hex="absent", public_key_multibase="absent"),
    "a codec unknown": with_method(
        public_key_hex="absent", public_key_multibase="z" + base58_encode(b"\xe7\x01" + bytes(33))
    ),
    "not the DID's own key": with_method(
        public_key_hex=f"0x{OTHER.public_key.hex()}", public_key_multibase=key_multibase(OTHER.public_key)
    ),
    "a method that is no object": EXAMPLE | {"verification_method": ["keys-1"]},
    "one id twice": EXAMPLE | {"verification_method": EXAMPLE["verification_method"] * 2},
    "roles that are no array": EXAMPLE | {"assertion": f"{DID}#keys-1"},
    "a role for another DID's key": EXAMPLE | {"authentication": [f"{OTHER.did}#keys-1"]},
    "no created_at": EXAMPLE | {"created_at": None},
    "a predecessor in hex": EXAMPLE | {"prev_did_doc_hash": "0x" + "00" * 32},
    "a predecessor without its multihash": EXAMPLE | {"prev_did_doc_hash": "z" + base58_encode(bytes(32))},
    "a predecessor by SHA-256": EXAMPLE | {"prev_did_doc_hash": "z" + base58_encode(b"\x12\x20" + bytes(32))},
    "too much of it": EXAMPLE | {"note": "x" * MAX_DOCUMENT_BYTES},
}


@pytest.mark.req("R-051", "R-059")
@pytest.mark.parametrize("value", VIOLATIONS.values(), ids=VIOLATIONS)
def test_a_document_that_does_not_hold_together_is_refused(value):
    with pytest.raises(InvalidPacket) as refusal:
        read(value)
    assert refusal.value.code == "invalid_schema"


@pytest.mark.req("R-052")
def test_a_hash_has_one_form():
    assert is_document_hash(EXAMPLE_HASH)
    sha256 = "z" + base58_encode(b"\x12\x20" + bytes(range(32)))
    others = "", "z", EXAMPLE_HASH[1:], "0x" + "00" * 32, EXAMPLE_HASH + "1" * 40, "z" + "0" * 46
    for text in (*others, sha256):
        assert not is_document_hash(text)


def test_documents_link_by_hash():
    first = read(EXAMPLE)
    second = build_document(DID, first.methods, created_at=9, previous=first)
    assert second.prev_hash == EXAMPLE_HASH
    assert second.value["prev_did_doc_hash"] == EXAMPLE_HASH


@pytest.mark.req("R-061")
def test_a_role_is_given_by_id_or_by_the_key_it_spells():
    spelled = f"{DID}#{key_multibase(AUTHOR.public_key)}"
    for listed, expected in ((None, True), ([], False), ([spelled], True), ([f"{DID}#other"], False)):
        document = read(EXAMPLE | {"assertion": listed})
        assert document.may_assert(document.methods[0]) is expected
        assert document.may_authenticate(document.methods[0])


@pytest.mark.req("R-080")
def test_a_recovery_key_has_no_other_part():
    document = read(with_method(usage="recovery"))
    assert document.methods[0].recovery
    assert not document.may_assert(document.methods[0])
    assert not document.may_authenticate(document.methods[0])


@pytest.mark.req("R-091")
def test_custody_is_one_of_four_words():
    for custody in ("hardware", "wrapped", "software", "unknown"):
        assert read(with_method(custody=custody)).methods[0].custody == custody
    assert read(with_method(custody="pocket")).methods[0].custody == "unknown"


@pytest.mark.req("R-085")
@pytest.mark.parametrize(
    ("policy", "read_as"),
    [
        ({"threshold": 2}, RecoveryPolicy(2)),
        ({"threshold": 2.0, "key_ids": None}, RecoveryPolicy(2)),
        ({"threshold": 1, "key_ids": ["a"]}, RecoveryPolicy(1, ("a",))),
        ({"threshold": "2"}, RecoveryPolicy(None)),
        ({"threshold": True}, RecoveryPolicy(None)),
        ({"threshold": 1, "key_ids": [1]}, RecoveryPolicy(None)),
        ([], RecoveryPolicy(None)),
    ],
)
def test_a_policy_without_sense_is_kept_as_one(policy, read_as):
    assert read(EXAMPLE | {"recovery_policy": policy}).recovery_policy == read_as


@pytest.mark.req("R-060")
def test_the_implicit_document_of_a_did():
    document = implicit_genesis(DID)
    assert document is not None
    (method,) = document.methods
    assert (method.key_id, method.public_key, method.valid_from, method.valid_until) == (
        f"{DID}#keys-1",
        AUTHOR.public_key,
        0,
        None,
    )
    assert document.may_assert(method)
    assert document.may_authenticate(method)
    assert implicit_genesis("did:strata:relay_1") is None
    named = implicit_genesis("did:strata:relay_1", AUTHOR.public_key)
    assert named is not None
    assert named.methods[0].public_key == AUTHOR.public_key


def test_a_key_id_may_spell_its_key():
    assert spelled_key(f"{DID}#{key_multibase(OTHER.public_key)}") == OTHER.public_key
    for other in (f"{DID}#keys-1", DID, f"{DID}#z6Mk", f"{DID}#" + "z" * 5000):
        assert spelled_key(other) is None


METHODS = st.builds(
    VerificationMethod,
    key_id=st.just(""),
    public_key=st.just(b""),
    valid_from=st.integers(0, 2**53 - 1),
    valid_until=st.none() | st.integers(1, 2**53 - 1),
    revoked_at=st.none() | st.integers(0, 2**53 - 1),
    recovery=st.booleans(),
    custody=st.sampled_from(["hardware", "wrapped", "software", "unknown"]),
)


@given(st.lists(METHODS, min_size=1, max_size=4), st.none() | st.integers(-1, 5), st.booleans())
def test_what_is_built_reads_back(drawn, threshold, lists_roles):
    keys = [AUTHOR, *(Identity.from_seed(bytes([n]) * 32) for n in range(3))]
    methods = [
        VerificationMethod(
            method_id(DID, f"keys-{n}"),
            identity.public_key,
            m.valid_from,
            m.valid_until,
            m.revoked_at,
            m.recovery,
            m.custody,
        )
        for n, (m, identity) in enumerate(zip(drawn, keys, strict=False))
    ]
    policy = None if threshold is None else RecoveryPolicy(threshold, (methods[0].key_id,))
    roles = [m.key_id for m in methods] if lists_roles else None
    document = build_document(
        DID,
        methods,
        created_at=1,
        authentication=roles,
        assertion=roles,
        recovery_policy=policy,
        extra={"service": []},
    )
    assert document.methods == tuple(methods)
    assert document.recovery_policy == policy
    assert document.authentication == (None if roles is None else tuple(roles))
    assert document.value["service"] == []
    assert DidDocument.parse(document.canonical) == document
    assert canonical.canonicalize(document.canonical) == document.canonical


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3),
    ),
    st.sampled_from([*EXAMPLE, *EXAMPLE["verification_method"][0]]),
)
def test_no_document_makes_the_reader_stumble(junk, name):
    for value in (EXAMPLE | {name: junk}, with_method(**{name: junk}), junk):
        try:
            read(value)
        except InvalidPacket as refusal:
            assert refusal.code == "invalid_schema"
