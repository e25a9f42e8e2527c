"""Identities: DIDs in both directions, key files, and pinned verdicts on edge-case Ed25519 signatures."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import canonical, ids
from strata.protocol.errors import IdentityError

VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text("utf-8"))
SEED = bytes(range(32))
posix = pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")


# --- DIDs ---------------------------------------------------------------------------------------------------


@pytest.mark.req("R-044", "R-045", "R-060")
@pytest.mark.parametrize("vector", VECTORS["keys"], ids=lambda vector: vector["did"])
def test_keys_of_vector_v0(vector: dict[str, str]) -> None:
    identity = ids.Identity.from_seed(bytes.fromhex(vector["seed"]))
    assert identity.did == vector["did"]
    assert ids.did_from_public_key(identity.public_key) == vector["did"]
    assert ids.public_key_from_did(vector["did"]) == identity.public_key
    if "public_key" in vector:
        assert identity.public_key.hex() == vector["public_key"]


@pytest.mark.req("R-046")
def test_the_bare_key_form_is_read_and_never_written() -> None:
    vector = VECTORS["keys"][0]
    key = bytes.fromhex(vector["public_key"])
    assert ids.public_key_from_did(vector["bare_did"]) == key
    assert vector["bare_did"] == "did:strata:z" + ids.base58_encode(key)
    assert ids.did_from_public_key(key) != vector["bare_did"]


@pytest.mark.req("R-044", "R-045")
@given(st.binary(min_size=32, max_size=32))
def test_a_self_certifying_did_gives_its_key_back(key: bytes) -> None:
    did = ids.did_from_public_key(key)
    assert did.startswith("did:strata:z6Mk")
    assert ids.is_did(did)
    assert ids.public_key_from_did(did) == key
    assert ids.public_key_from_did("did:strata:z" + ids.base58_encode(key)) == key


@pytest.mark.req("R-047", "R-048", "R-059")
@pytest.mark.parametrize(
    "did",
    [
        "did:strata:relay_1",
        "did:strata:alice",
        "did:strata:z",
        "did:strata:zebra",
        "did:strata:z0OIl",
        "did:device:abc-1.2",
        "did:ngo:one:two",
        "did:key:z6MkehRgf7yJbgaGfYsdoAsKdBPE3dj2CYhowQdcjqSJgvVd",
        "did:web:example.com%3A3000",
        "did:strata:z" + ids.base58_encode(b"\xe7\x01" + bytes(32)),  # secp256k1
        "did:strata:z" + ids.base58_encode(b"\xed\x01" + bytes(31)),
        "did:strata:z" + ids.base58_encode(b"\xed\x01" + bytes(33)),
        "did:strata:z" + ids.base58_encode(b"\x01" * 31),
        "did:strata:z" + ids.base58_encode(b"\x01" * 33),
        "did:strata:z" + "1" * 900,
        "did:strata:Z6MkehRgf7yJbgaGfYsdoAsKdBPE3dj2CYhowQdcjqSJgvVd",
    ],
)
def test_other_dids_carry_no_key(did: str) -> None:
    assert ids.is_did(did)
    assert ids.public_key_from_did(did) is None


@pytest.mark.req("R-044")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "alice",
        "did",
        "did:strata",
        "did:strata:",
        "did::alice",
        "did:Strata:alice",
        "DID:strata:alice",
        "did:strata:alice:",
        "did:strata:alice#keys-1",
        "did:strata:alice/path",
        "did:strata:alice?query",
        "did:strata:al ice",
        "did:strata:alice\n",
        "did:strata:alice\x00",
        "did:strata:älice",
        "did:strata:50%",
        "did:strata:5%0g",
        "did:strata:" + "a" * 1014,
    ],
)
def test_what_is_no_did(text: str) -> None:
    assert not ids.is_did(text)
    with pytest.raises(IdentityError):
        ids.public_key_from_did(text)


def test_the_longest_did() -> None:
    assert ids.is_did("did:strata:" + "a" * (ids.MAX_DID_CHARACTERS - 11))


def test_remembered_dids_are_bounded_in_number_and_in_length() -> None:
    for cached in (ids._has_form, ids.public_key_from_did):
        assert cached.cache_info().maxsize is not None
        before = cached.cache_info().currsize
        for number in range(5):
            text = f"did:x:{number}" + "a" * ids.MAX_DID_CHARACTERS
            assert not ids.is_did(text)
            with pytest.raises(IdentityError):
                ids.public_key_from_did(text)
        assert cached.cache_info().currsize == before


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_keys_and_seeds_of_wrong_length_are_refused(length: int) -> None:
    with pytest.raises(IdentityError):
        ids.Identity.from_seed(bytes(length))
    with pytest.raises(IdentityError):
        ids.did_from_public_key(bytes(length))


# --- base58 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        (b"\x00", "1"),
        (b"\x00\x00a", "112g"),
        (b"hello world", "StV1DL6CwTryKyV"),
        (b"\xff", "5Q"),
        (bytes.fromhex("000111d38e5fc9071ffcd20b4a763cc9ae4f252bb4e48fd66a835e252ada93ff480d6dd43dc62a641155a5"),
         "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"),
    ],
)  # fmt: skip
def test_base58_of_known_values(data: bytes, text: str) -> None:
    assert ids.base58_encode(data) == text
    assert ids.base58_decode(text) == data


@given(st.binary(max_size=64))
def test_base58_gives_the_bytes_back(data: bytes) -> None:
    assert ids.base58_decode(ids.base58_encode(data)) == data


@given(st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz", max_size=64))
def test_base58_has_one_text_for_each_value(text: str) -> None:
    # Otherwise two DIDs of one form could name the same key.
    assert ids.base58_encode(ids.base58_decode(text)) == text


@pytest.mark.parametrize("text", ["0", "O", "I", "l", "a b", "ä", "z\n"])
def test_foreign_characters_are_not_base58(text: str) -> None:
    with pytest.raises(IdentityError):
        ids.base58_decode(text)


# --- Signatures ---------------------------------------------------------------------------------------------


@pytest.mark.req("R-025")
@pytest.mark.parametrize("vector", VECTORS["ed25519"], ids=lambda vector: vector["name"])
def test_pinned_verdicts(vector: dict[str, Any]) -> None:
    key, message, signature = (bytes.fromhex(vector[name]) for name in ("public_key", "message", "signature"))
    assert ids.verify(key, message, signature) is vector["valid"]


@pytest.mark.req("R-025")
def test_only_honest_signatures_and_one_tolerated_key_are_pinned_as_valid() -> None:
    # A key of mixed order belongs to the one who made it and forges nothing; RFC 8032 allows it.
    assert [vector["name"] for vector in VECTORS["ed25519"] if vector["valid"]] == [
        "an honest signature",
        "an honest signature of the empty message",
        "key of mixed order 8L; the equation holds",
    ]


@pytest.mark.req("R-025")
def test_wrong_lengths_do_not_verify() -> None:
    identity = ids.Identity.from_seed(SEED)
    signature = identity.sign(b"message")
    assert ids.verify(identity.public_key, b"message", signature)
    for key in (b"", identity.public_key[:31], identity.public_key + b"\x00"):
        assert not ids.verify(key, b"message", signature)
    for wrong in (b"", signature[:63], signature + b"\x00", signature + b"message"):
        assert not ids.verify(identity.public_key, b"message", wrong)
    assert not ids.verify(identity.public_key, b"essage", signature + b"m")


@pytest.mark.req("R-023")
@pytest.mark.parametrize(
    "vector", VECTORS["messages"] + VECTORS["objects"], ids=lambda vector: vector["name"]
)
def test_signatures_of_vectors_v2_and_v6(vector: dict[str, Any]) -> None:
    message = vector["message"].encode() if "message" in vector else canonical.encode(vector["value"])
    assert "0x" + ids.Identity.from_seed(SEED).sign(message).hex() == vector["signature"]


@pytest.mark.req("R-025")
@given(st.binary(max_size=100), st.integers(0, 511), st.integers(0, 255))
def test_one_flipped_bit_is_noticed(message: bytes, signature_bit: int, key_bit: int) -> None:
    identity = ids.Identity.from_seed(SEED)
    signature = identity.sign(message)
    assert ids.verify(identity.public_key, message, signature)
    assert not ids.verify(identity.public_key, message, flip(signature, signature_bit))
    assert not ids.verify(flip(identity.public_key, key_bit), message, signature)
    if message:
        assert not ids.verify(
            identity.public_key, flip(message, signature_bit % (8 * len(message))), signature
        )


def flip(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


# --- Keys ---------------------------------------------------------------------------------------------------


@pytest.mark.req("R-090")
def test_an_identity_does_not_show_its_seed() -> None:
    identity = ids.Identity.generate()
    for text in (repr(identity), str(identity), f"{identity}", repr([identity])):
        assert identity.did in text
        assert identity.seed.hex() not in text
        assert repr(identity.seed) not in text
    assert not hasattr(identity, "__dict__")
    for copier in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="save"):
            copier(identity)


@pytest.mark.req("R-090")
def test_generated_identities_differ() -> None:
    assert len({ids.Identity.generate().did for _ in range(16)}) == 16


@pytest.mark.req("R-091")
def test_an_identity_says_where_its_key_is_kept() -> None:
    assert ids.Identity.from_seed(SEED).custody == "software"


def test_a_key_file_gives_the_identity_back(tmp_path: Path) -> None:
    identity = ids.Identity.generate()
    path = tmp_path / "key.json"
    identity.save(path)
    assert ids.Identity.load(path).seed == identity.seed
    assert ids.Identity.load(str(path)).did == identity.did


@posix
def test_a_key_file_is_its_owner_s_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ids.Identity.generate().save(tmp_path / "key.json")
    finally:
        os.umask(before)
    assert (tmp_path / "key.json").stat().st_mode & 0o777 == 0o600


def test_a_key_file_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    first = ids.Identity.generate()
    first.save(path)
    with pytest.raises(FileExistsError):
        ids.Identity.generate().save(path)
    assert ids.Identity.load(path).seed == first.seed


@posix
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o777])
def test_a_key_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key.json"
    identity = ids.Identity.generate()
    identity.save(path)
    path.chmod(mode)
    with pytest.raises(IdentityError, match="chmod 600") as caught:
        ids.Identity.load(path)
    assert str(path) in str(caught.value)
    path.chmod(0o600)
    assert ids.Identity.load(path).did == identity.did


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "{}",
        "null",
        '{"did":"did:strata:x"}',
        '{"seed":"0x00","did":"did:strata:x"}',
        '{"seed":7,"did":"did:strata:x"}',
        '{"seed":"0xzz","did":"did:strata:x"}',
        '{"seed":"%s","did":"did:strata:x"}' % ("00" * 32),
        '{"seed":"0x%s","did":"did:strata:x"}' % ("5a" * 32),
        "[" * 4000,
    ],
)
def test_what_is_no_key_file_is_refused_without_quoting_it(tmp_path: Path, body: str) -> None:
    path = tmp_path / "key.json"
    path.write_text(body)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match="not a key file") as caught:
        ids.Identity.load(path)
    assert "5a5a" not in str(caught.value)


def test_half_a_key_file_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        ids.Identity.generate().save(tmp_path / "key.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.req("R-026")
def test_a_method_s_key_is_read_from_either_spelling_and_both_must_agree():
    one, other = (ids.Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
    text, multibase = "0x" + one.public_key.hex(), one.did.removeprefix("did:strata:")
    assert ids.public_key_from_method(text, None) == one.public_key
    assert ids.public_key_from_method(text.upper().replace("0X", "0x"), multibase) == one.public_key
    assert ids.public_key_from_method(None, multibase) == one.public_key
    bare = "z" + ids.base58_encode(one.public_key)  # a DID may be spelled this way, a method may not
    for hexadecimal, base58 in [
        (None, None),
        ("0x" + other.public_key.hex(), multibase),
        (text[2:], None),
        (text + "00", None),
        (None, bare),
        (None, "alice"),
    ]:
        with pytest.raises(IdentityError):
            ids.public_key_from_method(hexadecimal, base58)


def test_a_key_speaks_for_another_did_and_its_file_says_so(tmp_path: Path) -> None:
    """Rotation gives a DID new keys, so the key in a file is not always the key in the DID."""
    first, second = (ids.Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
    rotated = second.speaking_for(first.did)
    assert (rotated.did, rotated.public_key, rotated.seed) == (first.did, second.public_key, second.seed)
    assert ids.verify(second.public_key, b"message", rotated.sign(b"message"))
    rotated.save(tmp_path / "key.json")
    loaded = ids.Identity.load(tmp_path / "key.json")
    assert (loaded.did, loaded.seed) == (first.did, second.seed)
    assert second.speaking_for(second.did).did == second.did
    with pytest.raises(IdentityError):
        second.speaking_for("alice")


@pytest.mark.parametrize(
    "damage", [{"seed": "0x" + "00" * 32}, {"key": "did:strata:x"}, {"did": "alice"}, {"did": 7}]
)
def test_a_damaged_file_of_such_a_key_is_noticed(tmp_path: Path, damage: dict[str, object]) -> None:
    first, second = (ids.Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
    path = tmp_path / "key.json"
    second.speaking_for(first.did).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(IdentityError, match="not a key file"):
        ids.Identity.load(path)


def test_without_its_check_a_key_speaks_for_nobody_else(tmp_path: Path) -> None:
    first, second = (ids.Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
    path = tmp_path / "key.json"
    second.speaking_for(first.did).save(path)
    members = json.loads(path.read_text())
    del members["key"]
    path.write_text(json.dumps(members))
    with pytest.raises(IdentityError, match="not a key file"):
        ids.Identity.load(path)
