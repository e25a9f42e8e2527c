"""c2pa with manifests that we make."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import cbor2
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import fields
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.provenance.evidence import EvidenceClaim
from strata.protocol.provenance.evidence.c2pa import C2paVerifier
from strata.protocol.provenance.evidence.jumbf import MAX_BOX_DEPTH, MAX_BOXES, parse

from tests.support.made_origins import (
    HELLO,
    NOW,
    TRUST,
    Authority,
    attested,
    hardware_header,
    model_header,
    verdict,
)

ROOT = Authority.make("C2PA Root")
CA = Authority.make("C2PA CA", ROOT, path_length=0)
SOURCE = "http://cv.iptc.org/newscodes/digitalsourcetype/"
CAPTURE, MODEL = SOURCE + "digitalCapture", SOURCE + "trainedAlgorithmicMedia"
HARDWARE_CLAIM = EvidenceClaim("HARDWARE_SECURE_ENCLAVE", HELLO)
MODEL_CLAIM = EvidenceClaim("AI_MODEL", HELLO)


def box(kind: bytes, body: bytes) -> bytes:
    return (len(body) + 8).to_bytes(4, "big") + kind + body


def superbox(type_id: bytes, label: str, *parts: bytes) -> bytes:
    description = type_id.ljust(16, b"\x00") + b"\x03" + label.encode() + b"\x00"
    return box(b"jumb", box(b"jumd", description) + b"".join(parts))


def cbor_box(type_id: bytes, label: str, value: Any) -> bytes:
    return superbox(type_id, label, box(b"cbor", cbor2.dumps(value)))


def actions(source: str = CAPTURE, action: str = "c2pa.created") -> bytes:
    return cbor_box(b"cbor", "c2pa.actions", {"actions": [{"action": action, "digitalSourceType": source}]})


def reference(label: str, assertion: bytes, algorithm: str | None = None) -> dict[str, Any]:
    """Reference an assertion as a claim does: the hash covers the contents of the superbox."""
    digest = hashlib.new(algorithm or "sha256", assertion[8:]).digest()
    entry = {"url": f"self#jumbf=c2pa.assertions/{label}", "hash": digest}
    return entry | ({"alg": algorithm} if algorithm else {})


@dataclasses.dataclass
class Manifest:
    """A manifest whose parts can be replaced by wrong ones."""

    source: str = CAPTURE
    signer: Authority = dataclasses.field(default_factory=lambda: Authority.make("signer", CA, ca=False))
    algorithm: int = -7
    claim_label: str = "c2pa.claim"
    member: str = "assertions"
    hash_name: str | None = None
    listed: Any = None
    chain: Any = None
    chain_protected: bool = True
    tagged: bool = True
    payload: Any = None
    signed: bytes | None = None
    action: str = "c2pa.created"

    def store(self) -> bytes:
        assertion = actions(self.source, self.action)
        listed = (
            [reference("c2pa.actions", assertion, self.hash_name)] if self.listed is None else self.listed
        )
        claim = cbor2.dumps({"alg": "sha256", self.member: listed, "signature": "self#jumbf=c2pa.signature"})
        manifest = superbox(
            b"c2ma",
            "urn:uuid:0",
            superbox(b"c2as", "c2pa.assertions", assertion),
            superbox(b"c2cl", self.claim_label, box(b"cbor", claim)),
            superbox(b"c2cs", "c2pa.signature", box(b"cbor", self.cose(claim))),
        )
        older = superbox(b"c2ma", "urn:uuid:older")
        return superbox(b"c2pa", "c2pa", older, manifest)

    def cose(self, claim: bytes) -> bytes:
        chain = [self.signer.der, CA.der] if self.chain is None else self.chain
        header = {1: self.algorithm} | ({33: chain} if self.chain_protected else {})
        protected = cbor2.dumps(header)
        message = cbor2.dumps(["Signature1", protected, b"", self.signed or claim])
        loose = {} if self.chain_protected else {"x5chain": chain}
        value = [protected, loose, self.payload, self.signer.sign(message)]
        return cbor2.dumps(cbor2.CBORTag(18, value) if self.tagged else value)


def fault(payload: bytes, claim: EvidenceClaim = HARDWARE_CLAIM, roots: Any = (ROOT.der,)) -> str | None:
    try:
        C2paVerifier(roots=roots).verify(payload, nonce=None, claim=claim, now=NOW)
    except InvalidPacket as error:
        assert error.code == ErrorCode.INVALID_ATTESTATION
        return error.detail
    return None


def made(**changes: Any) -> bytes:
    return Manifest(**changes).store()


@pytest.mark.req("R-225")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"claim_label": "c2pa.claim.v2", "member": "created_assertions"},
        {"tagged": False},
        {"chain_protected": False},
        {"hash_name": "sha384"},
        {"hash_name": "sha512"},
    ],
)
def test_a_sound_manifest_passes(changes: Any) -> None:
    assert fault(made(**changes)) is None


@pytest.mark.req("R-225")
def test_signers_of_every_kind() -> None:
    edwards = Authority.make("signer", CA, ca=False, key=ed25519.Ed25519PrivateKey.generate())
    assert fault(made(signer=edwards, algorithm=-8)) is None
    p384 = Authority.make("signer", CA, ca=False, key=ec.generate_private_key(ec.SECP384R1()))
    assert fault(made(signer=p384, algorithm=-35)) is None
    for signer, algorithm in (
        (edwards, -7),
        (p384, -7),
        (edwards, -35),
        (p384, -8),
        (p384, "ES384"),
        (p384, []),
    ):
        assert fault(made(signer=signer, algorithm=algorithm)) == "claim_signature"


@pytest.mark.req("R-225")
def test_the_claim_signature_chains_to_the_trust_list() -> None:
    stranger = Authority.make("signer", Authority.make("C2PA CA", Authority.make("x")), ca=False)
    assert fault(made(signer=stranger)) == "link_signature"
    assert fault(made(), roots=()) == "unrooted"
    direct = Authority.make("signer", ROOT, ca=False)
    assert fault(made(signer=direct, chain=direct.der)) is None
    assert fault(made(chain=None, signed=b"another claim")) == "claim_signature"
    for broken in ([], "x", [1], 5):
        assert fault(made(chain=broken)) in ("malformed_evidence", "chain_too_long")
    assert fault(made(payload=b"attached")) == "malformed_evidence"


@pytest.mark.req("R-225")
def test_assertions_are_what_the_claim_says() -> None:
    right = reference("c2pa.actions", actions())
    for listed, expected in (
        ([], "malformed_evidence"),
        ("x", "malformed_evidence"),
        ([right] * 300, "malformed_evidence"),
        ([right | {"hash": bytes(32)}], "assertion_mismatch"),
        ([right | {"hash": None}], "assertion_mismatch"),
        ([right | {"url": "self#jumbf=c2pa.assertions/c2pa.other"}], "assertion_mismatch"),
        ([right, right | {"url": 5}], "assertion_mismatch"),
        ([right | {"alg": "md5"}], "assertion_mismatch"),
        ([right | {"alg": []}], "assertion_mismatch"),
        (["text"], "assertion_mismatch"),
        ([right, right], None),
    ):
        assert fault(made(listed=listed)) == expected


@pytest.mark.req("R-225")
def test_assertions_map_to_the_claimed_origin() -> None:
    assert fault(made(), MODEL_CLAIM) == "origin_mismatch"
    assert fault(made(source=MODEL), MODEL_CLAIM) is None
    assert fault(made(source=MODEL)) == "origin_mismatch"
    assert fault(made(source=SOURCE + "screenCapture")) == "origin_mismatch"
    assert fault(made(action="c2pa.opened")) == "origin_mismatch"
    assert fault(made(), EvidenceClaim("SOFTWARE", None)) == "origin_mismatch"


@pytest.mark.req("R-225")
def test_the_payload_is_jumbf() -> None:
    whole = made()
    for garbage in (
        b"",
        b"text",
        whole[:-1],
        whole + whole,
        whole[:4] + b"free" + whole[8:],
        superbox(b"c2pa", "c2pa"),
        superbox(b"c2pa", "c2pa", superbox(b"c2ma", "x")),
        box(b"jumb", b""),
        box(b"jumb", box(b"jumd", b"short")),
        box(b"jumb", box(b"jumd", bytes(16) + b"\x03unended")),
    ):
        assert fault(garbage) == "malformed_evidence"


def test_boxes_of_every_length_form() -> None:
    inner = box(b"jumd", bytes(16) + b"\x00")
    to_the_end = b"\x00\x00\x00\x00jumb" + inner
    long = b"\x00\x00\x00\x01jumb" + (len(inner) + 16).to_bytes(8, "big") + inner
    for data in (box(b"jumb", inner), to_the_end, long):
        assert parse(data).body == inner
        assert parse(data).label == ""


def test_boxes_are_bounded_in_number_and_depth() -> None:
    deep = superbox(b"x", "bottom")
    for _ in range(MAX_BOX_DEPTH - 1):
        deep = superbox(b"x", "level", deep)
    assert parse(deep).boxes[0].label == "level"
    with pytest.raises(InvalidPacket):
        parse(superbox(b"x", "one more", deep))
    assert parse(superbox(b"x", "many", *[box(b"free", b"")] * MAX_BOXES)).contents == {"free": b""}
    with pytest.raises(InvalidPacket):
        parse(superbox(b"x", "many", *[box(b"free", b"")] * (MAX_BOXES + 1)))


@pytest.mark.req("R-222", "R-225")
def test_a_claim_with_a_content_credential() -> None:
    trust = dataclasses.replace(TRUST, evidence={"c2pa": C2paVerifier(roots=[ROOT.der])})

    def with_evidence(header: dict[str, Any], payload: bytes) -> Any:
        evidence = {"format": "c2pa", "payload": fields.unpadded_base64url(payload), "nonce": None}
        return attested(header | {"attestation_evidence": evidence})

    assert verdict(with_evidence(hardware_header(), made()), trust) is None
    assert verdict(with_evidence(model_header(), made(source=MODEL)), trust) is None
    for header in (hardware_header(), model_header()):
        with pytest.raises(InvalidPacket) as caught:
            verdict(with_evidence(header, made(source=SOURCE + "screenCapture")), trust)
        assert caught.value.code == ErrorCode.INVALID_ATTESTATION


SOUND = made()


@given(st.integers(0, len(SOUND) - 1), st.integers(1, 255), st.binary(max_size=60))
def test_garbage_is_refused_in_the_proper_way(at: int, mask: int, noise: bytes) -> None:
    flipped = bytearray(SOUND)
    flipped[at] ^= mask
    fault(bytes(flipped))
    fault(SOUND[:at])
    assert fault(noise) is not None
