"""play-integrity with tokens signed by our own key."""

from __future__ import annotations

import dataclasses
import hmac
import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st
from strata.protocol import fields
from strata.protocol.errors import ErrorCode, InvalidPacket
from strata.protocol.provenance.evidence import EvidenceClaim
from strata.protocol.provenance.evidence.play import DeviceVerdict, PlayIntegrityVerifier

from tests.support.made_origins import HELLO, NOW

KEY, OTHER = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
RSA = rsa.generate_private_key(65537, 2048)
NONCE = bytes(range(32))
APP = "net.example.camera"
NO_OBJECTS: tuple[object, ...] = (None, "x", [])
CLAIM = EvidenceClaim("SOFTWARE", HELLO)


def der(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def token(key: Any = KEY, algorithm: str = "ES256", **changes: Any) -> bytes:
    claims = {
        "requestDetails": {
            "requestPackageName": APP,
            "nonce": fields.unpadded_base64url(NONCE),
            "timestampMillis": str(NOW * 1000),
        },
        "appIntegrity": {"appRecognitionVerdict": "PLAY_RECOGNIZED", "packageName": APP},
        "deviceIntegrity": {"deviceRecognitionVerdict": ["MEETS_DEVICE_INTEGRITY"]},
    }
    return jwt.PyJWS().encode(json.dumps(claims | changes).encode(), key, algorithm).encode()


def request(**changes: Any) -> dict[str, Any]:
    sound = {"requestPackageName": APP, "nonce": fields.unpadded_base64url(NONCE)}
    return {"requestDetails": sound | changes}


def device(*labels: str) -> dict[str, Any]:
    return {"deviceIntegrity": {"deviceRecognitionVerdict": list(labels)}}


def fault(payload: bytes, *, nonce: bytes | None = NONCE, claim: Any = CLAIM, **options: Any) -> str | None:
    defaults: dict[str, Any] = {"keys": [der(KEY)], "packages": [APP]}
    verifier = PlayIntegrityVerifier(**defaults | options)
    try:
        verifier.verify(payload, nonce=nonce, claim=claim, now=NOW)
    except InvalidPacket as error:
        assert error.code == ErrorCode.INVALID_ATTESTATION
        return error.detail
    return None


@pytest.mark.req("R-224")
def test_a_sound_token_passes() -> None:
    assert fault(token()) is None
    assert fault(token(RSA, "RS256"), keys=[der(KEY), der(RSA)]) is None
    assert PlayIntegrityVerifier.format == "play-integrity"


@pytest.mark.req("R-224")
def test_the_signature_is_by_a_configured_key_and_its_own_algorithm() -> None:
    assert fault(token(OTHER)) == "token_signature"
    assert fault(token(), keys=[]) == "token_signature"
    assert fault(jwt.PyJWS().encode(b"{}", "", "none").encode()) == "token_signature"
    # A public key as the secret of a MAC: the classic attack on tokens.
    head, body, _ = jwt.PyJWS().encode(b"{}", bytes(32), "HS256").split(".")
    mac = hmac.digest(der(KEY), f"{head}.{body}".encode(), "sha256")
    assert fault(f"{head}.{body}.{fields.unpadded_base64url(mac)}".encode()) == "token_signature"
    assert fault(token()[:-4] + b"AAAA") == "token_signature"
    for garbage in (b"", b"..", b"\xff", b"a.b.c", token() + b"x"):
        assert fault(garbage) == "token_signature"
    assert fault(jwt.PyJWS().encode(b"[1]", KEY, "ES256").encode()) == "token_signature"


@pytest.mark.req("R-224")
def test_the_nonce_is_the_one_of_the_claim() -> None:
    assert fault(token(**request(nonce="AAAA"))) == "nonce_mismatch"
    assert fault(token(**request(nonce=None))) == "nonce_mismatch"
    assert fault(token(), nonce=bytes(32)) == "nonce_mismatch"
    assert fault(token(), nonce=None) == "nonce_missing"
    hashed = request(nonce=None, requestHash=fields.unpadded_base64url(NONCE))
    assert fault(token(**hashed)) is None


@pytest.mark.req("R-224")
def test_the_app_is_recognized_and_the_one_expected() -> None:
    assert fault(token(**request(requestPackageName="net.example.other"))) == "app_mismatch"
    assert fault(token(**request(requestPackageName=["net.example.camera"]))) == "app_mismatch"
    of_manifest = dataclasses.replace(CLAIM, app_ids=frozenset({"net.example.listed"}))
    assert fault(token(), claim=of_manifest) == "app_mismatch"
    assert fault(token(**request(requestPackageName="net.example.listed")), claim=of_manifest) is None
    for verdict in ("UNRECOGNIZED_VERSION", "UNEVALUATED", None):
        integrity: dict[str, Any] = {"appIntegrity": {"appRecognitionVerdict": verdict}}
        assert fault(token(**integrity)) == "app_not_recognized"


@pytest.mark.req("R-224")
@pytest.mark.parametrize("threshold", DeviceVerdict)
def test_the_device_reaches_the_threshold(threshold: DeviceVerdict) -> None:
    for verdict in DeviceVerdict:
        expected = None if verdict >= threshold else "device_verdict"
        assert fault(token(**device(verdict.name)), threshold=threshold) == expected
    for labels in ((), ("MEETS_VIRTUAL_INTEGRITY",), ("meets_strong_integrity",)):
        assert fault(token(**device(*labels)), threshold=threshold) == "device_verdict"


@pytest.mark.req("R-224")
@pytest.mark.parametrize("member", ["requestDetails", "appIntegrity", "deviceIntegrity"])
def test_every_part_is_there(member: str) -> None:
    for value in NO_OBJECTS:
        changes: dict[str, Any] = {member: value}
        assert fault(token(**changes)) == "malformed_evidence"


def test_other_kinds_of_key_are_a_mistake_in_the_settings() -> None:
    with pytest.raises(ValueError, match="P-256 or RSA"):
        PlayIntegrityVerifier(keys=[der(ed25519.Ed25519PrivateKey.generate())])


@given(st.integers(0, len(token()) - 1), st.integers(1, 255), st.binary(max_size=60))
def test_garbage_is_refused_in_the_proper_way(at: int, mask: int, noise: bytes) -> None:
    flipped = bytearray(token())
    flipped[at % len(flipped)] ^= mask
    fault(bytes(flipped))
    assert fault(noise) is not None


@given(
    st.dictionaries(
        st.sampled_from(["requestDetails", "appIntegrity", "deviceIntegrity"]),
        st.dictionaries(
            st.sampled_from(
                ["nonce", "requestPackageName", "appRecognitionVerdict", "deviceRecognitionVerdict"]
            ),
            st.none() | st.integers() | st.text(max_size=4) | st.lists(st.none() | st.text(max_size=3)),
        ),
    )
)
def test_a_signed_token_of_any_shape_is_judged(changes: dict[str, Any]) -> None:
    assert fault(token(**changes)) is None if not changes else fault(token(**changes)) is not None
