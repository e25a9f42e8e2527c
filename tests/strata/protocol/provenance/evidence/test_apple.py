"""apple-app-attest with attestations of our own authority."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import cbor2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import fields
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.provenance.evidence import EvidenceClaim
from strata.protocol.provenance.evidence.apple import AppAttestVerifier
from strata.protocol.provenance.judgement import evidence_nonce

from tests.support.made_origins import HELLO, NOW, TRUST, Authority, attested, hardware_header, verdict

ROOT = Authority.make("App Root", key=ec.generate_private_key(ec.SECP384R1()), digest=hashes.SHA384())
CA = Authority.make("App CA", ROOT, path_length=0, digest=hashes.SHA384())
APP = "TEAM123456.net.example.camera"
NONCE = hashlib.sha256(b"this claim").digest()
CLAIM = EvidenceClaim("HARDWARE_SECURE_ENCLAVE", HELLO)
KEY = ec.generate_private_key(ec.SECP256R1())


def authenticator_data(
    key_id: bytes, *, app: str = APP, counter: int = 0, aaguid: bytes = b"appattest".ljust(16, b"\x00")
) -> bytes:
    app_hash = hashlib.sha256(app.encode()).digest()
    size = len(key_id).to_bytes(2, "big")
    return app_hash + b"\x40" + counter.to_bytes(4, "big") + aaguid + size + key_id + b"\xa0"


def evidence(
    *,
    nonce: bytes = NONCE,
    extension: bytes | None = None,
    key_id: bytes | None = None,
    authority: Authority = CA,
    certificates: Any = None,
    fmt: str = "apple-appattest",
    **data: Any,
) -> bytes:
    """What DCAppAttestService would return, with faults on request."""
    point = Authority.make("unused", key=KEY).point
    auth_data = authenticator_data(key_id or hashlib.sha256(point).digest(), **data)
    stamp = hashlib.sha256(auth_data + nonce).digest() if extension is None else extension
    body = b"\x30\x24\xa1\x22\x04\x20" + stamp
    oid = x509.ObjectIdentifier("1.2.840.113635.100.8.2")
    leaf = Authority.make(
        "credential",
        authority,
        ca=False,
        key=KEY,
        extensions=((x509.UnrecognizedExtension(oid, body), False),) if stamp else (),
    )
    chain = [leaf.der, authority.der] if certificates is None else certificates
    return cbor2.dumps({"fmt": fmt, "attStmt": {"x5c": chain, "receipt": b"r"}, "authData": auth_data})


def fault(
    payload: bytes, *, nonce: bytes | None = NONCE, now: int = NOW, claim: Any = CLAIM, **options: Any
) -> Any:
    defaults: dict[str, Any] = {"roots": [ROOT.der], "app_ids": [APP]}
    verifier = AppAttestVerifier(**defaults | options)
    try:
        verifier.verify(payload, nonce=nonce, claim=claim, now=now)
    except InvalidPacket as error:
        assert error.code == ErrorCode.INVALID_ATTESTATION
        return error.detail
    return None


@pytest.mark.req("R-223")
def test_a_sound_attestation_passes() -> None:
    assert fault(evidence()) is None
    assert AppAttestVerifier.format == "apple-app-attest"


@pytest.mark.req("R-223")
def test_the_payload_is_cbor_of_the_right_shape() -> None:
    for garbage in (b"", b"\xff", b"{}", cbor2.dumps([1]), cbor2.dumps({"fmt": "apple-appattest"})):
        assert fault(garbage) == "malformed_evidence"
    assert fault(evidence(fmt="packed")) == "malformed_evidence"
    assert fault(evidence(certificates="x")) == "malformed_evidence"
    assert fault(evidence(certificates=[1])) == "malformed_evidence"
    whole = cbor2.loads(evidence())
    assert fault(cbor2.dumps({**whole, "authData": whole["authData"][:60]})) == "malformed_evidence"
    assert fault(b"\x81" * 100_000) == "malformed_evidence"


@pytest.mark.req("R-223")
def test_the_chain_ends_at_a_configured_root() -> None:
    stranger = Authority.make("App CA", Authority.make("App Root"), path_length=0)
    assert fault(evidence(authority=stranger)) == "unrooted"
    assert fault(evidence(), roots=[]) == "unrooted"
    assert fault(evidence(certificates=[])) == "chain_too_long"
    assert fault(evidence(), now=NOW + 10**9) == "outside_validity"


@pytest.mark.req("R-223")
def test_the_nonce_ties_the_evidence_to_the_claim() -> None:
    assert fault(evidence(nonce=bytes(32))) == "nonce_mismatch"
    assert fault(evidence(extension=bytes(32))) == "nonce_mismatch"
    assert fault(evidence(extension=b"")) == "nonce_mismatch"
    assert fault(evidence(), nonce=None) == "nonce_missing"


@pytest.mark.req("R-223")
def test_the_app_is_the_one_expected() -> None:
    assert fault(evidence(app="TEAM123456.net.example.other")) == "app_mismatch"
    assert fault(evidence(), app_ids=[]) == "app_mismatch"
    of_manifest = dataclasses.replace(CLAIM, app_ids=frozenset({"net.example.listed"}))
    assert fault(evidence(app="net.example.listed"), claim=of_manifest) is None
    assert fault(evidence(), claim=of_manifest) == "app_mismatch"


@pytest.mark.req("R-223")
def test_counter_environment_and_credential() -> None:
    assert fault(evidence(counter=1)) == "counter"
    assert fault(evidence(aaguid=b"appattestdevelop")) == "environment"
    assert fault(evidence(aaguid=b"appattestdevelop"), development=True) is None
    assert fault(evidence(key_id=bytes(32))) == "credential_mismatch"
    assert fault(evidence(key_id=bytes(16) + b"\x01" * 17)) == "malformed_evidence"


@pytest.mark.req("R-222", "R-223")
def test_a_hardware_claim_with_an_attestation_of_its_app() -> None:
    trust = dataclasses.replace(
        TRUST, evidence={"apple-app-attest": AppAttestVerifier(roots=[ROOT.der], app_ids=[APP])}
    )
    header = hardware_header(genesis_id="0x" + "22" * 32)
    nonce = evidence_nonce(header)

    def claim(payload: bytes, stated: bytes | None = nonce) -> Any:
        members = {
            "format": "apple-app-attest",
            "payload": fields.unpadded_base64url(payload),
            "nonce": None if stated is None else fields.unpadded_base64url(stated),
        }
        return attested(header | {"attestation_evidence": members})

    assert verdict(claim(evidence(nonce=nonce)), trust) is None
    for wrong in (claim(evidence()), claim(evidence(nonce=nonce), NONCE), claim(evidence(nonce=nonce), None)):
        with pytest.raises(InvalidPacket) as caught:
            verdict(wrong, trust)
        assert caught.value.code == ErrorCode.INVALID_ATTESTATION


SOUND = evidence()


@given(st.integers(0, len(SOUND) - 1), st.integers(1, 255), st.binary(max_size=40))
def test_garbage_is_refused_in_the_proper_way(at: int, mask: int, noise: bytes) -> None:
    flipped = bytearray(SOUND)
    flipped[at] ^= mask
    fault(bytes(flipped))
    fault(noise)
    fault(SOUND[:at])
