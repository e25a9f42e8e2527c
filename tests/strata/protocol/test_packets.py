"""Packets: the vectors, each schema rule broken in turn, the order of checks, and what the builder writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import assume, example, given
from hypothesis import strategies as st
from strata.protocol import canonical, ids, packets
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.packets import Packet

VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text("utf-8"))
AUTHOR = ids.Identity.from_seed(bytes(range(32)))
NOW = 1_760_000_000
HASH = "0x" + "ab" * 32
ABSENT = object()

Json = dict[str, Any]


def sealed(value: Json, signer: ids.Identity = AUTHOR) -> bytes:
    """The canonical bytes of a packet with a matching id and signature, whatever its schema."""
    body = {name: member for name, member in value.items() if name not in ("packet_id", "signature")}
    signed = canonical.encode(body)
    proof = {"packet_id": packets.byte_hash(signed), "signature": f"0x{signer.sign(signed).hex()}"}
    return canonical.encode(body | proof)


def valid(**changes: Any) -> Json:
    """The members of a valid packet with these changes; `content__member` names a member of `content`."""
    value: Json = {"version": 1, "timestamp": NOW, "author_id": AUTHOR.did, "content": {"type": "POST"}}
    for path, member in changes.items():
        *parents, name = path.split("__")
        target = value
        for parent in parents:
            target = target[parent]
        if member is ABSENT:
            del target[name]
        else:
            target[name] = member
    return value


def refusal(raw: bytes, **options: Any) -> InvalidPacket:
    with pytest.raises(InvalidPacket) as caught:
        Packet.parse(raw, **options)
    return caught.value


def built(content: Mapping[str, Any] | None = None, **options: Any) -> Packet:
    return packets.build(AUTHOR, content or {"type": "POST"}, **{"timestamp": NOW, **options})


# --- Vectors ------------------------------------------------------------------------------------------------


@pytest.mark.req("R-022", "R-023", "R-024", "R-009", "R-043", "R-117")
@pytest.mark.parametrize("vector", VECTORS["packets"], ids=lambda vector: vector["name"])
def test_packets_of_vectors_v1_v1b_and_v5(vector: Json) -> None:
    options = {name: vector[name] for name in ("timestamp", "nonce", "provenance_header") if name in vector}
    packet = packets.build(AUTHOR, vector["content"], **options)
    assert packet.packet_id == vector["packet_id"]
    assert packet.signature == vector["signature"]
    assert packet.size_bytes == vector.get("size_bytes", packet.size_bytes)
    assert len(packet.signed_bytes) == vector.get("signed_bytes", len(packet.signed_bytes))
    packet.verify()


@pytest.mark.req("R-009", "R-022")
def test_vector_v1_arrives_in_any_spelling() -> None:
    vector = VECTORS["packets"][0]
    value = valid(content__text="hello relay", packet_id=vector["packet_id"], signature=vector["signature"])
    compact = canonical.encode(value)
    for raw in (
        compact,
        json.dumps(value, indent=3).encode(),
        json.dumps(dict(reversed(value.items()))).encode(),
        compact.replace(b"hello", b"\\u0068ello"),
        compact.replace(b"1760000000", b"1.76e9"),
    ):
        packet = Packet.parse(raw)
        assert packet.canonical == compact
        assert packet.timestamp == NOW
        packet.verify()


@pytest.mark.req("R-018")
@pytest.mark.parametrize("vector", VECTORS["byte_hashes"], ids=lambda vector: repr(vector["text"]))
def test_byte_hashes_of_vector_v4(vector: Json) -> None:
    assert packets.byte_hash(vector["text"].encode()) == vector["hash"]


@pytest.mark.req("R-009", "R-052")
def test_did_document_hash_of_vector_v3() -> None:
    document = VECTORS["did_document"]
    text = canonical.encode(document["value"])
    assert len(text) == document["size_bytes"]
    assert "z" + ids.base58_encode(b"\x1e\x20" + blake3(text).digest()) == document["did_doc_hash"]


# --- The view -----------------------------------------------------------------------------------------------


def test_the_members_of_a_packet() -> None:
    media = [{"media_hash": HASH, "media_type": "image/png", "size_bytes": 5, "media_uris": ["ipfs://x"]}]
    packet = built({"type": "POST", "media": media}, expires_at=NOW + 60, nonce="n")
    assert packet.version == 1
    assert packet.timestamp == NOW
    assert packet.author_id == AUTHOR.did
    assert packet.content_type == "POST"
    assert packet.content == {"type": "POST", "media": media}
    assert packet.expires_at == NOW + 60
    assert packet.nonce == "n"
    assert packet.media_hashes == (HASH,)
    assert packet.digest.hex() == packet.packet_id[2:]
    assert packet.signature_bytes.hex() == packet.signature[2:]
    assert packet.value == json.loads(packet.canonical)
    assert packet.size_bytes == len(packet.canonical)
    assert built().media_hashes == ()
    assert built().expires_at is None
    assert built().nonce is None


@pytest.mark.req("R-022", "R-005")
def test_signed_bytes_are_everything_but_id_and_signature() -> None:
    # Nested members with these names are kept.
    inner = {"packet_id": HASH, "signature": "0x00", "type": "POST"}
    packet = built(inner, extra={"zzz": {"packet_id": 1}, "aaa": [1.5, 1e-9]})
    value = json.loads(packet.canonical)
    del value["packet_id"], value["signature"]
    assert packet.signed_bytes == canonical.encode(value)
    packet.verify()


@pytest.mark.req("R-016")
def test_a_packet_is_read_from_any_buffer() -> None:
    packet = built()
    buffers: list[Any] = [
        bytearray(packet.canonical),
        memoryview(packet.canonical),
        msgspec.Raw(packet.canonical),
    ]
    for raw in buffers:
        parsed = Packet.parse(raw)
        assert parsed == packet
        assert type(parsed.canonical) is bytes


def test_equality_follows_the_bytes() -> None:
    packet, same, other = built(), built(), built(nonce="n")
    assert packet == same
    assert hash(packet) == hash(same)
    assert packet != other
    assert packet != packet.canonical
    shouted = Packet.parse(
        packet.canonical.replace(packet.signature.encode(), b"0x" + packet.signature[2:].upper().encode())
    )
    assert shouted.packet_id == packet.packet_id
    assert shouted != packet


@pytest.mark.req("R-328")
def test_repr_shows_neither_payload_nor_signature() -> None:
    packet = built({"type": "POST", "text": "secret plan"})
    assert packet.packet_id in repr(packet)
    assert "secret" not in repr(packet)
    assert packet.signature not in repr(packet)


def test_a_packet_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        built().timestamp = 0  # type: ignore[misc]


# --- Check 5: schema and canonical form ---------------------------------------------------------------------


@pytest.mark.req("R-031")
@pytest.mark.parametrize("name", ["version", "timestamp", "author_id", "content", "content__type"])
@pytest.mark.parametrize("wrong", [ABSENT, None, True, "x", 1.5, [], {}, -1.5])
def test_required_members(name: str, wrong: Any) -> None:
    if name == "content__type" and wrong == "x":
        wrong = 7  # any string is a content type
    error = refusal(sealed(valid(**{name: wrong})))
    assert error.code is ErrorCode.INVALID_SCHEMA
    assert name.rpartition("__")[2] in error.reason


@pytest.mark.req("R-031", "R-020", "R-024")
@pytest.mark.parametrize("name", ["packet_id", "signature"])
@pytest.mark.parametrize("wrong", [ABSENT, None, True, 1, [], {}, ""])
def test_id_and_signature_are_required(name: str, wrong: Any) -> None:
    value = json.loads(built().canonical)
    value[name] = wrong
    if wrong is ABSENT:
        del value[name]
    error = refusal(canonical.encode(value))
    assert error.code is ErrorCode.INVALID_SCHEMA
    assert name in error.reason


@pytest.mark.req("R-031", "R-001")
@pytest.mark.parametrize("raw", [b"[]", b"null", b"1", b'"packet"', b"true", b"[{}]"])
def test_a_packet_is_an_object(raw: bytes) -> None:
    assert refusal(raw).code is ErrorCode.INVALID_SCHEMA


@pytest.mark.req("R-020")
@pytest.mark.parametrize(
    "respell",
    [
        lambda text: text.upper(),
        lambda text: "0x" + text[2:].upper(),
        lambda text: text[2:],
        lambda text: "0X" + text[2:],
        lambda text: text[:-1],
        lambda text: text + "0",
        lambda text: text + "\n",
        lambda text: "0x1e20" + text[2:],
        lambda text: "z" + ids.base58_encode(bytes.fromhex(text[2:])),
        lambda text: text[:-1] + "g",
        lambda text: text[:-1] + "\u0661",
    ],
)
def test_packet_id_has_one_spelling(respell: Callable[[str], str]) -> None:
    value = json.loads(built().canonical)
    value["packet_id"] = respell(value["packet_id"])
    assert refusal(canonical.encode(value)).code is ErrorCode.INVALID_SCHEMA


@pytest.mark.req("R-025")
@pytest.mark.parametrize(
    "respell",
    [
        lambda text: text[2:],
        lambda text: "0X" + text[2:],
        lambda text: text[:-2],
        lambda text: text + "00",
        lambda text: text[:-1],
        lambda text: text[:-1] + "g",
        lambda text: text[:-1] + " ",
        lambda text: text[:-2] + "  ",
        lambda text: text[:60] + "\t\n" + text[62:],
        lambda text: text[:60] + " " + text[60:],
        lambda text: "0x" + " ".join(text[2:][at : at + 2] for at in range(0, 128, 2)),
        lambda text: text[:-1] + "\u0661",
    ],
)
def test_signature_is_0x_and_128_hex_digits(respell: Callable[[str], str]) -> None:
    value = json.loads(built().canonical)
    value["signature"] = respell(value["signature"])
    assert refusal(canonical.encode(value)).code is ErrorCode.INVALID_SCHEMA


@pytest.mark.req("R-024")
def test_an_upper_case_signature_is_kept_as_received() -> None:
    packet = built()
    assert packet.signature == packet.signature.lower()
    shouted = "0x" + packet.signature[2:].upper()
    parsed = Packet.parse(packet.canonical.replace(packet.signature.encode(), shouted.encode()))
    assert parsed.signature == shouted
    assert shouted.encode() in parsed.canonical
    assert parsed.packet_id == packet.packet_id
    parsed.verify()


@pytest.mark.req("R-017")
@pytest.mark.parametrize("version", [0, 2, -1, 999])
def test_other_versions_are_refused_by_name(version: int) -> None:
    error = refusal(sealed(valid(version=version)))
    assert error.code is ErrorCode.INVALID_SCHEMA
    assert str(version) in error.reason


@pytest.mark.req("R-013")
@pytest.mark.parametrize("number", [1e21, -1e21, 0.5])
@pytest.mark.parametrize("name", ["timestamp", "expires_at", "version"])
def test_a_number_that_is_no_safe_integer_is_no_time(name: str, number: float) -> None:
    assert refusal(sealed(valid(**{name: number}))).code is ErrorCode.INVALID_SCHEMA


@pytest.mark.req("R-013")
@pytest.mark.parametrize("literal", [b"1760000000.0", b"1.76e9", b"17600000000e-1"])
def test_numbers_with_zero_fraction_are_integers(literal: bytes) -> None:
    packet = built(expires_at=NOW)
    parsed = Packet.parse(
        packet.canonical.replace(b"1760000000", literal).replace(b'"version":1', b'"version":1.0')
    )
    assert parsed == packet
    assert (parsed.timestamp, parsed.expires_at, parsed.version) == (NOW, NOW, 1)
    assert {type(parsed.timestamp), type(parsed.expires_at), type(parsed.version)} == {int}


@pytest.mark.req("R-012", "R-011")
@pytest.mark.parametrize(
    ("old", "new", "detail"),
    [
        (b'"POST"', b'"POST","big":9007199254740993', "integer_out_of_range"),
        (b'"POST"', b'"POST","deep":[{"big":9007199254740993}]', "integer_out_of_range"),
        (b'"POST"', b'"POST","type":"POST"', "duplicate_member"),
        (b'"version":1', b'"version":1,"version":1', "duplicate_member"),
        (b'"POST"', b'"\\ud800"', "lone_surrogate"),
        (b'"POST"', b'"POST","n":NaN', "malformed_json"),
        (b'"POST"', b'"POST","n":1e999', "number_out_of_range"),
        (b'"POST"', b'"\xff"', "not_utf8"),
        (b'"POST"', b'"POST","n":' + b"[" * 64 + b"]" * 64, "too_deep"),
    ],
)
def test_packets_without_canonical_form(old: bytes, new: bytes, detail: str) -> None:
    error = refusal(built().canonical.replace(old, new))
    assert error.code is ErrorCode.INVALID_SCHEMA
    assert error.detail == detail


@pytest.mark.req("R-321")
def test_depth_can_be_set() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    raw = json.dumps(valid(content__deep=deep)).encode()
    assert refusal(raw).detail == "too_deep"
    signed = canonical.encode(json.loads(raw), max_depth=200)
    value = json.loads(raw) | {
        "packet_id": packets.byte_hash(signed),
        "signature": f"0x{AUTHOR.sign(signed).hex()}",
    }
    Packet.parse(json.dumps(value).encode(), max_depth=200).verify()


@pytest.mark.req("R-032", "R-037", "R-027", "R-035", "R-033")
@pytest.mark.parametrize(
    "changes",
    [
        {"expires_at": "soon"},
        {"expires_at": 1.5},
        {"expires_at": True},
        {"expires_at": []},
        {"nonce": 7},
        {"nonce": ["n"]},
        {"provenance_header": "UNKNOWN"},
        {"provenance_header": []},
        {"attestations": {}},
        {"attestations": "a"},
        {"attestations": [{}, 1]},
        {"attestations": [None]},
        {"consensus_metrics": {"human_votes": 1}},
        {"consensus_metrics": []},
        {"consensus_metrics": 0},
        {"consensus_metrics": False},
        {"consensus_metrics": ""},
        {"content__text": 5},
        {"content__text": {}},
        {"content__thread_ref": 5},
        {"content__thread_ref": "0x00"},
        {"content__thread_ref": HASH.upper()},
        {"content__media": {}},
        {"content__media": "a"},
        {"content__media": False},
        {"content__media": [{"media_hash": HASH}]},
        {"content__media": [{"media_hash": HASH}], "provenance_header": None},
        {"content__media": ["a"], "provenance_header": {}},
        {"content__media": [{}], "provenance_header": {}},
        {"content__media": [{"media_hash": None}], "provenance_header": {}},
        {"content__media": [{"media_hash": "ipfs://bafy"}], "provenance_header": {}},
        {"content__media": [{"media_hash": HASH}, {"media_hash": HASH[2:]}], "provenance_header": {}},
        {"content__media": [{"media_hash": HASH, "media_type": 1}], "provenance_header": {}},
        {"content__media": [{"media_hash": HASH, "size_bytes": "1"}], "provenance_header": {}},
        {"content__media": [{"media_hash": HASH, "size_bytes": True}], "provenance_header": {}},
        {"content__media": [{"media_hash": HASH, "media_uris": "u"}], "provenance_header": {}},
        {"content__media": [{"media_hash": HASH, "media_uris": [1]}], "provenance_header": {}},
        {"provenance_header": {"genesis_media_hash": "https://x"}},
        {"provenance_header": {"genesis_media_hash": 1}},
        {"provenance_header": {"edit_history": [{"resulting_media_hash": "https://x"}]}},
    ],
    ids=str,
)
def test_optional_members_of_wrong_type(changes: Json) -> None:
    assert refusal(sealed(valid(**changes))).code is ErrorCode.INVALID_SCHEMA


@pytest.mark.req("R-032", "R-037", "R-014", "R-041", "R-007", "R-038", "R-039", "R-004")
@pytest.mark.parametrize(
    "changes",
    [
        {"expires_at": None, "nonce": None, "provenance_header": None, "attestations": None},
        {"consensus_metrics": None},
        {"consensus_metrics": {}},
        {"attestations": []},
        {"attestations": [{"x": 1}]},
        {"content__text": None, "content__media": None, "content__thread_ref": None},
        {"content__text": "", "content__media": [], "content__thread_ref": HASH},
        {"content__media": [{"media_hash": HASH}], "provenance_header": {}},
        {
            "content__media": [
                {"media_hash": HASH, "media_type": None, "size_bytes": None, "media_uris": None}
            ],
            "provenance_header": {
                "origin_type": "SATELLITE",
                "genesis_media_hash": None,
                "edit_history": None,
            },
        },
        {
            "content__media": [{"media_hash": HASH, "size_bytes": 5.0, "media_uris": []}],
            "provenance_header": {},
        },
        {
            "provenance_header": {
                "genesis_media_hash": HASH,
                "edit_history": [{"resulting_media_hash": HASH}, 1],
            }
        },
        {"content__type": "ZZZ_TEST"},
        {"content__type": ""},
        {"content__type": "/app/1/chat/proto"},
        {"author_id": "did:strata:relay_1"},
        {"author_id": "did:device:abc"},
        {"x_new": {"deep": [1, "two", None]}},
        {"content__x_new": "a\u0000b 😀 \ue000"},
        {"timestamp": -1},
        {"timestamp": 0},
    ],
    ids=str,
)
def test_what_is_accepted(changes: Json) -> None:
    raw = sealed(valid(**changes))
    packet = Packet.parse(raw)
    assert packet.canonical == raw
    assert packet.value == json.loads(raw)


@pytest.mark.req("R-014")
def test_null_and_absence_have_different_ids() -> None:
    absent, null = Packet.parse(sealed(valid())), Packet.parse(sealed(valid(content__thread_ref=None)))
    assert absent.packet_id != null.packet_id
    assert b'"thread_ref":null' in null.canonical


@pytest.mark.req("R-005", "R-039")
def test_unknown_members_count_in_the_hash() -> None:
    packet = Packet.parse(sealed(valid(x_new=1)))
    assert b'"x_new":1' in packet.canonical
    assert b'"x_new":1' in packet.signed_bytes
    packet.verify()
    assert refusal(packet.canonical.replace(b'"x_new":1', b'"x_new":2')).detail == "packet_id_mismatch"


@pytest.mark.req("R-002", "R-006")
def test_names_and_types_are_case_sensitive() -> None:
    assert refusal(sealed({"Version": 1} | valid(version=ABSENT))).code is ErrorCode.INVALID_SCHEMA
    assert Packet.parse(sealed(valid(content__type="post"))).content_type == "post"


# --- Checks 6 and 7, and the order of all three -------------------------------------------------------------


@pytest.mark.req("R-117", "R-121", "R-122")
def test_the_limit_itself_passes() -> None:
    packet = built({"type": "POST", "text": "ü" * 100})
    spaced = json.dumps(packet.value, indent=8).encode()
    assert len(spaced) > packet.size_bytes
    assert Packet.parse(spaced, max_bytes=packet.size_bytes) == packet
    error = refusal(packet.canonical, max_bytes=packet.size_bytes - 1)
    assert error.code is ErrorCode.PACKET_TOO_LARGE
    assert error.max_bytes == packet.size_bytes - 1


@pytest.mark.req("R-183", "R-022")
def test_an_id_that_does_not_recompute() -> None:
    packet = built({"type": "POST", "text": "hello"})
    error = refusal(packet.canonical.replace(b"hello", b"jello"))
    assert (error.code, error.detail) == (ErrorCode.INVALID_SIGNATURE, "packet_id_mismatch")
    error = refusal(packet.canonical.replace(packet.packet_id.encode(), HASH.encode()))
    assert (error.code, error.detail) == (ErrorCode.INVALID_SIGNATURE, "packet_id_mismatch")


@pytest.mark.req("R-184")
def test_the_first_of_two_faults_decides() -> None:
    packet = built()
    wrong_id = packet.canonical.replace(packet.packet_id.encode(), HASH.encode())
    assert refusal(wrong_id, max_bytes=10).code is ErrorCode.PACKET_TOO_LARGE
    wrong_schema = wrong_id.replace(b'"POST"', b"7")
    assert refusal(wrong_schema, max_bytes=10).code is ErrorCode.INVALID_SCHEMA
    assert refusal(wrong_schema + b"}", max_bytes=10).detail == "malformed_json"


# --- Signature, freshness -----------------------------------------------------------------------------------


@pytest.mark.req("R-023", "R-043")
def test_the_signature_is_the_author_s() -> None:
    packet = built()
    assert packets.verify_signature(packet, AUTHOR.public_key)
    stranger = ids.Identity.from_seed(b"\x07" * 32)
    assert not packets.verify_signature(packet, stranger.public_key)
    forged = Packet.parse(sealed(valid(), signer=stranger))
    with pytest.raises(InvalidPacket) as caught:
        forged.verify()
    assert (caught.value.code, caught.value.detail) == (ErrorCode.INVALID_SIGNATURE, None)


@pytest.mark.parametrize("padding", [0, 20_000])
def test_a_signature_is_verified_once_for_each_key_and_kept_apart_from_its_twins(
    padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []

    def verify(key: bytes, message: bytes, signature: bytes) -> bool:
        asked.append(signature)
        return genuine(key, message, signature)

    genuine = ids.verify
    monkeypatch.setattr(ids, "verify", verify)
    stranger = ids.Identity.from_seed(b"\x07" * 32)
    content = {"type": "POST", "text": "x" * padding, "run": padding}
    packet = packets.build(AUTHOR, content, timestamp=1)
    twin = packet.signature_bytes[:63] + bytes([packet.signature_bytes[63] ^ 1])
    spoilt = Packet.parse(packet.canonical.replace(packet.signature[2:].encode(), twin.hex().encode()))
    assert spoilt.digest == packet.digest, "the id does not cover the signature"
    for _ in range(3):
        copy = Packet.parse(packet.canonical)
        assert packets.verify_shared(copy, AUTHOR.public_key)
        assert not packets.verify_shared(copy, stranger.public_key)
        assert not packets.verify_shared(spoilt, AUTHOR.public_key)
    assert len(asked) == 3


def test_what_is_remembered_of_large_packets_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets, "_MAX_REMEMBERED", 2)
    for number in range(4):
        packet = packets.build(AUTHOR, {"type": "POST", "text": "x" * 5000, "n": number}, timestamp=1)
        assert packets.verify_shared(packet, AUTHOR.public_key)
    assert len(packets._large_verdicts) == 2
    assert all(len(b"".join(name)) == 32 + 64 + 32 for name in packets._large_verdicts)


@pytest.mark.req("R-025")
def test_a_malleated_signature_is_refused() -> None:
    packet = built()
    order = 2**252 + 27742317777372353535851937790883648493
    scalar = int.from_bytes(packet.signature_bytes[32:], "little") + order
    twin = packet.signature_bytes[:32] + scalar.to_bytes(32, "little")
    parsed = Packet.parse(packet.canonical.replace(packet.signature[2:].encode(), twin.hex().encode()))
    assert parsed.packet_id == packet.packet_id
    with pytest.raises(InvalidPacket, match="signature"):
        parsed.verify()


@pytest.mark.req("R-046")
def test_a_packet_under_the_bare_key_form_verifies() -> None:
    bare = "did:strata:z" + ids.base58_encode(AUTHOR.public_key)
    Packet.parse(sealed(valid(author_id=bare))).verify()


@pytest.mark.req("R-047", "R-048", "R-059")
@pytest.mark.parametrize(
    "did", ["did:strata:relay_1", "did:ngo:x", "did:strata:z" + ids.base58_encode(b"\xe7\x01" + bytes(32))]
)
def test_an_author_whose_key_is_unknown(did: str) -> None:
    with pytest.raises(InvalidPacket) as caught:
        Packet.parse(sealed(valid(author_id=did))).verify()
    assert (caught.value.code, caught.value.detail) == (ErrorCode.INVALID_SIGNATURE, "unresolved_key")


@pytest.mark.req("R-092", "R-093", "R-094", "R-095", "R-029")
@pytest.mark.parametrize(
    ("timestamp", "code"),
    [
        (NOW, None),
        (NOW + 299, None),
        (NOW + 300, None),
        (NOW + 301, ErrorCode.TIMESTAMP_IN_FUTURE),
        (NOW * 1000, ErrorCode.TIMESTAMP_IN_FUTURE),
        (NOW - 86_400, None),
        (NOW - 86_401, ErrorCode.TIMESTAMP_TOO_OLD),
        (0, ErrorCode.TIMESTAMP_TOO_OLD),
        (-(2**53) + 1, ErrorCode.TIMESTAMP_TOO_OLD),
    ],
)
def test_freshness(timestamp: int, code: ErrorCode | None) -> None:
    assert code_of(lambda: packets.check_freshness(built(timestamp=timestamp), NOW)) is code


@pytest.mark.req("R-093", "R-096", "R-095")
def test_the_age_limit_can_be_set_and_the_future_bound_cannot() -> None:
    old = built(timestamp=NOW - 30 * 3600)
    assert code_of(lambda: packets.check_freshness(old, NOW)) is ErrorCode.TIMESTAMP_TOO_OLD
    packets.check_freshness(old, NOW, max_age_seconds=172_800)
    packets.check_freshness(built(timestamp=0), NOW, max_age_seconds=math.inf)
    early = built(timestamp=NOW + 301)
    for limit in (0, 60, math.inf):
        with pytest.raises(InvalidPacket, match="timestamp_in_future"):
            packets.check_freshness(early, NOW, max_age_seconds=limit)


@pytest.mark.req("R-100", "R-101", "R-103", "R-094")
def test_expiry_has_no_grace_and_is_the_top_level_member_s() -> None:
    packet = built({"type": "POST", "expires_at": 1}, expires_at=NOW)
    packets.check_freshness(packet, NOW)
    packet.verify(NOW)
    assert code_of(lambda: packets.check_freshness(packet, NOW + 1)) is ErrorCode.PACKET_EXPIRED
    assert code_of(lambda: packet.verify(NOW + 1)) is ErrorCode.PACKET_EXPIRED
    packet.verify()
    packets.check_freshness(built({"type": "POST", "expires_at": 1}), NOW)


def code_of(check: Callable[[], None]) -> ErrorCode | None:
    try:
        check()
    except InvalidPacket as error:
        return error.code
    return None


# --- Building -----------------------------------------------------------------------------------------------


@pytest.mark.req("R-015", "R-003")
def test_the_builder_writes_no_nulls() -> None:
    packet = built()
    assert set(packet.value) == {"packet_id", "version", "timestamp", "author_id", "content", "signature"}
    assert b"null" not in packet.canonical


@pytest.mark.req("R-034", "R-033")
def test_media_of_unknown_origin_get_the_minimal_header() -> None:
    media = {"type": "POST", "media": [{"media_hash": HASH}]}
    header: Json = {"origin_type": "UNKNOWN", "genesis_media_hash": None, "edit_history": []}
    assert built(media).value["provenance_header"] == header
    own = {"origin_type": "SOFTWARE", "genesis_media_hash": HASH, "edit_history": []}
    unattested = built(media, provenance_header=own, allow_unattested=True)
    assert unattested.value["provenance_header"] == own
    assert "provenance_header" not in built({"type": "POST", "media": []}).value


@pytest.mark.req("R-230")
@pytest.mark.parametrize("claim", ["SOFTWARE", "AI_MODEL", "HARDWARE_SECURE_ENCLAVE", "SATELLITE"])
def test_the_builder_refuses_a_claim_without_an_attestation(claim: str) -> None:
    with pytest.raises(ValueError, match="client_attestation"):
        built(provenance_header={"origin_type": claim})
    with pytest.raises(ValueError, match="client_attestation"):
        built(provenance_header={"origin_type": claim, "client_attestation": None})


@pytest.mark.req("R-124")
def test_the_builder_refuses_what_is_too_large() -> None:
    empty = built({"type": "POST", "text": ""}).size_bytes
    fits = "x" * (262_144 - empty)
    assert built({"type": "POST", "text": fits}).size_bytes == 262_144
    with pytest.raises(InvalidPacket) as caught:
        built({"type": "POST", "text": fits + "x"})
    assert (caught.value.code, caught.value.max_bytes) == (ErrorCode.PACKET_TOO_LARGE, 262_144)
    with pytest.raises(InvalidPacket):
        built({"type": "POST", "text": fits}, max_bytes=4096)


@pytest.mark.req("R-031", "R-012")
@pytest.mark.parametrize(
    "content",
    [{}, {"type": 1}, {"type": "POST", "n": 2**53}, {"type": "POST", "n": math.nan}, {"type": b"POST"}],
)
def test_the_builder_refuses_what_a_relay_would(content: Json) -> None:
    with pytest.raises(InvalidPacket):
        built(content) if content else packets.build(AUTHOR, content, timestamp=NOW)


def test_extra_members_do_not_replace_the_builder_s_own() -> None:
    assert built(extra={"x_new": 1}).value["x_new"] == 1
    for name in ("packet_id", "signature", "version", "timestamp", "author_id", "content", "nonce"):
        with pytest.raises(ValueError, match=name):
            built(extra={name: 1, "x_new": 1})


def test_the_builder_takes_any_mapping() -> None:
    header = MappingProxyType({"origin_type": "UNKNOWN"})
    packet = built(
        MappingProxyType({"type": "POST"}), extra=MappingProxyType({"x": 1}), provenance_header=header
    )
    assert packet.value["provenance_header"] == {"origin_type": "UNKNOWN"}


TARGET = built(
    {"type": "POST", "text": "Grüße 🦀", "n": [1, 0.5, 1e-7], "packet_id": HASH}, expires_at=NOW, nonce="n"
)

json_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(-1e15, 1e15).filter(lambda number: abs(number) < 2**53)
    | st.text(max_size=12),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=6), items, max_size=3),
    max_leaves=8,
)
members = st.dictionaries(st.text(max_size=8), json_value, max_size=4)


@pytest.mark.req("R-022", "R-023", "R-005", "R-016", "R-039")
@given(
    members,
    members,
    st.integers(-(2**53) + 1, 2**53 - 1),
    st.none() | st.integers(0, 2**53 - 1),
    st.none() | st.text(),
)
def test_what_is_built_is_parsed_and_verifies(
    content: Json, extra: Json, timestamp: int, expires_at: int | None, nonce: str | None
) -> None:
    for known in ("text", "media", "thread_ref"):
        content.pop(known, None)
    for known in (*TARGET.value, "attestations", "consensus_metrics", "provenance_header"):
        extra.pop(known, None)
    content["type"] = "TEST"
    packet = packets.build(
        AUTHOR, content, timestamp=timestamp, expires_at=expires_at, nonce=nonce, extra=extra
    )
    for raw in (packet.canonical, json.dumps(packet.value).encode()):
        parsed = Packet.parse(raw)
        assert parsed == packet
        assert (parsed.timestamp, parsed.expires_at, parsed.nonce) == (timestamp, expires_at, nonce)
        parsed.verify()
    assert canonical.canonicalize(packet.canonical) == packet.canonical


@pytest.mark.req("R-183", "R-043", "R-182")
@given(st.integers(0, len(TARGET.canonical) - 1), st.integers(1, 255))
@example(0, 1)
def test_no_byte_of_a_packet_can_change_unnoticed(at: int, difference: int) -> None:
    raw = bytearray(TARGET.canonical)
    raw[at] ^= difference
    try:
        packet = Packet.parse(bytes(raw))
        packet.verify()
    except InvalidPacket:
        return
    # Only other spellings of the same packet remain: the case of a hex digit in the signature.
    assert packet.signed_bytes == TARGET.signed_bytes
    assert packet.packet_id == TARGET.packet_id
    assert packet.signature_bytes == TARGET.signature_bytes


@given(st.binary(max_size=80), st.booleans())
def test_arbitrary_input_raises_nothing_else(raw: bytes, whole: bool) -> None:
    try:
        Packet.parse(raw if whole else TARGET.canonical.replace(b'"POST"', raw))
    except InvalidPacket as error:
        assume(error.code is not None)


@given(json_value)
@pytest.mark.req("R-031", "R-032")
def test_arbitrary_members_raise_nothing_else(value: Any) -> None:
    names = [*TARGET.value, "attestations", "consensus_metrics", "provenance_header"]
    for name in names:
        with_value = TARGET.value | {name: value}
        try:
            Packet.parse(canonical.encode(with_value))
        except InvalidPacket as error:
            assert error.code in (ErrorCode.INVALID_SCHEMA, ErrorCode.INVALID_SIGNATURE)
    for name in ("type", "text", "media", "thread_ref"):
        try:
            Packet.parse(sealed(valid(**{f"content__{name}": value, "provenance_header": {}})))
        except InvalidPacket as error:
            assert error.code is ErrorCode.INVALID_SCHEMA


@pytest.mark.req("R-036")
def test_a_reader_takes_media_without_a_header_for_one_of_unknown_origin():
    me = ids.Identity.from_seed(bytes(32))
    media = {"media_hash": "0x" + "a" * 64}
    value = {
        "version": 1,
        "timestamp": 1000,
        "author_id": me.did,
        "content": {"type": "POST", "media": [media]},
    }
    signed = canonical.encode(value)
    value["packet_id"] = packets.byte_hash(signed)
    value["signature"] = "0x" + me.sign(signed).hex()
    raw = canonical.encode(value)
    with pytest.raises(InvalidPacket):
        Packet.parse(raw)
    Packet.parse(raw, media_needs_header=False).verify()
    for max_bytes in (None, 10_000):  # without a size limit, small packets are cached
        Packet.read(raw, max_bytes=max_bytes).verify()


@pytest.mark.req("R-105")
def test_a_packet_is_judged_by_the_relay_s_time_and_by_its_own_only_without_one():
    packet = packets.build(
        ids.Identity.from_seed(bytes(32)), {"type": "POST"}, timestamp=1000, expires_at=2000
    )
    assert packets.observed_at(packet, 1500) == 1500
    assert packets.observed_at(packet, None) == 1000
    packet.verify(now=packets.observed_at(packet, None))
    with pytest.raises(InvalidPacket):
        packet.verify(now=packets.observed_at(packet, 2001))
